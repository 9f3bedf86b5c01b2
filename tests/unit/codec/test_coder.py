"""Codecs in their order: what is stored, and what is made of headers that nobody of ours wrote."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvservice.codec.base import EXTRA_BYTES_MAX, Coded, Encoded
from kvservice.codec.coder import Coder
from kvservice.core.block.numbers import Numbers
from kvservice.core.events import PullResult
from kvservice.core.segment.blockfile import BlockFileHeader, pack_file_header, unpack_file_header
from kvservice.core.segment.digest import digest_payload
from kvservice.core.tier.tier_block import TierBlock
from kvservice.errors import CodecError, KeyUnknown
from kvservice.units import BlockKey, SpanRoute

KEY = BlockKey(b"k" * 16)
PAYLOAD = bytes(range(256)) * 16
BLOCK = TierBlock(KEY, len(PAYLOAD), digest_payload(PAYLOAD, KEY), 3, SpanRoute(7), fingerprint=b"f" * 16)


class Add:
    """Adds a number to each byte, and repeats the first byte `extra` times in front."""

    def __init__(self, name: str, number: int, extra: int = 0) -> None:
        self.name = name
        self.number = number
        self.extra = extra
        self.seen: list[tuple[BlockFileHeader, Numbers | None]] = []

    def encode(self, header: BlockFileHeader, data: memoryview, numbers: Numbers | None) -> Coded | None:
        self.seen.append((header, numbers))
        return Coded(bytes(self.extra) + bytes((byte + self.number) % 256 for byte in data), f"{self.number}:x")

    def decode(self, header: BlockFileHeader, parameters: str, data: memoryview, target: memoryview) -> None:
        self.seen.append((header, None))
        if parameters != f"{self.number}:x":
            raise CodecError("parameters")
        target[:] = bytes((byte - self.number) % 256 for byte in data[self.extra :])


class Nothing(Add):
    """A codec that never pays."""

    def encode(self, header: BlockFileHeader, data: memoryview, numbers: Numbers | None) -> Coded | None:
        return None


class Panic(BaseException):
    """As that of libraries in Rust: no Exception. It would end the tier's thread, and nobody would be answered."""


class Raising(Add):
    def __init__(self, name: str, error: BaseException) -> None:
        super().__init__(name, 0)
        self.error = error

    def encode(self, header: BlockFileHeader, data: memoryview, numbers: Numbers | None) -> Coded | None:
        raise self.error

    def decode(self, header: BlockFileHeader, parameters: str, data: memoryview, target: memoryview) -> None:
        raise self.error


class Giving(Add):
    def __init__(self, name: str, coded: Coded) -> None:
        super().__init__(name, 0)
        self.coded = coded

    def encode(self, header: BlockFileHeader, data: memoryview, numbers: Numbers | None) -> Coded | None:
        return self.coded


class Halving(Add):
    """Forgets the last byte of each pair."""

    def encode(self, header: BlockFileHeader, data: memoryview, numbers: Numbers | None) -> Coded | None:
        kept = bytes(data[::2])
        target = bytearray(len(data))
        self.decode(header, "", memoryview(kept), memoryview(target))
        return Coded(kept, digest=digest_payload(target, header.block.key))

    def decode(self, header: BlockFileHeader, parameters: str, data: memoryview, target: memoryview) -> None:
        target[::2] = target[1::2] = data


def encoded(coder: Coder, payload: bytes = PAYLOAD) -> Encoded:
    done = coder.encode(BLOCK, memoryview(payload))
    assert done is not None and done.header.stored_bytes == len(done.data)
    assert unpack_file_header(pack_file_header(done.header)) == done.header
    return done


def decode(coder: Coder, done: Encoded, size: int = len(PAYLOAD)) -> tuple[PullResult, bytes]:
    target = bytearray(size)
    return coder.decode(done.header, memoryview(done.data), memoryview(target)), bytes(target)


def test_without_codecs_the_payload_itself_is_stored() -> None:
    coder = Coder()
    payload = memoryview(PAYLOAD)
    done = coder.encode(BLOCK, payload)
    assert done == Encoded(BlockFileHeader(BLOCK, len(PAYLOAD)), payload) and done.data is payload
    assert decode(coder, done) == (PullResult.OK, PAYLOAD)
    assert coder.is_plain and coder.counters() == {}


def test_codecs_are_undone_in_the_other_order() -> None:
    first, second = Add("one", 1, extra=3), Add("two", 2, extra=5)
    coder = Coder([first, Nothing("none", 0), second], numbers_of=lambda _: Numbers("float32", 4))
    done = encoded(coder)
    assert done.header.codec == "one:1:x=4096+two:2:x=4099" and done.header.block == BLOCK
    assert bytes(done.data[:9]) == bytes([0, 0, 0, 0, 0, 2, 2, 2, 3])
    assert second.seen[0] == (BlockFileHeader(BLOCK, 4099, "one:1:x=4096"), Numbers("float32", 4))
    assert decode(coder, done) == (PullResult.OK, PAYLOAD)
    assert second.seen[1][0] == done.header and first.seen[1][0].codec == "one:1:x=4096"
    assert coder.counters() == {"codec_bytes_in": 4096, "codec_bytes_out": 4104}


def test_a_reader_decodes_what_it_would_not_write() -> None:
    done = encoded(Coder([Add("one", 1)]))
    assert decode(Coder(reading=[Add("one", 1)]), done) == (PullResult.OK, PAYLOAD)


def test_digest_of_a_lossy_codec_is_that_of_what_it_gives_back() -> None:
    coder = Coder([Halving("half", 0), Add("one", 1)])
    done = encoded(coder)
    result, found = decode(coder, done)
    assert result is PullResult.OK and found == bytes(byte - byte % 2 for byte in PAYLOAD)
    assert done.header.block == replace(BLOCK, digest=digest_payload(found, KEY))


def test_bytes_that_changed_in_memory_get_no_new_digest() -> None:
    """A lossy codec stored them with a digest that fits: the tier gave them back as the block."""
    changed = bytearray(PAYLOAD)
    changed[7] ^= 1
    coder = Coder([Halving("half", 0), Add("one", 1)])
    assert coder.encode(BLOCK, memoryview(changed)) is None and coder.counters() == {"codec_refused": 1}


@pytest.mark.parametrize(
    ("error", "counter"),
    [(CodecError("no"), "codec_refused"), (ZeroDivisionError(), "codec_failed"), (Panic(), "codec_failed")],
)
def test_block_whose_codec_fails_is_not_stored(error: BaseException, counter: str) -> None:
    coder = Coder([Raising("bad", error)])
    assert coder.encode(BLOCK, memoryview(PAYLOAD)) is None
    assert coder.counters() == {counter: 1}


@pytest.mark.parametrize(
    "coded",
    [
        Coded(PAYLOAD, "Not small"),
        Coded(PAYLOAD, "a+b"),
        Coded(PAYLOAD, "a" * 200),
        Coded(PAYLOAD, key_id='"'),
        Coded(PAYLOAD, nonce=bytes(65)),
        Coded(PAYLOAD, digest=1 << 64),
        Coded(b""),
        Coded("text"),  # type: ignore[arg-type]
        Coded(memoryview(PAYLOAD)[::2]),
    ],
)
def test_block_that_no_header_can_describe_is_not_stored(coded: Coded) -> None:
    coder = Coder([Giving("bad", coded)])
    assert coder.encode(BLOCK, memoryview(PAYLOAD)) is None
    assert coder.counters() == {"codec_failed": 1}


def test_stored_bytes_are_counted_in_bytes() -> None:
    """A codec may give any buffer, such as NumPy's."""
    coder = Coder([Giving("one", Coded(memoryview(PAYLOAD).cast("I")))])
    assert encoded(coder).data == PAYLOAD


def test_block_that_grows_too_much_is_not_stored() -> None:
    coder = Coder([Add("one", 1, extra=EXTRA_BYTES_MAX + 1)])
    assert coder.encode(BLOCK, memoryview(PAYLOAD)) is None
    assert coder.counters() == {"codec_failed": 1}


@pytest.mark.parametrize(
    ("error", "result", "counter"),
    [
        (CodecError("no"), PullResult.CORRUPT, "codec_corrupt"),
        (KeyUnknown("no"), PullResult.STALE, "codec_key_unknown"),
        (ZeroDivisionError(), PullResult.CORRUPT, "codec_failed"),
        (Panic(), PullResult.CORRUPT, "codec_failed"),
        (MemoryError(), PullResult.FAILED, "codec_failed"),  # a block that counts as corrupt is erased for all nodes
    ],
)
def test_block_that_cannot_be_decoded_is_no_hit(error: BaseException, result: PullResult, counter: str) -> None:
    done = encoded(Coder([Add("one", 1)]))
    coder = Coder(reading=[Raising("one", error)])
    assert decode(coder, done)[0] is result
    assert coder.counters() == {counter: 1}


def test_block_of_an_unknown_codec_is_no_hit() -> None:
    coder = Coder()
    assert decode(coder, encoded(Coder([Add("one", 1)])))[0] is PullResult.STALE
    assert coder.counters() == {"codec_unknown": 1}


@pytest.mark.parametrize(
    "codec",
    [
        "one",
        "one=",
        "one:1:x",
        "one:1:x=4095",
        "one:2:x=4096",
        "one:1:x=4096+one:1:x=4096",
        "+".join(f"c{number}=1" for number in range(9)),
        "one:1:x=4096+",
        "One:1:x=4096",
        "two=4096+one:1:x=9999999",
        "two=4096+one:1:x=9",
        "=4096",
    ],
)
def test_header_that_no_coder_wrote_is_corrupt(codec: str) -> None:
    done = encoded(Coder([Add("one", 1)]))
    coder = Coder(reading=[Add("one", 1), Add("two", 2)])
    assert decode(coder, Encoded(replace(done.header, codec=codec), done.data))[0] is PullResult.CORRUPT


@pytest.mark.parametrize("cut", [0, 1, 4095])
@pytest.mark.parametrize("writing", [[], [Add("one", 1)]], ids=["plain", "one"])
def test_lengths_that_differ_are_corrupt(writing: list[Add], cut: int) -> None:
    coder = Coder(writing)
    done = encoded(coder)
    assert decode(coder, Encoded(done.header, done.data[:cut]))[0] is PullResult.CORRUPT
    assert decode(coder, done, size=cut)[0] is PullResult.CORRUPT
    assert decode(coder, Encoded(done.header, bytes(done.data) + bytes(EXTRA_BYTES_MAX + 1)))[0] is PullResult.CORRUPT


def test_bytes_without_the_digest_of_their_header_are_corrupt() -> None:
    for coder in (Coder(), Coder([Add("one", 1)])):
        done = encoded(coder)
        flipped = bytes([done.data[0] ^ 1]) + bytes(done.data[1:])
        assert decode(coder, Encoded(done.header, flipped))[0] is PullResult.CORRUPT
        assert coder.counters()["codec_corrupt"] == 1
