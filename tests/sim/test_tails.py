"""Engines that keep the beginnings of blocks, in schedules of faults: no wrong byte, and nothing waits for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvservice.testing.sim.run import run_schedule
from kvservice.testing.sim.schedule import make_schedule

pytestmark = [pytest.mark.sim, pytest.mark.slow]

SCHEDULES = 100  # half a minute


def test_beginnings_of_blocks_break_no_promise() -> None:
    loaded = 0
    for seed in range(SCHEDULES):
        outcome = run_schedule(replace(make_schedule(seed), tails=True))
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        loaded += outcome.counters["tails_loaded"]
    assert loaded > SCHEDULES // 3, "hardly any was hit"
