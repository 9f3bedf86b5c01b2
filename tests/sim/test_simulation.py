"""Schedules of faults against the production core: nothing goes wrong, and what would go wrong is found."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvservice.testing.sim.campaign import run_campaign
from kvservice.testing.sim.run import minimise, run_schedule
from kvservice.testing.sim.schedule import FAULTS, make_schedule
from tests.sim.mutants import MUTANTS
from tests.sim.mutation import Mutant, planted

pytestmark = pytest.mark.sim

SCHEDULES = int(os.environ.get("KVSERVICE_TEST_SIM_SCHEDULES", "10000"))
SEARCH = 2_000  # schedules in which a planted bug must show
REACHED = (
    "blocks_stored",
    "blocks_loaded",
    "blocks_pulled",
    "loads_failed",
    "pulls_stuck",
    "messages_lost",
    "clears_applied",
    "slabs_moved",
    "promises_ended",
)


def test_no_schedule_breaks_a_promise() -> None:
    tally = run_campaign(range(SCHEDULES), processes=2)
    assert not tally.violations, f"see it happen: kvservice sim --seed {min(tally.violations)[0]}\n{tally.violations}"
    assert tally.schedules == SCHEDULES
    if SCHEDULES >= 1_000:  # what never happened was not tested
        idle = [name for name in (*REACHED, *(f"fault_{kind}" for kind in FAULTS)) if not tally.counters[name]]
        assert not idle


def test_a_play_leaves_nothing_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one would read it, and be another story."""
    monkeypatch.chdir(tmp_path)
    schedule = make_schedule(5)
    assert "disk" in schedule.tiers
    run_schedule(schedule)
    assert not list(tmp_path.iterdir())


def test_one_seed_is_one_story() -> None:
    for seed in (3, 17, 62, 101):  # 62 has clears
        first, second = (run_schedule(make_schedule(seed), tell=True) for _ in range(2))
        assert first.story == second.story
        assert first.counters == second.counters


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "_"))
def test_planted_bug_is_found(mutant: Mutant) -> None:
    with planted(mutant):
        if run_schedule(make_schedule(mutant.seed)).violation:
            return
        found = next((seed for seed in range(SEARCH) if run_schedule(make_schedule(seed)).violation), None)
        assert found is not None, f"{mutant.name}: survived {SEARCH} schedules"


def test_failing_schedule_is_cut_down() -> None:
    mutant = next(
        mutant for mutant in MUTANTS if mutant.name == "a stuck slot is given back when its transfer has ended"
    )
    with planted(mutant):
        seed = next(seed for seed in range(SEARCH) if run_schedule(make_schedule(seed)).violation)
        whole = make_schedule(seed)
        small = minimise(whole)
        assert run_schedule(small).violation
        assert len(small.asks) + len(small.faults) < len(whole.asks) + len(whole.faults)
        for index in range(len(small.asks)):
            fewer = replace(small, asks=small.asks[:index] + small.asks[index + 1 :])
            assert not run_schedule(fewer).violation, "something that does not matter was left in"
