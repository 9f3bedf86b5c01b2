"""Lossy: each row of numbers (one token, one head, K or V) as 8-bit whole numbers times one 16-bit scale.

Rows of 64 numbers of 16 bits take 0.516 of their bytes. What is lost is watched: see codec.guard. Only
blocks whose engine accepts this codec are encoded, and their keys are others than those of exact blocks.
"""

from __future__ import annotations

import numpy as np

from kvservice.codec.base import Buffer, Coded
from kvservice.codec.floats import ITEM_BYTES, from_floats, to_floats
from kvservice.codec.guard import Guard
from kvservice.core.block.numbers import Numbers
from kvservice.core.segment.blockfile import BlockFileHeader
from kvservice.core.segment.digest import digest_payload
from kvservice.errors import CodecError

LARGEST = 127  # -128 is not used, so that both signs are alike
SCALE_BYTES = 2  # float16
ROW_DIGITS_MAX = 6  # of the length of a row in a header; no head has a million numbers


class Int8:
    name = "int8"
    interface_version = 1

    def __init__(self, guard: Guard | None = None) -> None:
        """`guard` looks at what is lost, and says when it is too much."""
        self._guard = guard or Guard()

    def encode(self, header: BlockFileHeader, data: memoryview, numbers: Numbers | None) -> Coded | None:
        if numbers is None or numbers.accepts != self.name or header.codec or not self._guard.allows(numbers):
            return None
        stored = pack_int8(data, numbers)
        if stored is None or len(stored) >= len(data):  # a row of one number grows by its scale
            return None
        decoded = bytearray(len(data))
        unpack_int8(memoryview(stored), numbers.type, numbers.row, memoryview(decoded))
        if not self._guard.passes(numbers, data, decoded):
            return None
        digest = digest_payload(decoded, header.block.key)
        return Coded(stored, f"{numbers.type}:{numbers.row}", digest=digest)

    def decode(self, header: BlockFileHeader, parameters: str, data: memoryview, target: memoryview) -> None:
        kind, _, row = parameters.partition(":")
        if kind not in ITEM_BYTES or not row.isascii() or not row.isdigit() or len(row) > ROW_DIGITS_MAX:
            raise CodecError("the header names numbers that the codec int8 does not know")
        unpack_int8(data, kind, int(row), target)


def pack_int8(data: Buffer, numbers: Numbers) -> bytes | None:
    """Scales of all rows, then their numbers. None for what has no such form: a row with an infinite number, one that
    is none or one above 8 million, and bytes that are not whole rows."""
    if numbers.type not in ITEM_BYTES or numbers.row < 1 or len(data) % (numbers.row * ITEM_BYTES[numbers.type]):
        return None
    rows = to_floats(data, numbers.type).reshape(-1, numbers.row)
    with np.errstate(over="ignore", invalid="ignore"):
        largest = np.abs(rows).max(axis=1, initial=0.0)
        scales = (largest / LARGEST).astype(np.float16)
        # A scale that was rounded down would not reach the largest number.
        short = scales.astype(np.float32) * LARGEST < largest
        scales = np.where(short, np.nextafter(scales, np.float16(np.inf)), scales).astype(np.float16)
    if not np.isfinite(scales).all():
        return None
    wide = scales.astype(np.float32)
    inverse = np.divide(1.0, wide, out=np.zeros_like(wide), where=wide > 0)
    whole = np.rint(rows * inverse[:, None])
    np.clip(whole, -LARGEST, LARGEST, out=whole)
    packed: bytes = scales.astype("<f2").tobytes() + whole.astype(np.int8).tobytes()
    return packed


def unpack_int8(data: memoryview, kind: str, row: int, target: memoryview) -> None:
    """The way back. Raises CodecError when the lengths do not fit."""
    row_bytes = row * ITEM_BYTES[kind]
    count = len(target) // row_bytes if row_bytes else 0
    if count * row_bytes != len(target) or len(data) != count * (SCALE_BYTES + row):
        raise CodecError("the stored block is not as long as its rows")
    scales = np.frombuffer(data[: count * SCALE_BYTES], "<f2").astype(np.float32)
    whole = np.frombuffer(data[count * SCALE_BYTES :], np.int8).reshape(count, row)
    with np.errstate(over="ignore", invalid="ignore"):  # a hostile scale may be anything
        from_floats(whole * scales[:, None], kind, target)
