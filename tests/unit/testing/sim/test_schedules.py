"""A few schedules of the simulator, so that it runs with the fast tests as well; tests/sim plays thousands."""

from __future__ import annotations

import pytest

from kvservice.testing.sim.run import run_schedule
from kvservice.testing.sim.schedule import make_schedule


@pytest.mark.parametrize("seed", [1, 3, 35])  # the last one's models have blocks of different sizes
def test_a_schedule_of_faults_breaks_no_promise(seed: int) -> None:
    result = run_schedule(make_schedule(seed))
    assert not result.violation
    assert result.counters["blocks_stored"]
