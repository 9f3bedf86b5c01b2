"""The loops over the slots of a chain do the same in C and in Python, and refuse what is no slot."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.core.segment.refs import BlockRef, PackedRefs
from kvservice.core.store import slots as table
from kvservice.core.store.pins import PinLoops, PortableLoops, loops_for
from kvservice.core.store.slots import Slot, SlotState
from kvservice.core.transitions import InvalidTransition
from kvservice.units import BlockKey, Generation, SlotIndex

PORTABLE = PortableLoops(SlotState.SEALED, SlotState.LEASED)
LOOPS = [pytest.param(PORTABLE, id="portable"), pytest.param(table.loops, id="used")]
SIZES = (512, 4096)
MOST = 2**64 - 1


def slot(index: int = 0, size: int = SIZES[0], generation: int = 2, pins: int = 0) -> Slot:
    made = Slot(SlotIndex(index), size, Generation(generation), SlotState.LEASED if pins else SlotState.SEALED)
    made.pins = pins
    return made


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def outcome(work: Callable[[], Any]) -> Any:
    """What it returns, as indices where it is slots, or what it raises."""
    try:
        found = work()
    except AssertionError as error:
        return type(error), str(error)
    return [each.index for each in found] if isinstance(found, list) else found


numbers = st.integers(0, MOST)
drawn = st.lists(st.tuples(numbers, st.sampled_from(SIZES), numbers, st.integers(0, 3)), max_size=12)


@given(drawn, st.data())
def test_both_do_the_same_to_any_slots(rows: list[tuple[int, int, int, int]], data: st.DataObject) -> None:
    both = [(loops, [slot(*row) for row in rows]) for loops in (PORTABLE, table.loops)]
    order = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=12) if rows else st.just([]))
    names = ["pin", "unpin", "sizes", "refs", "leading"]
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=6)):
        ends = []
        for loops, slots in both:
            known = {key(number): each for number, each in enumerate(slots)}
            keys = [key(number) for number in order] + [key(99)]
            chosen = [slots[number] for number in order]
            work = {
                "pin": lambda loops=loops, chosen=chosen: loops.pin(iter(chosen)),
                "unpin": lambda loops=loops, chosen=chosen: loops.unpin(tuple(chosen)),
                "sizes": lambda loops=loops, chosen=chosen: loops.sizes(chosen),
                "refs": lambda loops=loops, chosen=chosen: loops.refs(chosen),
                "leading": lambda loops=loops, known=known, keys=keys: loops.leading(known, keys, SIZES[0]),
            }[name]
            ends.append((outcome(work), [(each.pins, each.state) for each in slots]))
        assert ends[0] == ends[1], name


@pytest.mark.parametrize("loops", LOOPS)
def test_names_are_packed_as_references(loops: PinLoops) -> None:
    slots = [slot(7, generation=4), slot(MOST, generation=MOST)]
    assert PackedRefs(loops.refs(slots)) == [BlockRef(each.index, each.generation) for each in slots]


@pytest.mark.parametrize("loops", LOOPS)
def test_a_slot_without_a_block_is_not_pinned(loops: PinLoops) -> None:
    free = Slot(SlotIndex(3), SIZES[0], Generation(2))
    with pytest.raises(InvalidTransition, match="slot 3 is free, cannot pin"):
        loops.pin([free])
    assert free.pins == 0 and free.state is SlotState.FREE


@pytest.mark.parametrize("loops", LOOPS)
def test_a_slot_is_not_unpinned_too_often(loops: PinLoops) -> None:
    with pytest.raises(AssertionError, match="unpinned too often"):
        loops.unpin([slot()])


def test_the_compiled_loops_refuse_what_is_no_slot() -> None:
    native: Any = pytest.importorskip("kvservice.core.store._pins")
    unset = slot()
    del unset.generation
    for wrong in (object(), unset, None):
        for work in (native.pin, native.unpin, native.sizes, native.refs):
            with pytest.raises(TypeError):
                work([wrong])
        with pytest.raises(TypeError):
            native.leading({key(0): wrong}, [key(0)], SIZES[0])
    odd = slot()
    odd.pins = "many"  # type: ignore[assignment]
    with pytest.raises(TypeError):
        native.pin([odd])
    with pytest.raises(OverflowError):
        native.refs([slot(-1)])

    class Loose:
        index = payload_bytes = generation = state = pins = 0

    with pytest.raises(TypeError):
        native.bind(Loose, SlotState.SEALED, SlotState.LEASED, InvalidTransition)
    assert native.pin([again := slot()]) == [again], "a class that was refused is not used"


def test_compiled_loops_keep_no_object_alive() -> None:
    pytest.importorskip("kvservice.core.store._pins")
    slots = [slot(index + 1000, size=12_345 + index) for index in range(4)]
    watched = [*slots, *(each.payload_bytes for each in slots), SlotState.SEALED, SlotState.LEASED]
    before = [sys.getrefcount(each) for each in watched]
    for _ in range(100):
        known = {key(number): each for number, each in enumerate(slots)}
        found = table.loops.leading(known, list(known), slots[0].payload_bytes)
        table.loops.pin(slots), table.loops.pin(slots), table.loops.sizes(slots), table.loops.refs(slots)
        table.loops.unpin(slots), table.loops.unpin(slots)
        del known, found
    assert [sys.getrefcount(each) for each in watched] == before


@pytest.mark.parametrize("found", [None, ModuleType("_pins")], ids=["no compiler", "another build"])
def test_without_the_module_python_does_it(found: ModuleType | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvservice.core.store._pins", found)  # type: ignore[arg-type]
    monkeypatch.delattr("kvservice.core.store._pins", raising=False)
    assert isinstance(loops_for(Slot, SlotState.SEALED, SlotState.LEASED), PortableLoops)
