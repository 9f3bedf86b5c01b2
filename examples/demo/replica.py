"""One vLLM replica of the demo, as a Ray actor pinned to its node. The engine runs in the actor's own process."""

from __future__ import annotations

import time
from typing import Any

BLOCK_TOKENS = 32
MODEL_LENGTH = 8192
# float32: a replica that computes a prompt's tail after a hit batches it differently from one that computes it all,
# and in bfloat16 that alone can change a token.
DTYPE = "float32"
WARM_UP = " ".join(str(number) for number in range(300))  # some thirty blocks
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


class DemoReplica:
    """A `socket` of None means an engine without the cache. `batch_tokens` is the most tokens of one step."""

    def __init__(self, model: str, socket: str | None, role: str = "kv_both", batch_tokens: int | None = None) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = None
        if socket is not None:
            transfer = KVTransferConfig(
                kv_connector="KVServiceConnector",
                kv_connector_module_path="kvservice.connector.vllm",
                kv_role=role,
                kv_connector_extra_config={"mode": "service", "socket": socket, "fetch_timeout_seconds": 30},
            )
        self._llm = LLM(
            model=model,
            dtype=DTYPE,
            max_model_len=MODEL_LENGTH,
            block_size=BLOCK_TOKENS,
            enforce_eager=True,
            kv_transfer_config=transfer,
            disable_log_stats=True,
            max_num_batched_tokens=batch_tokens,
        )
        self._count = 0
        self._warm_up()

    def _warm_up(self) -> None:
        """An engine's first long prompt, and its first one behind a hit, pay for its lazy parts and for memory that it
        touches for the first time: half a second that is no part of any hit. Leaves nothing in the engine or the pool.
        """
        switches = {"kvservice": {"version": 1, "store": False, "load": False}}
        for _ in range(2):
            self.ask(WARM_UP, 1, switches)
        self.forget()

    def ready(self) -> bool:
        return True

    def ask(self, question: str, max_tokens: int, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """One greedy chat answer: tokens, text, seconds to the first token, and where the prompt's tokens came from.
        `params`: kv_transfer_params. Times at which something happened are of `time.time`."""
        from vllm import SamplingParams

        tokenizer = self._llm.get_tokenizer()
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        before = self._counters()
        engine = self._llm.llm_engine
        self._count += 1
        extra = None if params is None else {"kv_transfer_params": params}
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, extra_args=extra)
        asked_at, started = time.time(), time.perf_counter()
        first: float | None = None
        engine.add_request(f"demo-{self._count}", prompt, sampling)
        output: Any = None
        while engine.has_unfinished_requests():
            for output in engine.step():
                if first is None and output.outputs[0].token_ids:
                    first = time.perf_counter() - started
        while engine.engine_core.engine_core.scheduler.has_requests():  # the last copies need steps of their own
            engine.step()
        after = self._counters()
        remote = (after["load_blocks_remote"] - before["load_blocks_remote"]) * BLOCK_TOKENS
        pool = (after["load_blocks"] - before["load_blocks"]) * BLOCK_TOKENS
        prompt_tokens = len(output.prompt_token_ids)
        cached = max(output.num_cached_tokens or 0, pool)
        return {
            "token_ids": list(output.outputs[0].token_ids),
            "text": output.outputs[0].text.strip(),
            "asked_at": asked_at,
            "first_token_seconds": first,
            "prompt_tokens": prompt_tokens,
            "computed_tokens": prompt_tokens - cached,
            "engine_tokens": cached - pool,
            "pool_tokens": pool - remote,
            "remote_tokens": remote,
        }

    def forget(self) -> None:
        """Empty the engine's own prefix cache, so that the next answer cannot come from it."""
        self._llm.reset_prefix_cache()

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    def _counters(self) -> dict[str, int]:
        connector = self._llm.llm_engine.engine_core.engine_core.scheduler.connector
        found = {} if connector is None else connector.counters()
        return {name: found.get(name, 0) for name in ("load_blocks", "load_blocks_remote")}
