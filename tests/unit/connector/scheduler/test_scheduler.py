"""What the scheduler half promises, loads and stores, one rule a test."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvservice.connector.options import Offload
from kvservice.connector.plan import StepPlan, StepReport
from kvservice.connector.scheduler.half import IDLE_SECONDS, IDLE_SECONDS_MAX, SchedulerHalf
from kvservice.connector.scheduler.handoff import Prefill
from kvservice.connector.scheduler.ports import Promise, Wait
from kvservice.connector.scheduler.recent_suspects import PAUSE_SECONDS, RecentSuspects
from kvservice.connector.scheduler.request_terms import RequestTerms
from kvservice.connector.scheduler.stores import REPORT_SECONDS_MAX
from kvservice.core.segment.refs import BlockRef
from kvservice.units import BlockHash, Generation, HandoffId, SlotIndex
from tests.unit.connector.line import BLOCK, Line, half, hashes, keys_of, plan_step, report, run_step


def loading(line: Line, chain: Sequence[BlockHash]) -> SchedulerHalf:
    """Request "r", promised the two blocks of `chain`, with their load in the workers' hands."""
    scheduler = half(line)
    scheduler.on_new_request("r", chain, 0.0)
    line.answer(2)
    scheduler.matched("r", 0, 33, 0.1)
    scheduler.allocated("r", [1, 2, 3], 2 * BLOCK)
    plan_step(scheduler)
    return scheduler


def test_asks_at_arrival_and_waits_without_blocking() -> None:
    line, chain = Line(), hashes(1, 4)
    scheduler = half(line)
    scheduler.on_new_request("r", chain, 0.0)
    assert len(line.asked) == 1
    assert scheduler.matched("r", 0, 4 * BLOCK + 3, 0.1) == Wait()
    line.answer(3)
    assert scheduler.matched("r", 0, 4 * BLOCK + 3, 0.2) == Promise(3 * BLOCK)
    assert scheduler.matched("r", 0, 4 * BLOCK + 3, 0.2) == Promise(3 * BLOCK), "asking again changes nothing"


def test_deadline_ends_the_wait_and_a_late_answer_is_given_back() -> None:
    line = Line()
    scheduler = half(line)
    scheduler.on_new_request("r", hashes(1, 4), 0.0)
    assert scheduler.matched("r", 0, 70, 2.0) == Promise(0)
    line.answer(4)
    assert scheduler.matched("r", 0, 70, 2.1) == Promise(0)
    assert not line.leases


def test_wait_is_bounded_by_the_measured_cost_of_recomputing() -> None:
    line = Line()
    scheduler = half(line)
    scheduler.computed(1000, 1.0)  # a millisecond a token
    scheduler.on_new_request("r", hashes(1, 4), 0.0)
    assert line.asked[0][2].timeout_seconds < 2.0
    assert scheduler.matched("r", 0, 70, 4 * BLOCK * 0.001 + 0.001) == Promise(0)


def test_blocks_the_engine_has_itself_are_not_loaded_again() -> None:
    line, chain = Line(), hashes(1, 4)
    scheduler = half(line)
    scheduler.on_new_request("r", chain, 0.0)
    line.answer(4)
    assert scheduler.matched("r", BLOCK, 4 * BLOCK, 0.1) == Promise(3 * BLOCK)
    scheduler.allocated("r", [7, 8, 9, 10], 3 * BLOCK)
    (load,) = plan_step(scheduler).loads
    assert [entry.block_id for entry in load.entries] == [8, 9, 10]
    assert [entry.key for entry in load.entries] == keys_of(chain)[1:]


def test_lease_ends_when_the_workers_have_loaded() -> None:
    line = Line()
    scheduler = loading(line, hashes(1, 2))
    assert line.leases
    scheduler.loaded("r", failed=False)
    assert not line.leases


def test_abort_during_a_load_keeps_the_lease_until_it_ended() -> None:
    line, chain = Line(), hashes(1, 2)
    scheduler = loading(line, chain)
    scheduler.finished("r", chain, 0, [1, 2, 3], store_rest=False)
    assert line.leases, "the workers still read these slots"
    scheduler.loaded("r", failed=False)
    assert not line.leases


def test_load_that_cannot_be_planned_gives_its_lease_back() -> None:
    line, chain = Line(), hashes(1, 2)
    scheduler = half(line)
    scheduler.on_new_request("r", chain, 0.0)
    line.answer(2)
    scheduler.matched("r", 0, 33, 0.1)
    with pytest.raises(IndexError):
        scheduler.allocated("r", [1], 2 * BLOCK)  # fewer blocks than were promised
    scheduler.check_invariants()
    scheduler.finished("r", chain, 0, [1], store_rest=False)
    assert not line.leases


def test_failed_load_is_never_promised_to_that_request_again() -> None:
    line = Line()
    scheduler = loading(line, hashes(1, 2))
    scheduler.loaded("r", failed=True)
    assert scheduler.matched("r", 0, 33, 0.2) == Promise(0)
    assert not line.asked
    assert not line.leases


def test_blocks_whose_load_failed_are_stored_once_computed() -> None:
    line, chain = Line(), hashes(1, 2)
    scheduler = loading(line, chain)
    scheduler.loaded("r", failed=True)
    stored = run_step(scheduler, "r", chain, 2 * BLOCK).stores
    assert [entry.block_id for store in stored for entry in store.entries] == [100, 101]


def test_a_slot_found_wrong_is_suspected_in_its_own_pool_only() -> None:
    line, chain = Line(), hashes(1, 2)
    scheduler = half(line)
    scheduler.on_new_request("a", chain, 0.0)
    line.answer(2)
    scheduler.matched("a", 0, 33, 0.1)
    scheduler.allocated("a", [1, 2, 3], 2 * BLOCK)
    (load,) = plan_step(scheduler).loads
    scheduler.reported(StepReport(suspects={load.entries[0].ref}))
    assert line.suspects == {load.entries[0].ref}, "the pool is told, too"
    scheduler.loaded("a", failed=True)
    scheduler.on_new_request("b", chain, 0.2)
    line.answer(2)
    assert scheduler.matched("b", 0, 33, 0.3) == Promise(0), "the same slot of the same pool"
    line.lose()
    line.attach(2)
    scheduler.on_new_request("c", chain, 0.4)
    line.answer(2)
    assert scheduler.matched("c", 0, 33, 0.5) == Promise(2 * BLOCK), "another boot has other bytes in its slots"


def test_a_slot_found_wrong_is_used_again_after_a_while() -> None:
    """If it is still wrong, a load fails once more, and it is left alone for longer."""
    suspects, ref = RecentSuspects(), BlockRef(SlotIndex(1), Generation(2))
    for now, pause in ((1.0, PAUSE_SECONDS), (50.0, 2 * PAUSE_SECONDS), (500.0, 4 * PAUSE_SECONDS)):
        suspects.begin_step(now)
        suspects.add([ref])
        suspects.begin_step(now + 0.9 * pause)
        assert suspects.slots == {ref}
        suspects.begin_step(now + pause)
        assert not suspects.slots


def test_every_block_that_a_step_fills_is_stored_once() -> None:
    line, chain = Line(), hashes(1, 3)
    scheduler = half(line)
    scheduler.on_new_request("r", chain, 0.0)
    line.answer(0)
    scheduler.matched("r", 0, 50, 0.1)
    scheduler.allocated("r", [], 0)
    first = run_step(scheduler, "r", chain, 2 * BLOCK + 5)
    assert [entry.block_id for store in first.stores for entry in store.entries] == [100, 101]
    assert not run_step(scheduler, "r", chain, 2 * BLOCK + 6).stores
    last = run_step(scheduler, "r", chain, 3 * BLOCK)
    assert [entry.block_id for store in last.stores for entry in store.entries] == [102]
    scheduler.reported(report(first))
    scheduler.reported(report(last))
    assert [item.position for item in line.sealed] == [0, 1, 2]
    assert [item.parent for item in line.sealed] == [None, *keys_of(chain)[:2]]
    assert not line.slots


def test_block_is_sealed_when_the_last_worker_has_copied() -> None:
    line, chain = Line(), hashes(1, 1)
    scheduler = half(line, worker_count=2)
    scheduler.on_new_request("r", chain, 0.0, terms=RequestTerms(may_load=False))
    plan = run_step(scheduler, "r", chain, BLOCK)
    scheduler.reported(report(plan))
    assert not line.sealed
    scheduler.reported(report(plan))
    assert len(line.sealed) == 1


def test_block_that_one_worker_failed_to_copy_is_not_sealed() -> None:
    line, chain = Line(), hashes(1, 2)
    scheduler = half(line, worker_count=2)
    scheduler.on_new_request("r", chain, 0.0, terms=RequestTerms(may_load=False))
    plan = run_step(scheduler, "r", chain, 2 * BLOCK)
    scheduler.reported(report(plan).merge(report(plan, failed=1)))
    assert not line.sealed
    assert not line.slots
    assert line.counters["aborted"] == 2


def test_request_with_a_known_prefix_stores_only_the_rest() -> None:
    line = Line()
    scheduler = half(line)
    one, two = hashes(1, 3, shared=2), hashes(2, 3, shared=2)
    for name, chain in (("a", one), ("b", two)):
        scheduler.on_new_request(name, chain, 0.0, terms=RequestTerms(may_load=False))
    run_step(scheduler, "a", one, 3 * BLOCK)
    plan = run_step(scheduler, "b", two, 3 * BLOCK)
    assert [entry.block_id for store in plan.stores for entry in store.entries] == [102]


def test_block_that_the_pool_has_evicted_is_stored_again() -> None:
    line, chain = Line(), hashes(1, 2)
    scheduler = half(line)
    scheduler.on_new_request("a", chain, 0.0, terms=RequestTerms(may_load=False))
    scheduler.reported(report(run_step(scheduler, "a", chain, 2 * BLOCK)))
    scheduler.finished("a", chain, 2 * BLOCK, [100, 101], store_rest=True)
    scheduler.on_new_request("b", chain, 1.0)
    line.answer(0)
    scheduler.matched("b", 0, 40, 1.1)
    scheduler.allocated("b", [1, 2, 3], 0)
    assert run_step(scheduler, "b", chain, 2 * BLOCK).stores


def test_step_that_fills_no_block_does_not_read_the_table() -> None:
    def table() -> Sequence[int]:
        raise AssertionError("resolved for nothing")

    line, chain = Line(), hashes(1, 2)
    scheduler = half(line)
    scheduler.on_new_request("r", chain, 0.0, terms=RequestTerms(may_load=False))
    run_step(scheduler, "r", chain, 2 * BLOCK)
    assert not plan_step(scheduler, [("r", chain, 2 * BLOCK + 7, table)]).stores


def test_block_stored_while_asked_for_is_not_stored_twice() -> None:
    line, chain = Line(), hashes(1, 2)
    scheduler = half(line)
    scheduler.on_new_request("a", chain, 0.0, terms=RequestTerms(may_load=False))
    scheduler.on_new_request("b", chain, 0.0)
    scheduler.reported(report(run_step(scheduler, "a", chain, 2 * BLOCK)))
    line.answer(0)  # true when it was asked
    scheduler.matched("b", 0, 40, 0.1)
    scheduler.allocated("b", [1, 2, 3], 0)
    assert not run_step(scheduler, "b", chain, 2 * BLOCK).stores


def test_engine_that_only_consumes_reserves_nothing() -> None:
    line, chain = Line(), hashes(1, 2)
    scheduler = half(line, may_write=False)
    scheduler.on_new_request("r", chain, 0.0)
    line.answer(0)
    scheduler.matched("r", 0, 40, 0.1)
    scheduler.allocated("r", [1, 2, 3], 0)
    assert not run_step(scheduler, "r", chain, 2 * BLOCK).stores
    scheduler.finished("r", chain, 2 * BLOCK, [1, 2], store_rest=True)
    assert not plan_step(scheduler).stores
    assert line.expected == 0


def test_store_that_finds_no_slot_is_put_off_not_waited_for() -> None:
    line, chain = Line(slots=1), hashes(1, 2)
    scheduler = half(line)
    scheduler.on_new_request("r", chain, 0.0, terms=RequestTerms(may_load=False))
    first = run_step(scheduler, "r", chain, 2 * BLOCK)
    assert sum(len(store.entries) for store in first.stores) == 1
    scheduler.reported(report(first))
    second = run_step(scheduler, "r", chain, 2 * BLOCK + 1)
    assert [entry.block_id for store in second.stores for entry in store.entries] == [101]


def test_lazy_offload_stores_at_the_end_and_pins_until_then() -> None:
    line, chain = Line(), hashes(1, 2)
    scheduler = half(line, offload=Offload.LAZY)
    scheduler.on_new_request("r", chain, 0.0, terms=RequestTerms(may_load=False))
    assert not run_step(scheduler, "r", chain, 2 * BLOCK).stores
    scheduler.finished("r", chain, 2 * BLOCK, [100, 101], store_rest=True)
    assert scheduler.has_pending_work(0.0)
    assert set(line.pins.pinned) == {100, 101}
    (store,) = plan_step(scheduler).stores
    assert [entry.block_id for entry in store.entries] == [100, 101]


def test_block_under_copy_stays_pinned_when_its_request_is_gone() -> None:
    line, chain = Line(), hashes(1, 2)
    scheduler = half(line, worker_count=2)
    scheduler.on_new_request("r", chain, 0.0)
    line.answer(0)
    scheduler.matched("r", 0, 33, 0.1)
    scheduler.allocated("r", [100, 101, 102], 0)
    plan = run_step(scheduler, "r", chain, 2 * BLOCK)
    scheduler.finished("r", chain, 2 * BLOCK, [100, 101], store_rest=False)
    scheduler.reported(report(plan))
    assert set(line.pins.pinned) == {100, 101}, "the second worker still copies"
    scheduler.reported(report(plan, failed=1))
    assert not line.pins.pinned


def test_unreported_store_does_not_keep_an_idle_engine_stepping() -> None:
    """The engine stops stepping after a while."""
    line, chain = Line(), hashes(1, 2)
    scheduler = half(line)
    scheduler.on_new_request("r", chain, 0.0)
    line.answer(0)
    scheduler.matched("r", 0, 33, 0.1)
    scheduler.allocated("r", [100, 101, 102], 0)
    run_step(scheduler, "r", chain, 2 * BLOCK)
    assert scheduler.has_pending_work(1.0)
    assert not scheduler.has_pending_work(1.0 + REPORT_SECONDS_MAX)
    assert not scheduler.may_reattach(), "its slots may still be written"


def test_promise_that_a_lost_pool_made_does_not_count_as_stored() -> None:
    line, chain = Line(), hashes(1, 2)
    scheduler = half(line)
    scheduler.on_new_request("r", chain, 0.0)
    line.answer(2)
    scheduler.matched("r", 0, 33, 0.1)
    line.lose()
    scheduler.matched("r", 0, 33, 0.2)
    scheduler.allocated("r", [100, 101, 102], 0)
    line.attach(2)
    (store,) = run_step(scheduler, "r", chain, 2 * BLOCK).stores
    assert len(store.entries) == 2


def test_aborted_request_stores_nothing_more() -> None:
    line, chain = Line(), hashes(1, 2)
    scheduler = half(line, offload=Offload.LAZY)
    scheduler.on_new_request("r", chain, 0.0, terms=RequestTerms(may_load=False))
    scheduler.finished("r", chain, 2 * BLOCK, [100, 101], store_rest=False)
    assert not plan_step(scheduler).stores


def test_without_a_pool_everything_is_answered_at_once() -> None:
    line, chain = Line(), hashes(1, 2)
    line.lose()
    scheduler = half(line)
    scheduler.on_new_request("r", chain, 0.0)
    assert scheduler.matched("r", 0, 40, 0.0) == Promise(0)
    plan = run_step(scheduler, "r", chain, 2 * BLOCK)
    assert plan.pool is None
    assert not plan.stores


def test_pool_lost_while_waiting_ends_the_wait() -> None:
    line = Line()
    scheduler = half(line)
    scheduler.on_new_request("r", hashes(1, 2), 0.0)
    assert scheduler.matched("r", 0, 40, 0.0) == Wait()
    line.lose()
    assert scheduler.matched("r", 0, 40, 0.0) == Promise(0)


def test_promise_of_a_pool_that_is_gone_is_not_taken_up() -> None:
    line = Line()
    scheduler = half(line)
    scheduler.on_new_request("r", hashes(1, 2), 0.0)
    line.answer(2)
    assert scheduler.matched("r", 0, 40, 0.0) == Promise(2 * BLOCK)
    line.attach(2)
    assert scheduler.matched("r", 0, 40, 0.0) == Promise(0)


def test_preempted_request_gets_its_blocks_back_from_the_pool() -> None:
    line, chain = Line(), hashes(1, 2)
    scheduler = half(line)
    scheduler.on_new_request("r", chain, 0.0)
    line.answer(0)
    scheduler.matched("r", 0, 40, 0.0)
    scheduler.allocated("r", [1, 2, 3], 0)
    scheduler.reported(report(run_step(scheduler, "r", chain, 2 * BLOCK)))
    assert scheduler.matched("r", 0, 40, 1.0) == Wait(), "asked again, so it was preempted"
    line.answer(2)
    assert scheduler.matched("r", 0, 40, 1.1) == Promise(2 * BLOCK)


def test_reattaching_waits_for_copies_into_the_old_slots() -> None:
    line, chain = Line(), hashes(1, 1)
    scheduler = half(line)
    scheduler.on_new_request("r", chain, 0.0, terms=RequestTerms(may_load=False))
    plan = run_step(scheduler, "r", chain, BLOCK)
    assert not scheduler.may_reattach()
    scheduler.reported(report(plan))
    assert scheduler.may_reattach()


@pytest.mark.parametrize("found", [0, 1, 3])
def test_no_slots_are_expected_for_blocks_that_are_known(found: int) -> None:
    """A full pool would evict for them, and a burst of prompts that it has would push out others."""
    line, chain = Line(), hashes(1, 5)
    scheduler = half(line)
    scheduler.on_new_request("a", chain[:3], 0.0, terms=RequestTerms(may_load=False))
    scheduler.reported(report(run_step(scheduler, "a", chain[:3], 3 * BLOCK)))
    scheduler.finished("a", chain[:3], 3 * BLOCK, [100, 101, 102], store_rest=True)
    assert line.expected == 0
    scheduler.on_new_request("b", chain, 0.0)
    assert line.expected == 2
    line.answer(found)
    scheduler.matched("b", 0, 5 * BLOCK + 1, 0.1)
    scheduler.allocated("b", list(range(6)), found * BLOCK)
    assert line.expected == 5 - found, "what was evicted meanwhile is stored again"
    scheduler.finished("b", chain, 0, [], store_rest=False)
    assert line.expected == 0


def test_known_blocks_of_a_request_that_never_asks_count_once() -> None:
    line, chain = Line(), hashes(1, 5)
    scheduler = half(line)
    for name, blocks in (("a", 3), ("b", 5)):
        scheduler.on_new_request(name, chain[:blocks], 0.0, terms=RequestTerms(may_load=False))
        assert line.expected == {"a": 3, "b": 2}[name]
        for computed in range(1, blocks + 1):
            scheduler.reported(report(run_step(scheduler, name, chain[:blocks], computed * BLOCK)))
            assert line.expected == min(blocks - computed, {"a": 3, "b": 2}[name])


def test_prompt_that_is_not_admitted_is_not_stored() -> None:
    line, chain = Line(), hashes(1, 6)
    scheduler = half(line)
    scheduler.on_new_request("r", chain[:4], 0.0)
    assert line.expected == 4
    line.answer(1, admitted=False)
    assert scheduler.matched("r", 0, 6 * BLOCK, 0.1) == Promise(BLOCK), "what is there is used all the same"
    scheduler.allocated("r", list(range(7)), BLOCK)
    plan_step(scheduler)
    scheduler.loaded("r", failed=False)
    assert line.expected == 0
    assert run_step(scheduler, "r", chain, 6 * BLOCK).stores == []
    assert line.expected == 0, "nor what is generated"
    scheduler.finished("r", chain, 6 * BLOCK, list(range(7)), store_rest=True)
    assert plan_step(scheduler).stores == []


def test_who_may_not_read_asks_nothing_after_a_preemption() -> None:
    line, chain = Line(), hashes(1, 4)
    scheduler = half(line)
    scheduler.on_new_request("r", chain, 0.0, terms=RequestTerms(may_load=False))
    assert scheduler.matched("r", 0, 4 * BLOCK, 0.0) == Promise(0)
    scheduler.allocated("r", [1, 2, 3, 4], 0)
    run_step(scheduler, "r", chain, 4 * BLOCK)
    assert scheduler.matched("r", 0, 4 * BLOCK, 0.1) == Promise(0)
    assert not line.asked and not scheduler.counters["asked_after_preemption"]


def test_an_answer_from_before_a_reset_answers_no_later_ask() -> None:
    line, chain = Line(), hashes(1, 4)
    scheduler = half(line)
    scheduler.on_new_request("r", chain, 0.0)
    scheduler.reset(b"other weights")
    assert scheduler.matched("r", 0, 70, 0.0) == Promise(0)
    scheduler.allocated("r", [100, 101, 102, 103, 104], 0)
    run_step(scheduler, "r", chain, 4 * BLOCK)  # from here on its keys are those of the new weights
    assert scheduler.matched("r", 0, 70, 0.1) == Wait(), "preempted, it asks again"
    line.answer(4, 0)
    assert scheduler.matched("r", 0, 70, 0.1) == Wait()
    assert not line.leases, "what was promised of the old weights is given back"
    line.answer(2, 0)
    assert scheduler.matched("r", 0, 70, 0.1) == Promise(2 * BLOCK)


def test_a_reset_closes_hand_offs_and_withdraws_loans() -> None:
    """Only loans that are not lent yet are withdrawn."""
    line, chain = Line(), hashes(1, 2)
    scheduler = half(line, loan_seconds=5.0)
    running, ended = (HandoffId(bytes([number]) * 16) for number in (1, 2))
    scheduler.on_new_request("ended", chain, 0.0, terms=RequestTerms(may_load=False, wants=Prefill(ended)))
    scheduler.allocated("ended", [100, 101, 102], 0)
    scheduler.on_new_request("running", hashes(2, 2), 0.0, terms=RequestTerms(may_load=False, wants=Prefill(running)))
    scheduler.finished("ended", chain, 2 * BLOCK, [100, 101, 102], store_rest=True)
    scheduler.reset(b"other weights")
    assert sorted(line.closed) == [running, ended]
    plan = plan_step(scheduler)
    assert not plan.lends
    scheduler.reported(report(plan))
    assert line.counters["aborted"] == 2
    assert not line.sealed
    assert not line.pins.pinned
    scheduler.finished("running", hashes(2, 2), 0, [], store_rest=True)
    assert not line.handoffs, "closed once"


# -- switches of a request ----


def test_request_that_must_not_be_stored_leaves_nothing() -> None:
    line, chain = Line(), hashes(1, 2)
    scheduler = half(line)
    scheduler.on_new_request("r", chain, 0.0, terms=RequestTerms(may_store=False))
    line.answer(0)
    scheduler.matched("r", 0, 33, 0.1)
    scheduler.allocated("r", [100, 101, 102], 0)
    assert not run_step(scheduler, "r", chain, 2 * BLOCK).stores
    scheduler.finished("r", chain, 2 * BLOCK, [100, 101], store_rest=True)
    assert not plan_step(scheduler).stores
    assert line.expected == 0


@pytest.mark.parametrize("offload", [Offload.EAGER, Offload.LAZY])
def test_prompts_only_does_not_store_what_is_generated(offload: Offload) -> None:
    line, chain = Line(), hashes(1, 5)
    scheduler = half(line, offload=offload)
    scheduler.on_new_request("r", chain[:2], 0.0, terms=RequestTerms(may_load=False, prompt_only=True))
    plans = [run_step(scheduler, "r", chain[: tokens // BLOCK], tokens) for tokens in range(30, 5 * BLOCK, 10)]
    scheduler.finished("r", chain, 5 * BLOCK, list(range(100, 105)), store_rest=True)
    plans.append(plan_step(scheduler))
    assert [entry.block_id for plan in plans for store in plan.stores for entry in store.entries] == [100, 101]
    assert line.expected == 0


def test_what_a_step_fills_is_one_store_and_one_seal() -> None:
    """Also a block that two requests fill in the same step."""
    line, calls = Line(), []
    scheduler = half(line)
    chains = {name: hashes(number, 2, shared=1) for number, name in enumerate("abc", 1)}
    for name, chain in chains.items():
        scheduler.on_new_request(name, chain, 0.0, terms=RequestTerms(may_load=False))
        scheduler.allocated(name, [], 0)
    take, seal = line.take_slots, line.seal
    line.take_slots = lambda *asked: calls.append(("take", asked[1])) or take(*asked)  # type: ignore[func-returns-value,method-assign]
    line.seal = lambda of, items: calls.append(("seal", len(items))) or seal(of, items)  # type: ignore[func-returns-value,method-assign]
    plan = plan_step(scheduler, [(name, chain, 2 * BLOCK, lambda: range(9)) for name, chain in chains.items()])
    scheduler.reported(report(plan))
    assert calls == [("take", 4), ("seal", 4)]
    assert len({item.key for item in line.sealed}) == 4
    assert line.expected == 0
    scheduler.check_invariants()


def test_behind_the_first_that_finds_no_slot_all_wait() -> None:
    """A block whose prefix is not stored yet is no hit for anybody."""
    line = Line(slots=1)
    scheduler = half(line)
    chains = {name: hashes(number, 2, shared=1) for number, name in enumerate("ab", 1)}
    for name, chain in chains.items():
        scheduler.on_new_request(name, chain, 0.0, terms=RequestTerms(may_load=False))
        scheduler.allocated(name, [], 0)
    scheduled = [(name, chain, 2 * BLOCK, lambda: range(9)) for name, chain in chains.items()]
    plan = StepPlan()
    scheduler.begin_step(plan, 0.0)
    assert scheduler.plan_stores(plan, scheduled) == ["a", "b"], "both are named again in the next step"
    scheduler.reported(report(plan))
    line.free = 8
    scheduler.reported(report(plan_step(scheduler, scheduled)))
    assert [item.position for item in line.sealed] == [0, 1, 1]
    plan = StepPlan()
    scheduler.begin_step(plan, 0.0)
    assert scheduler.plan_stores(plan, scheduled) == []


def test_a_hand_off_is_a_store_of_its_own() -> None:
    line = Line()
    scheduler = half(line)
    scheduler.on_new_request("a", hashes(1, 1), 0.0, terms=RequestTerms(may_load=False))
    scheduler.on_new_request(
        "w", hashes(2, 1), 0.0, terms=RequestTerms(may_load=False, wants=Prefill(HandoffId(b"h" * 16)))
    )
    for name in "aw":
        scheduler.allocated(name, [], 0)
    scheduled = [(name, hashes(number, 1), BLOCK, lambda: range(9)) for number, name in enumerate("aw", 1)]
    first, second = plan_step(scheduler, scheduled).stores
    scheduler.reported(StepReport(stored={first.store_id: 1}))
    assert [item.key for item in line.sealed] == keys_of(hashes(2, 1)), "its reader waits for nobody else's copy"
    scheduler.reported(StepReport(failed={second.store_id: 1}))
    scheduler.check_invariants()


def test_an_idle_engine_waits_longer_until_it_asks_again() -> None:
    """Empty steps take the cores that a fetch needs; the answer ends the wait at once."""
    scheduler = half(Line())
    scheduler.on_new_request("a", hashes(1, 2), 0.0)
    waits = [scheduler.idle_seconds() for _ in range(5000)]
    assert waits[:2] == [IDLE_SECONDS, 2 * IDLE_SECONDS]
    assert waits[-1] == IDLE_SECONDS_MAX
    scheduler.on_new_request("b", hashes(2, 2), 0.0)
    assert scheduler.idle_seconds() == IDLE_SECONDS
