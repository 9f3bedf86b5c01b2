"""Promises that the same step computes on: what the scheduler half does until, and after, the workers' word on them."""

from __future__ import annotations

from functools import partial

import pytest

from kvservice.connector.layerwise.scheduler import LayerwiseScheduler
from kvservice.connector.plan import LoadPlan, StepPlan, StepReport
from kvservice.connector.scheduler.handoff import Prefill
from kvservice.connector.scheduler.ports import Promise, Wait
from kvservice.connector.scheduler.request_terms import RequestTerms
from kvservice.units import HandoffId
from tests.unit.connector.line import BLOCK, Line, half_of, hashes, plan_step, run_step

TOTAL = 4 * BLOCK + 3
IDS = [11, 12, 13, 14, 15]


half = partial(half_of, LayerwiseScheduler)


def loading(line: Line, scheduler: LayerwiseScheduler, computed: int = BLOCK) -> StepPlan:
    """Request r: a block of its own, two promised, the rest to compute in the step whose plan is returned."""
    scheduler.on_new_request("r", hashes(1, 4), 0.0)
    line.answer(3)
    assert scheduler.matched("r", computed, TOTAL, 0.1) == Promise(2 * BLOCK, layered=True)
    scheduler.allocated("r", IDS, 2 * BLOCK)
    return run_step(scheduler, "r", hashes(1, 4), TOTAL)


def test_nothing_computed_on_a_layered_load_is_stored_early() -> None:
    """The rest is computed in the step that loads; it is stored after that step's report."""
    line = Line()
    scheduler = half(line)
    plan = loading(line, scheduler)
    assert [(load.request_id, load.layered, len(load.entries)) for load in plan.loads] == [("r", True, 2)]
    assert not plan.stores, "a block computed on an unchecked load"
    assert line.leases
    scheduler.end_layered(StepReport(layered={"r": 1}))
    assert not line.leases and not line.pins.forgotten
    assert run_step(scheduler, "r", hashes(1, 4), TOTAL + 1).stores


@pytest.mark.parametrize("report", [StepReport(layered_failed={"r": 1}), StepReport(), None])
def test_load_that_is_not_confirmed_with_its_step_is_taken_back(report: StepReport | None) -> None:
    line = Line()
    scheduler = half(line)
    loading(line, scheduler)
    scheduler.end_layered(report)
    assert line.pins.forgotten == {12, 13, 14, 15}, "what was loaded and what was computed on it, not the engine's own"
    assert not line.leases
    assert scheduler.counters["loads_failed"] == 1
    assert scheduler.matched("r", BLOCK, TOTAL, 0.2) == Promise(0)


def test_every_rank_has_to_confirm() -> None:
    line = Line()
    scheduler = half(line, worker_count=2)
    loading(line, scheduler)
    scheduler.end_layered(StepReport(layered={"r": 1}).merge(StepReport(layered_failed={"r": 1})))
    assert line.pins.forgotten
    line = Line()
    scheduler = half(line, worker_count=2)
    loading(line, scheduler)
    scheduler.end_layered(StepReport(layered={"r": 1}).merge(StepReport(layered={"r": 1})))
    assert not line.pins.forgotten


@pytest.mark.parametrize("known", [True, False])
def test_request_that_would_share_unconfirmed_blocks_waits(known: bool) -> None:
    """It waits until the report."""
    line = Line()
    scheduler = half(line)
    scheduler.on_new_request("r", hashes(1, 4, shared=3), 0.0)
    if known:
        scheduler.on_new_request("s", hashes(2, 4, shared=3), 0.0)
    line.answer(3)
    if known:
        line.answer(0)
    assert scheduler.matched("r", 0, TOTAL, 0.1) == Promise(3 * BLOCK, layered=True)
    scheduler.allocated("r", IDS, 3 * BLOCK)
    assert scheduler.matched("s", 2 * BLOCK, TOTAL, 0.1) == Wait()
    assert scheduler.matched("s", 0, TOTAL, 0.1) == Promise(0), "it shares nothing"
    plan_step(scheduler)
    scheduler.end_layered(StepReport(layered={"r": 1}))
    assert scheduler.matched("s", 2 * BLOCK, TOTAL, 0.1) == Promise(0), "nobody waits after the step"


def test_blocks_of_a_load_that_was_not_planned_go_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM counts them as its own from the moment it took the promise, so others would find them in its cache."""
    line = Line()
    scheduler = half(line)
    for name, number in (("r", 1), ("s", 2)):
        scheduler.on_new_request(name, hashes(number, 4, shared=3), 0.0)
        line.answer(3 if name == "r" else 0)
    assert scheduler.matched("r", BLOCK, TOTAL, 0.1) == Promise(2 * BLOCK, layered=True)
    monkeypatch.setattr("kvservice.connector.scheduler.loads.load_entries", explode)
    with pytest.raises(OSError, match="planned"):
        scheduler.allocated("r", IDS, 2 * BLOCK)
    assert scheduler.matched("s", 3 * BLOCK, TOTAL, 0.1) == Wait()
    plan = run_step(scheduler, "r", hashes(1, 4, shared=3), TOTAL)
    assert not plan.loads and not plan.stores, "computed on bytes that never came"
    scheduler.unplanned("r", IDS[1:])
    scheduler.end_layered(None)
    assert scheduler.matched("s", 0, TOTAL, 0.2) == Promise(0)
    assert run_step(scheduler, "r", hashes(1, 4, shared=3), TOTAL).stores, "computed again"
    scheduler.finished("r", hashes(1, 4, shared=3), 0, [], store_rest=False)
    assert not line.leases
    scheduler.check_invariants()


def explode(*arguments: object) -> None:
    raise OSError("planned")


def test_load_of_the_next_step_is_not_ended_by_this_ones_report() -> None:
    line = Line()
    scheduler = half(line)
    plan_step(scheduler)
    scheduler.on_new_request("r", hashes(1, 4), 0.0)
    line.answer(3)
    scheduler.matched("r", 0, TOTAL, 0.1)
    scheduler.allocated("r", IDS, 3 * BLOCK)
    scheduler.end_layered(StepReport())
    assert line.leases and not line.pins.forgotten
    plan_step(scheduler)
    scheduler.end_layered(StepReport(layered={"r": 1}))
    assert not line.leases


@pytest.mark.parametrize("sound", [True, False])
def test_request_that_ends_as_it_loads_stores_only_if_sound(sound: bool) -> None:
    """It ends with the step that loads; the load must have been sound."""
    line = Line()
    scheduler = half(line)
    loading(line, scheduler)
    scheduler.finished("r", hashes(1, 4), TOTAL, IDS, store_rest=True)
    assert line.leases, "the workers may still read"
    assert line.pins.pinned
    scheduler.end_layered(StepReport(**{"layered" if sound else "layered_failed": {"r": 1}}))  # type: ignore[arg-type]
    plan = plan_step(scheduler)
    assert len(plan.stores) == sound
    if sound:
        scheduler.reported(StepReport(stored={plan.stores[0].store_id: 1}))
    assert not line.pins.pinned and not line.leases and not line.slots
    assert len(line.sealed) == sound


def test_whole_hit_and_hand_off_are_loaded_as_whole_blocks() -> None:
    line = Line()
    scheduler = half(line)
    scheduler.on_new_request("r", hashes(1, 4), 0.0)
    line.answer(4)
    assert scheduler.matched("r", 0, 4 * BLOCK, 0.1) == Promise(4 * BLOCK)
    scheduler.on_new_request("w", hashes(2, 4), 0.0, terms=RequestTerms(wants=Prefill(HandoffId(bytes(16)))))
    line.answer(2)
    assert scheduler.matched("w", 0, TOTAL, 0.1) == Promise(2 * BLOCK)


def test_promise_that_missed_its_steps_plan_is_never_loaded() -> None:
    line = Line()
    scheduler = half(line)
    scheduler.on_new_request("r", hashes(1, 4), 0.0)
    line.answer(3)
    scheduler.matched("r", BLOCK, TOTAL, 0.1)
    scheduler.allocated("r", IDS, 2 * BLOCK)
    scheduler.unplanned("r", [12, 13, 14])
    assert line.pins.forgotten == {12, 13, 14}
    scheduler.end_layered(None)
    assert plan_step(scheduler).loads == list[LoadPlan]()
    assert not line.leases
