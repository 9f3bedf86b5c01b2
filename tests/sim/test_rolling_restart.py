"""All nodes hand over and come back empty, one after the other: what primary copies are kept for holds all the time."""

from __future__ import annotations

import pytest

from kvservice.testing.sim.rolling import RollingRestart, make_rolling_schedule
from kvservice.testing.sim.run import RunOutcome, run_schedule
from tests.sim.mutation import Mutant, planted

pytestmark = pytest.mark.sim

SCHEDULES = 12  # ten seconds
SEARCH = 60  # schedules in which a planted bug must show
SENDER = "kvservice.core.drain.sender"
RECEIVER = "kvservice.core.drain.receiver"
MUTANTS = (
    Mutant("a copy that two nodes hold is not made primary", SENDER, "elif len(nodes) == 1:", "else:", seed=0),
    Mutant(
        "a copy that is offered becomes primary",
        RECEIVER,
        "            if held:\n                self._store.make_primary(item.key)\n",
        "            pass\n",
        seed=0,
    ),
    Mutant("free room is filled first", SENDER, "for room in RoomPart:", "for room in (RoomPart.POOL,):", seed=4),
)


def restart_all(seed: int) -> RunOutcome:
    return run_schedule(make_rolling_schedule(seed), play=RollingRestart)


def test_a_rolling_restart_keeps_primary_copies() -> None:
    drained = 0
    for seed in range(SCHEDULES):
        outcome = restart_all(seed)
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        drained += outcome.counters["blocks_drained"]
    assert drained > 10 * SCHEDULES, "hardly anything was handed over"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "_"))
def test_planted_bug_of_a_drain_is_found(mutant: Mutant) -> None:
    with planted(mutant):
        if any(restart_all(seed).violation for seed in (mutant.seed, *range(SEARCH))):
            return
    raise AssertionError(f"{mutant.name}: survived {SEARCH} schedules")
