"""How long Python's garbage collector stops a shard, as its books grow to 100,000 blocks and go on.

    python -m benchmarks.garbage [--blocks 100000] [--rounds 5] [--out PATH]

The core of a shard stores blocks without bytes until its pool is full, then as many again, which evict the first. Once
with the collector as a shard sets it (kvservice.garbage), once as Python comes; in alternating rounds, each in a
process of its own. `gc.callbacks` say when each collection began and ended; its processor time counts, which on a quiet
machine is how long everything stood. A full collection is one of generation 2.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import struct
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

WAYS = ("as a shard sets it", "as Python comes")
CHAIN_BLOCKS = 512
GOAL_MS = 10.0  # a full collection, at the most


class Watch:
    """Milliseconds of processor time of collections, by generation."""

    def __init__(self) -> None:
        self.found: tuple[list[float], list[float], list[float]] = ([], [], [])
        self._began = 0.0
        gc.callbacks.insert(0, self._note)

    def _note(self, phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.thread_time()
        else:
            self.found[about["generation"]].append(1e3 * (time.thread_time() - self._began))


def fill(blocks: int, times: int = 2) -> Any:
    """A core that has stored so many times what it has room for, which is `blocks`."""
    from kvservice.core import events as ev
    from kvservice.core.actions import Digest, NextTurn, Reply
    from kvservice.core.block.keys import span_route
    from kvservice.core.messages import SealItem
    from kvservice.core.segment.geometry import plan_geometry
    from kvservice.core.shard import ShardState
    from kvservice.testing.builders import make_spec
    from kvservice.units import BlockKey, BootEpoch, NodeId

    size = 4096
    state = ShardState(NodeId("n0"), BootEpoch(1), plan_geometry(blocks * size))
    now = [0.0]

    def handle(event: Any) -> list[Any]:
        now[0] += 0.001
        actions = list(state.handle(event, now[0]))
        while actions and isinstance(actions[-1], NextTurn):  # a long call is done in slices
            actions += state.handle(ev.GoOn(actions[-1].op), now[0])
        return actions

    def reply(actions: list[Any]) -> Any:
        return next(action.value for action in actions if isinstance(action, Reply))

    attachment = reply(handle(ev.Attach(1, make_spec(payload_bytes=size), ""))).attachment
    for number in range(times * blocks // CHAIN_BLOCKS):
        keys = [
            BlockKey(hashlib.blake2b(struct.pack("<QQ", number, index), digest_size=16).digest())
            for index in range(CHAIN_BLOCKS)
        ]
        refs = reply(handle(ev.Reserve(2, attachment, CHAIN_BLOCKS, 0)))
        items = tuple(
            SealItem(ref, key, keys[i - 1] if i else None, i, span_route(keys, i))
            for i, (ref, key) in enumerate(zip(refs, keys, strict=False))
        )
        asked = [action for action in handle(ev.Seal(3, attachment, items)) if isinstance(action, Digest)]
        handle(ev.Digested(tuple(ev.SlotDigest(one.slot, one.key, 1 << 63) for one in asked)))
    return state


def one_round(way: str, blocks: int) -> dict[str, float]:
    watch = Watch()
    fill(4 * CHAIN_BLOCKS)  # imports
    if way == WAYS[0]:
        from kvservice.garbage import keep_tables

        keep_tables()
    for of in watch.found:
        of.clear()  # those before the shard serves
    began = time.thread_time()
    state = fill(blocks)
    seconds = time.thread_time() - began
    full, young = list(watch.found[2]), watch.found[0] + watch.found[1]
    gc.unfreeze()
    began = time.thread_time()
    gc.collect()
    return {
        "full_max_ms": max(full, default=0.0),
        "full_count": len(full),
        "young_max_ms": max(young, default=0.0),
        "share_of_time": (sum(full) + sum(young)) / 1e3 / seconds,
        "everything_ms": 1e3 * (time.thread_time() - began),  # what one collection of all of it would take
        "blocks": state.slot_counts()["sealed"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", metavar="WAY", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one_round(options.one, options.blocks)))
        return 0
    from benchmarks.report import print_table, write_report

    rounds: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way in WAYS:
            command = [sys.executable, "-m", "benchmarks.garbage", "--one", way, "--blocks", str(options.blocks)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            rounds[way].append(json.loads(done.stdout))
    figures: dict[str, Any] = {}
    for way, found in rounds.items():
        figures[way] = {name: median(one[name] for one in found) for name in found[0]} | {"rounds": found}
    names = ("full_max_ms", "full_count", "young_max_ms", "share_of_time", "everything_ms")
    print_table(["collector", *names], [[way, *(figures[way][name] for name in names)] for way in WAYS])
    print("written", write_report("garbage", figures, options.out))
    return 0 if figures[WAYS[0]]["full_max_ms"] <= GOAL_MS else 1


if __name__ == "__main__":
    sys.exit(main())
