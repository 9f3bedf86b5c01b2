"""Suspects: blocks that an engine or another node did not find as promised when it read them, or that a tier did not
take. Pure.

The engine computes such a prompt again. But the pool would promise the block again, to this reader and to others, and
nothing that they compute would replace it, because a block that is held is not stored twice. So engines name their
suspects in heartbeats, and nodes when they give a lease back. The shard makes the digest anew. A block with another
digest is given up: its next store brings it back. Of one with its own digest the header is written again, which heals a
header that was damaged, and changes nothing where the reader was only late.

A tier fails at a write for many reasons, and a lossy codec refuses bytes that have changed in memory: at each look of
the cleaner, until the block is evicted.

A reader may be wrong or lie, so its word alone evicts nothing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from kvservice.core import events as ev
from kvservice.core.acquire.holds import Holds
from kvservice.core.actions import Digest
from kvservice.core.context import ShardContext
from kvservice.core.explain.evictions import EvictionCause
from kvservice.core.segment.refs import BlockRef
from kvservice.units import SlotIndex

NAMED_MAX = 1024  # that one heartbeat names
WAITING_MAX = 4096  # more are not looked at, and counted
CHECKED_MAX = 16  # at once, so that the digests of stores do not wait for long


class Suspects:
    """The suspects that are looked at, and those that wait for it. Each of the former is pinned, so that its slot keeps
    its block meanwhile."""

    def __init__(self, shard: ShardContext, holds: Holds) -> None:
        self._store = shard.store
        self._holds = holds
        self._emit = shard.emit
        self._counters = shard.counters
        self._waiting: OrderedDict[BlockRef, None] = OrderedDict()  # the first named first
        self._open: dict[SlotIndex, BlockRef] = {}

    def named(self, refs: Iterable[BlockRef]) -> None:
        """A reader or a tier names these. Those that are gone, or are looked at already, need nothing."""
        for ref in refs:
            if self._store.promised_as(ref) is None or ref.slot in self._open:
                continue
            if len(self._waiting) < WAITING_MAX:
                self._waiting[ref] = None
            else:
                self._counters["suspects_dropped"] += 1
        self._look()

    def _look(self) -> None:
        while self._waiting and len(self._open) < CHECKED_MAX:
            ref, _ = self._waiting.popitem(last=False)
            block = self._store.promised_as(ref)
            if block is not None:
                self._open[ref.slot] = ref
                self._store.pin((block.slot,))
                self._counters["suspects_checked"] += 1
                self._emit(Digest(ref.slot, block.payload_bytes, block.key))

    def digested(self, found: ev.SlotDigest, now: float) -> None:
        """The digest of a slot is there. Ignored if it is of no suspect."""
        ref = self._open.pop(found.slot, None)
        if ref is None:
            return
        block = self._store.promised_as(ref)  # None: it was given up meanwhile
        self._store.unpin((self._store.table[ref.slot],))
        if block is not None and found.digest == block.digest:
            self._store.write_header_again(block)
        elif block is not None and found.digest is not None:  # None: the pool shuts down
            self._counters["suspects_damaged"] += 1
            self._store.retire(block.key, EvictionCause.CORRUPT, now)
            self._holds.let_go_of(self._store.retired)
        self._look()

    def pinned(self) -> Counter[SlotIndex]:
        """For the shard's check of pin counts."""
        return Counter(self._open.keys())

    def check_invariants(self) -> None:
        assert len(self._open) <= CHECKED_MAX, "more suspects are looked at than may be"
        assert not self._waiting or len(self._open) == CHECKED_MAX, "suspects wait and nobody looks at them"
        for index in self._open:
            assert self._store.table[index].pins, "a suspect's slot may be given away"
