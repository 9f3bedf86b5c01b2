"""Clocks that do what clocks should not: schedules of faults on machines that are suspended, or whose clocks differ.

Without clears: those go by the time of day, and clocks that are seconds apart are documented to break them.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from kvservice.testing.sim.run import run_schedule
from kvservice.testing.sim.schedule import Fault, Schedule, make_schedule

pytestmark = pytest.mark.sim

SCHEDULES = int(os.environ.get("KVSERVICE_TEST_SIM_CLOCK_SCHEDULES", "30"))
LONG = 100.0  # for everybody else; to a machine whose clock stood still, no time at all


def on_suspended_machines(schedule: Schedule) -> Schedule:
    """Shortly after a request each, when something is promised or being read."""
    moments = [ask.at for ask in schedule.asks][:: max(len(schedule.asks) // 2, 1)][:2]
    seconds = (1.5, LONG) if schedule.seed % 4 == 0 else (1.5, 30.0)
    sleeps = tuple(Fault(at + 0.004, "suspend", schedule.seed + i, 0, seconds[i], 0) for i, at in enumerate(moments))
    return replace(schedule, faults=tuple(sorted(schedule.faults + sleeps, key=lambda fault: fault.at)), clears=())


def with_clocks_that_differ(schedule: Schedule) -> Schedule:
    """By a tenth, either way. A lease then ends for its holder before its reader stops to believe in it."""
    rates = (0.9, 1.1, 1.0) if schedule.seed % 2 else (1.1, 0.9, 1.0)
    return replace(schedule, rates=rates[: schedule.nodes], clears=())


def test_a_machine_that_was_suspended_breaks_no_promise() -> None:
    met = 0
    for seed in range(SCHEDULES):
        outcome = run_schedule(on_suspended_machines(make_schedule(seed)))
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        met += outcome.counters["fault_suspend"]
    assert met > SCHEDULES, "hardly any machine was suspended"


def test_clocks_a_tenth_too_fast_or_slow_break_no_promise() -> None:
    for seed in range(SCHEDULES):
        outcome = run_schedule(with_clocks_that_differ(make_schedule(seed)))
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
