"""What paged memory costs and what a host tier is worth, on the reference engine.

    python -m benchmarks.engine [--requests 24] [--rounds 5] [--device cpu] [--model PATH] [--out PATH]

One table has three parts. Requests served and tokens per second, with 8 blocks on the device and 0, 8 and 64 blocks on
the host: the requests come at once, so the engine has to preempt, by recomputing without a host and by swapping with
one. Microseconds of one operation on blocks: allocate, free, swap, copy, attention. Milliseconds of a step's phases.

The model is a small Llama with random weights, which shows the engine's own share; give a real one with --model. This
engine is for reading and measuring: its figures are no figures of an engine for serving.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.report import default_out, print_table, write_report
from kvservice.engine.loop import PHASES, ReferenceEngine
from kvservice.engine.model import PagedModel
from kvservice.engine.options import EngineOptions
from kvservice.engine.sampling import Sampling

DEVICE_BLOCKS = 8
HOST_BLOCKS = (0, 8, 64)
BLOCK_TOKENS = 16
PROMPT_TOKENS = (20, 56)  # 2 to 4 blocks, so that some requests fit together until they have grown
ANSWER_TOKENS = 40
# A model whose forward takes milliseconds on a CPU, with the shape of a small one for use.
SMALL = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}


def open_model(path: str | None, device: str) -> Any:
    """A transformers model on the device."""
    torch.manual_seed(15)
    if path is None:
        return LlamaForCausalLM(LlamaConfig(**SMALL)).to(device)
    return AutoModelForCausalLM.from_pretrained(path, use_safetensors=True).to(device)


def engine_of(model: Any, **options: Any) -> ReferenceEngine:
    paged = PagedModel(model, block_tokens=BLOCK_TOKENS)
    given = {"mode": "embedded", "memory": "256MiB", "weights_version": "benchmark", "block_tokens": BLOCK_TOKENS}
    return ReferenceEngine(paged, EngineOptions(**{**given, **options}))


def prompts(count: int, vocabulary: int) -> list[list[int]]:
    chance = random.Random(15)
    return [[chance.randrange(4, vocabulary) for _ in range(chance.randint(*PROMPT_TOKENS))] for _ in range(count)]


def serve(model: Any, host_blocks: int, count: int) -> dict[str, Any]:
    """Requests that come at once, with eight blocks on the device."""
    way = "swap" if host_blocks else "recompute"
    with engine_of(
        model,
        device_blocks=DEVICE_BLOCKS,
        host_blocks=host_blocks,
        watermark=0.0,
        preempt_by=way,
        cache=host_blocks > 0,
    ) as engine:
        asked = prompts(count, model.config.vocab_size)
        engine.generate(asked[:1], Sampling(max_tokens=2))  # the first forward pays for what is made once
        phases: dict[str, list[float]] = {phase: [] for phase in PHASES}
        before, started = engine.all_counters(), time.perf_counter()
        for tokens in asked:
            engine.add(tokens, Sampling(max_tokens=ANSWER_TOKENS))
        served = tokens_out = 0
        while engine.has_requests:
            outputs = engine.step()
            served += sum(not output.reason for output in outputs)
            tokens_out += sum(len(each) for output in outputs for each in output.token_ids)
            for phase, seconds in engine.last.seconds.items():
                phases[phase].append(seconds)
        seconds = time.perf_counter() - started
        found = engine.all_counters() - before
    return {
        "host_blocks": host_blocks,
        "served": served,
        "seconds": seconds,
        "tokens_per_second": tokens_out / seconds,
        "swapped_out": found["swapped_out"],
        "recomputed": found["recomputed"],
        "prompt_tokens_computed": found["prefill_tokens"],
        "steps": len(phases["schedule"]),
        "phase_ms": {phase: 1e3 * statistics.mean(taken) for phase, taken in phases.items()},
    }


def timed(device: str, times: int, call: Callable[[], object]) -> float:
    """Microseconds of one call, the median of so many."""
    found = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return 1e6 * statistics.median(found)


def operations(model: Any, device: str, rounds: int) -> dict[str, float]:
    """Microseconds of one operation on one block, or of one sequence's attention in one layer."""
    with engine_of(model, device_blocks=64, host_blocks=64, preempt_by="swap") as engine:
        engine.generate(prompts(1, model.config.vocab_size), Sampling(max_tokens=2))
        allocator, kv, cache = engine.blocks.device, engine.model.kv, engine._cache
        assert cache is not None
        times = 200 * rounds
        pool: list[int] = []
        allocates, frees = [], []
        for _ in range(times):
            started = time.perf_counter()
            pool.append(allocator.allocate())
            middle = time.perf_counter()
            allocator.free(pool.pop())
            frees.append(time.perf_counter() - middle)
            allocates.append(middle - started)
        found = {"allocate": 1e6 * statistics.median(allocates), "free": 1e6 * statistics.median(frees)}
        outs, ins = [], []
        pairs = [(block, block) for block in range(8)]
        for _ in range(4 * rounds):
            started = time.perf_counter()
            assert cache.swap_out("one", pairs), "the pool has no room"
            outs.append(time.perf_counter() - started)
            cache.start([], is_idle=True)  # a step in which the pool is asked to hold them
            cache.wait_for_answer()
            cache.end(0, 0.0)
            started = time.perf_counter()
            assert not cache.start([("one", pairs)], is_idle=True), "the pool has lost them"
            ins.append(time.perf_counter() - started)
            cache.end(0, 0.0)
        found["swap out"] = 1e6 * statistics.median(outs) / len(pairs)
        found["swap in"] = 1e6 * statistics.median(ins) / len(pairs)
        pair = torch.tensor([[0, 1]])
        found["copy"] = timed(device, times, lambda: kv.copy_blocks(pair))
        slots = torch.arange(512, device=kv.device)[None]
        query = torch.randn(1, model.config.num_attention_heads, 1, kv.shape.key_width, device=kv.device)

        def attend() -> None:
            keys, values = kv.read(0, slots)
            torch.nn.functional.scaled_dot_product_attention(query.to(keys.dtype), keys, values, enable_gqa=True)

        found["attention over 512 tokens"] = timed(device, times, attend)
    return found


def measure(model: Any, device: str, requests: int, rounds: int) -> dict[str, Any]:
    """All figures; of each way to serve the round with the median time."""
    serving = []
    for host_blocks in HOST_BLOCKS:
        runs = sorted((serve(model, host_blocks, requests) for _ in range(rounds)), key=lambda row: row["seconds"])
        serving.append(runs[len(runs) // 2])
    return {
        "device": device,
        "block_tokens": BLOCK_TOKENS,
        "device_blocks": DEVICE_BLOCKS,
        "serving": serving,
        "operation_us": operations(model, device, rounds),
    }


def table(figures: dict[str, Any]) -> list[list[object]]:
    rows: list[list[object]] = []
    for row in figures["serving"]:
        where = f"{DEVICE_BLOCKS} blocks on the device, {row['host_blocks']} on the host"
        rows.append([f"{where}: requests served", row["served"], ""])
        rows.append([f"{where}: tokens a second", row["tokens_per_second"], "tokens/s"])
        rows.append([f"{where}: preempted by swap, by recompute", f"{row['swapped_out']}, {row['recomputed']}", ""])
    rows += [[f"operation: {name}", taken, "µs"] for name, taken in figures["operation_us"].items()]
    phases = figures["serving"][-1]["phase_ms"]
    return rows + [[f"phase of a step, with a host: {name}", taken, "ms"] for name, taken in phases.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", help="folder of a model; default: a small one with random weights")
    parser.add_argument("--out", type=Path, default=default_out("engine"))
    options = parser.parse_args()
    figures = measure(open_model(options.model, options.device), options.device, options.requests, options.rounds)
    figures["model"] = options.model or SMALL
    print_table(["", "", ""], table(figures))
    print(write_report("engine", figures, options.out))


if __name__ == "__main__":
    main()
