"""A slot of the pool that holds several blocks of the engine: what it is called, and what is asked, loaded, stored."""

from __future__ import annotations

from functools import partial

import pytest

from kvservice.connector.cache_groups import OneGroup
from kvservice.connector.layerwise.scheduler import LayerwiseScheduler
from kvservice.connector.plan import StepPlan, StepReport
from kvservice.connector.scheduler.half import SchedulerHalf
from kvservice.connector.scheduler.ports import Promise, StoredBlock, Wait
from kvservice.connector.scheduler.request_terms import RequestTerms
from tests.unit.connector.line import BLOCK, EngineBlocks, Line, half_of, hashes, keys_of, plan_step

PARTS = pytest.mark.parametrize("parts", [1, 4, 16])


def half_with(
    line: Line, parts: int, kind: type[SchedulerHalf] = SchedulerHalf, engine: EngineBlocks | None = None
) -> SchedulerHalf:
    half = half_of(kind, line, block_tokens=parts * BLOCK, remember_stored=True, grouping=OneGroup(parts))
    if engine is not None:
        half.pin_with(engine)
        half.read_cache(engine)
    return half


def stored(half: SchedulerHalf, plan: StepPlan) -> list[tuple[int, int, int]]:
    """Report every store of the plan as done. Returns (block, slot, part) of what was copied."""
    half.reported(StepReport(stored={store.store_id: 1 for store in plan.stores}))
    return [(entry.block_id, entry.ref.slot, entry.part) for store in plan.stores for entry in store.entries]


@PARTS
def test_the_last_block_of_a_slot_names_it(parts: int) -> None:
    line, chain = Line(), hashes(1, 3 * parts)
    half = half_with(line, parts)
    half.on_new_request("r", [*chain, *hashes(2, parts - 1)], 0.0)
    ((_, _, asked),) = line.asked
    assert list(asked.keys) == keys_of(chain)[parts - 1 :: parts]
    assert len(asked.keys) == 3, "the rest fills no slot"


def test_a_prompt_shorter_than_one_slot_is_no_hit() -> None:
    line = Line()
    half = half_with(line, 16)
    half.on_new_request("r", hashes(1, 15), 0.0)
    assert not line.asked
    assert half.matched("r", 0, 15 * BLOCK + 3, 0.1) == Promise(0)
    ids = list(range(100, 116))
    half.allocated("r", ids, 0)
    assert not plan_step(half, [("r", hashes(1, 15), 15 * BLOCK + 3, lambda: ids)]).stores


@PARTS
def test_whole_slots_are_stored_and_what_is_left_is_not(parts: int) -> None:
    line, chain = Line(), hashes(1, 2 * parts + parts - 1)
    half = half_with(line, parts)
    half.on_new_request("r", chain, 0.0, terms=RequestTerms(may_load=False))
    ids = list(range(100, 100 + len(chain)))
    half.allocated("r", ids, 0)
    copied = stored(half, plan_step(half, [("r", chain, len(chain) * BLOCK, lambda: ids)]))
    first, second = copied[0][1], copied[parts][1]
    assert copied == [
        *((100 + part, first, part) for part in range(parts)),
        *((100 + parts + part, second, part) for part in range(parts)),
    ]
    assert first != second
    whole = chain[: 2 * parts]
    assert [item.key for item in line.sealed] == keys_of(whole)[parts - 1 :: parts]
    assert [item.position for item in line.sealed] == [0, 1]
    assert not line.slots and line.expected == 0
    told = [StoredBlock(h, whole[i - 1] if i else None) for i, h in enumerate(whole)]
    assert half.take_told() == ([], told), "the engine's events name its own blocks"
    line.heard.removed[line.sealed[1].key] = None
    assert half.take_told() == (whole[parts:], [])


@PARTS
def test_a_slot_filled_over_several_steps_is_stored_once(parts: int) -> None:
    line, chain = Line(), hashes(1, 2 * parts)
    half = half_with(line, parts)
    half.on_new_request("r", chain, 0.0, terms=RequestTerms(may_load=False))
    ids = list(range(100, 100 + len(chain)))
    half.allocated("r", ids, 0)
    copied = []
    for blocks in range(1, len(chain) + 1):
        plan = plan_step(half, [("r", chain[:blocks], blocks * BLOCK, lambda: ids)])
        assert bool(plan.stores) == (blocks % parts == 0)
        copied += [block for block, _, _ in stored(half, plan)]
    assert copied == ids


@pytest.mark.parametrize("own", [0, 3, 4, 5, 7])
def test_a_load_leaves_the_engines_own_part_of_a_slot_alone(own: int) -> None:
    """Other requests may be computing on it."""
    line, chain = Line(), hashes(1, 12)
    half = half_with(line, 4)
    half.on_new_request("r", chain, 0.0)
    line.answer(2)
    total = 12 * BLOCK + 1
    assert half.matched("r", own * BLOCK, total, 0.1) == Promise((8 - own) * BLOCK)
    ids = list(range(100, 113))
    half.allocated("r", ids, (8 - own) * BLOCK)
    (load,) = plan_step(half).loads
    assert [(e.block_id, e.part) for e in load.entries] == [(ids[i], i % 4) for i in range(own, 8)]
    assert {e.key for e in load.entries} == set(keys_of(chain)[3:8:4][own // 4 :])
    half.loaded("r", failed=False)
    assert not line.leases
    copied = stored(half, plan_step(half, [("r", chain, total, lambda: ids)]))
    assert [block for block, _, _ in copied] == ids[8:12], "what the pool has is not stored again"
    half.check_invariants()


def test_a_slot_that_the_engine_has_in_part_is_asked_for() -> None:
    line, engine, chain = Line(), EngineBlocks(32), hashes(1, 12)
    half = half_with(line, 4, engine=engine)
    engine.take(chain[:7])
    half.on_new_request("r", chain, 0.0)
    ((_, _, asked),) = line.asked
    assert asked.skip == 1 and len(asked.keys) == 3
    line.answer(1)
    assert half.matched("r", 7 * BLOCK, 12 * BLOCK + 1, 0.1) == Promise(BLOCK)
    ids = list(range(100, 113))
    half.allocated("r", ids, BLOCK)
    (load,) = plan_step(half).loads
    assert [(e.block_id, e.part) for e in load.entries] == [(107, 3)]


def test_an_engine_that_takes_a_part_of_a_block_is_refused() -> None:
    """Its tokens would count as loaded. The lease ends with the request."""
    line = Line()
    half = half_with(line, 4)
    half.on_new_request("r", hashes(1, 8), 0.0)
    line.answer(2)
    assert half.matched("r", 0, 9 * BLOCK, 0.1) == Promise(8 * BLOCK)
    with pytest.raises(AssertionError):
        half.allocated("r", list(range(9)), 6 * BLOCK)
    half.finished("r", hashes(1, 8), 0, [], store_rest=False)
    assert not line.leases


def test_a_preempted_request_stores_its_whole_slots() -> None:
    line, engine, chain = Line(slots=0), EngineBlocks(32), hashes(1, 10)
    half = half_with(line, 4, engine=engine)
    half.on_new_request("r", chain, 0.0, terms=RequestTerms(may_load=False))
    ids, _ = engine.take(chain)
    half.allocated("r", ids, 0)
    plan_step(half, [("r", chain, 10 * BLOCK, lambda: ids)])  # no slot is free
    engine.give_up(ids)
    engine.take(hashes(2, 23))  # takes the last block of the request
    line.free = 64
    copied = stored(half, plan_step(half, preempted=("r",)))
    assert [(block, part) for block, _, part in copied] == [(ids[i], i % 4) for i in range(8)]
    assert half.counters["store_blocks_preempted"] == 8


def test_a_hit_inside_a_slot_that_is_not_confirmed_waits() -> None:
    """Another prompt shares half of a slot with one that is loaded in the step being planned."""
    line = Line()
    half = half_with(line, 4, LayerwiseScheduler)
    half.on_new_request("r", hashes(1, 8, shared=2), 0.0)
    line.answer(2)
    assert half.matched("r", 0, 9 * BLOCK, 0.1) == Promise(8 * BLOCK, layered=True)
    half.allocated("r", list(range(11, 20)), 8 * BLOCK)
    other = partial(half.matched, "other", 2 * BLOCK, 9 * BLOCK)
    half.on_new_request("other", hashes(2, 8, shared=2), 0.0)
    line.answer(0)
    assert other(0.2) == Wait()
    plan_step(half)
    half.end_layered(StepReport(layered={"r": 1}))  # type: ignore[attr-defined]
    assert other(0.3) == Promise(0)
