"""The segment of one node, as memory that outlives processes: real slabs and headers, and short payloads in place of
long ones.

Headers lie in memory of the segment's real size, and the real code assigns slabs. A payload is scaled down: 32 bytes
for each quarter of a slab that its slot takes. So payloads lie over those that the slab had for another size, but never
over its old headers: a slab has few here, and all of them are in front of its first payload.

A payload has two halves that are written at different moments, so that a reader can find one half new and one half old.
"""

from __future__ import annotations

import hashlib
import math
import mmap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvservice.core.segment.geometry import Geometry, index_in_slab, slab_of, slot_index
from kvservice.memory.slabs import Slabs
from kvservice.testing.builders import LARGE, SMALL
from kvservice.testing.sim.world import Killed
from kvservice.units import BlockHash, BootEpoch, KiB, SlotIndex

HUGE = 1000 * KiB  # one of them fits a slab of 1 MiB
# The bytes of a simulated payload, by the real size of its slot: enough to tell any two payloads apart.
SCALED = {SMALL: 32, LARGE: 64, HUGE: 128}
REAL = {scaled: real for real, scaled in SCALED.items()}
SLAB_BYTES = 128  # of the scaled payloads of a slab


def content_of(model: bytes, block_hash: BlockHash, payload_bytes: int) -> bytes:
    """The only bytes that are right for this block of this model, under any key; `payload_bytes` is the real size."""
    return hashlib.shake_128(model + block_hash).digest(SCALED[payload_bytes])


class MappedFile(Slabs):
    """The file of a segment as another process maps it: what it holds while it has no name any more, too."""

    def __init__(self, geometry: Geometry, mapping: mmap.mmap, payloads: bytearray) -> None:
        super().__init__(geometry, mapping)
        self._payloads = payloads
        self.is_cut_short = False

    def payload(self, slot: SlotIndex, payload_bytes: int) -> memoryview:
        """The scaled payload of a slot of this real size, writable."""
        scaled = SCALED[payload_bytes]
        start = slab_of(slot) * SLAB_BYTES + index_in_slab(slot) * scaled
        return memoryview(self._payloads)[start : start + scaled]

    def read(self, slot: SlotIndex, payload_bytes: int) -> bytes:
        return bytes(self.payload(slot, payload_bytes))

    def slot_of(self, payload: memoryview) -> SlotIndex:
        """The slot that a view from `payload` shows."""
        start = _address(payload) - _address(memoryview(self._payloads))
        return slot_index(start // SLAB_BYTES, start % SLAB_BYTES // len(payload))

    def write_half(self, slot: SlotIndex, half: int, payload: bytes) -> None:
        """Write one half of this scaled payload."""
        middle = len(payload) // 2
        part = slice(half * middle, (half + 1) * middle)
        self.payload(slot, REAL[len(payload)])[part] = payload[part]

    # -- faults ----

    def flip(self, slot: SlotIndex, bit: int) -> None:
        """Flip a bit of a payload, as failing memory does."""
        payload = self.payload(slot, self.slab_payload_bytes(slab_of(slot)))
        payload[bit // 8 % len(payload)] ^= 1 << bit % 8

    def flip_header(self, slot: SlotIndex, bit: int) -> None:
        data = bytearray(self.header_bytes(slot))
        data[bit // 8 % len(data)] ^= 1 << bit % 8
        start = self.geometry.header_offset(slot)
        self.buffer[start : start + len(data)] = data

    def swap(self, one: SlotIndex, other: SlotIndex) -> None:
        """Swap two whole payloads: each is intact, but under the wrong key. Not where their sizes differ."""
        size = self.slab_payload_bytes(slab_of(one))
        if size == self.slab_payload_bytes(slab_of(other)):
            first, second = self.read(one, size), self.read(other, size)
            self.payload(one, size)[:], self.payload(other, size)[:] = second, first

    def transplant(self, one: SlotIndex, other: SlotIndex) -> None:
        """Put all of another block, with its digest, under this slot's key: everything is intact except the name. Not
        where their sizes differ."""
        size = self.slab_payload_bytes(slab_of(one))
        mine, theirs = self.read_header(one), self.read_header(other)
        if mine is not None and theirs is not None and size == self.slab_payload_bytes(slab_of(other)):
            self.payload(one, size)[:] = self.read(other, size)
            self.write_header(one, replace(mine, digest=theirs.digest))

    def sealed(self) -> list[SlotIndex]:
        """Slots whose digest is known. Nobody could notice what happens to bytes before that."""
        return [slot for slot, _, header in self.scan() if header.is_stable]


class SegmentMemory(MappedFile):
    """The file that has the node's name, with what belongs to its owner."""

    def __init__(self, geometry: Geometry) -> None:
        self.epoch = BootEpoch(0)
        self.path = Path("simulated")
        self.existed = True
        self.used_at = math.inf
        self.writers: set[bytes] = set()  # engines whose liveness lock is held; the lock lives in the memory
        self.claimed: set[bytes] = set()  # engines whose slots the shard is taking back
        self.slabs_moved = 0
        self._cut: tuple[int, Callable[[], None]] | None = None  # how many stores of the next move, and what kills
        self.geometry = geometry
        self.lose()

    def boot(self) -> BootEpoch:
        """Let a new boot of the shard take the segment over."""
        self.epoch = BootEpoch(self.epoch + 1)
        return self.epoch

    def lose(self) -> None:
        """The host restarted: the content is gone, and only the epoch goes on, as it grows with time in production."""
        self.writers.clear()
        mapping = mmap.mmap(-1, self.geometry.segment_bytes)  # pages that nobody touches take no memory
        payloads = bytearray(self.geometry.slab_count * SLAB_BYTES)
        super().__init__(self.geometry, mapping, payloads)
        self.file = MappedFile(self.geometry, mapping, payloads)  # those who map the old one keep it

    def cut_short(self) -> None:
        """The file ends before its slots."""
        self.file.is_cut_short = True

    def cut_next_move(self, stores: int, kill: Callable[[], None]) -> None:
        """Kill the shard when it moves a slab to another size next, behind so many stores to the memory."""
        self._cut = stores, kill

    def let_moves_end(self) -> None:
        self._cut = None

    def assign_slab(self, slab: int, payload_bytes: int) -> None:
        """As in production, but a move may be cut off. Raises Killed then."""
        moves = self.slab_payload_bytes(slab) not in (0, payload_bytes)
        self.slabs_moved += moves
        if not moves or self._cut is None:
            super().assign_slab(slab, payload_bytes)
            return
        stores, kill = self._cut
        self._cut, whole = None, self.buffer
        cut: Any = _CutOff(whole, stores)
        self.buffer = cut
        try:
            super().assign_slab(slab, payload_bytes)
            raise Killed
        except Killed:
            kill()
            raise
        finally:
            self.buffer = whole

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


class _CutOff:
    """A buffer whose writer is killed behind so many stores."""

    def __init__(self, buffer: memoryview, stores: int) -> None:
        self._buffer, self._left = buffer, stores

    def __setitem__(self, place: slice, data: bytes) -> None:
        if not self._left:
            raise Killed
        self._left -= 1
        self._buffer[place] = data


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)
