"""Clears of which a node hears from an object store only: schedules in which the operator reaches one node."""

from __future__ import annotations

from collections import Counter

import pytest

from kvservice.pool import tiers
from kvservice.testing.sim.run import run_schedule
from kvservice.testing.sim.schedule import CLEARS_AT, CLEARS_EVERY, make_schedule, with_deaf_nodes

pytestmark = [pytest.mark.sim, pytest.mark.slow]

SCHEDULES = 8  # ten seconds


def violations(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], Counter[str]]:
    monkeypatch.setattr(tiers, "MARKS_EVERY_SECONDS", 0.5)
    found, counters = [], Counter[str]()
    for number in range(SCHEDULES):
        schedule = make_schedule(CLEARS_AT + CLEARS_EVERY * number)
        outcome = run_schedule(with_deaf_nodes(schedule))
        found += [f"seed {schedule.seed}: {outcome.violation}"] if outcome.violation else []
        counters.update(outcome.counters)
    return found, counters


def test_nodes_joined_by_a_store_only_obey_a_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    found, counters = violations(monkeypatch)
    assert not found
    assert counters["clears_applied"] > SCHEDULES // 2, "hardly anything was cleared"


def test_nodes_that_never_ask_the_store_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(pool: tiers.PoolTiers, name: str) -> None:
        return

    monkeypatch.setattr(tiers.PoolTiers, "follow_marks", never)
    found, _ = violations(monkeypatch)
    assert any("never heard of a clear" in each for each in found)
