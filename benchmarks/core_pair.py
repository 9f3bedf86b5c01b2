"""Acquire and release of a chain that is all here, in the core alone: microseconds a pair, by the chain's length.

    python -m benchmarks.core_pair [--before TREE] [--rounds 5] [--out PATH]

Each sample is a process of its own. With `--before`, the root of another checkout (`git worktree add TREE COMMIT`),
this tree and that one are measured in turn, so that a busy machine slows both down. Shown are the best of the rounds,
and the longest that one call of `handle` kept others waiting: long calls are done in slices.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LENGTHS = (16, 64, 128, 512, 1000, 2048)  # 1,000 is what a flood of long calls asks for
BLOCKS_A_SAMPLE = 40_000
SLOTS_A_SLAB = 3  # of the harness, with room to spare
REPEATS_MIN = 5


def measure(length: int) -> dict[str, float]:
    """Run in the tree that is measured: the imports are that tree's."""
    from kvservice.core import events as ev
    from kvservice.core.messages import AcquireRequest
    from kvservice.testing.builders import CoreHarness, make_chain

    harness = CoreHarness(slab_count=length // SLOTS_A_SLAB + 2)
    state, resume = harness.state, getattr(ev, "GoOn", None)
    state.check_invariants = lambda: None  # the harness checks after each event, which takes as long as there are slots
    attachment, chain = harness.attach(), make_chain(length)
    harness.store(attachment, chain)
    packed = b"".join(chain)
    repeats = max(REPEATS_MIN, BLOCKS_A_SAMPLE // length)
    now, total, slowest = harness.now, 0.0, 0.0
    pairs: list[float] = []
    longest: list[float] = []

    def handle(event: object) -> object:
        """The value of the reply, after as many slices as it takes."""
        nonlocal total, slowest
        while True:
            begun = time.perf_counter()
            actions = state.handle(event, now)
            took = time.perf_counter() - begun
            total, slowest = total + took, max(slowest, took)
            for action in actions:
                if type(action).__name__ == "Reply":
                    return action.value
            assert resume is not None, actions
            event = resume(event.op)

    for number in range(repeats):
        keys = tuple(
            packed[i : i + 16] for i in range(0, len(packed), 16)
        )  # as they come off the wire: no known objects
        total, slowest, now = 0.0, 0.0, now + 0.001
        found = handle(ev.Acquire(10 + 2 * number, attachment, AcquireRequest(keys, 0, 1.0)))
        assert len(found.blocks) == length
        handle(ev.Release(11 + 2 * number, attachment, (found.lease_id,)))
        pairs.append(total)
        longest.append(slowest)
    return {"pair_us": 1e6 * statistics.median(pairs), "longest_us": 1e6 * statistics.median(longest)}


def sample(tree: Path) -> dict[str, dict[str, float]]:
    """Measure one tree in a new process."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child"]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    found: dict[str, dict[str, float]] = json.loads(subprocess.check_output(command, cwd=tree, env=environment))
    return found


def best(samples: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    return {
        name: {what: round(min(one[name][what] for one in samples), 1) for what in samples[0][name]}
        for name in samples[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="root of another checkout, measured in turn with this one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        gc.disable()
        print(json.dumps({str(length): measure(length) for length in LENGTHS}))
        return
    from benchmarks.report import print_table, write_report

    ours, theirs = [], []
    for _ in range(options.rounds):
        ours.append(sample(ROOT))
        if options.before is not None:
            theirs.append(sample(options.before.resolve()))
    figures: dict[str, dict[str, float]] = best(ours)
    for name, before in best(theirs).items() if theirs else ():
        figures[name]["base_pair_us"], figures[name]["base_longest_us"] = before["pair_us"], before["longest_us"]
        figures[name]["ratio"] = round(before["pair_us"] / figures[name]["pair_us"], 2)
    headings = ("blocks", "pair µs", "longest call µs", *(("before µs", "longest µs", "ratio") if theirs else ()))
    print_table(headings, [(name, *row.values()) for name, row in figures.items()])
    print(write_report("core_pair", figures, options.out))


if __name__ == "__main__":
    main()
