"""A block of the engine that fills several slots of the pool, each with a name of its own."""

from __future__ import annotations

from collections import Counter

import pytest

from kvservice.connector.cache_groups import PagesOfBlocks
from kvservice.connector.plan import StepReport
from kvservice.connector.scheduler.ports import Promise
from kvservice.connector.scheduler.request_terms import RequestTerms
from tests.unit.connector.line import BLOCK, Line, half, hashes, keys_of, plan_step

PAGES = 2  # of an engine's block


@pytest.mark.parametrize("promised", [1, 2, 5, 6])
def test_hit_ends_behind_a_whole_block_of_the_engine(promised: int) -> None:
    line, chain = Line(), hashes(1, 8)
    scheduler = half(line, remember_stored=True, grouping=PagesOfBlocks(PAGES))
    scheduler.on_new_request("r", chain, 0.0)
    line.answer(promised)
    usable = promised // PAGES * PAGES
    assert scheduler.matched("r", 0, 8 * BLOCK + 1, 0.1) == Promise(usable * BLOCK)
    ids = [70, 71, 72, 73, 74]
    scheduler.allocated("r", ids, usable * BLOCK)
    loads = plan_step(scheduler).loads
    entries = loads[0].entries if loads else ()
    assert [(e.block_id, e.part, e.key) for e in entries] == [
        (ids[page // PAGES], page % PAGES, keys_of(chain)[page]) for page in range(usable)
    ]
    scheduler.loaded("r", failed=False)
    assert not line.leases
    scheduler.check_invariants()


def test_load_begins_behind_the_engines_own_blocks() -> None:
    line, chain = Line(), hashes(1, 8)
    scheduler = half(line, remember_stored=True, grouping=PagesOfBlocks(PAGES))
    scheduler.on_new_request("r", chain, 0.0)
    line.answer(7)
    assert scheduler.matched("r", 2 * BLOCK, 8 * BLOCK + 1, 0.1) == Promise(4 * BLOCK)
    scheduler.allocated("r", [70, 71, 72, 73, 74], 4 * BLOCK)
    (load,) = plan_step(scheduler).loads
    assert [(e.block_id, e.part) for e in load.entries] == [(71, 0), (71, 1), (72, 0), (72, 1)]


def test_each_page_is_stored_once_it_is_full() -> None:
    """Also the first page of a block whose second one is not computed yet. Blocks are pinned once however many of their
    pages are copied."""
    line, chain = Line(), hashes(1, 5)
    scheduler = half(line, remember_stored=True, grouping=PagesOfBlocks(PAGES))
    scheduler.on_new_request("r", chain, 0.0, terms=RequestTerms(may_load=False))
    ids = [70, 71, 72]
    scheduler.allocated("r", ids, 0)
    copied = []
    for pages in (3, 4, 5):
        plan = plan_step(scheduler, [("r", chain[:pages], pages * BLOCK, lambda: ids)])
        pinned = [block for store in plan.stores for block in {entry.block_id for entry in store.entries}]
        assert line.pins.pinned == Counter(pinned)
        copied += [(e.block_id, e.part, e.key) for store in plan.stores for e in store.entries]
        scheduler.reported(StepReport(stored={store.store_id: 1 for store in plan.stores}))
    assert copied == [(ids[page // PAGES], page % PAGES, key) for page, key in enumerate(keys_of(chain))]
    assert [item.position for item in line.sealed] == list(range(5))
    assert not line.slots and line.expected == 0 and not line.pins.pinned
    assert scheduler.take_told() == ([], []), "the engine's events do not know pages"


def test_a_page_needs_no_other_group() -> None:
    pages = PagesOfBlocks(PAGES)
    assert (pages.stride, pages.window_groups, pages.needed_from(0, 5)) == (1, (), 0)
    assert pages.length([1, 2, 3]) == 6 and pages.named(hashes(1, 2), 1) == []
