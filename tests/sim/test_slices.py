"""Schedules in which every call is done a block at a time, and waits for its next turn while others are served."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvservice.testing.sim.run import run_schedule
from kvservice.testing.sim.schedule import CLEARS_AT, CLEARS_EVERY, make_schedule

pytestmark = [pytest.mark.sim, pytest.mark.slow]

SCHEDULES = 12  # fifteen seconds


def test_clears_and_long_calls_may_meet() -> None:
    slices = 0
    for number in range(SCHEDULES):
        seed = CLEARS_AT + CLEARS_EVERY * number
        outcome = run_schedule(replace(make_schedule(seed), slices=True))
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        slices += outcome.counters["slices"]
    assert slices > 20 * SCHEDULES, "hardly any call was long"
