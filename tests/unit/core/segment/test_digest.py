"""Rules of core.segment.digest: bound to the key, the same for every kind of buffer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvservice.core.segment import digest as module
from kvservice.core.segment import native as native_module
from kvservice.core.segment.digest import PIECE_BYTES, copy_and_digest, digest_payload
from kvservice.core.segment.native import OnePass, agrees, native
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


@pytest.mark.parametrize("way", ["one pass", "pieces"])
def test_the_digest_of_a_copy_is_of_all_its_pieces(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native is not None, "the compiled copy is missing from this installation: make install builds it"
    if way == "pieces":
        monkeypatch.setattr(module, "native", None)
    whole = bytes(range(256)) * (3 * PIECE_BYTES // 256) + b"end"
    for payload in (whole, whole[: 2 * PIECE_BYTES], whole[:1], b""):
        target = bytearray(len(payload))
        assert copy_and_digest(memoryview(target), memoryview(payload), KEY) == digest_payload(payload, KEY)
        assert target == payload


@pytest.fixture
def compiled() -> Iterator[OnePass]:
    assert native is not None, "the compiled copy is missing from this installation: make install builds it"
    yield native
    native.use(native.levels()[-1])


def test_every_level_of_the_processor_agrees_with_the_library(compiled: OnePass) -> None:
    assert compiled.levels()[0] == "portable"
    for level in compiled.levels():
        compiled.use(level)
        assert agrees(compiled)
        for length in (*range(241, 1400), 65536, 65537):
            payload = bytes(range(251)) * (length // 251 + 1)
            target = memoryview(bytearray(length + 3))[length % 4 :][:length]
            assert copy_and_digest(target, payload[:length], KEY) == digest_payload(payload[:length], KEY)
            assert target == payload[:length]


@pytest.mark.parametrize("length", [4096, 4097, 4159])
def test_the_digest_is_of_what_was_stored(compiled: OnePass, length: int) -> None:
    """Whoever writes the source meanwhile: here each store changes what is behind it in the source."""
    for level in compiled.levels():
        compiled.use(level)
        shared = memoryview(bytearray(bytes(range(251)) * 20))
        target = shared[8 : 8 + length]
        digest = compiled.copy_one(target, shared[:length], 5)
        assert digest == xxhash.xxh3_64_intdigest(target, seed=5)


@pytest.mark.parametrize("found", [None, ModuleType("_one_pass")], ids=["no compiler", "another build"])
def test_copies_of_another_build_are_not_used(monkeypatch: pytest.MonkeyPatch, found: ModuleType | None) -> None:
    """Then the library's digest follows the copy."""
    monkeypatch.setitem(sys.modules, "kvservice.core.segment._one_pass", found)  # type: ignore[arg-type]
    monkeypatch.delattr("kvservice.core.segment._one_pass", raising=False)
    assert native_module._native() is None


@pytest.mark.parametrize("bit", [0, 63])
def test_a_module_that_disagrees_is_not_used(compiled: OnePass, bit: int) -> None:
    class Wrong:
        """Built for another processor, say: one bit of one length."""

        def copy_one(self, target: memoryview, source: bytes, seed: int) -> int:
            return compiled.copy_one(target, source, seed) ^ ((len(source) == 1025) << bit)

    assert agrees(compiled)
    assert not agrees(Wrong())  # type: ignore[arg-type]


def test_a_module_that_copies_wrongly_is_not_used(compiled: OnePass) -> None:
    class Wrong:
        def copy_one(self, target: memoryview, source: bytes, seed: int) -> int:
            found = compiled.copy_one(target, source, seed)
            target[-1] ^= 1
            return found

    assert not agrees(Wrong())  # type: ignore[arg-type]


@pytest.mark.parametrize("answer", [True, False])
def test_a_module_that_judges_headers_wrongly_is_not_used(compiled: OnePass, answer: bool) -> None:
    class Wrong:
        copy_one = compiled.copy_one

        def have_crcs(self, headers: bytes) -> bool:
            return answer

    assert not agrees(Wrong())  # type: ignore[arg-type]


def test_a_part_of_a_header_is_refused(compiled: OnePass) -> None:
    assert compiled.have_crcs(b"")
    with pytest.raises(ValueError, match="64 bytes"):
        compiled.have_crcs(bytes(65))


def test_sizes_that_do_not_fit_are_refused(compiled: OnePass) -> None:
    for target, source in ((bytearray(300), bytes(299)), (bytearray(240), bytes(240))):
        with pytest.raises(ValueError):
            compiled.copy_one(memoryview(target), source, 0)
    with pytest.raises(ValueError, match="level"):
        compiled.use("avx9")
