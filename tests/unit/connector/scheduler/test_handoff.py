"""Prefill/decode from the engine's side: which parameters are believed, and when a hand-off is over."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.connector.options import Offload
from kvservice.connector.plan import StepReport
from kvservice.connector.scheduler.half import IDLE_SECONDS, IDLE_SECONDS_MAX
from kvservice.connector.scheduler.handoff import Prefill, decode_params, parse_transfer_params
from kvservice.connector.scheduler.ports import Promise, Wait
from kvservice.connector.scheduler.request import RequestState
from kvservice.connector.scheduler.request_terms import RequestTerms
from kvservice.core.messages import Handoff
from kvservice.errors import InvalidRequest
from kvservice.units import BlockKey, HandoffId, NodeId
from tests.unit.connector.line import BLOCK, Line, half, hashes, plan_step, report, run_step

ID = HandoffId(bytes(range(16)))
HERE = Handoff(ID, NodeId("n"))
GOOD: dict[str, Any] = {"version": 1, "role": "decode", "handoff": ID.hex(), "node": "n"}


def test_the_answer_of_a_prefill_is_what_a_decode_asks_with() -> None:
    assert parse_transfer_params(decode_params(HERE)) == HERE


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        (None, None),
        ({}, None),
        ({"do_remote_prefill": True, "remote_engine_id": "x"}, None),
        ({"do_remote_decode": True, "remote_host": None}, Prefill()),
        ({"kvservice": {"version": 1, "role": "prefill", "handoff": ID.hex()}}, Prefill(ID)),
        ({"kvservice": GOOD, "more": [1, 2]}, HERE),
    ],
)
def test_known_forms_are_understood(params: Any, wanted: Any) -> None:
    assert parse_transfer_params(params) == wanted


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"version": "1"},
        {"role": "both"},
        {"role": None},
        {"handoff": ID.hex().upper()},
        {"handoff": ID.hex() + "00"},
        {"handoff": 12},
        {"handoff": ID.hex() + "\n"},
        {"node": ""},
        {"node": "x" * 513},
        {"node": ["n"]},
    ],
)
def test_what_is_not_exactly_right_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(change))):
        parse_transfer_params({"kvservice": {**GOOD, **change}})


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=40),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["kvservice", "version", "role", "handoff", "node", "x"]), inner, max_size=5)
    ),
)


@given(json)
def test_nothing_but_a_refusal_comes_of_nonsense(params: Any) -> None:
    try:
        found = parse_transfer_params(params)
    except InvalidRequest:
        return
    assert found is None or isinstance(found, Prefill | Handoff)


def test_prefill_is_closed_when_its_last_copy_is_sealed() -> None:
    line, chain = Line(), hashes(1, 3)
    scheduler = half(line, worker_count=2)
    scheduler.on_new_request("r", chain, 0.0, terms=RequestTerms(may_load=False, wants=Prefill(ID)))
    assert ID in line.handoffs
    scheduler.matched("r", 0, 3 * BLOCK, 0.0)
    scheduler.allocated("r", [1, 2, 3, 4], 0)
    first = run_step(scheduler, "r", chain, BLOCK)
    rest = run_step(scheduler, "r", chain, 3 * BLOCK)
    assert scheduler.finished("r", chain, 3 * BLOCK, [1, 2, 3, 4], store_rest=True) == ID
    for plan in (first, rest):
        for _ in range(2):
            assert not line.closed
            scheduler.reported(report(plan))
    assert line.closed == [ID] and len(line.sealed) == 3


def test_prefill_that_is_aborted_closes_its_handoff() -> None:
    line, chain = Line(), hashes(1, 3)
    scheduler = half(line)
    scheduler.on_new_request("r", chain, 0.0, terms=RequestTerms(wants=Prefill(ID)))
    scheduler.finished("r", chain, 0, [], store_rest=False)
    assert line.closed == [ID]


def test_prefill_whose_copy_fails_closes_its_handoff() -> None:
    line, chain = Line(), hashes(1, 1)
    scheduler = half(line)
    scheduler.on_new_request("r", chain, 0.0, terms=RequestTerms(may_load=False, wants=Prefill(ID)))
    scheduler.matched("r", 0, BLOCK, 0.0)
    scheduler.allocated("r", [1, 2], 0)
    plan = run_step(scheduler, "r", chain, BLOCK)
    scheduler.finished("r", chain, BLOCK, [1, 2], store_rest=True)
    scheduler.reported(report(plan, failed=1))
    assert line.closed == [ID] and not line.sealed


def test_prompts_with_one_handoff_close_it_once_with_the_last() -> None:
    """A client may send several prompts with the parameters of one call, for example a list of them."""
    line, chains = Line(), {"r": hashes(1, 1), "s": hashes(2, 1)}
    scheduler = half(line)
    plans = []
    for name, chain in chains.items():  # the second one comes while a copy of the first is under way
        scheduler.on_new_request(name, chain, 0.0, terms=RequestTerms(may_load=False, wants=Prefill(ID)))
        scheduler.matched(name, 0, BLOCK, 0.0)
        scheduler.allocated(name, [1, 2], 0)
        plans.append(run_step(scheduler, name, chain, BLOCK))
    for (name, chain), plan in zip(chains.items(), plans, strict=True):
        scheduler.reported(report(plan))
        assert not line.closed
        assert scheduler.finished(name, chain, BLOCK, [1, 2], store_rest=True) == ID
        scheduler.check_invariants()
    assert line.closed == [ID] and len(line.sealed) == 2


def test_prefill_is_not_over_while_another_copies_its_blocks() -> None:
    """Two prompts that are alike come in one step, and the first one's copy brings the blocks of both. vLLM says that
    they have ended before it says which copies have."""
    line, chain = Line(), hashes(1, 3)
    scheduler = half(line)
    other = HandoffId(bytes(16))
    for name, handoff in (("r", ID), ("s", other)):
        scheduler.on_new_request(name, chain, 0.0, terms=RequestTerms(wants=Prefill(handoff)))
        line.answer(0)
        scheduler.matched(name, 0, 3 * BLOCK, 0.0)
        scheduler.allocated(name, [1, 2, 3, 4], 0)
    plan = plan_step(scheduler, [(name, chain, 3 * BLOCK, lambda: [1, 2, 3, 4]) for name in ("r", "s")])
    for name in ("r", "s"):
        scheduler.finished(name, chain, 3 * BLOCK, [1, 2, 3, 4], store_rest=True)
    assert not line.closed
    scheduler.reported(report(plan))
    assert sorted(line.closed) == [other, ID] and len(line.sealed) == 3
    scheduler.check_invariants()


@pytest.mark.parametrize("offload", [Offload.LAZY, Offload.EVICTING])
def test_prefill_is_stored_while_it_is_computed(offload: Offload) -> None:
    """Its reader waits for it. All at once at its end, it would find no more slots than are in stock."""
    line, chain = Line(), hashes(1, 3)
    scheduler = half(line, offload=offload)
    scheduler.on_new_request("r", chain, 0.0, terms=RequestTerms(wants=Prefill(ID)))
    assert line.expected == 3
    line.answer(0)
    scheduler.matched("r", 0, 3 * BLOCK, 0.0)
    scheduler.allocated("r", [1, 2, 3, 4], 0)
    scheduler.reported(report(run_step(scheduler, "r", chain, 2 * BLOCK)))
    assert len(line.sealed) == 2


def test_prefill_without_a_pool_is_an_ordinary_request() -> None:
    line, chain = Line(), hashes(1, 1)
    line.lose()
    scheduler = half(line)
    scheduler.on_new_request("r", chain, 0.0, terms=RequestTerms(wants=Prefill(ID)))
    assert scheduler.finished("r", chain, 0, [], store_rest=False) is None
    assert scheduler.counters["handoff_without_pool"] == 1


def test_prefill_stores_again_what_may_have_been_evicted() -> None:
    """An engine that never reads never hears of evictions."""
    line, chain = Line(), hashes(1, 2)
    scheduler = half(line)
    for name, wants in (("a", None), ("b", None), ("c", Prefill(ID))):
        scheduler.on_new_request(name, chain, 0.0, terms=RequestTerms(may_load=False, wants=wants))
        scheduler.matched(name, 0, 2 * BLOCK, 0.0)
        scheduler.allocated(name, [1, 2, 3], 0)
        scheduler.reported(report(run_step(scheduler, name, chain, 2 * BLOCK)))
    assert len(line.sealed) == 2 + 0 + 2


def test_decode_waits_longer_for_its_handoff_than_for_a_fetch() -> None:
    line = Line()
    scheduler = half(line)
    scheduler.on_new_request("r", hashes(1, 4), 0.0, terms=RequestTerms(wants=HERE))
    (_, _, wanted) = line.asked[0]
    assert wanted.handoff == HERE and wanted.timeout_seconds == 60.0
    assert scheduler.matched("r", 0, 70, 59.0) == Wait()
    assert scheduler.idle_seconds() == IDLE_SECONDS_MAX
    scheduler.on_new_request("other", hashes(2, 4), 0.0)
    assert scheduler.idle_seconds() == IDLE_SECONDS
    line.answer(4)
    assert scheduler.matched("r", 0, 70, 59.0) == Promise(4 * BLOCK)


def test_preempted_decode_does_not_wait_for_prefill_again() -> None:
    line, chain = Line(), hashes(1, 4)
    scheduler = half(line)
    scheduler.on_new_request("r", chain, 0.0, terms=RequestTerms(wants=HERE))
    line.answer(4)
    scheduler.matched("r", 0, 70, 0.0)
    scheduler.allocated("r", [1, 2, 3, 4, 5], 4 * BLOCK)
    plan_step(scheduler)
    scheduler.loaded("r", failed=False)
    assert scheduler._requests["r"].state is RequestState.RUNNING
    assert scheduler.matched("r", 0, 70, 1.0) == Wait()
    assert line.asked[0][2].handoff is None and line.asked[0][2].timeout_seconds == 2.0


def test_whole_blocks_of_a_finished_prefill_are_lent() -> None:
    line, chain = Line(), hashes(1, 3)
    scheduler = half(line, loan_seconds=5.0)
    scheduler.on_new_request("r", chain, 0.0, terms=RequestTerms(may_load=False, wants=Prefill(ID)))
    scheduler.on_new_request("ordinary", hashes(2, 3), 0.0, terms=RequestTerms(may_load=False))
    for name in ("r", "ordinary"):
        scheduler.matched(name, 0, 3 * BLOCK, 0.0)
        scheduler.allocated(name, [1, 2, 3, 4], 0)
    scheduler.reported(report(run_step(scheduler, "r", chain, 2 * BLOCK + 5)))
    scheduler.finished("r", chain, 2 * BLOCK + 5, [1, 2, 3, 4], store_rest=True)
    scheduler.finished("ordinary", hashes(2, 3), 2 * BLOCK, [5, 6, 7, 8], store_rest=True)
    assert line.pins.pinned.keys() >= {1, 2}
    [loan] = (plan := plan_step(scheduler)).lends
    assert loan.blocks == ((1, BlockKey(chain[0][:16])), (2, BlockKey(chain[1][:16])))
    scheduler.reported(report(plan))
    assert line.pins.pinned == {1: 1, 2: 1} and scheduler.has_pending_work(1.0)
    assert scheduler.idle_seconds() == IDLE_SECONDS, "an engine with nothing else to do goes round in a circle"
    scheduler.reported(StepReport(returned={(loan.loan_id, 1)}))
    assert not line.pins.pinned and not scheduler.has_pending_work(1.0)


def test_prefill_that_is_aborted_lends_nothing() -> None:
    line, chain = Line(), hashes(1, 2)
    scheduler = half(line, loan_seconds=5.0)
    scheduler.on_new_request("r", chain, 0.0, terms=RequestTerms(may_load=False, wants=Prefill(ID)))
    scheduler.matched("r", 0, 2 * BLOCK, 0.0)
    scheduler.allocated("r", [1, 2, 3], 0)
    scheduler.reported(report(run_step(scheduler, "r", chain, 2 * BLOCK)))
    scheduler.finished("r", chain, 2 * BLOCK, [1, 2, 3], store_rest=False)
    assert not plan_step(scheduler).lends and not line.pins.pinned


@pytest.mark.parametrize(
    ("loan_seconds", "wants", "borrows"), [(5.0, HERE, True), (0.0, HERE, False), (5.0, None, False)]
)
def test_only_a_handoff_is_borrowed(loan_seconds: float, wants: Handoff | None, borrows: bool) -> None:
    line = Line()
    scheduler = half(line, loan_seconds=loan_seconds)
    scheduler.on_new_request("r", hashes(1, 2), 0.0, terms=RequestTerms(wants=wants))
    line.answer(2)
    assert scheduler.matched("r", 0, 3 * BLOCK, 0.1) == Promise(2 * BLOCK)
    scheduler.allocated("r", [1, 2, 3], 2 * BLOCK)
    [load] = plan_step(scheduler).loads
    assert load.may_borrow is borrows
