"""Memory that goes bad under blocks that are in use: what one engine has found damaged, no other one meets."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from kvservice.testing.sim import run
from kvservice.testing.sim.schedule import Ask, Fault, Schedule
from tests.sim.mutation import Mutant, planted

pytestmark = pytest.mark.sim

SUSPECTS = "kvservice.core.acquire.suspects"
BLOCKS, ENGINES = 6, 3
PAUSE = 3.0  # seconds between requests: suspects are named within one
FLIPS = 4
KINDS = ("flip", "flip_header")
PLANTS = (
    Mutant(
        "a damaged block is given up",
        SUSPECTS,
        "            self._store.retire(block.key, EvictionCause.CORRUPT, now)\n",
        "            pass\n",
    ),
    Mutant(
        "a header is written again",
        SUSPECTS,
        "            self._store.write_header_again(block)\n",
        "            pass\n",
    ),
    Mutant("suspects are named to the pool", "kvservice.connector.scheduler.half", "if report.suspects:", "if False:"),
)


def played(kind: str) -> tuple[int, float]:
    """Engines of one node ask for one prompt in turn; one block of the node goes bad now and then. Returns how many
    loads failed, and which part of what was asked for was loaded."""
    asks = [Ask(PAUSE * number, number % ENGINES, 0, 0, 0, BLOCKS) for number in range(4 * FLIPS * ENGINES)]
    faults = [Fault(PAUSE * (4 * ENGINES * number + 5.5), kind, 0, 0, 0.0, 7 + 37 * number) for number in range(FLIPS)]
    schedule = Schedule(1, 1, 1, ENGINES, 8, tuple(asks), tuple(faults), 1, 0.0, (1.0,))
    with patch.object(run, "FAULTS_SECONDS", PAUSE * len(asks)):
        outcome = run.run_schedule(schedule)
    assert not outcome.violation, outcome.violation
    assert outcome.counters[f"fault_{kind}"] == FLIPS
    return outcome.counters["loads_failed"], outcome.counters["blocks_loaded"] / (BLOCKS * len(asks))


@pytest.mark.parametrize("kind", KINDS)
def test_each_damage_costs_one_load_at_most(kind: str) -> None:
    failed, loaded = played(kind)
    assert 0 < failed <= FLIPS and loaded > 0.8


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_a_planted_bug_costs_most_of_the_hits(plant: Mutant) -> None:
    with planted(plant):
        assert min(played(kind)[1] for kind in KINDS) < 0.5
