"""Rules of store.slots: the table of transitions is exact, nothing is lost, no generation of a slot comes twice."""

from __future__ import annotations

import itertools

import pytest

from kvservice.core.segment.geometry import Geometry, slab_of
from kvservice.core.store.slots import TRANSITIONS, Slot, SlotEvent, SlotState, SlotTable
from kvservice.core.transitions import InvalidTransition
from kvservice.testing.builders import LARGE, SMALL
from kvservice.units import Generation, MiB, SlotIndex

OWNER = b"o" * 16


def make_table(slab_count: int = 1, assigned: int = 1, payload_bytes: int = SMALL) -> SlotTable:
    table = SlotTable(Geometry(slab_bytes=MiB, slab_count=slab_count))
    for _ in range(assigned):
        assert table.assign_slab(payload_bytes) is not None
    return table


def take(table: SlotTable, payload_bytes: int = SMALL) -> Slot:
    slot = table.take_free(payload_bytes, OWNER)
    assert slot is not None
    return slot


def bring(table: SlotTable, state: SlotState) -> Slot:
    """A slot in this state."""
    slot = take(table)
    if state is SlotState.FREE:
        table.free(slot, SlotEvent.ABORT)
    elif state is SlotState.QUARANTINED:
        table.quarantine(slot)
    elif state in (SlotState.SEALED, SlotState.LEASED):
        table.seal(slot)
        if state is SlotState.LEASED:
            table.pin([slot])
    assert slot.state is state
    return slot


def apply(table: SlotTable, slot: Slot, event: SlotEvent) -> None:
    """The public call that stands for this event, for this very slot."""
    if event is SlotEvent.RESERVE:
        while table.take_free(slot.payload_bytes, OWNER) is not slot:
            pass
    elif event in (SlotEvent.ABORT, SlotEvent.EVICT, SlotEvent.END_QUARANTINE):
        table.free(slot, event)
    elif event in (SlotEvent.ADOPT, SlotEvent.ADOPT_WRITING):
        table.adopt(slot.index, Generation(8), OWNER if event is SlotEvent.ADOPT_WRITING else None)
    else:
        {
            SlotEvent.SEAL: table.seal,
            SlotEvent.PIN: lambda slot: table.pin([slot]),
            SlotEvent.UNPIN: lambda slot: table.unpin([slot]),
            SlotEvent.QUARANTINE: table.quarantine,
        }[event](slot)


PAIRS = list(itertools.product(SlotState, SlotEvent))


@pytest.mark.parametrize("pair", [p for p in PAIRS if p in TRANSITIONS], ids=lambda p: f"{p[0].value}-{p[1].value}")
def test_each_transition_of_the_table_can_be_reached(pair: tuple[SlotState, SlotEvent]) -> None:
    table = make_table()
    slot = bring(table, pair[0])
    apply(table, slot, pair[1])
    assert slot.state is TRANSITIONS[pair]
    table.check_invariants()


# A slot that is not free is on no free list, so the calls below cannot even name it.
NOT_FREE = (SlotEvent.RESERVE, SlotEvent.ADOPT, SlotEvent.ADOPT_WRITING)


@pytest.mark.parametrize(
    "pair",
    [p for p in PAIRS if p not in TRANSITIONS and p[1] not in NOT_FREE],
    ids=lambda p: f"{p[0].value}-{p[1].value}",
)
def test_every_other_transition_is_an_error_without_effect(pair: tuple[SlotState, SlotEvent]) -> None:
    table = make_table()
    slot = bring(table, pair[0])
    before = (slot.state, slot.pins, slot.generation, slot.owner, table.counts())
    with pytest.raises(AssertionError) as caught:
        apply(table, slot, pair[1])
    if pair[1] is not SlotEvent.UNPIN:
        assert isinstance(caught.value, InvalidTransition)
        assert pair[0].value in str(caught.value) and pair[1].value in str(caught.value)
    assert (slot.state, slot.pins, slot.generation, slot.owner, table.counts()) == before
    table.check_invariants()


def test_only_free_slots_are_taken() -> None:
    table = make_table()
    taken = [bring(table, state) for state in (SlotState.SEALED, SlotState.LEASED, SlotState.QUARANTINED)]
    last = take(table)
    assert last not in taken
    assert table.take_free(SMALL, OWNER) is None
    assert table.take_free(LARGE, OWNER) is None
    table.check_invariants()


def test_generation_is_odd_exactly_while_it_may_be_written() -> None:
    table = make_table()
    slot = take(table)
    assert slot.generation == 1
    table.seal(slot)
    assert slot.generation == 2
    table.free(slot, SlotEvent.EVICT)
    while take(table) is not slot:
        pass
    assert slot.generation == 3


@pytest.mark.parametrize("end", ["abort", "end_quarantine", "evict"])
def test_no_generation_of_a_slot_comes_twice(end: str) -> None:
    table = make_table(payload_bytes=MiB // 2 + 1)  # one slot
    seen: set[int] = set()
    for _ in range(5):
        slot = take(table, MiB // 2 + 1)
        assert slot.generation not in seen and slot.generation % 2 == 1
        seen.add(slot.generation)
        if end == "evict":
            table.seal(slot)
            assert slot.generation not in seen and slot.generation % 2 == 0
            seen.add(slot.generation)
            table.free(slot, SlotEvent.EVICT)
        elif end == "end_quarantine":
            table.quarantine(slot)
            table.free(slot, SlotEvent.END_QUARANTINE)
        else:
            table.free(slot, SlotEvent.ABORT)


def test_generations_go_on_when_a_slab_changes_its_size() -> None:
    """A reader that still has a promise on the slot of the old size must not find its generation again."""
    table = make_table()
    used: dict[SlotIndex, int] = {}
    for payload_bytes in (SMALL, LARGE, SMALL, LARGE):
        for _ in range(6):
            slot = take(table, payload_bytes)
            assert slot.generation > used.get(slot.index, 0), "a generation was used again"
            table.seal(slot)
            used[slot.index] = slot.generation
            table.free(slot, SlotEvent.EVICT)
        table.unassign_slab(0)
        assert table.assign_slab(LARGE if payload_bytes == SMALL else SMALL) == 0
        table.check_invariants()


def test_a_slab_with_a_used_slot_cannot_be_taken_back() -> None:
    table = make_table()
    take(table)
    with pytest.raises(AssertionError):
        table.unassign_slab(0)


def test_slots_of_a_slab_taken_back_are_not_handed_out() -> None:
    table = make_table(slab_count=2, assigned=2)
    table.unassign_slab(0)
    assert table.free_slab_count == 1
    taken = [slot for slot in iter(lambda: table.take_free(SMALL, OWNER), None)]
    assert {slab_of(slot.index) for slot in taken} == {1}
    assert table.capacity == len(taken) == 4
    table.check_invariants()


def test_a_slab_is_given_away_once() -> None:
    table = make_table(slab_count=2, assigned=0)
    assert table.assign_slab(SMALL, 1) == 1
    assert table.assign_slab(LARGE, 1) is None
    assert table.assign_slab(LARGE) == 0
    assert table.assign_slab(LARGE) is None
    assert table.payload_sizes == (SMALL, LARGE)
    table.check_invariants()


def test_pins_are_counted_and_the_last_one_ends_the_lease() -> None:
    table = make_table()
    slot = bring(table, SlotState.LEASED)
    table.pin([slot])
    assert table.unpin([slot]) == []
    assert slot.state is SlotState.LEASED
    assert table.unpin([slot]) == [slot]
    assert slot.state is SlotState.SEALED
    with pytest.raises(AssertionError):
        table.unpin([slot])


def test_counts_name_every_state_and_add_up_to_the_capacity() -> None:
    table = make_table(slab_count=2, assigned=2)
    for state in SlotState:
        bring(table, state)
    counts = table.counts()
    assert set(counts) == {"free", "writing", "sealed", "leased", "quarantined"}
    assert sum(counts.values()) == table.capacity == 8
    assert [counts[name] for name in ("writing", "sealed", "leased", "quarantined")] == [1, 1, 1, 1]


@pytest.mark.parametrize("damage", ["state", "pins", "generation", "free_list", "slab"])
def test_the_check_finds_what_is_broken(damage: str) -> None:
    table = make_table(slab_count=2)
    slot = bring(table, SlotState.SEALED)
    table.check_invariants()
    if damage == "state":
        slot.state = SlotState.LEASED
    elif damage == "pins":
        slot.pins = 1
    elif damage == "generation":
        slot.generation = Generation(slot.generation + 1)
    elif damage == "free_list":
        table._free[SMALL].append(slot.index)
    else:
        table._free_slabs.clear()
    with pytest.raises(AssertionError):
        table.check_invariants()


def test_slots_of_two_sizes_are_pinned_in_one_pass() -> None:
    table = make_table(slab_count=2)
    table.assign_slab(2 * SMALL)
    slots = [take(table), take(table, 2 * SMALL), take(table)]
    for slot in slots:
        table.seal(slot)
    table.pin(slots)
    assert table.byte_counts()["leased"] == 4 * SMALL
    table.check_invariants()
    assert table.unpin(slots) == slots and table.byte_counts()["sealed"] == 4 * SMALL
    table.check_invariants()
