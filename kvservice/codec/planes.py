"""Lossless: the bytes of numbers are sorted by their place in the number, then compressed with zstd, by Blosc2.

Exponents repeat and mantissas do not, so a block's first bytes together are small. Blosc's shuffle does both in C.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvservice.codec.base import Coded
from kvservice.core.block.numbers import Numbers
from kvservice.core.segment.blockfile import BlockFileHeader
from kvservice.errors import CodecError, ConfigError

LEVEL = 1  # of zstd; higher levels are slower and save about one percent more
HEAD_BYTES = 32  # of a Blosc2 frame
FRAME_BYTES_MAX = (1 << 31) - 4096  # Blosc2 counts with 32 bits and a sign; a larger block is stored as it is
ITEMS = {"2": 2, "4": 4}  # bytes of a number, by the parameter in the header; with others nothing is gained
# The head of a frame: Blosc2's format 5 with zstd's 1, flags, and the size of a number; three lengths of 32 bits (of
# what it holds, of its parts, of itself); one filter, shuffle; the codec 5, zstd. A frame with another head is refused:
# Blosc2 would load a plug-in for other filters and codecs.
_FORMAT = b"\x05\x01\x85"
_FILTERS = bytes.fromhex("01000000000005000000000000000000")
_LENGTHS = slice(4, 16)


class Planes:
    """Blosc2 is imported when this is made, which takes a second."""

    name = "planes"
    interface_version = 1

    def __init__(self) -> None:
        """Raises ConfigError when Blosc2 is not installed."""
        try:
            import blosc2
        except ImportError as error:
            raise ConfigError(
                "the codec 'planes' needs Blosc2, which comes with the extra 'codecs' (pip install blosc2)",
                key="disk_codec",
            ) from error
        blosc2.set_releasegil(True)  # else it stops all threads of the process while it works
        self._blosc: Any = blosc2

    def encode(self, header: BlockFileHeader, data: memoryview, numbers: Numbers | None) -> Coded | None:
        if numbers is None or header.codec or str(numbers.item_bytes) not in ITEMS:
            return None
        if not 0 < len(data) <= FRAME_BYTES_MAX:
            return None
        frame = self._frame(data, numbers.item_bytes)
        # A frame of one repeated value, or of what cannot be compressed, has another head.
        if len(frame) >= len(data) or not _is_ours(frame, numbers.item_bytes):
            return None
        return Coded(frame, str(numbers.item_bytes))

    def decode(self, header: BlockFileHeader, parameters: str, data: memoryview, target: memoryview) -> None:
        if not _is_ours(data, ITEMS.get(parameters, 0)):
            raise CodecError("this is no frame that the codec planes has made")
        held, _, whole = (int(each) for each in np.frombuffer(data[_LENGTHS], "<u4"))
        # Blosc2 believes the head: it would write beyond a target that is smaller.
        if held != len(target) or whole != len(data) or not target:
            raise CodecError("the frame holds another length than its header says")
        try:
            self._blosc.decompress2(data, dst=np.frombuffer(target, np.uint8), nthreads=1)
        except (ValueError, RuntimeError) as error:
            raise CodecError(f"the frame cannot be decompressed: {error}") from None

    def _frame(self, data: bytes | memoryview, item_bytes: int) -> bytes:
        blosc = self._blosc
        made: bytes = blosc.compress2(
            data,
            codec=blosc.Codec.ZSTD,
            clevel=LEVEL,
            typesize=item_bytes,
            nthreads=1,
            filters=[blosc.Filter.SHUFFLE],
        )
        return made


def _is_ours(frame: bytes | memoryview, item_bytes: int) -> bool:
    head = bytes(frame[:HEAD_BYTES])
    return head[:4] == _FORMAT + bytes([item_bytes]) and head[_LENGTHS.stop :] == _FILTERS
