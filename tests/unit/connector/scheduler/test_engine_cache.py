"""What the scheduler half does with a look into the engine's own cache: it asks beyond what the engine has, stores what
a preempted request had, and stores what the engine is about to lose."""

from __future__ import annotations

import pytest

from kvservice.connector.layerwise.scheduler import LayerwiseScheduler
from kvservice.connector.options import Offload
from kvservice.connector.plan import StepPlan, StepReport
from kvservice.connector.scheduler import known_keys
from kvservice.connector.scheduler.half import SchedulerHalf
from kvservice.connector.scheduler.handoff import Prefill
from kvservice.connector.scheduler.ports import Promise, Wait
from kvservice.connector.scheduler.request_terms import RequestTerms
from kvservice.units import HandoffId
from tests.unit.connector.line import (
    BLOCK,
    WINDOW,
    EngineBlocks,
    Line,
    half_with,
    hashes,
    keys_of,
    plan_step,
)


def stored(half: SchedulerHalf, plan: StepPlan) -> list[int]:
    """Report every store of the plan as done. Returns the blocks that were copied."""
    half.reported(StepReport(stored={store.store_id: 1 for store in plan.stores}))
    return [entry.block_id for store in plan.stores for entry in store.entries]


def run_to_end(half: SchedulerHalf, engine: EngineBlocks, name: str, prompt: int, blocks: int) -> list[int]:
    """A request of `blocks` full blocks, computed in one step, that ends. Returns its blocks."""
    chain = hashes(prompt, blocks)
    half.on_new_request(name, chain, 0.0, terms=RequestTerms(may_load=False))
    ids, _ = engine.take(chain)
    half.allocated(name, ids, 0)
    stored(half, plan_step(half, [(name, chain, blocks * BLOCK, lambda: ids)]))
    half.finished(name, chain, blocks * BLOCK, ids, store_rest=True)
    engine.give_up(ids)
    return ids


def near_eviction(half: SchedulerHalf, engine: EngineBlocks, adapter: bytes = b"") -> None:
    """A request of four blocks that ends. None of them is stored yet, and the engine may soon take them away."""
    chain = hashes(1, 4)
    half.on_new_request("r", chain, 0.0, terms=RequestTerms(may_load=False), adapter=adapter)
    ids, _ = engine.take(chain)
    half.allocated("r", ids, 0)
    plan_step(half, [("r", chain, 4 * BLOCK, lambda: ids)])
    half.finished("r", chain, 4 * BLOCK, ids, store_rest=False)
    engine.give_up(ids)


# -- ask beyond what the engine has ----


def test_blocks_that_the_engine_has_are_not_asked_for() -> None:
    line, engine, chain = Line(), EngineBlocks(32), hashes(1, 9)
    half = half_with(line, engine)
    engine.take(chain[:6])
    half.on_new_request("r", chain, 0.0)
    ((_, _, asked),) = line.asked
    assert asked.skip == 6
    assert len(asked.keys) == 9


def test_promise_behind_the_engines_hit_fills_the_right_blocks() -> None:
    line, engine, chain = Line(), EngineBlocks(32), hashes(1, 9)
    half = half_with(line, engine)
    engine.take(chain[:6])
    half.on_new_request("r", chain, 0.0)
    line.answer(2)
    assert half.matched("r", 6 * BLOCK, 9 * BLOCK + 1, 0.1) == Promise(2 * BLOCK)
    half.allocated("r", list(range(100, 110)), 2 * BLOCK)
    (load,) = plan_step(half).loads
    assert [(entry.block_id, entry.key) for entry in load.entries] == [
        (106, keys_of(chain)[6]),
        (107, keys_of(chain)[7]),
    ]
    half.check_invariants()


def test_eviction_between_ask_and_match_asks_again_once() -> None:
    line, engine, chain = Line(), EngineBlocks(32), hashes(1, 9)
    half = half_with(line, engine)
    ids, _ = engine.take(chain[:6])
    half.on_new_request("r", chain, 0.0)
    line.answer(3)
    half.take_answers()
    engine.give_up(ids)
    engine.queue = ids[4:] + [block_id for block_id in engine.queue if block_id not in ids]
    engine.take(hashes(2, 2))  # it takes the fifth and the sixth block
    assert half.matched("r", 4 * BLOCK, 9 * BLOCK + 1, 0.1) == Wait()
    assert not line.leases, "the first promise is given back"
    ((_, _, asked),) = line.asked
    assert asked.skip == 4
    line.answer(5)
    assert half.matched("r", 4 * BLOCK, 9 * BLOCK + 1, 0.2) == Promise(5 * BLOCK)
    engine.held.clear()
    assert half.matched("r", 0, 9 * BLOCK + 1, 0.3) == Promise(0), "it asks again once"
    assert not line.asked
    assert half.counters["asked_again"] == 1


def test_eviction_while_the_answer_is_due_asks_again() -> None:
    line, engine, chain = Line(), EngineBlocks(32), hashes(1, 4)
    half = half_with(line, engine)
    engine.take(chain[:3])
    half.on_new_request("r", chain, 0.0)
    engine.held.clear()
    assert half.matched("r", 0, 4 * BLOCK + 1, 0.1) == Wait()
    assert [asked.skip for _, _, asked in line.asked] == [3, 0]
    line.answer(1)  # the first answer: nobody wants it any more
    line.answer(4)
    assert half.matched("r", 0, 4 * BLOCK + 1, 0.2) == Promise(4 * BLOCK)
    assert sum(line.leases.values()) == 4


@pytest.mark.parametrize("answered", [False, True])
def test_prompt_that_the_engine_has_whole_waits_for_nothing(answered: bool) -> None:
    """It computes the last token itself, and with it the last block of a prompt that ends with one."""
    line, engine, chain = Line(), EngineBlocks(32), hashes(1, 4)
    half = half_with(line, engine)
    engine.take(chain)
    half.on_new_request("r", chain, 0.0)
    if answered:
        line.answer(0)
    assert half.matched("r", 3 * BLOCK, 4 * BLOCK, 0.1) == Promise(0)
    assert half.counters["gave_up_waiting"] == 0
    assert half.counters["asked_again"] == 0


@pytest.mark.parametrize("late", [False, True])
def test_skipped_block_that_the_pool_lost_is_stored_again(late: bool) -> None:
    """Otherwise a prefix that is hot in the engine is missing in the pool for ever, and what is behind it is of no
    use."""
    line, engine, chain = Line(), EngineBlocks(32), hashes(1, 3)
    half = half_with(line, engine)
    ids = run_to_end(half, engine, "a", 1, 3)
    assert len(line.sealed) == 3
    half.on_new_request("b", chain, 0.0)
    if not late:
        line.answer(0, skipped_held=1)
    half.matched("b", 3 * BLOCK, 3 * BLOCK + 1, 0.1)
    assert engine.share(chain) == ids
    half.allocated("b", ids, 0)
    if late:
        line.answer(0, skipped_held=1)
    plan = plan_step(half, [("b", chain, 3 * BLOCK, lambda: ids)])
    assert stored(half, plan) == ids[1:]


# -- preemption ----


@pytest.mark.parametrize("offload", [Offload.EAGER, Offload.LAZY])
def test_lazy_engine_stores_what_a_preempted_request_has_full(offload: Offload) -> None:
    line, engine, chain = Line(), EngineBlocks(32), hashes(1, 3)
    half = half_with(line, engine, offload)
    half.on_new_request("r", chain, 0.0, terms=RequestTerms(may_load=False))
    ids, _ = engine.take(chain)
    half.allocated("r", ids, 0)
    before = stored(half, plan_step(half, [("r", chain, 2 * BLOCK + 3, lambda: ids)]))
    engine.give_up(ids)  # preempted: what the third block holds was not computed
    plan = plan_step(half, preempted=("r",))
    assert before + stored(half, plan) == ids[:2]
    assert not plan_step(half, preempted=("r",)).stores, "it is stored once"
    assert half.counters["store_blocks_preempted"] == (2 if offload is Offload.LAZY else 0)
    half.check_invariants()


def test_block_that_a_preempted_request_lost_ends_its_store() -> None:
    line, engine, chain = Line(), EngineBlocks(4), hashes(1, 3)
    half = half_with(line, engine, Offload.LAZY)
    half.on_new_request("r", chain, 0.0, terms=RequestTerms(may_load=False))
    ids, _ = engine.take(chain)
    half.allocated("r", ids, 0)
    plan_step(half, [("r", chain, 3 * BLOCK, lambda: ids)])
    engine.give_up(ids)
    engine.take(hashes(2, 2))  # another request takes the fourth block and the last one of this request
    assert stored(half, plan_step(half, preempted=("r",))) == ids[:2]


@pytest.mark.parametrize("offload", [Offload.EAGER, Offload.LAZY])
def test_a_preempted_handoff_copies_what_the_engine_has(offload: Offload) -> None:
    """Known keys do not count for a hand-off that never asked: its blocks are copied, and no others instead."""
    line, engine, chain = Line(), EngineBlocks(32), hashes(1, 3)
    half = half_with(line, engine, offload)
    run_to_end(half, engine, "a", 1, 3)
    stored(half, plan_step(half))
    half.on_new_request("p", chain, 0.0, terms=RequestTerms(may_load=False, wants=Prefill(HandoffId(bytes(16)))))
    ids = engine.share(chain)
    half.allocated("p", ids, 0)
    line.free = 0  # so it is put off
    stored(half, plan_step(half, [("p", chain, 3 * BLOCK, lambda: ids)]))
    line.free = 64
    engine.give_up(ids)
    assert stored(half, plan_step(half, preempted=("p",))) == ids
    half.check_invariants()


def test_a_block_that_only_the_pool_has_is_copied_from_nowhere() -> None:
    """The engine took the second block for another request. The pool was known to have it, which a hand-off ignores."""
    line, engine, chain = Line(), EngineBlocks(32), hashes(1, 3)
    half = half_with(line, engine, Offload.LAZY)
    run_to_end(half, engine, "a", 1, 3)
    stored(half, plan_step(half))
    half.on_new_request("p", chain, 0.0, terms=RequestTerms(may_load=False, wants=Prefill(HandoffId(bytes(16)))))
    ids = engine.share(chain)
    half.allocated("p", ids, 0)
    line.free = 0
    plan_step(half, [("p", chain, 3 * BLOCK, lambda: ids)])
    line.free = 64
    engine.give_up(ids)
    del engine.held[ids[1]]
    assert stored(half, plan_step(half, preempted=("p",))) == [ids[0], ids[2]]


def test_a_key_forgotten_within_the_step_copies_no_other_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys were known when the table was made, and a hand-off of the same step pushed them out."""
    monkeypatch.setattr(known_keys, "KNOWN_KEYS_MAX", 4)
    line, engine, chain, other = Line(), EngineBlocks(64), hashes(1, 3), hashes(2, 3)
    half = half_with(line, engine, Offload.LAZY)
    run_to_end(half, engine, "a", 1, 3)
    stored(half, plan_step(half))
    half.on_new_request("p", chain, 0.0, terms=RequestTerms(may_load=False))
    ids = engine.share(chain)
    half.allocated("p", ids, 0)
    half.on_new_request("h", other, 0.0, terms=RequestTerms(may_load=False, wants=Prefill(HandoffId(bytes(16)))))
    others, _ = engine.take(other)
    half.allocated("h", others, 0)
    line.free = 0
    plan_step(half, [("p", chain, 3 * BLOCK, lambda: ids), ("h", other, 3 * BLOCK, lambda: others)])
    line.free = 64
    engine.give_up(ids)
    engine.give_up(others)
    assert stored(half, plan_step(half, preempted=("p", "h"))) == [*others, *ids[:2]]


def test_preempted_layer_wise_load_is_not_stored() -> None:
    line, engine, chain = Line(), EngineBlocks(32), hashes(1, 3)
    half = half_with(line, engine, Offload.LAZY, LayerwiseScheduler)
    half.on_new_request("r", chain, 0.0, terms=RequestTerms(may_load=False))
    ids, _ = engine.take(chain)
    half.allocated("r", ids, 0)
    plan_step(half, [("r", chain, 3 * BLOCK, lambda: ids)])
    engine.give_up(ids)
    assert not plan_step(half, preempted=("r",)).stores


# -- near eviction ----


def test_nothing_is_stored_that_is_not_near_eviction() -> None:
    line, engine = Line(), EngineBlocks(32)
    half = half_with(line, engine, Offload.EVICTING)
    run_to_end(half, engine, "r", 1, 3)
    assert not plan_step(half).stores
    assert not line.sealed
    assert not half.has_pending_work(0.0)


def test_blocks_that_the_engine_takes_next_are_stored_first() -> None:
    line, engine, chain = Line(), EngineBlocks(10), hashes(1, 6)
    half = half_with(line, engine, Offload.EVICTING)
    ids = run_to_end(half, engine, "r", 1, 6)
    engine.take(hashes(2, 2))
    assert engine.queue == [9, 10, *reversed(ids)]
    plan = plan_step(half)
    assert [entry.block_id for entry in plan.stores[0].entries] == ids[:1:-1], "the two before them are empty"
    assert engine.queue == [9, 10, *ids[1::-1]], "a block under copy is not taken"
    stored(half, plan)
    assert engine.queue == [*ids[:1:-1], 9, 10, *ids[1::-1]], "they still go first"
    assert {item.key for item in line.sealed} == set(keys_of(chain)[2:])
    assert [item.parent for item in line.sealed] == list(reversed(keys_of(chain)[1:5]))
    assert not plan_step(half).stores, "the four that go next are harmless"
    assert not engine.pinned


def test_stored_block_near_eviction_is_not_copied_again() -> None:
    line, engine = Line(), EngineBlocks(12)
    half = half_with(line, engine, Offload.EVICTING)
    run_to_end(half, engine, "r", 1, 8)
    engine.take(hashes(2, 4))
    assert len(stored(half, plan_step(half))) == WINDOW
    assert not plan_step(half).stores


def test_block_of_a_private_request_is_not_stored_near_eviction() -> None:
    line, engine, chain = Line(), EngineBlocks(4), hashes(1, 4)
    half = half_with(line, engine, Offload.EVICTING)
    half.on_new_request("r", chain, 0.0, terms=RequestTerms(may_store=False))
    ids, _ = engine.take(chain)
    half.allocated("r", ids, 0)
    plan_step(half, [("r", chain, 4 * BLOCK, lambda: ids)])
    half.finished("r", chain, 4 * BLOCK, ids, store_rest=True)
    engine.give_up(ids)
    assert not plan_step(half).stores


def test_request_that_ends_while_the_engine_is_full_is_stored() -> None:
    """Its blocks may be taken before the free ones are looked at again."""
    line, engine, chain = Line(), EngineBlocks(6), hashes(1, 3)
    half = half_with(line, engine, Offload.EVICTING)
    run_to_end(half, engine, "r", 1, 3)
    assert set(engine.pinned) == {1, 2, 3}
    engine.queue = [block_id for block_id in engine.queue if block_id not in (1, 2, 3)]
    assert sorted(stored(half, plan_step(half))) == [1, 2, 3]
    assert {item.key for item in line.sealed} == set(keys_of(chain))


def test_prompt_that_is_handed_off_does_not_wait_for_eviction() -> None:
    line, engine, chain = Line(), EngineBlocks(32), hashes(1, 3)
    half = half_with(line, engine, Offload.EVICTING)
    half.on_new_request("r", chain, 0.0, terms=RequestTerms(may_load=False, wants=Prefill(HandoffId(bytes(16)))))
    ids, _ = engine.take(chain)
    half.allocated("r", ids, 0)
    assert stored(half, plan_step(half, [("r", chain, 3 * BLOCK, lambda: ids)])) == ids
    half.finished("r", chain, 3 * BLOCK, ids, store_rest=True)
    assert line.closed


def test_reset_forgets_what_was_near_eviction() -> None:
    line, engine = Line(), EngineBlocks(4)
    half = half_with(line, engine, Offload.EVICTING)
    near_eviction(half, engine)
    half.reset(b"another term")
    assert not plan_step(half).stores


def test_blocks_near_eviction_lose_the_name_of_a_lost_adapter() -> None:
    """Other weights may be computed under the same hashes of the engine."""
    line, engine = Line(), EngineBlocks(4)
    half = half_with(line, engine, Offload.EVICTING)
    near_eviction(half, engine, b"adapter")
    half.forget_adapter(b"adapter")
    assert not plan_step(half).stores
