"""The scheduler half with a model that keeps states: which states are stored, and what a hit must have of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.connector.cache_groups import NULL_BLOCK, EngineGroup, SeveralGroups, load_entries, state_positions
from kvservice.connector.plan import StepPlan, StepReport, StorePlan
from kvservice.connector.scheduler.ports import Promise, Wait
from kvservice.connector.scheduler.request import EngineRequest
from kvservice.connector.scheduler.store_plan import StorePart, plan_store
from kvservice.core.block.window_groups import WINDOW_BIT, Window, WindowGroup
from kvservice.core.messages import AcquireResult, MissReason
from kvservice.core.segment.layout import SlotLayout
from kvservice.units import LeaseId
from tests.unit.connector.line import BLOCK, Line, chains, half, hashes, refs

STATE = WindowGroup(SlotLayout(2, 1, 512, BLOCK), Window(is_state=True))
# Two groups of states around a full one, as vLLM makes them.
GROUPS = SeveralGroups((EngineGroup(1), EngineGroup(0), EngineGroup(1)), (STATE,), BLOCK)


def table(count: int, *states: int) -> tuple[list[int], ...]:
    """Block 100 × group + position, from 1. Of states the engine has blocks at these positions only."""

    def of_group(group: int) -> list[int]:
        return [100 * group + i + 1 if i in states else NULL_BLOCK for i in range(count)]

    return of_group(1), [201 + i for i in range(count)], of_group(3)


@pytest.mark.parametrize(
    ("begin", "end", "offered", "positions"),
    [
        (0, 4 * BLOCK, (), {3}),
        (4 * BLOCK, 6 * BLOCK, (), {3, 5}),  # what the step began with is copied before it goes on
        (4 * BLOCK, 6 * BLOCK + 3, (), {3}),
        (4 * BLOCK + 1, 4 * BLOCK + 2, (), set()),
        (6 * BLOCK - 1, 6 * BLOCK, (), {5}),  # a generated token that fills a block
        (0, 7, (), set()),
        (0, 9 * BLOCK + 3, (8 * BLOCK, 9 * BLOCK), {7, 8}),
        (0, 9 * BLOCK + 3, (8 * BLOCK + 5,), set()),  # the state of a part of a block has no name
    ],
)
def test_states_are_where_a_step_began_and_ended(
    begin: int, end: int, offered: tuple[int, ...], positions: set[int]
) -> None:
    assert state_positions(begin, end, BLOCK, offered) == positions


def test_only_states_are_left_out_of_a_table() -> None:
    whole = table(6, 1, 3, 5)
    assert GROUPS.only_states_at(whole, {5}) == table(6, 5)
    assert GROUPS.only_states_at(whole, frozenset()) == table(6)
    assert GROUPS.has_states
    windows = SeveralGroups(GROUPS.engine_groups, (WindowGroup(STATE.layout, Window(sliding_tokens=40)),), BLOCK)
    assert not windows.has_states
    assert windows.only_states_at(whole, frozenset()) == whole


def test_hit_loads_the_one_state_at_its_end() -> None:
    result = AcquireResult(LeaseId(1), refs(*range(6)), 0, MissReason.NONE, (refs(15),))
    entries = load_entries(GROUPS, chains(6), result, table(6, 5), 2)
    assert [(e.engine_group, e.block_id, e.ref.slot) for e in entries] == [
        *((1, 201 + i, i) for i in range(2, 6)),
        (0, 106, 15),
        (2, 306, 15),
    ]
    assert entries[-1].key == chains(6)[1][5]


def test_signposts_stand_for_attention_and_are_not_loaded() -> None:
    alone = SeveralGroups((EngineGroup(1),), (STATE,), BLOCK, signposts=1)
    whole = alone.table([[NULL_BLOCK, NULL_BLOCK, 7]])
    assert alone.length(whole) == 3
    assert [alone.stored(whole, group, 2) for group in (0, 1)] == [[(1, 0, NULL_BLOCK)], [(0, 0, 7)]]
    assert [alone.stored(whole, group, 1) for group in (0, 1)] == [[(1, 0, NULL_BLOCK)], None]
    result = AcquireResult(LeaseId(1), refs(*range(3)), 0, MissReason.NONE, (refs(15),))
    assert [(e.engine_group, e.block_id, e.ref.slot) for e in load_entries(alone, chains(3), result, whole, 0)] == [
        (0, 7, 15)
    ]
    assert alone.length(alone.table(None)) == 0


def test_hit_without_its_state_is_a_failed_load() -> None:
    result = AcquireResult(LeaseId(1), refs(*range(6)), 0, MissReason.NONE, (refs(15),))
    with pytest.raises(AssertionError, match="no block for the window"):
        load_entries(GROUPS, chains(6), result, table(6, 4), 0)
    with pytest.raises(AssertionError, match="a window is promised"):
        without = AcquireResult(LeaseId(1), refs(*range(6)), 0, MissReason.NONE, ((),))
        load_entries(GROUPS, chains(6), without, table(6, 5), 0)


def test_store_has_one_state_for_all_layers() -> None:
    free = iter(range(50, 90))
    keys, states = chains(4)
    part = StorePart(EngineRequest("r", keys, [states]), [], 4, table(4, 3))
    planned = plan_store(GROUPS, [part], (), 99, lambda count, _: refs(*[next(free)] * count))
    assert [item.position for item in planned.items] == [0, 1, 2, 3, WINDOW_BIT | 3]
    assert [(e.engine_group, e.block_id) for e in planned.entries[-2:]] == [(0, 104), (2, 304)]
    assert len({entry.ref for entry in planned.entries[-2:]}) == 1
    assert part.done == 4


class Engine:
    """A scheduler half, and an engine that computes a request in steps and forgets each state one step later."""

    def __init__(self) -> None:
        self.line = Line()
        self.pins = self.line.pins
        self.half = half(self.line, fetch_timeout_seconds=1.0, grouping=GROUPS)
        self.now = 0.0

    def arrive(self, blocks: int, hit: int = 0) -> None:
        tokens = blocks * BLOCK + 3
        self.half.on_new_request("r", hashes(1, blocks), self.now, tokens=tokens)
        assert isinstance(self.half.matched("r", 0, tokens, self.now), Wait)
        self.line.answer(hit, windows=[1 if hit else 0])
        assert self.half.matched("r", 0, tokens, self.now) == Promise(hit * BLOCK)
        self.half.allocated("r", table(blocks, hit - 1), hit * BLOCK)
        if hit:
            self.half.begin_step(StepPlan(), self.now)
            self.half.loaded("r", failed=False)

    def step(self, begin: int, end: int, named: int | None = None) -> list[StorePlan]:
        """The stores of a step from token `begin` to `end`, all of them copied. `named` blocks have a hash by now."""
        self.now += 1.0
        plan = StepPlan()
        self.half.begin_step(plan, self.now)
        kept = state_positions(begin, end, BLOCK)
        found = GROUPS.only_states_at(table(-(-end // BLOCK), *kept, end // BLOCK), kept)
        chain = hashes(1, end // BLOCK if named is None else named)
        self.half.plan_stores(plan, [("r", chain, end, lambda: found)])
        for store in plan.stores:
            self.half.reported(StepReport(stored={store.store_id: 1}))
        return plan.stores

    def states(self) -> list[int]:
        """The positions of the states that were stored."""
        return [item.position - WINDOW_BIT for item in self.line.sealed if item.position & WINDOW_BIT]


def test_every_step_that_ends_between_blocks_stores_its_state() -> None:
    engine = Engine()
    engine.arrive(9)
    for begin, end in ((0, 4), (4, 8), (8, 9)):
        engine.step(begin * BLOCK, end * BLOCK)
    engine.step(9 * BLOCK, 9 * BLOCK + 3)
    assert engine.states() == [3, 7, 8]
    engine.half.finished("r", hashes(1, 9), 9 * BLOCK + 3, table(10), store_rest=True)
    assert len(engine.line.sealed) == 9 + 3
    assert not engine.pins.pinned
    engine.half.check_invariants()


def test_state_of_a_block_named_a_step_late_is_stored() -> None:
    """An engine that schedules ahead knows a generated token one step after the step that it ends."""
    engine = Engine()
    engine.arrive(2)
    engine.step(0, 2 * BLOCK + 3)
    engine.step(3 * BLOCK - 1, 3 * BLOCK, named=2)
    assert engine.states() == []
    engine.step(3 * BLOCK, 3 * BLOCK + 1, named=3)
    assert engine.states() == [2]


def test_hit_is_not_stored_again_and_the_rest_is() -> None:
    engine = Engine()
    engine.arrive(6, hit=4)
    engine.step(4 * BLOCK, 6 * BLOCK)
    assert [item.position & ~WINDOW_BIT for item in engine.line.sealed] == [4, 5, 5]


def test_state_that_finds_no_slot_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried in the step after; then the engine has overwritten it, and its blocks of attention go on without."""
    engine = Engine()
    take = engine.line.take_slots
    monkeypatch.setattr(engine.line, "take_slots", lambda of, count, group=0: [] if group else take(of, count))
    engine.arrive(6)
    engine.step(0, 2 * BLOCK)
    assert engine.half.counters["store_blocks_put_off"] == 1
    engine.step(2 * BLOCK, 2 * BLOCK + 5)
    assert [item.position for item in engine.line.sealed] == [0]
    engine.step(2 * BLOCK + 5, 2 * BLOCK + 6)
    assert [item.position for item in engine.line.sealed] == [0, 1]
    assert not engine.line.slots, "a slot is held by nobody"


@given(st.lists(st.integers(1, 3 * BLOCK), min_size=1, max_size=12))
def test_no_state_is_stored_under_the_name_of_another(lengths: list[int]) -> None:
    """Whatever the steps: each stored state is one that the engine had at that number of tokens."""
    engine = Engine()
    engine.arrive(sum(lengths) // BLOCK + 1)
    begin, true = 0, set[int]()
    for length in lengths:
        end = begin + length
        true |= {end // BLOCK - 1} if end % BLOCK == 0 else set()
        for store in engine.step(begin, end):
            for entry in store.entries:
                assert entry.block_id != NULL_BLOCK
        begin = end
    assert set(engine.states()) == true
