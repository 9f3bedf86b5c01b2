"""Rules of core.block.keys: a name depends on everything that changes the bytes, and on nothing else."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.core.block import keys
from kvservice.errors import InvalidRequest
from kvservice.units import BlockHash, BlockKey

HASHES = [BlockHash(bytes([number]) * 32) for number in range(5)]
FINGERPRINT = b"f" * 32


def test_key_is_a_published_function_of_its_parts() -> None:
    """Keys are compared between versions and machines: changing the function loses every cache and must be noticed."""
    expected = hashlib.blake2b(FINGERPRINT + HASHES[1], key=b"kvservice/default-tenant", digest_size=16).digest()
    assert keys.block_key(FINGERPRINT, HASHES[1]) == expected
    assert expected.hex() == "d3da8578cc2bf595e91dfe117870a9e5"
    derived = keys.adapter_key(keys.term_key(b"", b"a term"), b"an adapter")
    assert keys.block_key(FINGERPRINT, HASHES[1], derived).hex() == "56d9623e1579e5d19be1aace8c7331c0"


def test_keys_of_a_chain_are_the_keys_of_its_blocks() -> None:
    assert keys.block_keys(FINGERPRINT, HASHES) == [keys.block_key(FINGERPRINT, one) for one in HASHES]


def test_another_tenant_fingerprint_or_block_has_another_key() -> None:
    names = {
        keys.block_key(FINGERPRINT, HASHES[0]),
        keys.block_key(b"g" * 32, HASHES[0]),
        keys.block_key(FINGERPRINT, HASHES[1]),
        keys.block_key(FINGERPRINT, HASHES[0], b"another tenant"),
    }
    assert len(names) == 4
    assert all(len(name) == keys.KEY_BYTES for name in names)


def test_chain_hash_of_a_block_depends_on_everything_before_it() -> None:
    one = keys.chain_hashes([1, 2, 3, 4, 5, 6], 2)
    other = keys.chain_hashes([1, 9, 3, 4, 5, 6], 2)
    assert len(one) == 3
    assert not set(one) & set(other)


def test_chains_share_the_hashes_of_their_common_prefix() -> None:
    assert keys.chain_hashes([1, 2, 3, 4, 5, 6], 2)[:2] == keys.chain_hashes([1, 2, 3, 4, 9, 9], 2)[:2]


def test_partial_block_has_no_hash() -> None:
    assert len(keys.chain_hashes(range(17), 16)) == 1
    assert keys.chain_hashes(range(15), 16) == []
    assert keys.chain_hashes([], 16) == []


def test_root_separates_chains_of_equal_tokens() -> None:
    assert keys.chain_hashes([1, 2], 2) != keys.chain_hashes([1, 2], 2, root=b"lora")


def test_token_boundaries_cannot_be_confused() -> None:
    assert keys.chain_hashes([1, 256], 2) != keys.chain_hashes([257, 0], 2)


def test_blocks_of_one_span_have_one_route() -> None:
    chain = [BlockKey(number.to_bytes(4, "big") * 4) for number in range(130)]
    routes = [keys.span_route(chain, position) for position in range(130)]
    assert routes == [0] * 64 + [64] * 64 + [128] * 2


def test_route_is_the_big_endian_head_of_the_span() -> None:
    assert keys.route_of_head(BlockKey(b"\x01\x02\x03\x04" + bytes(12))) == 0x01020304
    assert keys.partition_of(keys.route_of_head(BlockKey(b"\xff" * 16)), 7) == 0xFFFFFFFF % 7


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 511, 512, 513, keys.KEYS_PER_REQUEST_MAX])
def test_chains_of_every_length_come_back(count: int) -> None:
    names = tuple(number.to_bytes(16, "big") for number in range(count))
    assert keys.unpack_keys(b"".join(names)) == names


@given(st.lists(st.binary(min_size=16, max_size=16), max_size=200))
def test_packed_keys_come_back_as_they_were(names: list[bytes]) -> None:
    assert keys.unpack_keys(keys.pack_keys([BlockKey(name) for name in names])) == tuple(names)


@pytest.mark.parametrize("length", [1, 15, 17, 31])
def test_packed_keys_of_a_broken_length_are_refused(length: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        keys.unpack_keys(bytes(length))
    assert caught.value.attributes["length"] == length


def test_too_many_keys_are_refused_and_just_enough_are_not() -> None:
    most = keys.KEYS_PER_REQUEST_MAX
    assert len(keys.unpack_keys(bytes(16 * most))) == most
    with pytest.raises(InvalidRequest):
        keys.unpack_keys(bytes(16 * (most + 1)))
    assert keys.check_packed(bytes(16 * 3), 3) == bytes(16 * 3)
    with pytest.raises(InvalidRequest):
        keys.check_packed(bytes(16 * 4), 3)
