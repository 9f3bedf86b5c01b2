"""What is done to each slot of a chain that is promised or given back, in one pass over the slots. Pure.

A hit pins thousands of blocks in the time that others wait for, so these loops are also a C module, if the installation
had a compiler: a tenth of a microsecond a block for a promise and its end, instead of half of one. Counts and records
are core.store.slots' and core.store.blocks'.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from kvservice.core.transitions import InvalidTransition
from kvservice.units import BlockKey


class Pinned(Protocol):
    """A slot, as these loops see it."""

    index: Any
    payload_bytes: int
    generation: Any
    state: Any
    pins: int


P = TypeVar("P", bound=Pinned)


class PinLoops(Protocol):
    """All arguments are in the order of the chain."""

    def leading(self, slots: Mapping[BlockKey, P], keys: Sequence[BlockKey], payload_bytes: int, /) -> list[P]:
        """The slots of the first keys, up to one that has none, or one of another size."""
        ...

    def pin(self, slots: Iterable[P], /) -> list[P]:
        """One more reader for each. Returns those that had none. Raises InvalidTransition for one without a block."""
        ...

    def unpin(self, slots: Iterable[P], /) -> list[P]:
        """One reader less for each. Returns those that have none any more."""
        ...

    def sizes(self, slots: Iterable[Pinned], /) -> dict[int, int]:
        """How many there are of each size."""
        ...

    def refs(self, slots: Iterable[Pinned], /) -> bytes:
        """Their names, as core.segment.refs packs them."""
        ...


class PortableLoops:
    """For installations without a compiler."""

    def __init__(self, sealed: object, leased: object) -> None:
        """The states of a slot without readers and with some."""
        self._sealed, self._leased = sealed, leased

    def leading(self, slots: Mapping[BlockKey, P], keys: Sequence[BlockKey], payload_bytes: int, /) -> list[P]:
        found: list[P] = []
        for key in keys:
            slot = slots.get(key)
            if slot is None or slot.payload_bytes != payload_bytes:
                break
            found.append(slot)
        return found

    def pin(self, slots: Iterable[P], /) -> list[P]:
        first: list[P] = []
        for slot in slots:
            if not slot.pins:
                if slot.state is not self._sealed:
                    raise InvalidTransition(f"slot {slot.index} is {slot.state.value}, cannot pin: {slot}")
                slot.state = self._leased
                first.append(slot)
            slot.pins += 1
        return first

    def unpin(self, slots: Iterable[P], /) -> list[P]:
        last: list[P] = []
        for slot in slots:
            pins = slot.pins - 1
            assert pins >= 0, f"unpinned too often: {slot}"
            slot.pins = pins
            if not pins:
                slot.state = self._sealed
                last.append(slot)
        return last

    def sizes(self, slots: Iterable[Pinned], /) -> dict[int, int]:
        return dict(Counter(slot.payload_bytes for slot in slots))

    def refs(self, slots: Iterable[Pinned], /) -> bytes:
        numbers = [number for slot in slots for number in (slot.index, slot.generation)]
        return struct.pack(f"<{len(numbers)}Q", *numbers)


def loops_for(kind: type[Pinned], sealed: object, leased: object) -> PinLoops:
    """The loops over slots of this class, which has its attributes as `__slots__`."""
    try:
        from kvservice.core.store import _pins
    except ImportError:
        return PortableLoops(sealed, leased)
    if not hasattr(_pins, "refs"):  # an older build; `make native` builds it again
        return PortableLoops(sealed, leased)
    _pins.bind(kind, sealed, leased, InvalidTransition)
    return _pins
