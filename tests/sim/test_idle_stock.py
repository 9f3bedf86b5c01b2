"""Engines that give their stock of slots back between requests: schedules of faults in which they do so at once."""

from __future__ import annotations

import pytest

from kvservice.session import session, stock
from kvservice.testing.sim.run import run_schedule
from kvservice.testing.sim.schedule import make_schedule

pytestmark = pytest.mark.sim

SCHEDULES = 25  # some seconds; every schedule of the other tests runs with the production's minute


def test_a_stock_that_comes_and_goes_breaks_no_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "STOCK_IDLE_SECONDS", 0.05)
    monkeypatch.setattr(session, "TICK_SECONDS", 0.02)
    given_back = 0
    for seed in range(SCHEDULES):
        outcome = run_schedule(make_schedule(seed))
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        given_back += outcome.counters["stock_given_back"]
    assert given_back > SCHEDULES, "hardly any engine was idle"
