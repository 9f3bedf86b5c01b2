"""One real vLLM replica as a process that a test drives: JSON lines in, JSON lines out.

{"prompt": "...", "max_tokens": 8}  ->  {"token_ids": [...], "text": "...", "seconds": 1.2, "cached_tokens": 64}
{"reset": true}                     ->  {"reset": true}       forgets the engine's own prefix cache
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class Replica:
    """The test's end of the pipe. `prefix` runs the process elsewhere, e.g. in a network namespace."""

    def __init__(
        self, model: Path, extra: dict[str, object] | None, log: Path, prefix: list[str] | None = None
    ) -> None:
        arguments = [sys.executable, "-m", "tests.vllm.replica", "--model", str(model)]
        if extra is not None:
            arguments += ["--extra", json.dumps(extra)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "VLLM_NO_USAGE_STATS": "1"}
        environment.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1")
        environment.update(VLLM_LOGGING_LEVEL="WARNING", VLLM_CPU_OMP_THREADS_BIND="nobind")
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            [*(prefix or []), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
        )
        self.log = log

    def ready(self) -> Replica:
        """Blocks until the model is loaded."""
        self._read()
        return self

    def send(self, **command: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()

    def ask(self, prompt: str, max_tokens: int = 8) -> dict[str, Any]:
        self.send(prompt=prompt, max_tokens=max_tokens)
        return self._read()

    def answer(self) -> dict[str, Any]:
        """The answer to an earlier `send`."""
        return self._read()

    def reset(self) -> None:
        self.send(reset=True)
        self._read()

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(b"@"):
                found: dict[str, Any] = json.loads(line[1:])
                return found
        raise AssertionError(f"the replica ended: {self.log.read_text(errors='replace')[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--extra", type=json.loads, default=None)
    given = parser.parse_args()
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    transfer = None
    if given.extra is not None:
        transfer = KVTransferConfig(
            kv_connector="KVServiceConnector",
            kv_connector_module_path="kvservice.connector.vllm",
            kv_role="kv_both",
            kv_connector_extra_config=given.extra,
        )
    llm = LLM(
        model=given.model, dtype="bfloat16", max_model_len=4096, enforce_eager=True, block_size=32,
        kv_transfer_config=transfer, disable_log_stats=True,
    )  # fmt: skip

    def say(**values: object) -> None:
        print("@" + json.dumps(values), flush=True)

    say(ready=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command.get("reset"):
            llm.reset_prefix_cache()
            say(reset=True)
            continue
        started = time.perf_counter()
        sampling = SamplingParams(temperature=0, max_tokens=command["max_tokens"])
        output = llm.generate([command["prompt"]], sampling, use_tqdm=False)[0]
        say(
            token_ids=list(output.outputs[0].token_ids),
            text=output.outputs[0].text,
            seconds=time.perf_counter() - started,
            cached_tokens=output.num_cached_tokens,
        )
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
