"""A node without engines that takes what the others evict, in schedules of faults."""

from __future__ import annotations

import pytest

from kvservice.testing.sim.run import run_schedule
from kvservice.testing.sim.schedule import make_schedule, with_memory_node

pytestmark = [pytest.mark.sim, pytest.mark.slow]

SCHEDULES = 100  # half a minute


def test_what_others_evict_breaks_no_promise() -> None:
    spilled = 0
    for seed in range(SCHEDULES):
        schedule = make_schedule(seed)
        if schedule.clears:
            continue
        outcome = run_schedule(with_memory_node(schedule))
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        spilled += outcome.counters["blocks_spilled"]
    assert spilled > SCHEDULES, "hardly anything was taken"
