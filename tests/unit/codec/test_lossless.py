"""planes, and when it is used."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from kvservice.codec.aesgcm import AesGcm
from kvservice.codec.coder import Coder
from kvservice.codec.int8 import Int8
from kvservice.codec.keys import KeyRing
from kvservice.codec.planes import HEAD_BYTES, Planes
from kvservice.codec.where_it_pays import ONE_IN, WherePays
from kvservice.codec.worth import MEASURED_MIN, CodecWorth
from kvservice.core.block.numbers import Numbers
from kvservice.core.events import PullResult
from kvservice.core.segment.blockfile import BlockFileHeader
from kvservice.errors import CodecError, ConfigError
from kvservice.testing.codec_contract import block_of
from tests.unit.codec.test_int8 import kv

BFLOAT16 = Numbers("bfloat16", 2, 64, 16, "int8")
PAYLOAD = kv(0)


@pytest.fixture(scope="module")
def planes() -> Planes:
    return Planes()


def frame_of(planes: Planes) -> bytearray:
    coded = planes.encode(BlockFileHeader(block_of(PAYLOAD), len(PAYLOAD)), memoryview(PAYLOAD), BFLOAT16)
    assert coded is not None and coded.parameters == "2"
    return bytearray(coded.data)


def decode(planes: Planes, frame: bytes | bytearray, size: int = len(PAYLOAD), parameters: str = "2") -> bytes:
    target = bytearray(size)
    header = BlockFileHeader(block_of(PAYLOAD), len(frame), f"planes:{parameters}={size}")
    planes.decode(header, parameters, memoryview(frame), memoryview(target))
    return bytes(target)


def test_numbers_become_smaller_and_come_back(planes: Planes) -> None:
    frame = frame_of(planes)
    assert len(frame) < 0.8 * len(PAYLOAD)
    assert decode(planes, frame) == PAYLOAD


def test_frames_begin_as_they_always_did(planes: Planes) -> None:
    """Files of earlier versions are read by this one: what stands around the lengths must not change."""
    head = frame_of(planes)[:HEAD_BYTES]
    assert head[:8].hex() == "05018502" + len(PAYLOAD).to_bytes(4, "little").hex()
    assert head[16:].hex() == "01000000000005000000000000000000"


@pytest.mark.parametrize(
    ("place", "value"),
    [(0, 4), (1, 2), (2, 0x87), (3, 4), (4, 1), (5, 255), (7, 127), (12, 1), (15, 255), (16, 40), (22, 36), (31, 16)],
)
def test_frame_with_another_head_is_refused(planes: Planes, place: int, value: int) -> None:
    """Blosc2 believes a head: it would write beyond the target, or load a plug-in for a codec that it names."""
    frame = frame_of(planes)
    assert frame[place] != value
    frame[place] = value
    with pytest.raises(CodecError):
        decode(planes, frame)


def test_frame_of_another_length_is_refused(planes: Planes) -> None:
    frame = frame_of(planes)
    for size in (0, 100, len(PAYLOAD) - 1, len(PAYLOAD) + 1):
        with pytest.raises(CodecError):
            decode(planes, frame, size)
    for parameters in ("4", "", "3", "22"):
        with pytest.raises(CodecError):
            decode(planes, frame, parameters=parameters)


def test_damaged_frame_is_refused_or_gives_other_bytes(planes: Planes) -> None:
    draw = np.random.default_rng(5)
    refused = 0
    for _ in range(60):
        frame = frame_of(planes)
        frame[int(draw.integers(HEAD_BYTES, len(frame)))] ^= int(draw.integers(1, 256))
        try:
            decode(planes, frame)
        except CodecError:
            refused += 1
    assert refused


@pytest.mark.parametrize("numbers", [None, Numbers("float8_e4m3fn", 1), Numbers("float64", 8)])
def test_bytes_whose_numbers_are_not_known_stay(planes: Planes, numbers: Numbers | None) -> None:
    header = BlockFileHeader(block_of(PAYLOAD), len(PAYLOAD))
    assert planes.encode(header, memoryview(PAYLOAD), numbers) is None


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "blosc2", None)
    with pytest.raises(ConfigError, match="comes with the extra 'codecs'"):
        Planes()
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(ConfigError, match="comes with the extra 'codecs'"):
        AesGcm(KeyRing())


@pytest.mark.parametrize(
    ("accepts", "codec"), [("", "planes:2=32768+aesgcm="), ("int8", "int8:bfloat16:64=32768+aesgcm=16896")]
)
def test_lossy_then_lossless_then_encryption(planes: Planes, accepts: str, codec: str) -> None:
    codecs = [Int8(), planes, AesGcm(KeyRing(b"n" * 32))]
    coder = Coder(codecs, numbers_of=lambda _: Numbers("bfloat16", 2, 64, 16, accepts))
    done = coder.encode(block_of(PAYLOAD), memoryview(PAYLOAD))
    assert done is not None and done.header.codec.startswith(codec)
    target = bytearray(len(PAYLOAD))
    assert coder.decode(done.header, memoryview(done.data), memoryview(target)) is PullResult.OK
    assert (bytes(target) == PAYLOAD) is (accepts == "")


# -- when it pays ----


def worth(read: float, decode_seconds: float, share: float = 0.7, count: int = MEASURED_MIN) -> CodecWorth:
    """Speeds in seconds for a million bytes."""
    found = CodecWorth()
    for _ in range(count):
        found.read(10**6, read)
        found.coded(10**6, int(share * 10**6), decode_seconds)
    return found


@pytest.mark.parametrize(
    ("read", "decode_seconds", "share", "pays"),
    [
        (1 / 200, 1 / 1300, 0.7, True),  # an object store, in seconds for a megabyte
        (1 / 1500, 1 / 1300, 0.7, False),  # a disk
        (1 / 300, 1 / 100, 0.7, False),
        (1.0, 0.01, 0.99, False),
        (1.0, 0.0, 0.9, True),
    ],
)
def test_codec_pays_where_reading_is_slow_against_decoding(
    read: float, decode_seconds: float, share: float, pays: bool
) -> None:
    assert worth(read, decode_seconds, share).pays is pays


def test_nothing_is_decided_before_enough_was_measured() -> None:
    assert not worth(1.0, 0.01, count=MEASURED_MIN - 1).pays
    found = CodecWorth()
    for _ in range(100):
        found.read(10**6, 1.0)
        found.read(0, 1.0)
        found.coded(0, 0, 0.1)
    assert not found.pays


def test_codec_that_is_on_stays_on_until_it_costs() -> None:
    """Between no gain and ten percent the answer is the one before."""
    found = worth(1.0, 0.01)
    assert found.pays
    for _ in range(100):
        found.coded(10**6, 700_000, 0.28)
    assert found.pays and not worth(1.0, 0.28).pays
    for _ in range(100):
        found.coded(10**6, 700_000, 0.31)
    assert not found.pays


def test_codec_is_tried_on_some_blocks_and_used_when_it_pays(planes: Planes) -> None:
    codec = WherePays(planes)
    coder = Coder([codec], numbers_of=lambda _: BFLOAT16, on_read=codec.tier_read)

    def store(count: int) -> set[str]:
        done = [coder.encode(block_of(PAYLOAD), memoryview(PAYLOAD)) for _ in range(count)]
        return {each.header.codec.partition(":")[0] for each in done if each is not None}

    assert store(ONE_IN * MEASURED_MIN) == {""} and not codec.pays
    for _ in range(MEASURED_MIN):
        coder.tier_read(len(PAYLOAD), 10.0)
    assert codec.pays and store(3) == {"planes"}
    for _ in range(200):
        coder.tier_read(len(PAYLOAD), 1e-9)
    assert not codec.pays and store(3) == {""}
    Coder().tier_read(1, 1.0)
