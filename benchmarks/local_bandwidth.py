"""Loads and stores of one node's blocks as an engine does them, against the plain copy of the same bytes.

    python -m benchmarks.local_bandwidth [--rounds N] [--total BYTES] [--out PATH]

A real shard, a real attachment, and the connector's worker half with KV tensors as vLLM's CPU backend allocates them: a
tensor a layer. The limit is one memcpy a slot, from slot to ordinary memory or back, on one core; it alternates with
what is measured, and ratios are medians of neighbours. `copy, then digest` is that memcpy with the library's digest of
each slot behind it, and `one pass` what both are in C. `sealed`: until the shard has the digests as well.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report import default_out, print_table, write_report
from kvservice.client.shard import ShardClient
from kvservice.connector.options import Verify
from kvservice.connector.plan import CopyEntry, LoadPlan, PoolInfo, StepPlan, StorePlan
from kvservice.connector.worker.block_copier import BlockCopier
from kvservice.connector.worker.half import WorkerHalf
from kvservice.core.block.keys import span_route
from kvservice.core.messages import AcquireRequest, MissReason, SealItem, SealStatus
from kvservice.core.segment.digest import digest_payload
from kvservice.core.segment.layout import SlotLayout
from kvservice.core.segment.refs import BlockRef
from kvservice.memory.runs import copy_blocks
from kvservice.testing.cluster import LocalCluster
from kvservice.units import BlockKey, GiB, KiB, MiB
from tests.integration.engine import Engine, chain, spec

LAYERS, HEADS, TOKENS = 16, 4, 16
BLOCK_BYTES = (64 * KiB, 720 * KiB, 2 * MiB, 4 * MiB)
SMALL_BYTES, PARTS = 64 * KiB, 16  # a small model's blocks of 16 tokens, with slot_tokens 256
AT_ONCE_BYTES = 2 * MiB
POOL_BYTES = 2 * GiB
Work = Callable[[], object]


class Worker:
    """An engine's memory and its worker half."""

    def __init__(self, engine: Engine, layout: SlotLayout, blocks: int, verify: Verify) -> None:
        width = layout.cell_bytes // layout.part_tokens
        shape = (blocks * layout.parts, layout.kv_head_count, layout.part_tokens, width)
        self.layers = [torch.randint(0, 255, shape, dtype=torch.uint8) for _ in range(layout.layer_count)]
        self._half = WorkerHalf(BlockCopier(self.layers, range(layout.kv_head_count)), verify)
        segment = engine.segment
        self._info = PoolInfo(str(segment.path), segment.geometry, segment.epoch, layout, bytes(16))
        self._stored = 0

    def _entries(self, blocks: Iterable[tuple[BlockRef, BlockKey]]) -> tuple[CopyEntry, ...]:
        parts = self._info.layout.parts
        return tuple(
            CopyEntry(row * parts + part, ref, key, part=part)
            for row, (ref, key) in enumerate(blocks)
            for part in range(parts)
        )

    def plan(self, blocks: Sequence[tuple[BlockRef, BlockKey]]) -> StepPlan:
        """What the scheduler half sends for a load of them all."""
        return StepPlan(pool=self._info, loads=[LoadPlan("request", self._entries(blocks))])

    def load(self, plan: StepPlan) -> None:
        self._half.start_loads(plan)
        assert self._half.take_loaded() == ({"request"}, set())

    def store(self, refs: Sequence[BlockRef], keys: Sequence[BlockKey]) -> None:
        self._stored += 1
        entries = self._entries(zip(refs, keys, strict=True))
        self._half.store(StepPlan(pool=self._info, stores=[StorePlan(self._stored, entries)]))
        report = self._half.take_report()
        assert report is not None and report.stored == {self._stored: 1}, report

    def close(self) -> None:
        self._half.close()


def model_of(block_bytes: int) -> str:
    """Engines of different models share no block, so each process stores its own."""
    return f"of {block_bytes} by {os.getpid()}"


def timed(work: Work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def compare(total: int, rounds: int, limit: Work, **ways: Work) -> dict[str, dict[str, float]]:
    """Median GB/s of each way, and the median of its ratios to the limit beside it."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            pair = (timed(limit), timed(way))
            if number:  # the first touches the memory
                seconds[name].append(pair)
    return {name: summary(total, pairs) for name, pairs in seconds.items()}


def summary(total: int, pairs: list[tuple[float, float]]) -> dict[str, float]:
    return {
        "gb_per_second": round(total / statistics.median(own for _, own in pairs) / 1e9, 2),
        "memcpy_gb_per_second": round(total / statistics.median(bound for bound, _ in pairs) / 1e9, 2),
        "ratio": round(statistics.median(bound / own for bound, own in pairs), 3),
    }


async def stored(client: ShardClient, layout: SlotLayout, count: int) -> tuple[Engine, list[tuple[BlockRef, BlockKey]]]:
    """Blocks in the pool, leased until the engine leaves."""
    model = model_of(layout.payload_bytes)
    engine = await Engine.attach(client, replace(spec(model), layout=layout))
    keys = chain(7, count, model)
    refs = await client.reserve(engine.id, count)
    items = []
    for position, ref in enumerate(refs):
        engine.segment.payload(ref.slot, layout.payload_bytes)[:] = position.to_bytes(2, "big") * (
            layout.payload_bytes // 2
        )
        parent = keys[position - 1] if position else None
        items.append(SealItem(ref, keys[position], parent, position, span_route(keys, position)))
    await client.seal(engine.id, items)
    result = await client.acquire(engine.id, AcquireRequest(keys, 0, 5.0))
    assert result.miss is MissReason.NONE
    return engine, list(zip(result.blocks, keys, strict=True))


async def of_size(socket: str, block_bytes: int, total: int, rounds: int, parts: int = 1) -> dict[str, Any]:
    """`block_bytes` of a block of the engine, of which `parts` lie in a slot."""
    layout = SlotLayout(LAYERS, HEADS, block_bytes // LAYERS // HEADS, TOKENS * parts, parts)
    block_bytes = layout.payload_bytes
    count = max(1, total // block_bytes)
    client = ShardClient(socket)
    engine, blocks = await stored(client, layout, count)
    memory = torch.zeros(count * block_bytes, dtype=torch.uint8)
    own = memory.data_ptr()
    base = engine.segment.address
    offsets = [engine.segment.geometry.payload_offset(ref.slot, block_bytes) for ref, _ in blocks]

    def out() -> None:
        for row, offset in enumerate(offsets):
            ctypes.memmove(own + row * block_bytes, base + offset, block_bytes)

    places, sizes = np.array(offsets), np.full(count, block_bytes)
    rows, ends = np.arange(count) * block_bytes, np.arange(1, count + 1)
    keys = [key for _, key in blocks]
    own_bytes = memoryview(memory.numpy()).cast("B")  # type: ignore[arg-type]

    def then_digest() -> None:
        for row, offset in enumerate(offsets):
            ctypes.memmove(own + row * block_bytes, base + offset, block_bytes)
            digest_payload(own_bytes[row * block_bytes : (row + 1) * block_bytes], keys[row])

    ways: dict[str, Work] = {
        "copy, then digest": then_digest,
        "one pass": lambda: copy_blocks(own, base, rows, places, sizes, ends, keys),
    }
    workers = {verify: Worker(engine, layout, count, verify) for verify in Verify}
    plan = workers[Verify.OFF].plan(blocks)
    loads = {f"load, verify_load {v.value}": lambda w=w: w.load(plan) for v, w in workers.items()}
    found: dict[str, Any] = compare(count * block_bytes, rounds, out, **ways, **loads)
    found |= await stores(engine, workers[Verify.OFF], layout, count, rounds, own)
    for worker in workers.values():
        worker.close()
    engine.let_go()
    await client.close()
    return found


async def stores(
    engine: Engine, worker: Worker, layout: SlotLayout, count: int, rounds: int, own: int
) -> dict[str, dict[str, float]]:
    pairs = await store_pairs(engine, worker, layout, count, rounds, own)
    return {name: summary(count * layout.payload_bytes, found) for name, found in pairs.items()}


async def store_pairs(
    engine: Engine, worker: Worker, layout: SlotLayout, count: int, rounds: int, own: int
) -> dict[str, list[tuple[float, float]]]:
    """Seconds of the memcpy and of the store beside it, for each round but the first. Each stores into new slots,
    because a block that the pool holds is not written again."""
    size = layout.payload_bytes
    pairs: dict[str, list[tuple[float, float]]] = {"store": [], "store, sealed": []}
    for number in range(rounds + 1):
        keys = chain(100 + number, count, model_of(size))
        refs = await engine.pool.reserve(engine.id, count)
        assert len(refs) == count, f"{len(refs)} of {count} slots"
        offsets = [engine.segment.geometry.payload_offset(ref.slot, size) for ref in refs]

        def into(offsets: list[int] = offsets) -> None:
            for row, offset in enumerate(offsets):
                ctypes.memmove(engine.segment.address + offset, own + row * size, size)

        bound = timed(into)
        started = time.perf_counter()
        worker.store(refs, keys)
        copied = time.perf_counter() - started
        items = [
            SealItem(ref, keys[i], keys[i - 1] if i else None, i, span_route(keys, i)) for i, ref in enumerate(refs)
        ]
        started = time.perf_counter()
        statuses = await engine.pool.seal(engine.id, items)
        sealed = copied + time.perf_counter() - started
        assert set(statuses) == {SealStatus.SEALED}
        if number:
            pairs["store"].append((bound, copied))
            pairs["store, sealed"].append((bound, sealed))
    return pairs


def two_at_once(socket: str, total: int, rounds: int) -> dict[str, Any]:
    """Two engines of the node, each a process with its own limit beside it."""
    words = [sys.executable, "-m", "benchmarks.local_bandwidth", "--engine", socket]
    words += ["--total", str(total), "--rounds", str(rounds)]
    running = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [json.loads(process.communicate()[0]) for process in running]
    return {f"{way}, engine {number}": ways for number, found in enumerate(answers, 1) for way, ways in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--total", type=int, default=128 * MiB, help="bytes of each measured load")
    parser.add_argument("--out", type=Path, default=default_out("local_bandwidth"))
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.engine:
        print(json.dumps(asyncio.run(of_size(options.engine, AT_ONCE_BYTES, options.total, options.rounds))))
        return
    figures: dict[str, Any] = {"bytes_per_run": options.total, "rounds": options.rounds}
    with LocalCluster(nodes=1, lookup_partitions=1, pool_bytes=POOL_BYTES) as cluster:
        socket = cluster.socket("n0")
        for block_bytes in BLOCK_BYTES:
            figures[f"{block_bytes // KiB} KiB"] = asyncio.run(
                of_size(socket, block_bytes, options.total, options.rounds)
            )
        figures[f"{PARTS} of {SMALL_BYTES // KiB} KiB in a slot"] = asyncio.run(
            of_size(socket, SMALL_BYTES, options.total, options.rounds, PARTS)
        )
        figures[f"{AT_ONCE_BYTES // KiB} KiB, two engines at once"] = two_at_once(socket, options.total, options.rounds)
    rows = [
        [f"{way}, {size}", *values.values()]
        for size, ways in figures.items()
        if isinstance(ways, dict)
        for way, values in ways.items()
    ]
    print_table(["way", "GB/s", "memcpy GB/s", "ratio"], rows)
    print(write_report("local_bandwidth", figures, options.out))


if __name__ == "__main__":
    main()
