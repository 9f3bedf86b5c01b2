"""The ratios that matter, each measured beside its limit or the path of before: fails when one is worse than its goal.

    python -m benchmarks.guard [--only NAME ...] [--out PATH]      # or `make bench-guard`, at most five minutes

A ratio is the time of the reference over the time of ours. Both are measured again and again in turn, so that a busy
machine slows both down. What counts is the median, with the interval that holds it at 95 %: a guard fails only when the
whole interval is worse than the goal. Goals lie below what a quiet machine shows, so that a failure is a regression and
no noise. A change that makes a path slower on purpose changes its goal here, and says why.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import torch

from benchmarks import connector_step, policy, tier_disk
from benchmarks.local_bandwidth import HEADS, LAYERS, TOKENS, Worker, store_pairs, stored, timed
from benchmarks.report import ROOT, print_table, write_report
from benchmarks.transfer_bandwidth import two_processes
from kvservice.client.shard import ShardClient
from kvservice.connector.options import Verify
from kvservice.core.block.keys import pack_keys
from kvservice.core.directory import key_table
from kvservice.core.directory.directory import Directory
from kvservice.core.messages import AcquireRequest, Holder
from kvservice.core.segment.layout import SlotLayout
from kvservice.core.segment.refs import BlockRef
from kvservice.lookup.client import LookupClient
from kvservice.memory import runs
from kvservice.memory.runs import copy_runs
from kvservice.replay.policies import POLICIES
from kvservice.testing.cluster import LocalCluster
from kvservice.units import BlockKey, BootEpoch, GiB, KiB, MiB, NodeId
from tests.integration.engine import Engine, attached, chain

Work = Callable[[], object]
Ratios = list[float]
READ_BYTES = 64 * MiB  # of one measured load
SMALL_RUNS = 4096
LAYOUT = SlotLayout(LAYERS, HEADS, 720 * KiB // LAYERS // HEADS, TOKENS)
Blocks = list[tuple[BlockRef, BlockKey]]
REQUESTS = 128  # running in one step
EVICTION_SLOTS, EVICTION_BLOCKS = 5_000, 50_000
DISK_BYTES, DISK_THREADS = 256 * MiB, 4
CALLS = 20  # of one sample, where a call takes a millisecond or less


def compared(ours: Work, reference: Work, rounds: int) -> Ratios:
    """Of neighbouring runs. The first pair only warms up."""
    pairs = [(timed(reference), timed(ours)) for _ in range(rounds + 1)][1:]
    return [bound / own for bound, own in pairs]


async def compared_calls(
    ours: Callable[[], Awaitable[object]], reference: Callable[[], Awaitable[object]], rounds: int
) -> Ratios:
    """As `compared`, for calls that are awaited: each sample is the median of some."""
    pairs = [(await _median_call(reference), await _median_call(ours)) for _ in range(rounds + 1)][1:]
    return [bound / own for bound, own in pairs]


async def _median_call(call: Callable[[], Awaitable[object]]) -> float:
    samples = []
    for _ in range(CALLS):
        begun = time.perf_counter()
        await call()
        samples.append(time.perf_counter() - begun)
    return statistics.median(samples)


def interval(ratios: Ratios) -> tuple[float, float, float]:
    """Median, and the ranks around it between which it lies at 95 %, whatever the distribution."""
    ranked, half = sorted(ratios), 0.98 * math.sqrt(len(ratios))
    low = max(0, math.floor(len(ranked) / 2 - half))
    high = min(len(ranked) - 1, math.ceil(len(ranked) / 2 + half) - 1)
    return statistics.median(ranked), ranked[low], ranked[high]


# -- what is measured ----


def local_read() -> Ratios:
    """Blocks of 720 KiB from slots into an engine's KV cache, every one verified, against memcpy."""
    return asyncio.run(_local(256 * MiB, _reads))


def local_store() -> Ratios:
    """Blocks of 720 KiB from an engine's KV cache into slots, until it may write over them, against memcpy."""
    return asyncio.run(_local(2 * GiB, _stores))


async def _local(
    pool_bytes: int, measure: Callable[[Engine, Worker, Blocks, torch.Tensor], Awaitable[Ratios]]
) -> Ratios:
    """Measure between a shard's slots, which hold the blocks, and an engine's worker or memory of the same size."""
    with LocalCluster(nodes=1, lookup_partitions=1, pool_bytes=pool_bytes) as cluster:
        client = ShardClient(cluster.socket("n0"))
        engine, blocks = await stored(client, LAYOUT, READ_BYTES // LAYOUT.payload_bytes)
        worker = Worker(engine, LAYOUT, len(blocks), Verify.SAMPLED)
        ratios = await measure(
            engine, worker, blocks, torch.zeros(len(blocks) * LAYOUT.payload_bytes, dtype=torch.uint8)
        )
        worker.close()
        engine.let_go()
        await client.close()
    return ratios


async def _reads(engine: Engine, worker: Worker, blocks: Blocks, memory: torch.Tensor) -> Ratios:
    size = LAYOUT.payload_bytes
    sources = np.array([engine.segment.geometry.payload_offset(ref.slot, size) for ref, _ in blocks])
    targets, sizes = np.arange(len(blocks)) * size, np.full(len(blocks), size)
    plan = worker.plan(blocks)
    return compared(
        lambda: worker.load(plan),
        lambda: copy_runs(memory.data_ptr(), engine.segment.address, targets, sources, sizes),
        rounds=25,
    )


async def _stores(engine: Engine, worker: Worker, blocks: Blocks, memory: torch.Tensor) -> Ratios:
    worker.load(worker.plan(blocks))  # which maps the pool
    pairs = await store_pairs(engine, worker, LAYOUT, len(blocks), 25, memory.data_ptr())
    return [bound / own for bound, own in pairs["store"]]


def small_runs() -> Ratios:
    """Runs of 4 KiB in one call of the C module, against the way before it: a call of ctypes for each."""
    offsets, sizes = np.arange(SMALL_RUNS) * 8 * KiB, np.full(SMALL_RUNS, 4 * KiB)
    source, target = (np.ones(SMALL_RUNS * 8 * KiB, np.uint8) for _ in range(2))
    copy = lambda: copy_runs(target.ctypes.data, source.ctypes.data, offsets, offsets, sizes)  # noqa: E731
    with _without(runs, "_native") as before:
        return compared(copy, lambda: before(copy), rounds=25)


def pull() -> Ratios:
    """Blocks of 720 KiB pulled by NIXL and verified, against a raw NIXL read of the same bytes."""
    return _pulled("pull")


def mapped_pull() -> Ratios:
    """Blocks of 720 KiB of a shard of this machine, copied and verified, against a raw NIXL read of the same bytes."""
    return _pulled("mapped")


def _pulled(way: str) -> Ratios:
    with two_processes() as between:
        total, limit, ours = between.ways(720 * KiB, READ_BYTES)
        assert total
        return compared(ours[way], limit, rounds=15)


def lookup() -> Ratios:
    """512 keys resolved by a lookup partition, against its answer to an empty question."""
    with LocalCluster(nodes=1, lookup_partitions=1, pool_bytes=64 * MiB, slab_bytes=MiB) as cluster:
        return asyncio.run(_lookup(cluster))


async def _lookup(cluster: LocalCluster) -> Ratios:
    engine, keys = await attached(cluster.socket("n0")), chain(1, 512)
    await engine.store(keys)
    await asyncio.to_thread(cluster.wait_until_known, keys, 60.0)
    client = LookupClient(cluster.lookup_addresses)
    ratios = await compared_calls(
        lambda: client.resolve(keys, 0, 5.0), lambda: client.find_node(NodeId("nobody"), 5.0), rounds=25
    )
    await client.close()
    engine.let_go()
    await engine.pool.close()
    return ratios


def directory() -> Ratios:
    """512 keys of 100,000 found in the table of the directory by the C module, against the way before it: numpy."""
    found, node = Directory(), Holder(NodeId("n"), "n:1", BootEpoch(1))
    packed = [pack_keys(chain(number, 512)) for number in range(200)]
    for sequence, keys in enumerate(packed, 1):
        found.apply(node, sequence, keys, full_begin=sequence == 1, now=0.0)
    resolve = lambda: [found.resolve(keys, 0.0) for keys in packed]  # noqa: E731
    with _without(key_table, "native") as before:
        return compared(resolve, lambda: before(resolve), rounds=25)


def acquire() -> Ratios:
    """A prefix of 64 local blocks promised and released, against two calls that change nothing."""
    with LocalCluster(nodes=1, lookup_partitions=1, pool_bytes=64 * MiB, slab_bytes=MiB) as cluster:
        return asyncio.run(_acquire(cluster.socket("n0")))


async def _acquire(socket: str) -> Ratios:
    engine, keys = await attached(socket), chain(1, 64)
    await engine.store(keys)
    request = AcquireRequest(keys, 0, 5.0)

    async def promised() -> None:
        result = await engine.pool.acquire(engine.id, request)
        assert len(result.blocks) == len(keys)
        await engine.pool.release(engine.id, [result.lease_id])

    async def nothing() -> None:
        await engine.pool.release(engine.id, [])
        await engine.pool.release(engine.id, [])

    ratios = await compared_calls(promised, nothing, rounds=25)
    engine.let_go()
    await engine.pool.close()
    return ratios


def step() -> Ratios:
    """A step of 128 requests of which 8 fill a block, as vLLM's scheduler waits for it, against one dictionary entry a
    request."""

    def entries() -> None:
        seen = {}
        for request, computed in running:
            seen[request] = computed

    running = [(f"cmpl-{number:08d}", number) for number in range(REQUESTS)]
    engine = connector_step.Engine(REQUESTS, "one in 16")
    ratios: Ratios = []
    for number in range(connector_step.WARM_UP + connector_step.STEPS):
        seconds, _, _ = engine.step(number)
        if number >= connector_step.WARM_UP:
            ratios.append(timed(entries) / seconds)
        time.sleep(connector_step.PAUSE_SECONDS)
    engine.close()
    return ratios


def eviction() -> Ratios:
    """The default eviction policy on conversations that do not fit, against LRU."""
    pairs = [
        [policy.cost(POLICIES[name], EVICTION_SLOTS, EVICTION_BLOCKS) for name in ("lru", "default")] for _ in range(7)
    ]
    return [bound / own for bound, own in pairs]


def disk_write() -> Ratios:
    """Blocks of 2 MiB written by the disk tier, against one plain write a file by as many threads."""
    return _on_disk()["write"]


def disk_read() -> Ratios:
    """The same blocks read and verified."""
    return _on_disk()["read"]


@cache  # a round writes and reads
def _on_disk() -> dict[str, Ratios]:
    folder = ROOT / "build"
    folder.mkdir(exist_ok=True)
    ways = {name: tier_disk.WAYS[name] for name in ("plain", "disk tier")}
    with tier_disk.slots() as memory:
        blocks = tier_disk.blocks_of(memory, 2 * MiB, DISK_BYTES)
        rounds = [tier_disk.one_round(folder, blocks, DISK_THREADS, ways) for _ in range(10)][1:]
    return {kind: [tier_disk.ratio(each, "disk tier", kind) for each in rounds] for kind in ("write", "read")}


@contextmanager
def _without(module: object, name: str) -> Iterator[Callable[[Work], None]]:
    """Runs work as where nothing was compiled."""
    compiled = getattr(module, name)
    if compiled is None:
        raise SystemExit("the C modules are not there: make native")

    def before(work: Work) -> None:
        setattr(module, name, None)
        try:
            work()
        finally:
            setattr(module, name, compiled)

    yield before


# Each with its goal. On two quiet cores: local read 1.26, local store 2.9, small runs 2.2, pull 0.66 to 0.8, mapped
# pull 1.9 to 2.3, lookup 0.68, directory 49 to 59, acquire 0.43 to 0.56, step 0.037, eviction 0.54, disk write 0.97,
# disk read 0.92. Where memcpy copies 20 GB/s, two commits had 0.69 to 0.93 of it for the local read, by turns.
GUARDS: dict[str, tuple[Callable[[], Ratios], float]] = {
    "local read": (local_read, 0.6),
    "local store": (local_store, 1.5),
    "small runs": (small_runs, 1.8),
    "pull": (pull, 0.55),
    "mapped pull": (mapped_pull, 1.5),
    "lookup": (lookup, 0.55),
    "directory": (directory, 15.0),
    "acquire": (acquire, 0.38),
    "step": (step, 0.028),
    "eviction": (eviction, 0.3),
    "disk write": (disk_write, 0.7),
    "disk read": (disk_read, 0.7),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=GUARDS, default=list(GUARDS), metavar="NAME")
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, object] = {}
    rows, failed = [], []
    for name in options.only:
        measure, goal = GUARDS[name]
        begun = time.monotonic()
        median, low, high = interval(measure())
        is_met = high >= goal
        failed += [] if is_met else [name]
        figures[name] = {"ratio": round(median, 3), "low": round(low, 3), "high": round(high, 3), "goal": goal}
        spread = f"{low:.2f} to {high:.2f}"
        rows.append([name, median, spread, goal, "yes" if is_met else "NO", round(time.monotonic() - begun, 1)])
    print_table(["ratio", "median", "95 %", "goal", "met", "seconds"], rows)
    if options.out is not None:
        print(write_report("guard", figures, options.out))
    if failed:
        print(f"slower than before, beyond the noise: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
