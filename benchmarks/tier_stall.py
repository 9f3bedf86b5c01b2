"""Whether a tier slows an engine: reserve, seal and acquire without one, with a busy one, with a hung one.

A busy disk slows everything on its machine, whoever uses it. So there is a control: `beside` has no tier, and another
process, as nice as a tier's threads, reads and writes files with plain calls as fast as the drive lets it.

    python -m benchmarks.tier_stall [--folder FOLDER] [--rounds 5] [--requests 400] [--block-bytes N] [--out PATH]

One process, one event loop, one pool of 64 blocks. Every 10 ms a request reserves 8 blocks in the full pool, seals
them, and acquires a prompt of 8 blocks that is in memory. Every block that is sealed is written down, and another
engine keeps reading prompts that only the tier has, so the disk is loaded both ways. The ways alternate in every round.
The longest step is the longest time that the loop was in one callback, whoever made it, the garbage collector among
them. That is set as in a shard's process, or with `--plain-collector` as Python comes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import mmap
import multiprocessing
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from benchmarks.report import default_out, percentile, print_table, write_report
from kvservice.aio import end_tasks
from kvservice.core.messages import AcquireRequest, SealItem
from kvservice.core.segment.geometry import plan_geometry
from kvservice.garbage import keep_tables
from kvservice.pool.port import PoolPort
from kvservice.pool.runtime import PoolRuntime
from kvservice.pool.runtime_ports import PoolConfig
from kvservice.pool.tier_specs import DISK, TierSpec
from kvservice.pool.tiers import TierPhase
from kvservice.testing.builders import make_chain, make_spec
from kvservice.testing.eventually import eventually_async
from kvservice.testing.fake_tier import FakeTier
from kvservice.tier.base import Tier
from kvservice.tier.mounts import decide_access, mounts_here
from kvservice.tier.worker import NICENESS
from kvservice.units import AttachmentId, BlockKey, GiB, MiB, NodeId, SpanRoute

WAYS = ("none", "beside", "disk", "hung")
CALLS = ("reserve", "seal", "acquire")
POOL_BLOCKS, PROMPT_BLOCKS = 64, 8
PACE_SECONDS = 0.010  # between requests: 8 MiB each, so the engine stores about 600 MB/s
WARM_REQUESTS = 16  # before a round counts: they fill the pool
RATIO_GOAL, STEP_GOAL_SECONDS = 1.1, 0.010  # of p99 with a tier to p99 without; no step of the loop above it


BESIDE_FILES = 256  # of each thread of the control


@dataclass
class Round:
    """What one way took in one round."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in CALLS})
    longest_step: float = 0.0
    longest_collection: float = 0.0  # a full one
    counters: dict[str, int] = field(default_factory=dict)


@contextlib.contextmanager
def longest_step(found: Round) -> Iterator[None]:
    """Measure every callback of every loop meanwhile."""
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        began = time.perf_counter()
        run(handle)
        found.longest_step = max(found.longest_step, time.perf_counter() - began)

    collecting = 0.0

    def collected(phase: str, about: dict[str, int]) -> None:
        nonlocal collecting
        if phase == "start":
            collecting = time.perf_counter()
        elif about["generation"] == 2:
            found.longest_collection = max(found.longest_collection, time.perf_counter() - collecting)

    asyncio.Handle._run = timed  # type: ignore[assignment, method-assign]
    gc.callbacks.append(collected)
    try:
        yield
    finally:
        gc.callbacks.remove(collected)
        asyncio.Handle._run = run  # type: ignore[method-assign]


def prompt(number: int) -> tuple[BlockKey, ...]:
    return make_chain(PROMPT_BLOCKS, f"prompt {number}")


async def timed_request(pool: PoolPort, engine: AttachmentId, number: int, seconds: dict[str, list[float]]) -> bool:
    """Store a prompt and ask for it, and note what the calls took. A block's bytes are whatever lies in its slot.
    False: the pool had no room."""
    keys, began = prompt(number), time.perf_counter()
    refs = await pool.reserve(engine, PROMPT_BLOCKS)
    seconds["reserve"].append(time.perf_counter() - began)
    if len(refs) < PROMPT_BLOCKS:
        await pool.abort(engine, refs)
        return False
    parents = (None, *keys)
    items = [
        SealItem(ref, key, parents[position], position, SpanRoute(number))
        for position, (ref, key) in enumerate(zip(refs, keys, strict=True))
    ]
    began = time.perf_counter()
    await pool.seal(engine, items)
    seconds["seal"].append(time.perf_counter() - began)
    began = time.perf_counter()
    result = await pool.acquire(engine, AcquireRequest(keys, 0, 1.0))
    seconds["acquire"].append(time.perf_counter() - began)
    if result.lease_id:
        await pool.release(engine, [result.lease_id])
    return True


class Load:
    """The engine that is measured, and one that reads what only the tier has."""

    def __init__(self, pool: PoolRuntime, size: int, engine: AttachmentId, reader: AttachmentId) -> None:
        self.pool = pool
        self.size = size
        self.engine = engine
        self.reader = reader
        self.stored = 0  # prompts

    async def store(self, found: Round) -> None:
        self.stored += await timed_request(self.pool, self.engine, self.stored, found.seconds)

    async def read_old(self) -> None:
        """Read prompts that memory no longer has, for ever."""
        chosen = random.Random(1)
        while True:
            old = prompt(chosen.randrange(max(self.stored - POOL_BLOCKS // PROMPT_BLOCKS, 1)))
            result = await self.pool.acquire(self.reader, AcquireRequest(old, 0, 1.0))
            if result.lease_id:
                await self.pool.release(self.reader, [result.lease_id])
            await asyncio.sleep(0.005)


def use_the_disk(folder: str, size: int, threads: int) -> None:
    """Read and write files until the process is ended."""
    os.nice(NICENESS)

    def use(number: int) -> None:
        memory, chosen = mmap.mmap(-1, size), random.Random(number)
        memory.write(os.urandom(size))
        flags = os.O_DIRECT | os.O_RDWR | os.O_CREAT
        written = set[int]()
        while True:
            place = chosen.randrange(BESIDE_FILES)
            descriptor = os.open(f"{folder}/{number}-{place}", flags, 0o600)
            if place in written and number % 2:
                os.preadv(descriptor, [memory], 0)
            else:
                os.pwritev(descriptor, [memory], 0)
                written.add(place)
            os.close(descriptor)

    for number in range(threads):
        threading.Thread(target=use, args=(number,)).start()


@contextlib.contextmanager
def disk_in_use(way: str, folder: Path, size: int) -> Iterator[None]:
    """The control: the disk is busy meanwhile, and not with a tier."""
    if way != "beside":
        yield
        return
    threads = decide_access(folder.resolve(), mounts_here()).threads
    process = multiprocessing.get_context("spawn").Process(target=use_the_disk, args=(str(folder), size, threads))
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


async def play(way: str, folder: Path, requests: int, size: int) -> Round:
    """One round of one way, in a new pool."""
    fake, found = FakeTier(DISK), Round()
    specs = () if way in ("none", "beside") else (TierSpec(DISK, str(folder), 8 * GiB, "stored", "none"),)
    makers: dict[str, Callable[[], Tier]] | None = {DISK: lambda: fake} if way == "hung" else None
    geometry = plan_geometry(POOL_BLOCKS * (size + 64 * 1024) + 8 * MiB)
    config = PoolConfig(NodeId("n"), None, geometry, tiers=specs)
    gc.collect()  # the pool of the round before, so that this one does not pay for it
    pool = await PoolRuntime.open(config, tiers=makers)
    await eventually_async(lambda: all(state.phase is TierPhase.OPEN for state in pool.tier_states()), "the tier")
    if way == "hung":
        fake.hang()
    spec = make_spec(payload_bytes=size)
    engine = await pool.attach(spec, lambda reason: None)
    other = replace(spec, engine_id=bytes(range(16)))
    reader = await pool.attach(other, lambda reason: None)
    load = Load(pool, size, engine.attachment_id, reader.attachment_id)
    for _ in range(WARM_REQUESTS):
        await load.store(Round())
    reading = asyncio.create_task(load.read_old())
    with disk_in_use(way, folder, size), longest_step(found):
        for _ in range(requests):
            await load.store(found)
            await asyncio.sleep(PACE_SECONDS)
    await end_tasks([reading])
    counters = pool.stats().counters
    found.counters = {name: count for name, count in counters.items() if name.startswith("tier_") and count}
    fake.go_on()
    await pool.close()
    return found


def figures(rounds: dict[str, list[Round]]) -> dict[str, object]:
    p99 = {
        way: {name: [percentile(each.seconds[name], 0.99) * 1e6 for each in found] for name in CALLS}
        for way, found in rounds.items()
    }
    return {
        "p99_us": {way: {name: median(values) for name, values in of_way.items()} for way, of_way in p99.items()},
        "ratio": {
            way: {name: median(p99[way][name]) / median(p99["none"][name]) for name in CALLS} for way in WAYS[1:]
        },
        "disk_to_beside": {name: median(p99["disk"][name]) / median(p99["beside"][name]) for name in CALLS},
        "ratio_goal": RATIO_GOAL,
        "longest_step_ms": {way: [each.longest_step * 1e3 for each in found] for way, found in rounds.items()},
        "full_collection_ms": {way: [each.longest_collection * 1e3 for each in found] for way, found in rounds.items()},
        "step_goal_ms": STEP_GOAL_SECONDS * 1e3,
        "counters": {way: found[-1].counters for way, found in rounds.items()},
        "each_p99_us": p99,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: a new one in the present folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=400, help="of each way in each round")
    parser.add_argument("--block-bytes", type=int, default=1 * MiB)
    parser.add_argument("--out", type=Path, default=default_out("tier_stall"))
    parser.add_argument("--plain-collector", action="store_true", help="leave Python's garbage collector as it comes")
    arguments = parser.parse_args()
    if not arguments.plain_collector:
        keep_tables()
    rounds: dict[str, list[Round]] = {way: [] for way in WAYS}
    for _ in range(arguments.rounds):
        for way in WAYS:
            with tempfile.TemporaryDirectory(dir=arguments.folder or Path.cwd(), prefix=".tier-stall-") as folder:
                found = asyncio.run(play(way, Path(folder), arguments.requests, arguments.block_bytes))
            rounds[way].append(found)
    every = figures(rounds)
    p99, ratio = every["p99_us"], every["ratio"]
    assert isinstance(p99, dict)
    assert isinstance(ratio, dict)
    print_table(
        [
            "tier",
            *(f"{name} p99 us" for name in CALLS),
            *(f"{name} ratio" for name in CALLS),
            "longest step ms",
            "full gc ms",
        ],
        [
            [
                way,
                *(p99[way][name] for name in CALLS),
                *(ratio.get(way, dict.fromkeys(CALLS, 1.0))[name] for name in CALLS),
                max(each.longest_step for each in rounds[way]) * 1e3,
                max(each.longest_collection for each in rounds[way]) * 1e3,
            ]
            for way in WAYS
        ],
    )
    print(write_report("tier_stall", {"rounds": arguments.rounds, **every}, arguments.out))


if __name__ == "__main__":
    main()
