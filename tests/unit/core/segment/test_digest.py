"""Rules of core.segment.digest: bound to the key, the same for every kind of buffer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvservice.core.segment.digest import PIECE_BYTES, copy_and_digest, digest_payload
from kvservice.units import BlockKey

KEY = BlockKey(bytes(range(16)))


def test_the_digest_is_a_published_function() -> None:
    assert digest_payload(b"kvservice", KEY) == 0x0E0533FA842F7FE9


def test_another_keys_bytes_do_not_verify() -> None:
    other = BlockKey(KEY[:15] + b"\xff")
    assert digest_payload(b"payload", KEY) != digest_payload(b"payload", other)


@given(st.binary(min_size=1, max_size=200), st.data())
def test_a_flipped_bit_does_not_verify(payload: bytes, data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, 8 * len(payload) - 1))
    damaged = bytearray(payload)
    damaged[bit // 8] ^= 1 << bit % 8
    assert digest_payload(damaged, KEY) != digest_payload(payload, KEY)


@given(st.binary(max_size=100))
def test_every_kind_of_buffer_has_the_same_digest(payload: bytes) -> None:
    digests = {digest_payload(kind, KEY) for kind in (payload, bytearray(payload), memoryview(payload))}
    assert len(digests) == 1
    assert 0 <= digests.pop() < 1 << 64


def test_the_digest_of_a_copy_is_of_all_its_pieces() -> None:
    whole = bytes(range(256)) * (3 * PIECE_BYTES // 256) + b"end"
    for payload in (whole, whole[: 2 * PIECE_BYTES], whole[:1], b""):
        target = bytearray(len(payload))
        assert copy_and_digest(memoryview(target), memoryview(payload), KEY) == digest_payload(payload, KEY)
        assert target == payload
