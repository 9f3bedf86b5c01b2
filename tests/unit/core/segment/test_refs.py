"""Rules of core.segment.refs: packed references are a sequence like any other, without an object for each."""

from __future__ import annotations

import pytest

from kvservice.core.segment.refs import REF_BYTES, BlockRef, PackedRefs
from kvservice.units import Generation, SlotIndex

REFS = tuple(BlockRef(SlotIndex(slot), Generation(2 * slot)) for slot in (0, 7, (1 << 40) + 3))
PACKED = PackedRefs.of([number for ref in REFS for number in ref])


def test_packed_references_equal_the_single_ones() -> None:
    assert PACKED == REFS and list(REFS) == list(PACKED) and PackedRefs(PACKED.data) == PACKED
    assert len(PACKED) == 3 and len(PACKED.data) == 3 * REF_BYTES
    assert REFS[:2] != PACKED and PackedRefs(PACKED.data[REF_BYTES:]) != PACKED and PACKED != 3
    assert PackedRefs() == () and not PackedRefs()
    assert repr(PACKED) == f"PackedRefs({list(REFS)})"


def test_each_place_and_slice_is_that_of_a_tuple() -> None:
    assert [PACKED[place] for place in range(-3, 3)] == [REFS[place] for place in range(-3, 3)]
    for start in (None, -4, -1, 0, 1, 2, 5):
        for end in (None, -4, -1, 0, 1, 2, 5):
            for step in (None, 1, 2, -1):
                assert PACKED[start:end:step] == REFS[start:end:step], (start, end, step)
    for place in (3, -4):
        with pytest.raises(IndexError):
            PACKED[place]


def test_a_part_of_a_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="15 bytes"):
        PackedRefs(bytes(15))


def test_packed_references_are_no_key_of_a_table() -> None:
    with pytest.raises(TypeError):
        hash(PACKED)
