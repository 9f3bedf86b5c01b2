"""Where everything is in a shard's segment: pure arithmetic that the shard, the engines and the peers share.

A segment has one control page, one scratch area and then `slab_count` slabs of equal size. A slab is assigned to one
slot size when it is first needed, so that models with different block sizes share a segment (the idea is memcached's
slab classes, doc/new_lru.txt). Inside a slab are one 64-byte slab header, one 64-byte header per slot, and the
payloads. Each payload starts on a page boundary, so that copy engines and NICs see aligned runs.

    0            control page (4 KiB)   magic, version, boot epoch, geometry; memory.segment
    4 KiB        scratch (SCRATCH_BYTES)   remote slot headers are read into it while a pull is verified
    ...          slab 0 | slab 1 | ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvservice.errors import ConfigError
from kvservice.units import KiB, MiB, SlotIndex, align_up, format_bytes

PAGE_BYTES = 4 * KiB  # of x86-64 and the common arm64 kernels; payloads start at multiples of it
HEADER_BYTES = 64  # one cache line, so that one read gets a whole header
CONTROL_BYTES = PAGE_BYTES
SCRATCH_BYTES = 1 * MiB  # 16,384 remote headers in flight; transfer.puller says what happens when it is full
SLAB_BYTES_DEFAULT = 64 * MiB  # large enough for many blocks, and small enough that a pool has slabs for several sizes
SLAB_BYTES_MIN = 1 * MiB  # in smaller slabs hardly any block would fit; a smaller slab_bytes is refused
SLOT_BITS = 16  # of a slot's index for its place in the slab. The slab's number takes the other 16 of 32.
SLOTS_PER_SLAB_MAX = 1 << SLOT_BITS  # what the index can name; a slab with smaller blocks leaves the rest unused

assert PAGE_BYTES % HEADER_BYTES == 0
assert SCRATCH_BYTES % PAGE_BYTES == 0
assert SLAB_BYTES_MIN % PAGE_BYTES == 0
assert SLAB_BYTES_DEFAULT % SLAB_BYTES_MIN == 0, "plan_geometry halves the default until it is the minimum"


def slot_index(slab_index: int, index_in_slab: int) -> SlotIndex:
    return SlotIndex(slab_index << SLOT_BITS | index_in_slab)


def slab_of(slot: SlotIndex) -> int:
    return slot >> SLOT_BITS


def index_in_slab(slot: SlotIndex) -> int:
    return slot & (SLOTS_PER_SLAB_MAX - 1)


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes of a segment. Fixed when it is made, and checked on every mapping against its control page."""

    slab_bytes: int  # multiple of PAGE_BYTES, at least SLAB_BYTES_MIN
    slab_count: int  # at least 1

    @property
    def slabs_bytes(self) -> int:
        """The bytes of all slabs. Shares of a pool, as a quota in percent, are of these."""
        return self.slab_bytes * self.slab_count

    @property
    def segment_bytes(self) -> int:
        return CONTROL_BYTES + SCRATCH_BYTES + self.slabs_bytes

    @property
    def scratch_offset(self) -> int:
        return CONTROL_BYTES

    def slab_offset(self, slab_index: int) -> int:
        return CONTROL_BYTES + SCRATCH_BYTES + slab_index * self.slab_bytes

    def slots_per_slab(self, payload_bytes: int) -> int:
        """How many slots of this payload size one slab holds; 0 when one does not fit."""
        return _slots_per_slab(self.slab_bytes, payload_bytes)

    def header_offset(self, slot: SlotIndex) -> int:
        """Byte offset in the segment of the slot's 64-byte header."""
        return self.slab_offset(slab_of(slot)) + HEADER_BYTES * (1 + index_in_slab(slot))

    def header_offsets(self, slots: Sequence[SlotIndex]) -> npt.NDArray[np.int64]:
        """`header_offset` of each slot, as an int64 array."""
        numbers = np.array(slots, dtype=np.int64)
        first = self.slab_offset(0) + HEADER_BYTES
        return first + (numbers >> SLOT_BITS) * self.slab_bytes + (numbers & (SLOTS_PER_SLAB_MAX - 1)) * HEADER_BYTES

    def payload_offset(self, slot: SlotIndex, payload_bytes: int) -> int:
        """Byte offset in the segment of the slot's payload. `payload_bytes` is the size assigned to its slab."""
        start = _payload_start(_slots_per_slab(self.slab_bytes, payload_bytes))
        stride = align_up(payload_bytes, PAGE_BYTES)
        return self.slab_offset(slab_of(slot)) + start + index_in_slab(slot) * stride

    def payload_offsets(self, slots: Sequence[SlotIndex], payload_bytes: int) -> npt.NDArray[np.int64]:
        """`payload_offset` of each slot, as an int64 array."""
        numbers = np.array(slots, dtype=np.int64)
        start = self.slab_offset(0) + _payload_start(_slots_per_slab(self.slab_bytes, payload_bytes))
        stride = align_up(payload_bytes, PAGE_BYTES)
        return start + (numbers >> SLOT_BITS) * self.slab_bytes + (numbers & (SLOTS_PER_SLAB_MAX - 1)) * stride


@lru_cache(maxsize=256)  # called for every block that is copied; a pool has a handful of payload sizes
def _slots_per_slab(slab_bytes: int, payload_bytes: int) -> int:
    stride = align_up(payload_bytes, PAGE_BYTES)
    count = (slab_bytes - HEADER_BYTES) // (stride + HEADER_BYTES)
    while count > 0 and _payload_start(count) + count * stride > slab_bytes:
        count -= 1
    return min(count, SLOTS_PER_SLAB_MAX)


def _payload_start(slot_count: int) -> int:
    return align_up(HEADER_BYTES * (1 + slot_count), PAGE_BYTES)


def plan_geometry(budget_bytes: int, slab_bytes: int | None = None) -> Geometry:
    """The largest geometry whose segment does not exceed the budget.

    By default slabs have 64 MiB, and less for a small budget, so that at least eight fit. Raises ConfigError when not
    even one slab fits; the error names the smallest budget that works.
    """
    usable = budget_bytes - CONTROL_BYTES - SCRATCH_BYTES
    if slab_bytes is None:
        slab_bytes = SLAB_BYTES_DEFAULT
        while slab_bytes > SLAB_BYTES_MIN and usable // slab_bytes < 8:
            slab_bytes //= 2
    if slab_bytes < SLAB_BYTES_MIN or slab_bytes % PAGE_BYTES:
        raise ConfigError(f"slab size {slab_bytes} must be a multiple of {PAGE_BYTES} and at least {SLAB_BYTES_MIN}")
    if usable < slab_bytes:
        need = CONTROL_BYTES + SCRATCH_BYTES + slab_bytes
        raise ConfigError(
            f"a cache of {format_bytes(max(budget_bytes, 0))} is too small: the smallest is {format_bytes(need)}; "
            "raise the memory budget, or switch the cache off by removing the connector from the engine",
            budget_bytes=budget_bytes,
            needed_bytes=need,
        )
    return Geometry(slab_bytes=slab_bytes, slab_count=usable // slab_bytes)
