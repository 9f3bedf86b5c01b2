"""Plays many schedules in several processes, and stops at the first one that fails."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from kvservice.signals import mapped
from kvservice.testing.sim.run import run_schedule
from kvservice.testing.sim.schedule import make_schedule

# Schedules that one process plays before it reports: seconds of work, so a failure stops the others soon.
CHUNK = 50


@dataclass(slots=True)
class CampaignTally:
    schedules: int = 0
    virtual_seconds: float = 0.0
    counters: Counter[str] = field(default_factory=Counter)
    violations: list[tuple[int, str]] = field(default_factory=list)  # (seed, what)

    def add(self, other: CampaignTally) -> None:
        self.schedules += other.schedules
        self.virtual_seconds += other.virtual_seconds
        self.counters.update(other.counters)
        self.violations += other.violations


def run_seeds(seeds: range) -> CampaignTally:
    """Play these schedules in this process, one after the other."""
    tally = CampaignTally()
    for seed in seeds:
        outcome = run_schedule(make_schedule(seed))
        tally.schedules += 1
        tally.virtual_seconds += outcome.virtual_seconds
        tally.counters.update(outcome.counters)
        if outcome.violation:
            tally.violations.append((seed, outcome.violation))
    return tally


def run_campaign(
    seeds: range, processes: int, on_progress: Callable[[CampaignTally], None] | None = None
) -> CampaignTally:
    """Play the schedules; blocks until all have run or one fails. Processes are started fresh, not forked, so that none
    inherits a lock."""
    tally = CampaignTally()
    context = multiprocessing.get_context("spawn")
    # It computes for minutes, so everything else on the machine goes first.
    with ProcessPoolExecutor(processes, context, initializer=os.nice, initargs=(19,)) as pool:
        for part in mapped(pool, run_seeds, _chunks(seeds)):
            tally.add(part)
            if on_progress is not None:
                on_progress(tally)
            if tally.violations:
                pool.shutdown(cancel_futures=True)
                break
    return tally


def _chunks(seeds: range) -> Iterator[range]:
    for start in range(0, len(seeds), CHUNK):
        yield seeds[start : start + CHUNK]
