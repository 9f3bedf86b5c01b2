"""The segment of one node, as bytes that outlive processes: real packed headers, and short payloads in place of long
ones.

A payload has two halves that are written at different moments, so that a reader can find one half new and one half old.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from pathlib import Path

from kvservice.core.segment.digest import digest_payload
from kvservice.core.segment.geometry import Geometry, slab_of
from kvservice.core.segment.header import SlotHeader, pack_header, unpack_header
from kvservice.units import BlockHash, BlockKey, BootEpoch, SlotIndex

PAYLOAD_BYTES = 32  # Of a simulated payload, whatever the slot's real size: enough to tell any two payloads apart.
HALF = PAYLOAD_BYTES // 2  # of a payload; the two halves are written at different moments
BLANK = bytes(PAYLOAD_BYTES)


def content_of(model: bytes, block_hash: BlockHash) -> bytes:
    """The only bytes that are right for this block of this model, under any key."""
    return hashlib.blake2b(model + block_hash, digest_size=PAYLOAD_BYTES).digest()


class MappedFile:
    """The file of a segment as another process maps it: what it holds while it has no name any more, too."""

    def __init__(self, headers: dict[SlotIndex, bytes], payloads: dict[SlotIndex, bytearray]) -> None:
        self._headers, self._payloads = headers, payloads
        self.is_cut_short = False

    def header_bytes(self, slot: SlotIndex) -> bytes:
        return self._headers.get(slot, b"")

    def read(self, slot: SlotIndex) -> bytes:
        return bytes(self._payloads.get(slot, BLANK))


class SegmentMemory:
    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.epoch = BootEpoch(0)
        self.path = Path("simulated")
        self.existed = True
        self.used_at = math.inf
        self.writers: set[bytes] = set()  # engines whose liveness lock is held; the lock lives in the memory
        self.claimed: set[bytes] = set()  # engines whose slots the shard is taking back
        self._headers: dict[SlotIndex, bytes] = {}
        self._payloads: dict[SlotIndex, bytearray] = {}
        self._slabs: dict[int, int] = {}
        self.file = MappedFile(self._headers, self._payloads)

    def boot(self) -> BootEpoch:
        """Let a new boot of the shard take the segment over."""
        self.epoch = BootEpoch(self.epoch + 1)
        return self.epoch

    def lose(self) -> None:
        """The host restarted: the content is gone, and only the epoch goes on, as it grows with time in production."""
        self.writers.clear()
        self._headers, self._payloads, self._slabs = {}, {}, {}  # those who map the old ones keep them
        self.file = MappedFile(self._headers, self._payloads)

    def cut_short(self) -> None:
        """The file ends before its slots."""
        self.file.is_cut_short = True

    def assign_slab(self, slab: int, payload_bytes: int) -> None:
        for slot in [slot for slot in self._headers if slab_of(slot) == slab]:
            del self._headers[slot]
        self._slabs[slab] = payload_bytes

    def write_header(self, slot: SlotIndex, header: SlotHeader) -> None:
        self._headers[slot] = pack_header(header)

    def clear_header(self, slot: SlotIndex) -> None:
        self._headers.pop(slot, None)

    def read_header(self, slot: SlotIndex) -> SlotHeader | None:
        data = self._headers.get(slot)
        return None if data is None else unpack_header(data)

    def header_bytes(self, slot: SlotIndex) -> bytes:
        return self._headers.get(slot, b"")

    def write_half(self, slot: SlotIndex, half: int, payload: bytes) -> None:
        old = self._payloads.setdefault(slot, bytearray(BLANK))
        old[half * HALF : (half + 1) * HALF] = payload[half * HALF : (half + 1) * HALF]

    def read(self, slot: SlotIndex) -> bytes:
        return bytes(self._payloads.get(slot, BLANK))

    def payload(self, slot: SlotIndex, payload_bytes: int) -> memoryview:
        return memoryview(self._payloads.setdefault(slot, bytearray(BLANK)))

    def slot_of(self, payload: memoryview) -> SlotIndex:
        """The slot that a view from `payload` shows."""
        return next(slot for slot, data in self._payloads.items() if data is payload.obj)

    def digest(self, slot: SlotIndex, key: BlockKey) -> int:
        return digest_payload(self.read(slot), key)

    def close(self) -> None:
        """Does nothing: the next boot maps the memory again."""

    def unlink(self) -> None:
        self.lose()

    def touch(self, wall: float) -> None:
        self.used_at = wall

    def is_linked(self) -> bool:
        return True

    def retire(self) -> None:
        """Does nothing: engines look at the epoch, and the next boot has another one."""

    def scan(self) -> list[tuple[SlotIndex, int, SlotHeader]]:
        found = []
        for slot in sorted(self._headers):
            header = self.read_header(slot)
            payload_bytes = self._slabs.get(slab_of(slot), 0)
            if header is not None and payload_bytes:
                found.append((slot, payload_bytes, header))
        return found

    def slabs(self) -> dict[int, int]:
        return dict(self._slabs)

    def flip(self, slot: SlotIndex, bit: int) -> None:
        """Flip a bit of a payload, as failing memory does."""
        payload = self._payloads.setdefault(slot, bytearray(BLANK))
        payload[bit // 8 % PAYLOAD_BYTES] ^= 1 << bit % 8

    def flip_header(self, slot: SlotIndex, bit: int) -> None:
        data = bytearray(self._headers[slot])
        data[bit // 8 % len(data)] ^= 1 << bit % 8
        self._headers[slot] = bytes(data)

    def swap(self, one: SlotIndex, other: SlotIndex) -> None:
        """Swap two whole payloads: each is intact, but under the wrong key."""
        first, second = self.read(one), self.read(other)
        self.payload(one, PAYLOAD_BYTES)[:], self.payload(other, PAYLOAD_BYTES)[:] = second, first

    def transplant(self, one: SlotIndex, other: SlotIndex) -> None:
        """Put all of another block, with its digest, under this slot's key: everything is intact except the name."""
        mine, theirs = self.read_header(one), self.read_header(other)
        if mine is not None and theirs is not None:
            self.payload(one, PAYLOAD_BYTES)[:] = self.read(other)
            self.write_header(one, replace(mine, digest=theirs.digest))

    def sealed(self) -> list[SlotIndex]:
        """Slots whose digest is known. Nobody could notice what happens to bytes before that."""
        found = []
        for slot in sorted(self._headers):
            header = self.read_header(slot)
            if header is not None and header.is_stable:
                found.append(slot)
        return found
