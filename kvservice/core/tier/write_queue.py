"""Blocks that wait to be written into one tier, and those being written. Pure.

A block that waits is not pinned: it may be evicted meanwhile, and is then not written. Only what is being written is
pinned, and that is bounded in bytes. So a tier that is slow, or never answers, holds a small part of the memory and
nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvservice.core.tier.tier_block import TierBlock
from kvservice.units import BlockKey, MiB, SlotIndex

QUEUE_MAX = 4096  # blocks that wait, 64 KiB of keys: seconds of any disk's work. Further ones are dropped.
WRITE_BLOCKS_MAX = 16  # of one job: its slots are pinned until its last block is written
# Under way that are not full: one is written while the next gathers. So a tier that is written all the time makes few
# events, for which engines wait.
SMALL_JOBS_MAX = 2
WRITING_BYTES_MAX = 64 * MiB  # being written into one tier: enough for a disk's parallel writes
# The share of the memory that writes, and the share that reads of one tier may hold: a tier that never answers keeps
# it for ever. Reads get more, because engines wait for them. A block that is larger than the share goes alone.
WRITING_SHARE, READING_SHARE = 1 / 16, 1 / 4
REST_SECONDS_MAX = 60.0  # after failed writes, doubled from one second on: a full disk is tried once a minute

Item = tuple[TierBlock, SlotIndex]


def fits_share(payload_bytes: int, held_bytes: int, share_bytes: int) -> bool:
    """Whether a block may be read or written beside so many bytes of the same tier. Alone it always may, so that a
    small memory has tiers as well."""
    return not held_bytes or held_bytes + payload_bytes <= share_bytes


def _bytes_of(items: tuple[Item, ...]) -> int:
    return sum(block.payload_bytes for block, _ in items)


class WriteQueue:
    def __init__(self, memory_bytes: int) -> None:
        self._writing_max = min(WRITING_BYTES_MAX, int(memory_bytes * WRITING_SHARE))
        self._waiting: dict[BlockKey, int] = {}  # payload bytes, in their order
        self._jobs: dict[int, tuple[Item, ...]] = {}
        self._writing: set[BlockKey] = set()
        self.writing_bytes = 0
        self._failures = 0  # consecutive jobs that wrote nothing
        self._rest_until = 0.0

    def __len__(self) -> int:
        """Blocks that wait."""
        return len(self._waiting)

    def __contains__(self, key: BlockKey) -> bool:
        """Whether the block waits or is being written."""
        return key in self._waiting or key in self._writing

    def is_resting(self, now: float) -> bool:
        """Whether the tier failed lately: nothing is queued for it then."""
        return now < self._rest_until

    def resumes_at(self, now: float) -> float | None:
        """When the rest ends that blocks wait for; None when none does."""
        return self._rest_until if self._waiting and self.is_resting(now) else None

    def put(self, key: BlockKey, payload_bytes: int) -> bool:
        """Queue a block. False when too many wait."""
        if len(self._waiting) >= QUEUE_MAX:
            return False
        self._waiting[key] = payload_bytes
        return True

    def next_items(self, prepare: Callable[[BlockKey], Item | None]) -> tuple[Item, ...]:
        """The items of the next job; none when enough is being written, or when too few wait beside jobs that are under
        way. `prepare` returns None for a block that is not written after all. A block larger than the bound is written
        alone."""
        items: list[Item] = []
        if len(self._jobs) >= SMALL_JOBS_MAX and len(self._waiting) < WRITE_BLOCKS_MAX:
            return ()
        byte_count = 0
        while self._waiting and len(items) < WRITE_BLOCKS_MAX:
            key, payload_bytes = next(iter(self._waiting.items()))
            if not fits_share(payload_bytes, self.writing_bytes + byte_count, self._writing_max):
                break
            del self._waiting[key]
            item = prepare(key)
            if item is not None:
                items.append(item)
                byte_count += item[0].payload_bytes
        return tuple(items)

    def begin(self, number: int, items: tuple[Item, ...]) -> None:
        self._jobs[number] = items
        self._writing.update(block.key for block, _ in items)
        self.writing_bytes += _bytes_of(items)

    def end(self, number: int) -> tuple[Item, ...] | None:
        """The items of a job that is over; None when it is not known."""
        items = self._jobs.pop(number, None)
        if items is not None:
            self._writing.difference_update(block.key for block, _ in items)
            self.writing_bytes -= _bytes_of(items)
        return items

    def report(self, written: int, now: float) -> None:
        """A job wrote so many blocks."""
        if written:
            self._failures = 0
            return
        if self.is_resting(now):
            return  # it began before the one that failed: both are one failure
        self._rest_until = now + min(2.0**self._failures, REST_SECONDS_MAX)
        self._failures = min(self._failures + 1, 10)

    def pinned(self) -> Counter[SlotIndex]:
        """How often each slot of the memory is pinned for writes, for checks."""
        return Counter(slot for items in self._jobs.values() for _, slot in items)

    def blocks(self) -> list[TierBlock]:
        """Those that are being written."""
        return [block for items in self._jobs.values() for block, _ in items]

    def writing(self) -> set[BlockKey]:
        """Blocks that are being written, for checks."""
        return set(self._writing)

    def check_invariants(self) -> None:
        assert len(self._waiting) <= QUEUE_MAX
        keys = [block.key for block in self.blocks()]
        assert len(keys) == len(set(keys)) and set(keys) == self._writing, "a block is written twice at once"
        assert not self._writing & self._waiting.keys(), "a block that is being written waits to be written"
        assert self.writing_bytes == sum(map(_bytes_of, self._jobs.values())), "bytes in flight are off"
        assert len(keys) <= 1 or self.writing_bytes <= self._writing_max, "a tier writes more than its share"
