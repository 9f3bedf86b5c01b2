"""The slabs of a segment in memory: the headers of slabs and slots, read and written where geometry says that they are.

A slab header has 64 bytes: u64 magic, u64 payload bytes, u32 crc32 of both, zeros. Headers are written with one 64-byte
copy. x86-64 and ARM64 do not tear aligned words, and the header's CRC turns any other mixture into "no block". Only the
shard writes headers, so no lock is needed to read them.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvservice.core.segment.geometry import HEADER_BYTES, Geometry, slot_index
from kvservice.core.segment.header import SlotHeader, has_length, is_whole, pack_header, unpack_header
from kvservice.units import SlotIndex

SLAB_MAGIC = 0x4B565353_4C414230  # "KVSSLAB0": tells a slab's header from whatever else was in memory
_CRC = struct.Struct("<I")
_SLAB = struct.Struct("<QQ")
_SLAB_BYTES = _SLAB.size + _CRC.size
_EMPTY_HEADER = bytes(HEADER_BYTES)
_WORDS_OF_HEADER = np.arange(HEADER_BYTES // 8)  # words of 64 bits


class Slabs:
    """The slabs of one mapping. memory.segment.Segment is one, and so is the memory of a simulated node."""

    def __init__(self, geometry: Geometry, mapping: mmap.mmap) -> None:
        self.geometry = geometry
        self._map = mapping
        self.buffer = memoryview(mapping)

    def read_header(self, slot: SlotIndex) -> SlotHeader | None:
        return unpack_header(self.header_bytes(slot))

    def header_bytes(self, slot: SlotIndex) -> bytes:
        """The 64 bytes of the slot's header at this moment, valid or not."""
        start = self.geometry.header_offset(slot)
        return self._map[start : start + HEADER_BYTES]

    def header_rows(self, slots: Sequence[SlotIndex]) -> npt.NDArray[np.uint64]:
        """The headers of these slots at this moment, `(n, 8)` little-endian words each. Raises IndexError for a slot
        outside of the segment."""
        words = np.frombuffer(self.buffer, "<u8")
        rows: npt.NDArray[np.uint64] = words[(self.geometry.header_offsets(slots)[:, None] >> 3) + _WORDS_OF_HEADER]
        return rows

    def write_header(self, slot: SlotIndex, header: SlotHeader) -> None:
        start = self.geometry.header_offset(slot)
        self.buffer[start : start + HEADER_BYTES] = pack_header(header)

    def clear_header(self, slot: SlotIndex) -> None:
        start = self.geometry.header_offset(slot)
        self.buffer[start : start + HEADER_BYTES] = _EMPTY_HEADER

    def slab_payload_bytes(self, slab: int) -> int:
        """The payload size assigned to the slab; 0 when it has none or its header is not valid for this geometry."""
        data = self._slab_header(slab)
        magic, payload_bytes = _SLAB.unpack_from(data)
        if (
            magic != SLAB_MAGIC
            or data != _pack_slab(payload_bytes)
            or payload_bytes == 0
            or self.geometry.slots_per_slab(payload_bytes) == 0
        ):
            return 0
        return int(payload_bytes)

    def _slab_header(self, slab: int) -> bytes:
        start = self.geometry.slab_offset(slab)
        return self._map[start : start + _SLAB_BYTES]

    def assign_slab(self, slab: int, payload_bytes: int) -> None:
        """Assign the slab to a payload size (0: to none). All headers that it can have had are cleared first, so none
        counts again, also where a shard was killed in here and the slab's header does not say how many they were."""
        start = self.geometry.slab_offset(slab)
        self.buffer[start : start + _SLAB_BYTES] = bytes(_SLAB_BYTES)
        cleared = HEADER_BYTES * (1 + self.geometry.slots_per_slab(1))  # no size has more slots
        self.buffer[start : start + cleared] = bytes(cleared)
        if payload_bytes:
            self.buffer[start : start + _SLAB_BYTES] = _pack_slab(payload_bytes)

    def scan(self) -> Iterator[tuple[SlotIndex, int, SlotHeader]]:
        """(slot, payload bytes, header) for every whole header, stable or being written, for adoption."""
        for slab in range(self.geometry.slab_count):
            payload_bytes = self.slab_payload_bytes(slab)
            if not payload_bytes:
                continue
            for index in range(self.geometry.slots_per_slab(payload_bytes)):
                slot = slot_index(slab, index)
                header = self.read_header(slot)
                if header is not None:
                    yield slot, payload_bytes, header

    def is_understood(self) -> bool:
        """Whether every slot reads as free, as a block or as being written.

        Otherwise something was damaged, and it may have said that an engine writes there.
        """
        for slab in range(self.geometry.slab_count):
            payload_bytes = self.slab_payload_bytes(slab)
            if not payload_bytes:
                if any(self._slab_header(slab)):
                    return False
                continue
            for index in range(self.geometry.slots_per_slab(payload_bytes)):
                header = self.header_bytes(slot_index(slab, index))
                if header != _EMPTY_HEADER and not (is_whole(header) and has_length(header, payload_bytes)):
                    return False
        return True


def _pack_slab(payload_bytes: int) -> bytes:
    body = _SLAB.pack(SLAB_MAGIC, payload_bytes)
    return body + _CRC.pack(zlib.crc32(body))
