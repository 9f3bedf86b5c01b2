"""What a request that ended has left finds its slots in later steps, as long as the engine holds its blocks."""

from __future__ import annotations

import pytest

from kvservice.connector.layerwise.scheduler import LayerwiseScheduler
from kvservice.connector.options import Offload
from kvservice.connector.plan import StepPlan, StepReport
from kvservice.connector.scheduler import ended
from kvservice.connector.scheduler.ended import WAIT_SECONDS_MAX
from kvservice.connector.scheduler.half import IDLE_SECONDS, SchedulerHalf
from kvservice.connector.scheduler.handoff import Prefill
from kvservice.connector.scheduler.request_terms import RequestTerms
from kvservice.units import BlockHash, HandoffId
from tests.unit.connector.line import BLOCK, EngineBlocks, Line, half_with, hashes, keys_of

BLOCKS = 9  # of the request that ends
ROOM = 4  # slots that the pool has at a time
HANDOFF = HandoffId(b"h" * 16)


def end_request(
    half: SchedulerHalf, engine: EngineBlocks, prompt: int = 1, wants: Prefill | None = None
) -> list[BlockHash]:
    """A request of full blocks, computed in one step, that has ended. The engine keeps its blocks in its cache."""
    chain = hashes(prompt, BLOCKS)
    half.on_new_request("r", chain, 0.0, terms=RequestTerms(may_load=False, wants=wants))
    ids, _ = engine.take(chain)
    half.allocated("r", ids, 0)
    half.finished("r", chain, BLOCKS * BLOCK, ids, store_rest=True)
    engine.give_up(ids)
    return chain


def step(half: SchedulerHalf, now: float = 0.0) -> int:
    """A step without requests whose copies end at once. Returns how many blocks it stores."""
    plan = StepPlan()
    half.begin_step(plan, now, is_idle=True)
    half.plan_stores(plan, ())
    half.check_invariants()
    half.reported(StepReport(stored={store.store_id: 1 for store in plan.stores}))
    return sum(len(store.entries) for store in plan.stores)


def check_over(half: SchedulerHalf, line: Line, engine: EngineBlocks) -> None:
    """Nothing is expected, held or waited for."""
    assert not half.has_pending_work(0.0)
    assert not line.expected
    assert not line.slots
    assert not engine.pinned


@pytest.mark.parametrize("offload", [Offload.LAZY, Offload.EAGER])
def test_ended_request_stores_all_its_blocks_in_turns(offload: Offload) -> None:
    line, engine = Line(slots=ROOM), EngineBlocks(32)
    half = half_with(line, engine, offload)
    chain = end_request(half, engine)
    assert [step(half) for _ in range(4)] == [ROOM, ROOM, 1, 0]
    assert [item.key for item in line.sealed] == keys_of(chain)
    check_over(half, line, engine)


def test_idle_engine_goes_on_for_blocks_that_wait_for_slots() -> None:
    line, engine = Line(slots=ROOM), EngineBlocks(32)
    half = half_with(line, engine, Offload.LAZY)
    end_request(half, engine)
    step(half)
    assert line.expected == BLOCKS - ROOM, "the session reserves slots for them"
    assert half.has_pending_work(0.0)
    assert half.idle_seconds() == IDLE_SECONDS, "an engine with nothing else to do goes round in a circle"


def test_waiting_blocks_are_not_pinned() -> None:
    line, engine = Line(slots=0), EngineBlocks(BLOCKS)
    half = half_with(line, engine, Offload.LAZY)
    end_request(half, engine)
    assert not engine.pinned
    assert engine.free_blocks() == BLOCKS, "the engine may take them"


def test_blocks_that_the_engine_took_end_the_store() -> None:
    line, engine = Line(slots=ROOM), EngineBlocks(32)
    half = half_with(line, engine, Offload.LAZY)
    chain = end_request(half, engine)
    step(half)
    del engine.held[6]  # of the sixth block
    assert [step(half), step(half)] == [1, 0]
    assert [item.key for item in line.sealed] == keys_of(chain)[: ROOM + 1], "what is behind it could not be found"
    check_over(half, line, engine)


def test_pool_without_slots_is_waited_for_for_a_while() -> None:
    line, engine = Line(slots=ROOM), EngineBlocks(32)
    half = half_with(line, engine, Offload.LAZY)
    end_request(half, engine)
    step(half, 1.0)
    line.free = 0
    step(half, 2.0)
    assert half.has_pending_work(2.0)
    step(half, 2.0 + WAIT_SECONDS_MAX)
    check_over(half, line, engine)


def test_those_behind_one_that_finds_slots_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended, "LOOK_BLOCKS_MAX", 2)
    line, engine = Line(slots=0), EngineBlocks(32)
    half = half_with(line, engine, Offload.LAZY)
    for number in range(2):
        end_request(half, engine, number)
    line.free = ROOM
    assert sum(step(half, number * WAIT_SECONDS_MAX / 2) for number in range(12)) == 2 * BLOCKS
    check_over(half, line, engine)


def test_handoff_is_open_until_its_last_block_is_stored() -> None:
    line, engine = Line(slots=ROOM), EngineBlocks(32)
    half = half_with(line, engine, Offload.EAGER)
    end_request(half, engine, wants=Prefill(HANDOFF))
    sealed_when_closed: list[int] = []
    while half.has_pending_work(0.0):
        step(half)
        if HANDOFF in line.closed:
            sealed_when_closed.append(len(line.sealed))
    assert sealed_when_closed == [BLOCKS], "its reader waits for blocks that are still to come, and for no others"


def test_handoff_that_finds_no_slots_is_closed_after_a_while() -> None:
    line, engine = Line(slots=ROOM), EngineBlocks(32)
    half = half_with(line, engine, Offload.EAGER)
    end_request(half, engine, wants=Prefill(HANDOFF))
    line.free = 0
    for now in (1.0, 1.0 + WAIT_SECONDS_MAX):
        assert HANDOFF not in line.closed
        step(half, now)
    assert HANDOFF in line.closed
    check_over(half, line, engine)


def test_reset_drops_what_ended_requests_have_left() -> None:
    line, engine = Line(slots=ROOM), EngineBlocks(32)
    half = half_with(line, engine, Offload.LAZY)
    end_request(half, engine)
    step(half)
    half.reset(b"another term")
    assert not step(half)
    check_over(half, line, engine)


def test_ended_request_is_stored_anew_in_a_new_pool() -> None:
    line, engine = Line(slots=ROOM), EngineBlocks(32)
    half = half_with(line, engine, Offload.LAZY)
    chain = end_request(half, engine)
    step(half)
    line.lose()
    step(half)
    line.attach(2, boot=2)
    line.sealed.clear()
    assert sum(step(half) for _ in range(4)) == BLOCKS
    assert [item.key for item in line.sealed] == keys_of(chain)
    check_over(half, line, engine)


def test_request_with_the_same_name_has_books_of_its_own() -> None:
    line, engine = Line(slots=ROOM), EngineBlocks(32)
    half = half_with(line, engine, Offload.LAZY)
    end_request(half, engine)
    end_request(half, engine)
    assert sum(step(half) for _ in range(5)) == BLOCKS
    check_over(half, line, engine)


def test_step_looks_for_a_bounded_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended, "LOOK_BLOCKS_MAX", 3)
    line, engine = Line(slots=ROOM), EngineBlocks(32)
    half = half_with(line, engine, Offload.LAZY)
    for number in range(2):
        end_request(half, engine, number)
    assert [step(half) for _ in range(4)] == [ROOM, 3, 3, 3]


def test_waiting_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended, "WAITING_MAX", 1)
    line, engine = Line(slots=0), EngineBlocks(32)
    half = half_with(line, engine, Offload.LAZY)
    for number in range(3):
        end_request(half, engine, number)
    assert line.expected == BLOCKS, "of the first one"


def test_layerwise_engine_believes_no_block_of_an_ended_request() -> None:
    line, engine = Line(slots=ROOM), EngineBlocks(32)
    half = half_with(line, engine, Offload.LAZY, LayerwiseScheduler)
    end_request(half, engine)
    assert [step(half), step(half)] == [ROOM, 0]
    check_over(half, line, engine)
