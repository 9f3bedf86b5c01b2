"""vLLM on a CPU with LMCache's own connector, as a process: one prompt, and what came of it as a line of JSON.

python -m tests.vllm.lmcache_engine MODEL PORT DTYPE TOKENS
"""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.integration.lmcache_server import variables

ENGINE_SECONDS = 240.0
MARK = "RESULT "
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def ask(model: Path, port: int, dtype: str, tokens: int, seed: int, log: Path) -> dict[str, Any]:
    """What an engine of its own says to the prompt of this seed: `token_ids`, and how much of it was `cached`."""
    command = [sys.executable, "-m", "tests.vllm.lmcache_engine", str(model), str(port), dtype, str(tokens), str(seed)]
    with log.open("ab") as errors:
        done = subprocess.run(
            command, env={**variables(), **SETTINGS}, stdout=subprocess.PIPE, stderr=errors, timeout=ENGINE_SECONDS
        )
    lines = [line for line in done.stdout.decode().splitlines() if line.startswith(MARK)]
    assert done.returncode == 0 and lines, f"{done.returncode}: see {log}"
    found: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK))
    return found


def main() -> None:
    model, dtype = sys.argv[1], sys.argv[3]
    port, tokens, seed = int(sys.argv[2]), int(sys.argv[4]), int(sys.argv[5])
    import vllm.triton_utils.dispatcher as dispatcher
    from vllm import LLM, SamplingParams

    def namespace(module: Any) -> Any:
        """vLLM asks every loaded module for its names as a dict, and numba's library, which LMCache loads, has none."""
        found = builtins.vars(module)
        return found if hasattr(found, "get") else {}

    dispatcher.vars = namespace
    connector = {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
    }
    engine = LLM(
        model,
        dtype=dtype,
        max_model_len=1024,
        block_size=32,
        num_gpu_blocks_override=64,
        enforce_eager=True,
        seed=0,
        kv_transfer_config=connector,
    )
    prompt = {"prompt_token_ids": [100 + seed + 37 * number % 4000 for number in range(tokens)]}
    said = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)[0]
    result = {"token_ids": list(said.outputs[0].token_ids), "cached": said.num_cached_tokens}
    print(MARK + json.dumps(result), flush=True)
    engine.llm_engine.engine_core.shutdown()
    os._exit(0)  # LMCache's threads would keep the interpreter for seconds


if __name__ == "__main__":
    main()
