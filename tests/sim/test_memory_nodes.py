"""A node without engines that takes what the others evict, in schedules of faults."""

from __future__ import annotations

import pytest

from kvservice.testing.sim.run import run_schedule
from kvservice.testing.sim.schedule import Schedule, make_schedule, with_memory_node
from tests.sim.mutation import Mutant, planted

pytestmark = pytest.mark.sim

SCHEDULES = 100  # half a minute
SEARCH = 500  # schedules in which a planted bug must show
SPILL = "kvservice.core.tier.spill"
RECEIVER = "kvservice.core.drain.receiver"
CONTEXT = "kvservice.core.context"
MUTANTS = (
    Mutant(
        "a block that is offered is not offered again",
        SPILL,
        " or key in self._waiting or self._is_offered(key)\n",
        " or key in self._waiting\n",
        seed=16,
    ),
    Mutant(
        "offers under way are bounded",
        SPILL,
        "while self._receivers and len(self._offers) < OFFERS_MAX and self._waiting:",
        "while self._receivers and self._waiting:",
        seed=1,
    ),
    Mutant(
        "what is offered does not wait any more",
        SPILL,
        "            del self._waiting[key]\n",
        "            pass\n",
        seed=1,
    ),
    Mutant(
        "a block that came twice gives its slot back",
        RECEIVER,
        "            self._store.abort(slot)\n            self._store.make_primary(item.key)\n",
        "            self._store.make_primary(item.key)\n",
        seed=32,
    ),
    Mutant(
        "what is offered is cleared by the names of its engines",
        CONTEXT,
        "        names = self.freshness.names_of(fingerprint)\n",
        "        names = frozenset({('', 'another')})\n",
        seed=62,
    ),
)


def schedule_of(seed: int) -> Schedule:
    return with_memory_node(make_schedule(seed))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "_"))
def test_planted_bug_of_a_memory_node_is_found(mutant: Mutant) -> None:
    with planted(mutant):
        for seed in (mutant.seed, *range(SEARCH)):
            if run_schedule(schedule_of(seed)).violation:
                return
    raise AssertionError(f"{mutant.name}: survived {SEARCH} schedules")


@pytest.mark.slow
def test_what_others_evict_breaks_no_promise() -> None:
    spilled = 0
    for schedule in map(schedule_of, range(SCHEDULES)):
        outcome = run_schedule(schedule)
        assert not outcome.violation, f"seed {schedule.seed}: {outcome.violation}"
        spilled += outcome.counters["blocks_spilled"]
    assert spilled > SCHEDULES, "hardly anything was taken"
