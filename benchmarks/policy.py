"""What the default eviction policy finds beside LRU and S3-FIFO, on traffic that nobody tuned it to; and what it costs.

    python -m benchmarks.policy [--seeds 100] [--first-seed 0] [--processes 2] [--out PATH]

Each seed is a trace of `kvservice/replay/traffic.py`, played on one simulated node of several sizes. The first requests
of each trace only warm up. Compared are points: percent of the prompt blocks that are hits, less what the better of LRU
and S3-FIFO finds. The seeds follow from the commit, so nobody picks them, and a changed policy meets new ones.

The cost is that of the policy alone, without the shard around it: microseconds a block that is asked for, and bytes a
resident block, with all that is remembered of gone ones and with the keys.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import multiprocessing
import os
import random
import signal
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import commit, print_table, write_report
from kvservice.core.store.eviction import EvictionPolicy
from kvservice.replay.policies import POLICIES
from kvservice.replay.study import Plan, ReplayRun, play
from kvservice.replay.trace import key_of
from kvservice.replay.traffic import make_traffic
from kvservice.units import BlockKey

OTHERS = ("lru", "s3-fifo")
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)  # sizes of the cache: parts of a trace's different blocks
WARM_UP = 0.3  # of the requests
BELOW = 0.3  # points; less is noise
FAR_BELOW = 1.0  # points

COST_SLOTS = (20_000, 150_000)
COST_POLICIES = ("lru", "default")
COST_ROUNDS = 3
RETURNING = 0.6  # of the prompts go on with a conversation
FULL_FOR = 2  # blocks that are asked for when the cache is full and before the clock runs, in slots
TIMED_BLOCKS = 200_000
MEMORY_SLOTS = 40_000  # more than GONE_MIN, so that history is in proportion to the pool


@dataclass(frozen=True, slots=True)
class Point:
    """One trace, played at one size."""

    share: float
    hit_rates: dict[str, float]  # by policy

    @property
    def points(self) -> float:
        return 100 * (self.hit_rates["default"] - max(self.hit_rates[name] for name in OTHERS))


@dataclass(frozen=True, slots=True)
class Played:
    """One trace at all sizes."""

    seed: int
    name: str
    points: list[Point]

    def row(self) -> tuple[str, float, float, float]:
        found = [point.points for point in self.points]
        return (self.name, min(found), statistics.mean(found), max(found))


def seed_of(revision: str, index: int) -> int:
    """Of the commit, whether or not files differ from it."""
    text = f"{revision.removesuffix('-dirty')} {index}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def play_seed(seed: int, blocks: int = 60_000, shares: Sequence[float] = SHARES) -> Played:
    """Takes about twenty seconds."""
    trace = make_traffic(seed, blocks)
    plan = Plan([], count_from=int(len(trace.requests) * WARM_UP))
    found = []
    for share in shares:
        capacity = max(round(share * trace.unique_count), 1)
        rates = {name: play(trace, ReplayRun(name, capacity), plan)["hit_rate"] for name in ("default", *OTHERS)}
        found.append(Point(share, rates))
    return Played(seed, trace.name, found)


def summary(played: Sequence[Played]) -> dict[str, object]:
    """The figures of all points, and of each size."""
    sizes = dict.fromkeys(point.share for each in played for point in each.points)
    return {
        "result": _figures([point for each in played for point in each.points]),
        "by_size": [
            {"share": share, **_figures([point for each in played for point in each.points if point.share == share])}
            for share in sizes
        ],
        "by_seed": [
            {"seed": each.seed, "traffic": each.name, "points": [round(point.points, 3) for point in each.points]}
            for each in played
        ],
    }


def _figures(points: Sequence[Point]) -> dict[str, float]:
    found = [point.points for point in points]
    return {
        "mean": round(statistics.mean(found), 3),
        "below_share": round(sum(one < -BELOW for one in found) / len(found), 4),
        "below_one_share": round(sum(one < -FAR_BELOW for one in found) / len(found), 4),
        "worst": round(min(found), 3),
        "best": round(max(found), 3),
        "points": len(found),
        **{
            f"hit_rate_{name}": round(statistics.mean(point.hit_rates[name] for point in points), 5)
            for name in ("default", *OTHERS)
        },
    }


def conversations(seed: int) -> Iterator[list[BlockKey]]:
    """Prompts without an end. Of the conversations going on, the later ones are likelier to go on."""
    noise = random.Random(seed)
    names = map(key_of, itertools.count())
    open_ones: list[list[BlockKey]] = []
    while True:
        if open_ones and noise.random() < RETURNING:
            place = max(len(open_ones) - 1 - int(noise.expovariate(1 / 500)), 0)
            chain = open_ones.pop(place) + list(itertools.islice(names, 1 + int(noise.expovariate(1 / 3))))
        else:
            chain = list(itertools.islice(names, 1 + int(noise.expovariate(1 / 15))))
        open_ones.append(chain)
        del open_ones[:-3000]
        yield chain


def cost(make: Callable[[], EvictionPolicy], slots: int, timed: int = TIMED_BLOCKS) -> float:
    """Microseconds a block asked for, when the cache is full."""
    prompts = conversations(1)
    policy = make()
    resident = _fill(policy, prompts, slots)
    batch = _prompts_of(prompts, timed)
    blocks = sum(map(len, batch))
    gc.collect()
    gc.disable()
    begun = time.process_time()  # what else the machine does is not counted
    _ask(policy, resident, batch, slots)
    took = time.process_time() - begun
    gc.enable()
    return 1e6 * took / blocks


def memory(make: Callable[[], EvictionPolicy], slots: int = MEMORY_SLOTS) -> float:
    """Bytes a resident block."""
    tracemalloc.start()
    policy = make()
    resident = _fill(policy, conversations(1), slots)
    gc.collect()
    books, keys = (tracemalloc.Filter(True, path) for path in ("*/core/store/*", "*/replay/trace.py"))
    found = tracemalloc.take_snapshot().filter_traces((books, keys)).traces
    tracemalloc.stop()
    return sum(trace.size for trace in found) / len(resident)


def _fill(policy: EvictionPolicy, prompts: Iterator[list[BlockKey]], slots: int) -> set[BlockKey]:
    """Ask until the cache has been full for a while. Returns what is resident."""
    resident: set[BlockKey] = set()
    while len(resident) < slots:
        _ask(policy, resident, _prompts_of(prompts, slots), slots)
    _ask(policy, resident, _prompts_of(prompts, FULL_FOR * slots), slots)
    return resident


def _prompts_of(prompts: Iterator[list[BlockKey]], blocks: int) -> list[list[BlockKey]]:
    found = []
    while blocks > 0:
        found.append(next(prompts))
        blocks -= len(found[-1])
    return found


def _ask(policy: EvictionPolicy, resident: set[BlockKey], prompts: Sequence[list[BlockKey]], slots: int) -> None:
    for number, chain in enumerate(prompts):
        policy.touch(chain, float(number))
        parent: BlockKey | None = None
        for position, key in enumerate(chain):
            if key not in resident:
                if len(resident) == slots:
                    victim = policy.victim(0)
                    assert victim is not None
                    policy.remove(victim)
                    resident.discard(victim)
                policy.add(key, parent, position, float(number), is_secondary=False, size_class=0)
                resident.add(key)
            parent = key


def costs() -> list[dict[str, float]]:
    """By turns, so that a busy machine slows both down; the best of the rounds."""
    rows: list[dict[str, float]] = []
    for slots in COST_SLOTS:
        best = dict.fromkeys(COST_POLICIES, float("inf"))
        for number in range(COST_ROUNDS):
            _tell(f"cost at {slots} slots, round {number + 1} of {COST_ROUNDS}")
            for name in COST_POLICIES:
                best[name] = min(best[name], cost(POLICIES[name], slots))
        figures = {f"{name}_us": round(found, 3) for name, found in best.items()}
        rows.append({"slots": slots, **figures, "ratio": round(best["default"] / best["lru"], 2)})
    return rows


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _start_process() -> None:
    """Ctrl-C is for the parent, which then ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(19)


def play_all(seeds: Sequence[int], processes: int) -> list[Played]:
    """Started fresh, not forked, so that no process inherits a lock. They end when this one is interrupted."""
    found: list[Played] = []
    with multiprocessing.get_context("spawn").Pool(processes, _start_process) as pool:
        for played in pool.imap(play_seed, seeds):
            found.append(played)
            name, worst, mean, best = played.row()
            _tell(f"{len(found)} of {len(seeds)}: {name}: worst {worst:.2f}, mean {mean:.2f}, best {best:.2f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first-seed", type=int, default=0, help="index of the first seed")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    revision = commit()
    cost_rows = costs()  # before the other processes start
    bytes_a_block = {name: round(memory(POLICIES[name])) for name in COST_POLICIES}
    indices = range(given.first_seed, given.first_seed + given.seeds)
    played = play_all([seed_of(revision, index) for index in indices], given.processes)
    print_table(("traffic", "worst", "mean", "best"), [each.row() for each in played])
    found = summary(played)
    result = found["result"]
    assert isinstance(result, dict)
    print_table(("all", *result), [("points", *result.values())])
    print_table(("cost", *cost_rows[0]), [("microseconds a block", *row.values()) for row in cost_rows])
    print_table(("memory", *bytes_a_block), [("bytes a resident block", *bytes_a_block.values())])
    figures = {
        "first_seed": given.first_seed,
        "seeds": given.seeds,
        **found,
        "cost": cost_rows,
        "bytes_a_block": bytes_a_block,
    }
    print(write_report("policy", figures, given.out))


if __name__ == "__main__":
    main()
