"""How a block in a slot is named: for the engine it is promised to, and for the peer that reads it."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

from kvservice.units import BlockKey, Generation, SlotIndex


class BlockRef(NamedTuple):
    """A slot that was promised or reserved. Its generation must be the same before and after the bytes are copied."""

    slot: SlotIndex
    generation: Generation


_REF = struct.Struct("<QQ")
REF_BYTES = _REF.size


class PackedRefs(Sequence[BlockRef]):
    """References as they lie on the wire: the slot and the generation of each, two little-endian u64.

    Code that only passes them on makes no object for each. Equal to any sequence of the same references.
    """

    __slots__ = ("data",)

    def __init__(self, data: bytes = b"") -> None:
        """Raises ValueError for a part of a reference."""
        if len(data) % REF_BYTES:
            raise ValueError(f"{len(data)} bytes are no whole number of references")
        self.data = data

    @classmethod
    def of(cls, numbers: Sequence[int]) -> PackedRefs:
        """From the slots and generations in turn."""
        return cls(struct.pack(f"<{len(numbers)}Q", *numbers))

    def __len__(self) -> int:
        return len(self.data) // REF_BYTES

    def __iter__(self) -> Iterator[BlockRef]:
        return map(BlockRef._make, _REF.iter_unpack(self.data))

    @overload
    def __getitem__(self, index: int) -> BlockRef: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[BlockRef]: ...
    def __getitem__(self, index: int | slice) -> BlockRef | Sequence[BlockRef]:
        if isinstance(index, slice):
            start, end, step = index.indices(len(self))
            if step != 1:
                return tuple(self)[index]
            return PackedRefs(self.data[start * REF_BYTES : max(start, end) * REF_BYTES])
        place = range(len(self))[index]  # as for a tuple: from the end when negative, and IndexError beyond it
        return BlockRef._make(_REF.unpack_from(self.data, place * REF_BYTES))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PackedRefs):
            return self.data == other.data
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # it equals lists and tuples, whose hashes differ

    def __repr__(self) -> str:
        return f"PackedRefs({list(self)})"


class BlockHandle(NamedTuple):
    """What a peer needs to read one block one-sided and to check afterwards that it read the right one."""

    key: BlockKey
    slot: SlotIndex
    generation: Generation
    length: int
    digest: int
    position: int
    stored_at: float = 0.0  # when its bytes were computed: seconds since 1970; 0 = not known
