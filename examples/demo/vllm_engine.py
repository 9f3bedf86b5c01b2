"""One vLLM engine in a process of its own, asked by lines of JSON as `sglang_engine` is.

    python -m examples.demo.vllm_engine '{"model": "MODEL", "storage": {"mode": "service", "share": "engines"}}'

Calls: `{"ask": "text or token ids", "tokens": 8, "salt": ""}`, `{"forget": true}`, and `{"counters": true}` for what
the connector counted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.demo.replica import BLOCK_TOKENS, DTYPE, ENVIRONMENT
from examples.demo.sglang_engine import PAGE_TOKENS, serve
from examples.demo.sglang_process import EngineProcess

MODEL_LENGTH = 2048


class VLLMProcess(EngineProcess):
    def __init__(
        self, settings: Mapping[str, Any], before: Sequence[str] = (), variables: Mapping[str, str] | None = None
    ) -> None:
        """`settings`: arguments of `vllm.LLM`, and `storage` with the connector's options."""
        root = str(Path(__file__).resolve().parents[2])
        own = {**os.environ, "PYTHONPATH": root, "HF_HUB_OFFLINE": "1", **ENVIRONMENT}
        super().__init__("examples.demo.vllm_engine", settings, before, {**own, **(variables or {})})


class JsonEngine:
    """Answers calls. The engine runs on the calling thread."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        own = {name: value for name, value in settings.items() if name != "storage"}
        transfer = None
        if settings.get("storage") is not None:
            transfer = KVTransferConfig(
                kv_connector="KVServiceConnector",
                kv_connector_module_path="kvservice.connector.vllm",
                kv_role="kv_both",
                kv_connector_extra_config=dict(settings["storage"]),
            )
        given: dict[str, Any] = {"dtype": DTYPE, "max_model_len": MODEL_LENGTH, "block_size": BLOCK_TOKENS, **own}
        self._llm = LLM(**given, enforce_eager=True, kv_transfer_config=transfer, disable_log_stats=True)
        self._count = 0

    def answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        if call.get("forget"):
            return {"forgotten": bool(self._llm.reset_prefix_cache())}
        if call.get("counters"):
            self._settle()
            return dict(self._counters())
        return self._ask(call)

    def _ask(self, call: Mapping[str, Any]) -> dict[str, Any]:
        from vllm import SamplingParams

        engine, given = self._llm.llm_engine, call["ask"]
        prompt: Any = {"prompt": given} if isinstance(given, str) else {"prompt_token_ids": given}
        if call.get("salt"):
            prompt["cache_salt"] = call["salt"]
        before = self._counters().get("load_blocks", 0)
        self._count += 1
        started, first = time.perf_counter(), 0.0
        sampling = SamplingParams(temperature=0, max_tokens=call["tokens"], ignore_eos=True)
        engine.add_request(f"demo-{self._count}", prompt, sampling)
        output: Any = None
        while engine.has_unfinished_requests():
            for found in engine.step():
                output = found
                first = first or time.perf_counter() - started
        seconds = time.perf_counter() - started
        self._settle()
        after = self._counters().get("load_blocks", 0)
        of_page = PAGE_TOKENS if self._shares else BLOCK_TOKENS
        return {
            "text": output.outputs[0].text,
            "token_ids": list(output.outputs[0].token_ids),
            "prompt_tokens": len(output.prompt_token_ids),
            "cached_tokens": output.num_cached_tokens or 0,
            "storage_tokens": (after - before) * of_page,
            "first_token_seconds": first,
            "seconds": seconds,
        }

    def _settle(self) -> None:
        """The last copies need steps of their own."""
        engine = self._llm.llm_engine
        while engine.engine_core.engine_core.scheduler.has_requests():
            engine.step()

    @property
    def _shares(self) -> bool:
        transfer = self._llm.llm_engine.vllm_config.kv_transfer_config
        return transfer is not None and transfer.kv_connector_extra_config.get("share") == "engines"

    def _counters(self) -> dict[str, int]:
        connector = self._llm.llm_engine.engine_core.engine_core.scheduler.connector
        return {} if connector is None else connector.counters()

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is not an answer
    engine = JsonEngine(json.loads(sys.argv[1]))
    try:
        serve(engine.answer, sys.stdin, answers)
    finally:
        engine.close()


if __name__ == "__main__":
    main()
