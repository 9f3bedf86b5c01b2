"""Rules of core.segment.header: a header is whole or nothing."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.core.segment.header import SlotFlags, SlotHeader, pack_header, unpack_header
from kvservice.units import BlockKey, BootEpoch, Generation, SpanRoute

U32, U64 = st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1)
headers = st.builds(
    SlotHeader,
    epoch=U64.map(BootEpoch),
    generation=U64.map(Generation),
    key=st.binary(min_size=16, max_size=16).map(BlockKey),
    length=U32,
    route=U32.map(SpanRoute),
    digest=U64,
    position=U32,
    flags=st.sampled_from(list(SlotFlags)),
)
GOLDEN = SlotHeader(BootEpoch(3), Generation(4), BlockKey(bytes(range(16))), 5, SpanRoute(6), 7, 8, SlotFlags.SECONDARY)
GOLDEN_HEX = (
    "4c53564b0100010003000000000000000400000000000000000102030405060708090a0b0c0d0e0f"
    "050000000600000007000000000000000800000064c9ec1b"
)


@given(headers)
def test_a_header_comes_back_as_it_was(header: SlotHeader) -> None:
    data = pack_header(header)
    assert len(data) == 64
    assert unpack_header(data) == header
    assert unpack_header(memoryview(data)) == header


def test_the_format_in_memory_is_fixed() -> None:
    """A running engine or peer of another version reads this: changing it needs a new version number."""
    assert pack_header(GOLDEN).hex() == GOLDEN_HEX


@given(headers, st.integers(0, 511))
def test_any_flipped_bit_makes_it_no_header(header: SlotHeader, bit: int) -> None:
    data = bytearray(pack_header(header))
    data[bit // 8] ^= 1 << bit % 8
    assert unpack_header(bytes(data)) is None


@given(headers, headers, st.integers(1, 7))
def test_a_torn_header_is_no_header(old: SlotHeader, new: SlotHeader, words: int) -> None:
    torn = pack_header(new)[: 8 * words] + pack_header(old)[8 * words :]
    assert unpack_header(torn) in (None, old, new)


@pytest.mark.parametrize("data", [b"", bytes(63), bytes(64), bytes(65), b"\xff" * 64])
def test_other_bytes_are_no_header(data: bytes) -> None:
    assert unpack_header(data) is None


def test_a_header_of_another_version_or_magic_is_no_header() -> None:
    for position in (0, 4):
        body = bytearray(pack_header(GOLDEN)[:60])
        body[position] ^= 1
        assert unpack_header(bytes(body) + zlib.crc32(body).to_bytes(4, "little")) is None


def test_even_generations_are_stable() -> None:
    assert GOLDEN.is_stable
    assert not SlotHeader(BootEpoch(1), Generation(3), GOLDEN.key, 1, SpanRoute(0), 0, 0).is_stable
