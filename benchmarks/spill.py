"""Whether a memory node slows the engine whose evictions it takes: reserve, seal and acquire with one and without.

    python -m benchmarks.spill [--rounds 5] [--requests 400] [--out PATH]

One shard, and in the way `memory node` a second one that accepts what the first evicts; each a process. Every 20 ms an
engine reserves 8 blocks of 1 MiB in the full pool, seals them, and acquires a prompt of 8 blocks that is in memory. The
memory node reads whatever is about to be evicted, so it copies and checks as many bytes as the engine stores. It has
cores of its own where it is another machine; here its process is nice, and takes what the shard and the engine leave.
There is a control: `beside` has no memory node, and a process that is as nice copies as many bytes as often. The ways
alternate in every round. Milliseconds of the calls, as the engine sees them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.report import default_out, percentile, print_table, write_report
from benchmarks.tier_stall import CALLS, PROMPT_BLOCKS, timed_request
from kvservice.testing.builders import make_spec
from kvservice.testing.cluster import LocalCluster
from kvservice.units import MiB
from tests.integration.engine import attached

WAYS = ("none", "beside", "memory node")
POOL_BYTES, BLOCK_BYTES = 64 * MiB, 1 * MiB
PACE_SECONDS = 0.020  # between requests of 8 MiB each: less than the memory node can take
WARM_REQUESTS = 16  # before a round counts: they fill the pool

Times = dict[str, list[float]]


def give_way(process: int) -> None:
    """Make all threads of this process as nice as can be. Those that they start later are as nice."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        os.setpriority(os.PRIO_PROCESS, int(thread.name), 19)


def copy_for_ever() -> None:
    give_way(os.getpid())
    source = np.ones(PROMPT_BLOCKS * BLOCK_BYTES, np.uint8)
    target = np.empty_like(source)
    while True:
        target[:] = source
        time.sleep(PACE_SECONDS)


@contextlib.contextmanager
def copying(way: str) -> Iterator[None]:
    """The control."""
    if way != "beside":
        yield
        return
    process = multiprocessing.get_context("spawn").Process(target=copy_for_ever)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


async def measured(cluster: LocalCluster, requests: int) -> Times:
    engine = await attached(cluster.socket("n0"), make_spec(payload_bytes=BLOCK_BYTES))
    found: Times = {name: [] for name in CALLS}
    for number in range(WARM_REQUESTS + requests):
        if number == WARM_REQUESTS:
            found = {name: [] for name in CALLS}
        assert await timed_request(engine.pool, engine.attachment.attachment_id, number, found), "no room"
        await asyncio.sleep(PACE_SECONDS)
    await engine.pool.close()
    engine.let_go()
    return found


def one_round(way: str, requests: int) -> tuple[Times, int]:
    """One way in a cluster of its own. Returns the times, and how many blocks the memory node took."""
    memory_nodes = int(way == "memory node")
    with LocalCluster(1 + memory_nodes, 1, pool_bytes=POOL_BYTES, memory_nodes=memory_nodes) as cluster, copying(way):
        if memory_nodes:
            give_way(cluster.pid("n1"))
        found = asyncio.run(measured(cluster, requests))
        return found, cluster.stats("n0").counters.get("spill_blocks_taken", 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=400, help="of each way in each round")
    parser.add_argument("--out", type=Path, default=default_out("spill"))
    options = parser.parse_args()
    rounds: dict[str, list[Times]] = {way: [] for way in WAYS}
    taken: list[int] = []
    for _ in range(options.rounds):
        for way in WAYS:
            found, blocks = one_round(way, options.requests)
            rounds[way].append(found)
            taken += [blocks] if way == "memory node" else []
    shares = {"p50": 0.5, "p99": 0.99}
    times = {
        way: {
            name: {
                label: 1e3 * median(percentile(each[name], share) for each in found) for label, share in shares.items()
            }
            for name in CALLS
        }
        for way, found in rounds.items()
    }
    ratio = {
        way: {name: {label: times[way][name][label] / times["none"][name][label] for label in shares} for name in CALLS}
        for way in WAYS[1:]
    }
    print_table(
        ["way", *(f"{name} {label} ms" for name in CALLS for label in shares)],
        [[way, *(times[way][name][label] for name in CALLS for label in shares)] for way in WAYS],
    )
    stored = options.requests * PROMPT_BLOCKS
    figures = {"rounds": options.rounds, "blocks_stored_a_round": stored, "blocks_taken": taken}
    print(write_report("spill", {**figures, "milliseconds": times, "ratio": ratio}, options.out))


if __name__ == "__main__":
    main()
