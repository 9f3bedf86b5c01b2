"""Rules of core.segment.blockfile: a file is a whole block or nothing."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvservice.core.segment.blockfile import (
    FILE_HEADER_BYTES,
    BlockFileHeader,
    is_file_of,
    pack_file_header,
    unpack_file,
    unpack_file_header,
    version_of,
)
from kvservice.core.segment.digest import digest_payload
from kvservice.core.tier.tier_block import TierBlock
from kvservice.units import BlockKey, SpanRoute

KEY = BlockKey(bytes(range(16)))
PAYLOAD = bytes(range(256)) * 20
BLOCK = TierBlock(
    KEY, len(PAYLOAD), digest_payload(PAYLOAD, KEY), 9, SpanRoute(0x01020304), 5, bytes(range(16, 32)), 1795308000.25
)
PLAIN = BlockFileHeader(BLOCK, len(PAYLOAD))
ENCODED = replace(PLAIN, stored_bytes=77, codec="zstd+aesgcm", key_id="tenant/search:1", nonce=bytes(12))
PACKED = pack_file_header(PLAIN)

U32, U64 = st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1)
SIZES = st.integers(1, (1 << 48) - 1)
blocks = st.builds(
    TierBlock,
    key=st.binary(min_size=16, max_size=16).map(BlockKey),
    payload_bytes=SIZES,
    digest=U64,
    position=U32,
    route=U32.map(SpanRoute),
    account_tag=st.integers(0, (1 << 15) - 1),
    fingerprint=st.sampled_from([b"", bytes(range(16))]),
    stored_at=st.floats(0, allow_infinity=False, allow_nan=False),
)
headers = blocks.map(lambda block: BlockFileHeader(block, block.payload_bytes)) | st.builds(
    BlockFileHeader,
    block=blocks,
    stored_bytes=SIZES,
    codec=st.text("abcz019_.,:=+-", min_size=1, max_size=128),
    key_id=st.text("azAZ09_.:/=+-", max_size=256),
    nonce=st.binary(max_size=64),
)


@given(headers)
def test_a_header_comes_back_as_it_was(header: BlockFileHeader) -> None:
    data = pack_file_header(header)
    assert len(data) == FILE_HEADER_BYTES == 4096
    assert unpack_file_header(data) == header
    assert unpack_file_header(memoryview(data)) == header
    assert version_of(data) == 1
    fields = json.loads(data[8:])
    assert all(type(value) is str for value in fields["__metadata__"].values())


@settings(max_examples=30)
@given(headers)
def test_every_flipped_bit_makes_it_no_header(header: BlockFileHeader) -> None:
    data = bytearray(pack_file_header(header))
    used = 8 * (len(data.rstrip(b" ")) + 1)
    for bit in [*range(0, used, 7), *range(used, 8 * len(data), 997)]:
        data[bit // 8] ^= 1 << bit % 8
        assert unpack_file_header(data) is None, bit
        data[bit // 8] ^= 1 << bit % 8


@given(headers, headers, st.integers(1, 4095))
def test_a_torn_header_is_no_header(old: BlockFileHeader, new: BlockFileHeader, at: int) -> None:
    torn = pack_file_header(new)[:at] + pack_file_header(old)[at:]
    assert unpack_file_header(torn) in (None, old, new)


@given(st.binary(max_size=4097) | st.binary(max_size=4096).map(lambda data: (PACKED[:8] + data).ljust(4096)[:4096]))
def test_other_bytes_are_no_header(data: bytes) -> None:
    assert unpack_file_header(data) is None


def checked(data: bytes) -> bytes:
    """The header with the check that belongs to it, of 4,096 bytes."""
    at = data.index(b'"check":"') + len(b'"check":"')
    blank = (data[:at] + b"0" * 8 + data[at + 8 :]).rstrip(b" ").ljust(4096)
    return blank[:at] + b"%08x" % zlib.crc32(blank) + blank[at + 8 :]


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (b'"position":"9"', b'"position":"09"'),
        (b'"position":"9"', b'"position":"+9"'),
        (b'"position":"9"', b'"position": "9"'),
        (b'"route":"16909060"', b'"route":"4294967296"'),
        (b'"stored_at":"1795308000.25"', b'"stored_at":"1e999"'),
        (b'"stored_at":"1795308000.25"', b'"stored_at":"1.2.3"'),
        (b'"payload_bytes":"5120"', b'"payload_bytes":"5121"'),
        (b'"tag":"5"', b'"tag":"32768"'),
        (b"[5120]", b"[0]"),
        (b"[0,5120]", b"[0,5121]"),
    ],
)
def test_what_was_written_otherwise_is_no_header(was: bytes, now: bytes) -> None:
    """Also where its check is right: there is one way to write a header."""
    assert was in PACKED
    assert unpack_file_header(checked(PACKED)) == PLAIN
    assert unpack_file_header(checked(PACKED.replace(was, now))) is None


def test_a_header_of_another_version_is_named() -> None:
    other = PACKED.replace(b'"kvservice_block":"1"', b'"kvservice_block":"2"')
    assert unpack_file_header(other) is None
    assert version_of(other) == 2
    assert version_of(bytes(4096)) is None
    assert version_of(b"") is None


@pytest.mark.parametrize(
    "header",
    [
        replace(PLAIN, stored_bytes=len(PAYLOAD) + 1),
        replace(PLAIN, codec="Upper"),
        replace(PLAIN, codec='"'),
        replace(PLAIN, codec="x" * 129),
        replace(PLAIN, key_id="two words"),
        replace(PLAIN, nonce=bytes(65)),
        replace(PLAIN, block=replace(BLOCK, position=1 << 32)),
        replace(PLAIN, block=replace(BLOCK, position=-1)),
        replace(PLAIN, block=replace(BLOCK, key=BlockKey(b"short"))),
        replace(PLAIN, block=replace(BLOCK, account_tag=1 << 15)),
        replace(PLAIN, block=replace(BLOCK, stored_at=float("nan"))),
        replace(PLAIN, block=replace(BLOCK, stored_at=-1.0)),
        BlockFileHeader(replace(BLOCK, payload_bytes=0), 0),
    ],
)
def test_values_that_have_no_place_are_refused(header: BlockFileHeader) -> None:
    with pytest.raises(ValueError, match="no place in the header"):
        pack_file_header(header)


def test_a_file_is_whole_or_nothing() -> None:
    written = PACKED + PAYLOAD
    found = unpack_file(written)
    assert found is not None and found[0] == PLAIN and found[1] == PAYLOAD
    for wrong in (written[:-1], written + b"x", PACKED, b"", written[:5000] + b"\0" + written[5001:]):
        assert wrong != written and unpack_file(wrong) is None


def test_the_digest_of_an_encoded_payload_is_left_to_its_codec() -> None:
    found = unpack_file(pack_file_header(ENCODED) + bytes(77))
    assert found is not None and found[0] == ENCODED
    assert unpack_file(pack_file_header(ENCODED) + bytes(78)) is None


def test_a_file_belongs_to_the_block_it_names() -> None:
    assert is_file_of(PLAIN, BLOCK)
    assert is_file_of(PLAIN, replace(BLOCK, fingerprint=b"", digest=0)), "where it is not known, it does not count"
    assert is_file_of(replace(PLAIN, block=replace(BLOCK, fingerprint=b"")), BLOCK)
    assert not is_file_of(PLAIN, replace(BLOCK, fingerprint=bytes(16)))
    assert not is_file_of(PLAIN, replace(BLOCK, payload_bytes=1))
    assert not is_file_of(PLAIN, replace(BLOCK, stored_at=BLOCK.stored_at + 1)), "it is older than what is asked for"
    assert not is_file_of(PLAIN, replace(BLOCK, key=BlockKey(bytes(16))))
