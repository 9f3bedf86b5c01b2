"""A block of the engine that fills several slots of the pool, each with a name of its own."""

from __future__ import annotations

from collections import Counter

import pytest

from kvservice.connector.cache_groups import PagesOfBlocks
from kvservice.connector.plan import StepPlan, StepReport
from kvservice.connector.scheduler.half import SchedulerHalf
from kvservice.connector.scheduler.ports import Promise
from kvservice.connector.scheduler.request_terms import RequestTerms
from tests.unit.connector.line import BLOCK, Line, hashes, keys_of, pool_info

PAGES = 2  # of an engine's block


def half_of(line: Line) -> SchedulerHalf:
    half = SchedulerHalf(
        line,
        keys_of,
        pool_info,
        block_tokens=BLOCK,
        worker_count=1,
        fetch_timeout_seconds=2.0,
        remember_stored=True,
        grouping=PagesOfBlocks(PAGES),
    )
    half.pin_with(line.pins)
    return half


def step(half: SchedulerHalf, *scheduled: tuple) -> StepPlan:  # type: ignore[type-arg]
    plan = StepPlan()
    half.begin_step(plan, 0.0)
    half.plan_stores(plan, scheduled)
    return plan


@pytest.mark.parametrize("promised", [1, 2, 5, 6])
def test_hit_ends_behind_a_whole_block_of_the_engine(promised: int) -> None:
    line, chain = Line(), hashes(1, 8)
    half = half_of(line)
    half.on_new_request("r", chain, 0.0)
    line.answer(promised)
    usable = promised // PAGES * PAGES
    assert half.matched("r", 0, 8 * BLOCK + 1, 0.1) == Promise(usable * BLOCK)
    ids = [70, 71, 72, 73, 74]
    half.allocated("r", ids, usable * BLOCK)
    loads = step(half).loads
    entries = loads[0].entries if loads else ()
    assert [(e.block_id, e.part, e.key) for e in entries] == [
        (ids[page // PAGES], page % PAGES, keys_of(chain)[page]) for page in range(usable)
    ]
    half.loaded("r", failed=False)
    assert not line.leases
    half.check_invariants()


def test_load_begins_behind_the_engines_own_blocks() -> None:
    line, chain = Line(), hashes(1, 8)
    half = half_of(line)
    half.on_new_request("r", chain, 0.0)
    line.answer(7)
    assert half.matched("r", 2 * BLOCK, 8 * BLOCK + 1, 0.1) == Promise(4 * BLOCK)
    half.allocated("r", [70, 71, 72, 73, 74], 4 * BLOCK)
    (load,) = step(half).loads
    assert [(e.block_id, e.part) for e in load.entries] == [(71, 0), (71, 1), (72, 0), (72, 1)]


def test_each_page_is_stored_once_it_is_full() -> None:
    """Also the first page of a block whose second one is not computed yet. Blocks are pinned once however many of their
    pages are copied."""
    line, chain = Line(), hashes(1, 5)
    half = half_of(line)
    half.on_new_request("r", chain, 0.0, terms=RequestTerms(may_load=False))
    ids = [70, 71, 72]
    half.allocated("r", ids, 0)
    copied = []
    for pages in (3, 4, 5):
        plan = step(half, ("r", chain[:pages], pages * BLOCK, lambda: ids))
        pinned = [block for store in plan.stores for block in {entry.block_id for entry in store.entries}]
        assert line.pins.pinned == Counter(pinned)
        copied += [(e.block_id, e.part, e.key) for store in plan.stores for e in store.entries]
        half.reported(StepReport(stored={store.store_id: 1 for store in plan.stores}))
    assert copied == [(ids[page // PAGES], page % PAGES, key) for page, key in enumerate(keys_of(chain))]
    assert [item.position for item in line.sealed] == list(range(5))
    assert not line.slots and line.expected == 0 and not line.pins.pinned
    assert not half.take_stored(), "the engine's events do not know pages"


def test_a_page_needs_no_other_group() -> None:
    pages = PagesOfBlocks(PAGES)
    assert (pages.stride, pages.window_groups, pages.needed_from(0, 5)) == (1, (), 0)
    assert pages.length([1, 2, 3]) == 6 and pages.named(hashes(1, 2), 1) == []
