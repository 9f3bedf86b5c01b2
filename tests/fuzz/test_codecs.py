"""Stored blocks that somebody damaged or forged: a codec gives CodecError or some bytes, and never leaves its target.

Blosc2 is C that believes what it reads, so most of the rounds are its.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import pytest

from kvservice.codec.base import Codec
from kvservice.codec.int8 import Int8
from kvservice.codec.planes import HEAD_BYTES, Planes
from kvservice.core.block.numbers import Numbers
from kvservice.core.segment.blockfile import BlockFileHeader
from kvservice.errors import CodecError
from kvservice.testing.codec_contract import FENCE, block_of, payloads
from tests.fuzz.damage import damaged

NUMBERS = Numbers("bfloat16", 2, 64, 16, "int8")
PAYLOAD = payloads()["normal_bfloat16"]
CODECS: dict[str, Callable[[], Codec]] = {"planes": Planes, "int8": Int8}
ROUNDS = {"planes": 1500, "int8": 300}


@cache
def stored_by(name: str) -> tuple[Codec, str, bytes]:
    """The codec, its parameters, and what it makes of PAYLOAD."""
    codec = CODECS[name]()
    coded = codec.encode(BlockFileHeader(block_of(PAYLOAD), len(PAYLOAD)), memoryview(PAYLOAD), NUMBERS)
    assert coded is not None
    return codec, coded.parameters, bytes(coded.data)


def decode_damaged(name: str, data: bytes, size: int = len(PAYLOAD)) -> bool:
    """Whether bytes came of it."""
    codec, parameters, _ = stored_by(name)
    memory = bytearray(FENCE + bytes(size) + FENCE)
    header = BlockFileHeader(block_of(PAYLOAD), max(len(data), 1), f"{name}:{parameters}={size}")
    try:
        codec.decode(header, parameters, memoryview(data), memoryview(memory)[len(FENCE) : len(FENCE) + size])
    except CodecError:
        return False
    finally:
        assert memory[: len(FENCE)] == FENCE == memory[len(FENCE) + size :], "nothing beyond the target is written"
    return True


@pytest.mark.parametrize("name", CODECS)
def test_damaged_blocks_are_bytes_or_an_error(name: str) -> None:
    _, _, whole = stored_by(name)
    assert decode_damaged(name, whole)
    draw = random.Random(name)
    for index in range(ROUNDS[name]):
        data = damaged(draw, whole) if index % 4 else draw.randbytes(draw.randrange(200))
        decode_damaged(name, data, len(PAYLOAD) if index % 8 else draw.randrange(2 * len(PAYLOAD)))


def test_frames_with_a_good_head_and_a_forged_rest() -> None:
    """What a forger writes who knows which heads are accepted."""
    _, _, whole = stored_by("planes")
    draw = random.Random(7)
    for _ in range(600):
        rest = bytearray(draw.randbytes(draw.randrange(4, 2000)) if draw.randrange(2) else whole[HEAD_BYTES:])
        for _ in range(draw.randrange(1, 6)):
            start = draw.randrange(max(len(rest) - 4, 1))
            rest[start : start + 4] = draw.choice(
                [b"\xff\xff\xff\x7f", bytes(4), draw.randbytes(4), b"\x20\x00\x00\x00"]
            )
        parts = draw.choice([whole[8:12], (draw.randrange(1, 1 << 16)).to_bytes(4, "little"), b"\xff\xff\xff\x7f"])
        length = (HEAD_BYTES + len(rest)).to_bytes(4, "little")
        decode_damaged("planes", whole[:8] + parts + length + whole[16:HEAD_BYTES] + bytes(rest))
