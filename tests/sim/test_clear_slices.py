"""Clears whose walk takes many steps: schedules with clears, in which a step looks at one block only."""

from __future__ import annotations

import pytest

from kvservice.core.acquire import clearing
from kvservice.testing.sim.run import run_schedule
from kvservice.testing.sim.schedule import CLEARS_AT, CLEARS_EVERY, make_schedule

pytestmark = [pytest.mark.sim, pytest.mark.slow]

SCHEDULES = 12  # ten seconds


def test_nothing_old_is_promised_after_a_clear_in_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clearing, "SLICE", 1)
    applied = 0
    for number in range(SCHEDULES):
        seed = CLEARS_AT + CLEARS_EVERY * number
        outcome = run_schedule(make_schedule(seed))
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        applied += outcome.counters["clears_applied"]
    assert applied > SCHEDULES, "hardly anything was cleared"
