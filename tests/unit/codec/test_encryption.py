"""Blocks at rest: with whose key they are encrypted, and what a changed file becomes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvservice.codec.aesgcm import AesGcm
from kvservice.codec.base import Encoded
from kvservice.codec.coder import Coder
from kvservice.codec.keys import KeyRing, derive_key, read_key_file
from kvservice.core.block.tenants import tag_of
from kvservice.core.events import PullResult
from kvservice.errors import CodecError, ConfigError, KeyUnknown
from kvservice.testing.codec_contract import block_of

PAYLOAD = bytes(range(256)) * 8
SECRET_A, SECRET_B, NOBODY = b"a" * 32, b"b" * 32, b"n" * 32


def ring(nobody: bytes = b"", **tenants: bytes) -> KeyRing:
    keys = KeyRing(nobody)
    keys.set_tenants(tenants)
    return keys


def stored(coder: Coder, tenant: str = "") -> Encoded:
    done = coder.encode(replace(block_of(PAYLOAD), account_tag=tag_of(tenant)), memoryview(PAYLOAD))
    assert done is not None
    return done


def read(coder: Coder, done: Encoded) -> PullResult:
    target = bytearray(len(PAYLOAD))
    result = coder.decode(done.header, memoryview(done.data), memoryview(target))
    assert (result is PullResult.OK) == (bytes(target) == PAYLOAD)
    return result


def test_a_block_is_encrypted_with_its_tenants_key() -> None:
    coder = Coder([AesGcm(ring(NOBODY, alice=SECRET_A, bob=SECRET_B))])
    done = stored(coder, "alice")
    assert done.header.codec == "aesgcm=2048" and len(done.data) == len(PAYLOAD) + 16
    assert PAYLOAD[:32] not in bytes(done.data)
    assert done.header.key_id == derive_key(SECRET_A, "alice").key_id != stored(coder, "bob").header.key_id
    assert read(coder, done) is PullResult.OK
    assert read(Coder(reading=[AesGcm(ring(alice=SECRET_A))]), done) is PullResult.OK


def test_the_same_block_is_never_encrypted_alike() -> None:
    coder = Coder([AesGcm(ring(NOBODY))])
    first, second = stored(coder), stored(coder)
    assert first.header.nonce != second.header.nonce and bytes(first.data) != bytes(second.data)


@pytest.mark.parametrize("keys", [ring(), ring(bob=SECRET_B), ring(alice=SECRET_B), ring(SECRET_A)])
def test_who_lacks_the_key_does_not_read(keys: KeyRing) -> None:
    done = stored(Coder([AesGcm(ring(alice=SECRET_A))]), "alice")
    coder = Coder(reading=[AesGcm(keys)])
    assert read(coder, done) is PullResult.STALE
    assert coder.counters() == {"codec_key_unknown": 1}


def test_blocks_of_a_tenant_that_is_gone_cannot_be_read() -> None:
    keys = ring(alice=SECRET_A, bob=SECRET_B)
    coder = Coder([AesGcm(keys)])
    done = stored(coder, "alice")
    keys.set_tenants({"bob": SECRET_B})
    assert read(coder, done) is PullResult.STALE


def test_without_a_key_nothing_is_stored() -> None:
    """In plain text it must not be, when encryption was asked for."""
    coder = Coder([AesGcm(ring(alice=SECRET_A))])
    assert coder.encode(block_of(PAYLOAD), memoryview(PAYLOAD)) is None
    assert coder.counters() == {"codec_refused": 1}
    assert stored(Coder([AesGcm(ring(NOBODY))]), "unknown tenant").header.key_id == derive_key(NOBODY, "").key_id


@pytest.mark.parametrize(
    "change",
    [
        {"digest": 1},
        {"position": 6},
        {"route": 10},
        {"account_tag": 4},
        {"fingerprint": b"g" * 16},
        {"stored_at": 1.0},
        {"key": b"K" * 16},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_changed_header_is_corrupt(change: dict[str, object]) -> None:
    coder = Coder([AesGcm(ring(NOBODY))])
    done = stored(coder)
    header = replace(done.header, block=replace(done.header.block, **change))  # type: ignore[arg-type]
    with pytest.raises(CodecError, match="was changed"):
        AesGcm(ring(NOBODY)).decode(header, "", memoryview(done.data), memoryview(bytearray(len(PAYLOAD))))
    assert read(coder, Encoded(header, done.data)) is PullResult.CORRUPT


@pytest.mark.parametrize("place", [0, 1000, -1])
def test_a_flipped_bit_is_corrupt(place: int) -> None:
    coder = Coder([AesGcm(ring(NOBODY))])
    done = stored(coder)
    data = bytearray(done.data)
    data[place] ^= 1
    assert read(coder, Encoded(done.header, bytes(data))) is PullResult.CORRUPT
    nonce = bytes([done.header.nonce[0] ^ 1]) + done.header.nonce[1:]
    assert read(coder, Encoded(replace(done.header, nonce=nonce), done.data)) is PullResult.CORRUPT
    assert coder.counters()["codec_corrupt"] == 2


def test_a_file_in_anothers_place_is_corrupt() -> None:
    coder = Coder([AesGcm(ring(NOBODY))])
    mine, theirs = stored(coder), stored(coder)
    assert read(coder, Encoded(mine.header, theirs.data)) is PullResult.CORRUPT


def test_tenants_with_one_tag_share_the_first_ones_key() -> None:
    names = next(
        (first, second)
        for seen in [{}]
        for number in range(100_000)
        for second in [f"t{number}"]
        for first in [seen.setdefault(tag_of(second), second)]
        if first != second
    )
    keys = ring(**dict.fromkeys(names, SECRET_B) | {min(names): SECRET_A})
    assert keys.for_tag(tag_of(max(names))).key_id == derive_key(SECRET_A, min(names)).key_id


def test_keys_are_never_shown() -> None:
    found = derive_key(SECRET_A, "alice")
    assert found.key.hex() not in repr(found) and repr(found.key) not in repr(found)
    with pytest.raises(KeyUnknown) as refused:
        ring(alice=SECRET_A).by_id("00")
    assert SECRET_A.hex() not in repr(refused.value)


def test_key_file_is_long_enough_and_not_open_to_all(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(ConfigError, match="cannot read codec_key_file"):
        read_key_file(path)
    path.write_bytes(b"k" * 31)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="has no 32 to 4096 bytes"):
        read_key_file(path)
    path.write_bytes(b"k" * 32)
    assert read_key_file(path) == b"k" * 32
    path.write_bytes(b"k" * 5000)
    with pytest.raises(ConfigError, match="has no 32 to 4096 bytes"):
        read_key_file(path)
    path.chmod(0o604)
    with pytest.raises(ConfigError, match="every user of the machine can read"):
        read_key_file(path)
