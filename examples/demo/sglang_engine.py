"""One SGLang engine in a process of its own, asked by lines of JSON: for the demo and the tests.

    python -m examples.demo.sglang_engine '{"model_path": "MODEL", "storage": {"mode": "service"}}'

Each line in is a call, each line out its answer, in order; the first line out says that the engine is ready. Both are
objects. The process ends with its input. Calls: `{"ask": "text or token ids", "tokens": 8, "salt": ""}`,
`{"forget": true}`, which empties the engine's own memories of prompts, `{"attach": true}` or `false`, which attaches or
detaches the storage, `{"weights": "MODEL"}`, which changes its weights in place to those of a model, and
`{"counters": true}` for what SGLang's metrics have of the connector (with `enable_metrics`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / ".venv-sglang" / "site"
CPU = ROOT / "examples" / "sglang_cpu"
PAGE_TOKENS = 16
# What makes SGLang run on a CPU without its kernels, with pages in host memory. float32: an engine that computes a
# prompt's tail after a hit batches it in another way, and in bfloat16 that alone can change a token.
SETTINGS: dict[str, object] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "dtype": "float32",
    "page_size": PAGE_TOKENS,
    "max_total_tokens": 8192,
    "context_length": 8192,
    "max_running_requests": 4,
    "chunked_prefill_size": 4096,
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "skip_server_warmup": True,
    "sleep_on_idle": True,  # it asks for work in a loop otherwise, and the other engine needs the processor
    "log_level": "error",
    "watchdog_timeout": 300,
}
HICACHE: dict[str, object] = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": 2.0,
    "hicache_mem_layout": "page_first_direct",
    "hicache_io_backend": "direct",
    "hicache_write_policy": "write_through",
    "hicache_storage_prefetch_policy": "wait_complete",
    "hicache_storage_backend": "dynamic",
}
STORAGE: dict[str, object] = {
    "backend_name": "kvservice",
    "module_path": "kvservice.connector.sglang",
    "class_name": "HiCacheKVService",
    "interface_v1": 1,
    "hicache_storage_pass_prefix_keys": True,
    "prefetch_threshold": PAGE_TOKENS,
}
EVENTS = "sglang:kvservice_pages_total"  # the connector's counter in SGLang's metrics


def environment() -> dict[str, str]:
    """Of a process that imports SGLang on this machine."""
    paths = [str(CPU), str(SITE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "SGLANG_USE_CPU_ENGINE": "0",  # with 1 it wants its CPU kernels, which are in no wheel
        "HF_HUB_OFFLINE": "1",
    }


def settings(given: Mapping[str, Any]) -> dict[str, object]:
    """The arguments of `sglang.Engine`. `storage`: the connector's options; without it the engine has no storage."""
    own = {name: value for name, value in given.items() if name != "storage"}
    if given.get("storage") is None:
        return {**SETTINGS, **own}
    storage = json.dumps({**STORAGE, **given["storage"]})
    return {**SETTINGS, **HICACHE, "hicache_storage_backend_extra_config": storage, **own}


def answer(engine: Any, storage: object, call: Mapping[str, Any]) -> dict[str, Any]:
    """`storage`: the settings of the storage, as the engine takes them."""
    if call.get("forget"):
        return {"forgotten": bool(engine.flush_cache().success)}
    if call.get("counters"):
        return counters()
    if "weights" in call:
        done, said = engine.update_weights_from_disk(call["weights"])[:2]
        return {"done": bool(done), "said": said}
    if "attach" in call:
        manager = engine.tokenizer_manager
        doing = (
            manager.attach_hicache_storage("dynamic", storage) if call["attach"] else manager.detach_hicache_storage()
        )
        done = engine.loop.run_until_complete(doing)
        return {"done": bool(done.success), "said": done.message}
    prompt = call["ask"]
    given = {"prompt": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
    started, first = time.perf_counter(), 0.0
    last: dict[str, Any] = {}
    for part in engine.generate(
        **given,
        sampling_params={"temperature": 0, "max_new_tokens": call["tokens"], "ignore_eos": True},
        cache_salt=call.get("salt") or None,
        stream=True,
    ):
        first, last = first or time.perf_counter() - started, part
    meta = last["meta_info"]
    sources = meta.get("cached_tokens_details") or {}
    return {
        "text": last["text"],
        "token_ids": last.get("output_ids"),
        "prompt_tokens": meta["prompt_tokens"],
        "cached_tokens": meta.get("cached_tokens", 0),
        "storage_tokens": sources.get("storage", 0),
        "first_token_seconds": first,
        "seconds": time.perf_counter() - started,
    }


def counters() -> dict[str, Any]:
    """By event, of all processes of this engine."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]  # reads the folder that SGLang made for them
    samples = (sample for metric in registry.collect() for sample in metric.samples)
    return {one.labels["event"]: int(one.value) for one in samples if one.name == EVENTS}


def serve(respond: Callable[[Mapping[str, Any]], dict[str, Any]], calls: IO[str], answers: IO[str]) -> None:
    def say(found: dict[str, Any]) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    say({"ready": True})
    for line in calls:
        say(respond(json.loads(line)))


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what SGLang and its processes print is not an answer
    import sglang

    given = settings(json.loads(sys.argv[1]))
    engine, storage = sglang.Engine(**given), given.get("hicache_storage_backend_extra_config")
    try:
        serve(lambda call: answer(engine, storage, call), sys.stdin, answers)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
