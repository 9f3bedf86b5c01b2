"""Rules of core.block.engine_names: a file is read as it was written, or not at all."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.core.block.engine_names import EngineNames, pack_names, unpack_names

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
names_of_a_file = st.dictionaries(
    st.binary(min_size=16, max_size=16), st.frozensets(st.tuples(texts, texts), min_size=1, max_size=3), max_size=4
)


@given(names_of_a_file)
def test_a_file_of_names_is_read_as_it_was_written(names: EngineNames) -> None:
    assert unpack_names(pack_names(names)) == names


@given(names_of_a_file, st.integers(0, 1 << 16), st.integers(1, 255))
def test_a_damaged_file_has_no_names(names: EngineNames, place: int, change: int) -> None:
    data = bytearray(pack_names(names))
    data[place % len(data)] ^= change
    assert unpack_names(bytes(data)) == {}
    assert unpack_names(bytes(data[: place % len(data)])) == {}


@pytest.mark.parametrize(
    "body",
    [
        b"OTHERKIN" + bytes([1, 0, 0, 0, 0, 0, 0, 0]),
        b"KVSNAMES" + bytes([9, 0, 0, 0, 0, 0, 0, 0]),
        b"KVSNAMES" + bytes([1, 0, 0, 0, 1, 0, 0, 0]) + bytes(18),
        b"KVSNAMES" + bytes([1, 0, 0, 0, 1, 0, 0, 0]) + bytes(16) + bytes([9, 0, 0, 0]),
        b"KVSNAMES" + bytes([1, 0, 0, 0, 1, 0, 0, 0]) + bytes(16) + bytes([1, 0, 255, 0, 0]),
        b"KVSNAMES" + bytes([1, 0, 0, 0, 1, 0, 0, 0]) + bytes(20) + b"more",
        b"KVSNAMES",
        b"",
    ],
)
def test_a_file_that_says_no_names_has_none(body: bytes) -> None:
    assert unpack_names(body + zlib.crc32(body).to_bytes(4, "little")) == {}
