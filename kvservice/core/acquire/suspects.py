"""Suspects: blocks that an engine or another node did not find as promised when it read them. Pure.

The engine computes such a prompt again, and nobody is served a wrong byte. But the pool would promise the block again,
to this reader and to others, and nothing that they compute would replace it, because a block that is held is not stored
twice. So engines name their suspects in heartbeats, and nodes when they give a lease back. The shard makes the digest
anew. A block with another digest is given up: its next store brings it back. Of one with its own digest the header is
written again, which heals a header that was damaged, and changes nothing where the reader was only late.

A reader may be wrong or lie, so its word alone evicts nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice

from kvservice.core import events as ev
from kvservice.core.actions import Digest
from kvservice.core.context import ShardContext
from kvservice.core.explain.evictions import EvictionCause
from kvservice.core.segment.refs import BlockRef
from kvservice.core.store.slots import Block
from kvservice.units import SlotIndex

NAMED_MAX = 1024  # that one heartbeat names
WAITING_MAX = 4096  # more are not looked at
CHECKED_MAX = 16  # at once, so that the digests of stores do not wait for long


class Suspects:
    """The suspects that are looked at, and those that wait for it. Each of the former is pinned, so that its slot keeps
    its block meanwhile."""

    def __init__(self, shard: ShardContext) -> None:
        self._store = shard.store
        self._emit = shard.emit
        self._counters = shard.counters
        self._waiting: dict[BlockRef, None] = {}  # the first named first
        self._open: dict[SlotIndex, Block] = {}

    def named(self, refs: Iterable[BlockRef]) -> None:
        """A reader names these."""
        self._waiting.update(dict.fromkeys(islice(refs, WAITING_MAX - len(self._waiting))))
        self._look()

    def _look(self) -> None:
        """Those that are gone, or are looked at already, need nothing."""
        while self._waiting and len(self._open) < CHECKED_MAX:
            ref = next(iter(self._waiting))
            del self._waiting[ref]
            block = self._store.promised_as(ref)
            if block is not None and ref.slot not in self._open:
                self._open[ref.slot] = block
                self._store.pin((block.slot,))
                self._counters["suspects_checked"] += 1
                self._emit(Digest(ref.slot, block.payload_bytes, block.key))

    def digested(self, found: ev.SlotDigest, now: float) -> None:
        """The digest of a slot is there. Ignored if it is of no suspect."""
        block = self._open.pop(found.slot, None)
        if block is None:
            return
        is_held = block.slot.block is block
        self._store.unpin((block.slot,))
        if is_held and found.digest == block.digest:
            self._store.write_header_again(block)
        elif is_held and found.digest is not None:  # None: the pool shuts down
            self._counters["suspects_damaged"] += 1
            self._store.retire(block.key, EvictionCause.CORRUPT, now)
        self._look()

    def pinned(self) -> Counter[SlotIndex]:
        """For the shard's check of pin counts."""
        return Counter(self._open.keys())

    def check_invariants(self) -> None:
        assert len(self._open) <= CHECKED_MAX, "more suspects are looked at than may be"
        assert not self._waiting or len(self._open) == CHECKED_MAX, "suspects wait and nobody looks at them"
        for index, block in self._open.items():
            assert block.slot.index == index and block.slot.pins, "a suspect's slot may be given away"
