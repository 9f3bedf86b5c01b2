"""The scheduler half with a model of several KV cache groups: which of the engine's blocks are loaded and stored."""

from __future__ import annotations

import pytest

from kvservice.connector.cache_groups import EngineGroup, OneGroup, SeveralGroups, Table, is_whole, load_entries
from kvservice.connector.plan import StepPlan, StepReport
from kvservice.connector.scheduler.ports import Promise, Wait
from kvservice.connector.scheduler.request import EngineRequest
from kvservice.connector.scheduler.store_plan import StorePart, plan_store
from kvservice.core.block.keys import span_route
from kvservice.core.block.window_groups import WINDOW_BIT, Window, WindowGroup
from kvservice.core.messages import AcquireResult, MissReason
from kvservice.core.segment.geometry import slot_index
from kvservice.core.segment.layout import SlotLayout
from kvservice.core.segment.refs import BlockRef
from kvservice.units import Generation, LeaseId
from tests.unit.connector.line import BLOCK, Line, chains, half, hashes, refs

LAYOUT = SlotLayout(1, 1, 512, BLOCK)
WINDOWED = WindowGroup(LAYOUT, Window(sliding_tokens=2 * BLOCK + 1))  # two blocks
# Two groups of windows around a full one.
GROUPS = SeveralGroups((EngineGroup(1), EngineGroup(0), EngineGroup(1)), (WINDOWED,), BLOCK)


def table(count: int, window_from: int = 0) -> tuple[list[int], ...]:
    """Block 100 × group + position, from 1; null where a window has passed."""

    def windowed(group: int) -> list[int]:
        return [0 if i < window_from else 100 * group + i + 1 for i in range(count)]

    return windowed(1), [201 + i for i in range(count)], windowed(3)


def test_load_fills_every_group_and_a_windows_last_blocks() -> None:
    result = AcquireResult(LeaseId(1), refs(*range(6)), 0, MissReason.NONE, (refs(14, 15),))
    entries = load_entries(GROUPS, chains(6), result, table(6, window_from=4), 1)
    assert [(e.engine_group, e.block_id, e.ref.slot) for e in entries] == [
        *((1, 201 + i, i) for i in range(1, 6)),
        (0, 105, 14),
        (2, 305, 14),
        (0, 106, 15),
        (2, 306, 15),
    ]
    full, windowed = chains(6)
    assert [e.key for e in entries] == [*full[1:], windowed[4], windowed[4], windowed[5], windowed[5]]


def test_window_blocks_the_engine_has_itself_are_not_loaded() -> None:
    result = AcquireResult(LeaseId(1), refs(*range(6)), 0, MissReason.NONE, (refs(14, 15),))
    entries = load_entries(GROUPS, chains(6), result, table(6, window_from=4), 5)
    assert [(e.engine_group, e.block_id) for e in entries] == [(1, 206), (0, 106), (2, 306)]


def test_no_block_for_a_promised_window_is_a_failed_load() -> None:
    result = AcquireResult(LeaseId(1), refs(*range(6)), 0, MissReason.NONE, (refs(14, 15),))
    with pytest.raises(AssertionError, match="no block for the window"):
        load_entries(GROUPS, chains(6), result, table(6, window_from=5), 0)


def test_window_that_begins_within_a_slot_loads_its_later_parts() -> None:
    """Blocks of 8 tokens, two a slot, and a window that goes 24 tokens back."""
    groups = SeveralGroups(
        (EngineGroup(0), EngineGroup(1, parts=2)), (WindowGroup(LAYOUT, Window(sliding_tokens=25)),), BLOCK
    )
    result = AcquireResult(LeaseId(1), refs(0, 1, 2), 0, MissReason.NONE, (refs(11, 12),))
    entries = load_entries(groups, chains(3), result, ([1, 2, 3], [0, 0, 0, 14, 15, 16]), 0)
    assert [(e.block_id, e.part, e.ref.slot) for e in entries if e.engine_group] == [
        (14, 1, 11),
        (15, 0, 12),
        (16, 1, 12),
    ]
    assert groups.stored(([1, 2, 3], [0, 0, 0, 14, 15, 16]), 1, 1) is None, "half of a slot is not stored"
    assert groups.stored(([1, 2, 3], [0, 0, 0, 14, 15, 16]), 1, 2) == [(1, 0, 15), (1, 1, 16)]


def test_promise_without_its_windows_is_not_whole() -> None:
    assert is_whole(GROUPS, AcquireResult(LeaseId(1), refs(0, 1, 2), 0, MissReason.NONE, (refs(5, 6),)))
    assert is_whole(GROUPS, AcquireResult(LeaseId(1), refs(0), 0, MissReason.NONE, (refs(5),)))
    for windows in ((), (refs(5),), (refs(5, 6, 7),), (refs(5, 6), refs(7))):
        assert not is_whole(GROUPS, AcquireResult(LeaseId(1), refs(0, 1, 2), 0, MissReason.NONE, windows))
    assert is_whole(OneGroup(), AcquireResult(LeaseId(1), refs(0, 1, 2), 0, MissReason.NONE))


def part_of(count: int, blocks: Table) -> StorePart:
    """What a request with so many full blocks stores."""
    keys, *window_keys = chains(count)
    return StorePart(EngineRequest("r", keys, window_keys), [], count, blocks)


def test_store_takes_every_group_but_not_what_a_window_left() -> None:
    free = iter(range(50, 90))
    part = part_of(4, table(4, window_from=2))
    planned = plan_store(
        GROUPS, [part], {chains(4)[0][1]}, 99, lambda count, group: refs(*(next(free) for _ in range(count)))
    )
    full, windowed = chains(4)
    assert [item.key for item in planned.items] == [full[0], full[2], windowed[2], full[3], windowed[3]]
    assert [item.position for item in planned.items] == [0, 2, WINDOW_BIT | 2, 3, WINDOW_BIT | 3]
    assert [item.parent for item in planned.items] == [None, full[1], None, full[2], None]
    assert planned.items[4].route == span_route(windowed, 3)
    assert [(e.engine_group, e.block_id) for e in planned.entries] == [
        (1, 201),
        (1, 203),
        (0, 103),
        (2, 303),
        (1, 204),
        (0, 104),
        (2, 304),
    ]
    assert (part.done, planned.put_off, planned.unused) == (4, 0, [])
    assert (part.found, part.positions) == (5, [0, 2, 3])


def test_position_without_all_its_slots_is_put_off_whole() -> None:
    offered = {0: refs(0, 1, 2, 3), 1: refs(10, 11)}
    part = part_of(4, table(4))
    planned = plan_store(GROUPS, [part], (), 99, lambda count, group: offered[group][:count])
    assert [item.ref.slot for item in planned.items] == [0, 10, 1, 11]
    assert (part.done, planned.put_off) == (2, 2)
    assert set(planned.unused) == set(refs(2, 3)), "a slot would be lost"


class Bench:
    def __init__(self) -> None:
        self.line = Line()
        self.pins = self.line.pins
        self.half = half(self.line, fetch_timeout_seconds=1.0, grouping=GROUPS)


def test_whole_prompt_is_not_asked_for() -> None:
    """The last token is computed: with all of the prompt promised, its window would lack its first token."""
    for tokens, asked in ((4 * BLOCK, 3), (4 * BLOCK + 1, 4), (5, 0)):
        bench = Bench()
        bench.half.on_new_request("r", hashes(1, tokens // BLOCK), 0.0, tokens=tokens)
        assert [len(request.keys) for _, _, request in bench.line.asked] == ([asked] if asked else [])


def test_load_store_and_end_of_a_request() -> None:
    bench = Bench()
    half, line = bench.half, bench.line
    half.on_new_request("r", hashes(1, 6), 0.0, tokens=6 * BLOCK + 3)
    assert isinstance(half.matched("r", 0, 6 * BLOCK + 3, 0.0), Wait)
    line.answer(4, windows=[2])
    assert half.matched("r", BLOCK, 6 * BLOCK + 3, 0.0) == Promise(3 * BLOCK)
    half.allocated("r", table(7, window_from=2), 3 * BLOCK)
    plan = StepPlan()
    half.begin_step(plan, 0.0)
    assert len(plan.loads[0].entries) == 3 + 2 * 2
    half.loaded("r", failed=False)
    assert not line.leases
    plan = StepPlan()
    half.begin_step(plan, 1.0)
    half.plan_stores(plan, [("r", hashes(1, 6), 6 * BLOCK + 3, lambda: table(7, window_from=4))])
    assert len(plan.stores[0].entries) == 2 * 3
    assert set(bench.pins.pinned) == {205, 206, 105, 106, 305, 306}
    half.reported(StepReport(stored={plan.stores[0].store_id: 1}))
    assert len(line.sealed) == 4
    assert not line.slots
    assert not bench.pins.pinned
    half.finished("r", hashes(1, 6), 6 * BLOCK + 3, table(7, window_from=4), store_rest=True)
    half.check_invariants()


@pytest.mark.parametrize("wrong", [0, 1])
def test_suspect_block_of_any_group_drops_the_promise(wrong: int) -> None:
    bench = Bench()
    bench.half.on_new_request("earlier", hashes(2, 1), 0.0, tokens=BLOCK + 3)
    bench.line.answer(0, windows=[0])
    assert bench.half.matched("earlier", 0, BLOCK + 3, 0.0) == Promise(0)
    bench.half.on_new_request("r", hashes(1, 6), 0.0, tokens=6 * BLOCK + 3)
    bench.line.answer(4, windows=[2])
    bench.half.reported(StepReport(suspects={BlockRef(slot_index(1 + wrong, 1), Generation(2))}))
    assert bench.half.matched("r", 0, 6 * BLOCK + 3, 0.0) == Promise(0)
    bench.half.allocated("r", table(7), 0)
    assert not bench.line.leases, "the lease stays"
