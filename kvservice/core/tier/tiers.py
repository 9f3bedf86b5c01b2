"""The tiers of one node: which blocks go into which tier and when, and what each tier has. Pure; part of ShardState.

A tier is a holder of blocks like another node (core.acquire brings blocks back), and its books are a second store.
Eviction from memory never waits for a tier: what is not written yet is lost, and a cleaner keeps the cold end of the
memory written ahead of need. Tiers do not know of each other: each has its own queue, drops and rests.

A block is announced while the memory or a tier of this node has it. What a shared tier has is not announced: it is
asked itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

from kvservice.core.actions import Announce, Erase, Retract, WriteDown
from kvservice.core.block.marks import MARK_SECONDS
from kvservice.core.block.tenants import TenantLimits, TenantUsage, tag_of
from kvservice.core.bounded_table import BoundedTable
from kvservice.core.context import ShardContext
from kvservice.core.events import PullResult, TierFound, WrittenDown
from kvservice.core.messages import Holder
from kvservice.core.segment.blockfile import disk_room
from kvservice.core.segment.refs import BlockRef
from kvservice.core.store.slots import Block
from kvservice.core.store.worth import GuardedWorth
from kvservice.core.tier.books import TierBooks
from kvservice.core.tier.rules import TierRules, TierUsage, WriteMoment, tier_holder
from kvservice.core.tier.spill import Spill
from kvservice.core.tier.tier_block import TierBlock
from kvservice.core.tier.write_queue import QUEUE_MAX, READING_SHARE, Item, WriteQueue, fits_share
from kvservice.units import BlockKey, NodeId, SlotIndex

CLEAN_FREE_SHARE = 1 / 8  # of the memory: while less is free, the cleaner writes down the coldest blocks ahead of need
CLEAN_BLOCKS = 256  # that the cleaner looks at: it costs a millisecond
CLEAN_TIER_SHARE = 0.5  # of a tier's budget, that one look may fill
CLEAN_SECONDS = 0.1  # between two looks: with CLEAN_BLOCKS, more than any disk writes
# While digests are computed no write begins: an engine waits for them, and both need processors and memory bandwidth.
# For no longer than this, however many engines store.
HOLD_SECONDS = 0.02
KNOWN_MAX = 262_144  # blocks that are known to be in a shared tier, about 40 MB; a forgotten one is written again
# A tier that has less room than its budget holds what fits, and evicts to take more. For so long: then it is tried anew
# whether others of its file system have made room.
FULL_SECONDS = 600.0
CHECK_BLOCKS_MAX = 20_000  # larger books are not checked: a check would block the loop for too long


@dataclass(slots=True)
class _Read:
    blocks: tuple[TierBlock, ...]
    deadline: float
    is_cleared: bool = False  # something was cleared since it began: the tier may have the blocks of before

    @property
    def byte_count(self) -> int:
        return sum(block.payload_bytes for block in self.blocks)


@dataclass(slots=True)
class _Tier:
    rules: TierRules
    holder: Holder
    queue: WriteQueue
    books: TierBooks | None  # None: it is shared
    known: BoundedTable[BlockKey, bool] = field(default_factory=lambda: BoundedTable(KNOWN_MAX))  # if it is shared
    reads: dict[int, _Read] = field(default_factory=dict)  # by the number of the pull
    reading_bytes: int = 0
    cleared: set[BlockKey] = field(default_factory=set)  # being written, and not wanted any more
    full_until: float = 0.0  # it has no more room than its books use
    is_open: bool = False  # nothing is asked of it before: it says what it found, maybe nothing, when it is open
    is_listed: bool = False  # it has said all that it found: what it may have itself is not written into it before

    def has(self, key: BlockKey) -> bool:
        """Whether the block is in the tier, or on its way there, as far as this node knows."""
        held = self.known.get(key) is not None if self.books is None else self.books.knows(key)
        return held or key in self.queue

    def takes(self, now: float) -> bool:
        return self.is_listed and not self.queue.is_resting(now)


class Tiers:
    """`emit` of the context goes to the performer; `hides` says what the memory's store need not tell."""

    def __init__(self, rules: Sequence[TierRules], shard: ShardContext, *, spills: bool = False) -> None:
        """`spills`: offer cold blocks to nodes that accept them."""
        self._shard = shard
        self.spill = Spill(shard, is_on=spills)
        self._store = shard.store
        self._counters = shard.counters
        self._reading_max = int(shard.geometry.slabs_bytes * READING_SHARE)
        self._clean_below = int(shard.geometry.slabs_bytes * CLEAN_FREE_SHARE)
        self._tiers: dict[str, _Tier] = {}
        for each in rules:
            assert each.name not in self._tiers, "two tiers have one name"
            books = None
            if not each.is_shared:
                books = TierBooks(each.budget_bytes, GuardedWorth(), self._gone_from(each), each.extra_bytes)
            self._tiers[each.name] = _Tier(each, tier_holder(each.name), WriteQueue(shard.geometry.slabs_bytes), books)
        self._of_holder = {tier.holder.node_id: tier for tier in self._tiers.values()}
        self._moments = {tier.rules.write for tier in self._tiers.values()}
        self._cleans = WriteMoment.EVICTED in self._moments or self.spill.is_on
        if self._cleans:
            self._store.on_evict = self._count_lost
        self.hears_uses = WriteMoment.REUSED in self._moments  # else nobody needs to call `used`
        self._own = [tier.books for tier in self._tiers.values() if tier.books is not None]
        self.has_own = bool(self._own)
        self._left: list[BlockKey] = []  # blocks that left memory in this event
        self.shared = tuple(tier.rules.name for tier in self._tiers.values() if tier.rules.is_shared)
        self._next_job = 1
        self._now = 0.0  # of the last event
        self._cleaned_at = -CLEAN_SECONDS
        self._clean_at: float | None = None
        self._held_since: float | None = None  # writes wait for digests

    # -- what is announced ----

    def holds(self, key: BlockKey) -> bool:
        """Whether a tier of this node has the block and can give it."""
        return any(key in books for books in self._own)

    def not_open(self) -> Holder | None:
        """A tier that may have anything, because it has not opened yet or cannot be opened."""
        return next((tier.holder for tier in self._tiers.values() if not tier.is_open), None)

    def not_read(self, key: BlockKey) -> str:
        """A tier of this node that has the block and was not asked for it, as a node; "" when there is none."""
        having = (tier.holder.node_id for tier in self._tiers.values() if tier.books is not None and key in tier.books)
        return next(having, "")

    def hides(self, key: BlockKey) -> bool:
        """Whether nobody need hear that memory has got or lost this block: what a tier has is announced already, and
        stays announced."""
        return bool(self._own) and self.holds(key)

    def found(self, event: TierFound, now: float) -> None:
        """A tier is open, and has kept these blocks over a restart."""
        tier = self._tiers.get(event.tier)
        if tier is None:
            return
        tier.is_open = True
        if tier.books is not None:
            for block in event.blocks:
                self._adopt(tier, tier.books, block, now)
        if not event.more and not tier.is_listed:
            tier.is_listed = True
            self._catch_up(tier, now)

    def _adopt(self, tier: _Tier, books: TierBooks, block: TierBlock, now: float) -> None:
        if not self._is_fresh(block, now):
            self._count(tier, "found_too_old")
            self._shard.emit(Erase(tier.rules.name, (block.key,)))
            return
        is_new = block.key not in self._store and not self.holds(block.key)
        account = self._store.accounts.account_of(block.account_tag)
        if books.adopt(block, account, now):
            self._count(tier, "found")
            if is_new:
                self._shard.emit(Announce(block.key, block.route))
        elif not books.knows(block.key):
            self._count(tier, "found_no_room")
            self._shard.emit(Erase(tier.rules.name, (block.key,)))

    def _is_fresh(self, block: TierBlock, now: float) -> bool:
        freshness = self._shard.freshness
        account = self._store.accounts.account_of(block.account_tag)
        scopes = freshness.scopes(block.key, account, block.fingerprint)
        is_young = not block.stored_at or block.stored_at > freshness.wall(now) - MARK_SECONDS
        return is_young and freshness.accepts(scopes, block.stored_at, now)

    def _catch_up(self, tier: _Tier, now: float) -> None:
        """A tier that takes blocks as they are stored gets those that were stored before it was open: as many as may
        wait."""
        if tier.rules.write is WriteMoment.STORED:
            for block in self._store.blocks()[:QUEUE_MAX]:
                if not block.is_secondary:
                    self._offer(block, WriteMoment.STORED, now)

    def blocks(self) -> Iterable[TierBlock]:
        """Everything in the tiers of this node; a block in two of them twice."""
        for books in self._own:
            yield from books.blocks()

    # -- which blocks are written ----

    def sealed(self, key: BlockKey, now: float) -> None:
        """A block has become readable in memory."""
        if WriteMoment.STORED in self._moments:
            block = self._store.get(key)
            if block is not None and not block.is_secondary:
                self._offer(block, WriteMoment.STORED, now)

    def used(self, keys: Iterable[BlockKey], now: float) -> None:
        """Blocks are used, some of them in memory."""
        for key in keys:
            block = self._store.get(key)
            if block is not None:
                self._offer(block, WriteMoment.REUSED, now)

    def _offer(self, block: Block, moment: WriteMoment, now: float) -> None:
        """Queue the block for each tier that takes blocks at this moment."""
        for tier in self._tiers.values():
            if tier.rules.write is moment and tier.takes(now):
                self._offer_to(tier, block)

    def _offer_to(self, tier: _Tier, block: Block) -> None:
        """Queue the block if the tier lacks it, unless nothing of its tenant comes back."""
        if tier.has(block.key) or not self._shard.admission.admits(block.account):
            return
        if not tier.queue.put(block.key, block.payload_bytes):
            self._count(tier, "dropped_full")

    def work(self, now: float, *, is_digesting: bool = False) -> None:
        """Clean, and begin what may begin. Called after every event; cheap when there is nothing to do."""
        self._now = now
        if self._left:
            self._tell_books(now)
        if self._cleans:
            self._clean(now)
        self.spill.work(now)
        if self._holds_writes(now, is_digesting=is_digesting):
            return
        for tier in self._tiers.values():
            if tier.queue.is_resting(now):
                continue
            while tier.queue and (items := tier.queue.next_items(partial(self._prepare, tier))):
                number = self._next_job
                self._next_job += 1
                tier.queue.begin(number, items)
                self._shard.emit(WriteDown(number, tier.rules.name, items))

    def _holds_writes(self, now: float, *, is_digesting: bool) -> bool:
        if not is_digesting or not any(tier.queue for tier in self._tiers.values()):
            self._held_since = None
            return False
        if self._held_since is None:
            self._held_since = now
        if now < self._held_since + HOLD_SECONDS:
            return True
        self._held_since = None
        return False

    def _clean(self, now: float) -> None:
        """Queue the coldest blocks that a tier lacks, while little memory is free."""
        if now < self._cleaned_at + CLEAN_SECONDS:
            self._clean_at = self._cleaned_at + CLEAN_SECONDS
            return
        self._clean_at = None
        table = self._store.table
        free = table.free_bytes + table.free_slab_count * self._shard.geometry.slab_bytes
        if free >= self._clean_below:
            return
        self._cleaned_at = now
        coldest = [block for block in self._store.coldest(CLEAN_BLOCKS) if not block.is_secondary]
        for tier in self._takers_of_evicted(now):
            self._clean_into(tier, coldest)
        for block in coldest if self.spill.is_on else ():
            if self._shard.admission.admits(block.account):
                self.spill.put(block, now)

    def _takers_of_evicted(self, now: float) -> Iterator[_Tier]:
        """The tiers that are given what memory evicts, but those that take nothing now."""
        for tier in self._tiers.values():
            if tier.rules.write is WriteMoment.EVICTED and tier.takes(now):
                yield tier

    def _clean_into(self, tier: _Tier, coldest: Sequence[Block]) -> None:
        """Offer no more than half of what the tier holds: if one block of the cold end evicted another from a small
        tier, they would take turns for ever."""
        room = math.inf if tier.books is None else tier.books.limit_bytes * CLEAN_TIER_SHARE
        for block in coldest:
            room -= disk_room(block.payload_bytes)
            if room < 0:
                return
            self._offer_to(tier, block)

    def _count_lost(self, block: Block, now: float) -> None:
        """A block makes room in memory before the cleaner came to it. One that waits is counted when its turn comes."""
        if block.is_secondary or not self._shard.admission.admits(block.account):
            return
        for tier in self._takers_of_evicted(now):
            if not tier.has(block.key):
                self._count(tier, "dropped_evicted")
        self.spill.count_lost(block.key, now)

    def _prepare(self, tier: _Tier, key: BlockKey) -> Item | None:
        """Make room in the tier and pin the block in memory. None: it is not written."""
        block = self._store.get(key)
        if block is None:
            self._count(tier, "dropped_evicted")
            return None
        if tier.books is not None and tier.books.knows(key):
            return None  # it was found in the tier since it was queued
        if tier.books is not None and self._now >= tier.full_until:
            tier.books.limit_bytes = tier.books.budget_bytes
        account = block.account
        name = (key, block.payload_bytes, block.digest, block.position, block.route)
        written = TierBlock(*name, tag_of(account), block.origin.fingerprint, block.stored_at)
        if tier.books is not None and not tier.books.reserve(written, self._store.parent_of(block), account):
            self._count(tier, "dropped_no_room")
            return None
        self._store.pin((block.slot,))
        return written, block.slot.index

    def written(self, event: WrittenDown, now: float) -> list[BlockRef]:
        """Returns what a tier that has room did not take: its bytes may have changed in memory."""
        refused: list[BlockRef] = []
        for tier in self._tiers.values():
            items = tier.queue.end(event.job)
            if items is None:
                continue
            results = (*event.written, *[False] * len(items))
            sizes = (*event.stored_bytes, *[0] * len(items))
            good = 0
            for (block, slot), is_written, stored_bytes in zip(items, results, sizes, strict=False):
                self._store.unpin((self._store.table[slot],))
                if not is_written and not event.is_full:
                    refused.append(BlockRef(slot, self._store.table[slot].generation))
                if is_written:
                    good += 1
                    self._count(tier, "written_bytes", stored_bytes or block.payload_bytes)
                self._settle(tier, block, stored_bytes, now, is_written=is_written)
            if event.is_full and tier.books is not None:
                tier.books.limit_bytes = tier.books.used_bytes
                tier.full_until = now + FULL_SECONDS
            self._count(tier, "written_blocks", good)
            self._count(tier, "write_failed", len(items) - good)
            tier.queue.report(good, now)
        return refused

    def clear(self, is_covered: Callable[[TierBlock], bool], slice_blocks: int) -> Generator[None, None, int]:
        """Give up these blocks, and those of them that are being written when that ends. Yields after each whole slice,
        and returns how many there were. Memory must have none of them, else they are written later.

        What other nodes wrote into a shared tier is not known here: the marks keep it from being served, and what is
        stored from now on is written again, whatever lies there.
        """
        count = 0
        for tier in self._tiers.values():
            if tier.books is None:
                tier.known.clear()
            for read in tier.reads.values():
                read.is_cleared = True
            writing = [block for block in tier.queue.blocks() if is_covered(block)]
            tier.cleared.update(block.key for block in writing)
            count += len(writing)
            keys = iter([] if tier.books is None else tier.books.keys())
            while tier.books is not None and (some := list(islice(keys, slice_blocks))):
                for key in some:
                    block = tier.books.get(key)
                    if block is not None and is_covered(block):
                        tier.books.discard(key)
                        count += 1
                if len(some) == slice_blocks:
                    yield
        return count

    def _settle(self, tier: _Tier, block: TierBlock, stored_bytes: int, now: float, *, is_written: bool) -> None:
        was_cleared = block.key in tier.cleared
        if was_cleared:
            tier.cleared.discard(block.key)
            self._shard.emit(Erase(tier.rules.name, (block.key,)))
            is_written = False
        if tier.books is None:
            if is_written:
                tier.known.put(block.key, True)
        elif is_written:
            tier.books.seal(block.key, now, stored_bytes)
        else:
            tier.books.abort(block.key)
        if was_cleared and tier.rules.write is WriteMoment.STORED and tier.takes(now):
            again = self._store.get(block.key)  # stored since the clear, while the old one was on its way
            if again is not None and not again.is_secondary:
                self._offer_to(tier, again)

    # -- what is brought back ----

    def holders(
        self, keys: Sequence[BlockKey], indices: Iterable[int], payload_bytes: int, now: float
    ) -> dict[int, tuple[Holder, ...]]:
        """The tiers of this node that can give each of these blocks now. Blocks that none has are left out."""
        found: dict[int, tuple[Holder, ...]] = {}
        own = [tier for tier in self._tiers.values() if tier.books is not None]
        open_tiers = [tier for tier in own if self._may_read(tier, payload_bytes, now)]
        for index in indices if open_tiers else ():
            having = tuple(tier.holder for tier in open_tiers if self._gives(tier, keys[index], payload_bytes))
            if having:
                found[index] = having
        return found

    @staticmethod
    def _gives(tier: _Tier, key: BlockKey, payload_bytes: int) -> bool:
        block = None if tier.books is None else tier.books.get(key)
        return block is not None and block.payload_bytes == payload_bytes

    def _may_read(self, tier: _Tier, payload_bytes: int, now: float) -> bool:
        """Whether the tier is asked for blocks of this size at all: not while it owes an answer, and not for more than
        a share of the memory. Its answer ends that, so a tier that hangs costs one request its time, and the others
        nothing."""
        if not tier.is_open:
            return False
        late = any(read.deadline < now for read in tier.reads.values())
        if late or not fits_share(payload_bytes, tier.reading_bytes, self._reading_max):
            self._count(tier, "busy")
            return False
        return True

    def may_probe(self, name: str, payload_bytes: int, now: float) -> bool:
        return self._may_read(self._tiers[name], payload_bytes, now)

    def has_shared(self, name: str, keys: Sequence[BlockKey]) -> None:
        """A shared tier said that it has these blocks: they are not written into it again."""
        for key in keys:
            self._tiers[name].known.put(key, True)

    def lacks_shared(self, name: str, keys: Sequence[BlockKey]) -> None:
        """A shared tier said that it lacks the first of these blocks, so it has none that counts: they are written into
        it again. Its own rules remove what is old."""
        for key in keys:
            self._tiers[name].known.pop(key)

    def first_of(self, keys: Iterable[BlockKey], now: float) -> TierBlock | None:
        """The first of these blocks that a tier of this node can give now, if it has room for its size."""
        open_books = [
            tier.books for tier in self._tiers.values() if tier.books is not None and self._may_read(tier, 0, now)
        ]
        found = (books.get(key) for key in keys for books in open_books)
        return next((block for block in found if block is not None), None) if open_books else None

    def begin_read(
        self, number: int, holder: NodeId, wanted: Sequence[TierBlock], deadline: float, now: float
    ) -> tuple[TierBlock, ...]:
        """The leading blocks of `wanted` that the tier can give now, pinned in its books until `end_read`. A shared
        tier is believed to have them all. Of a tier of this node, its books say what a block is."""
        tier = self._of_holder[holder]
        given: list[TierBlock] = []
        held_bytes = tier.reading_bytes
        for block in wanted if self._may_read(tier, wanted[0].payload_bytes, now) else ():
            known = block if tier.books is None else tier.books.get(block.key)
            if known is None or known.payload_bytes != block.payload_bytes:
                break
            if not fits_share(known.payload_bytes, held_bytes, self._reading_max):
                break
            held_bytes += known.payload_bytes
            given.append(known)
        if tier.books is not None:
            for block in given:
                tier.books.pin(block.key)
            tier.books.touch([block.key for block in given], now)
        read = tier.reads[number] = _Read(tuple(given), deadline)
        tier.reading_bytes += read.byte_count
        return read.blocks

    def end_read(self, number: int, holder: NodeId, results: Sequence[PullResult], now: float) -> None:
        """A read is over, or did not begin (no results). Wrong blocks leave the tier."""
        tier = self._of_holder[holder]
        read = tier.reads.pop(number)
        tier.reading_bytes -= read.byte_count
        wrong: list[BlockKey] = []
        for block, result in zip(read.blocks, results, strict=False):
            self._count(tier, "read_blocks" if result is PullResult.OK else f"read_{result.value}")
            if result is PullResult.OK:
                self._count(tier, "read_bytes", block.payload_bytes)
                if tier.books is None and not read.is_cleared:
                    tier.known.put(block.key, True)
            elif result in (PullResult.STALE, PullResult.CORRUPT):
                tier.known.pop(block.key)
                if tier.books is not None:
                    tier.books.discard(block.key)
                elif result is PullResult.CORRUPT:
                    wrong.append(block.key)
        if tier.books is not None:
            for block in read.blocks:
                tier.books.unpin(block.key)
        elif wrong:
            self._shard.emit(Erase(tier.rules.name, tuple(wrong)))

    def not_kept(self, holder: NodeId, key: BlockKey) -> None:
        """A block that is being read is too old to be served, now and later. It leaves the tier when its read ends, so
        that a younger one is written."""
        tier = self._of_holder.get(holder)
        if tier is not None and tier.books is not None:
            tier.books.discard(key)

    def left_memory(self, key: BlockKey) -> None:
        """A block was evicted from memory: in the books it counts as used until now. Uses in memory are not told to
        them, which would cost an acquire of what is in memory as much as it costs by itself."""
        self.spill.left_memory(key)
        if self._own:
            self._left.append(key)

    def _tell_books(self, now: float) -> None:
        """Note that what has left memory was used until now. It left from the ends of chains, so read backwards it is
        chains again. A policy has as little work with a chain as with a block."""
        left, self._left = self._left, []
        for books in self._own:
            chain: list[BlockKey] = []
            for key in reversed(left):
                if key not in books:
                    continue
                if chain and books.policy.parent_of(key) != chain[-1]:
                    books.touch(chain, now)
                    chain = []
                chain.append(key)
            if chain:
                books.touch(chain, now)

    # -- limits, time and figures ----

    def set_limits(self, limits: Mapping[str, TenantLimits]) -> None:
        """Replace the tenants' limits in the books."""
        for tier in self._tiers.values():
            if tier.books is not None:
                quotas = {name: limit.tier_bytes.get(tier.rules.name, 0) for name, limit in limits.items()}
                tier.books.accounts.set_limits({name: TenantLimits(quota) for name, quota in quotas.items()})

    def with_disks(self, tenants: Iterable[TenantUsage]) -> tuple[TenantUsage, ...]:
        """These rows, with what the tenants have in the tiers of this node."""
        found = [{row.name: row for row in books.accounts.usage()} for books in self._own]
        return tuple(
            replace(
                tenant,
                disk_used_bytes=sum(rows[tenant.name].used_bytes for rows in found),
                disk_quota_bytes=sum(rows[tenant.name].quota_bytes for rows in found),
            )
            for tenant in tenants
        )

    def next_deadline(self) -> float | None:
        held = None if self._held_since is None else self._held_since + HOLD_SECONDS
        resting = [due for tier in self._tiers.values() if (due := tier.queue.resumes_at(self._now)) is not None]
        return min([due for due in (self._clean_at, held, *resting) if due is not None], default=None)

    def usage(self) -> tuple[TierUsage, ...]:
        return tuple(
            TierUsage(
                tier.rules.name,
                tier.rules.is_shared,
                len(tier.known) if tier.books is None else len(tier.books),
                0 if tier.books is None else tier.books.used_bytes,
                0 if tier.books is None else tier.books.budget_bytes,
                len(tier.queue),
                tier.queue.writing_bytes,
                tier.reading_bytes,
            )
            for tier in self._tiers.values()
        )

    def pinned(self) -> Counter[SlotIndex]:
        """Slots pinned for writes, for the shard's check of pin counts."""
        found: Counter[SlotIndex] = Counter()
        for tier in self._tiers.values():
            found.update(tier.queue.pinned())
        return found

    def reading(self) -> set[int]:
        """Numbers of the pulls that read from tiers, for checks."""
        return {number for tier in self._tiers.values() for number in tier.reads}

    def _gone_from(self, rules: TierRules) -> Callable[[TierBlock, bool], None]:
        def gone(block: TierBlock, is_evicted: bool) -> None:
            self._counters[f"tier_{rules.name}_evicted"] += is_evicted
            self._shard.emit(Erase(rules.name, (block.key,)))
            if block.key not in self._store and not self.holds(block.key):
                self._shard.emit(Retract(block.key, block.route))

        return gone

    def _count(self, tier: _Tier, name: str, by: int = 1) -> None:
        self._counters[f"tier_{tier.rules.name}_{name}"] += by

    def check_invariants(self) -> None:
        self.spill.check_invariants()
        for tier in self._tiers.values():
            tier.queue.check_invariants()
            assert tier.reading_bytes == sum(read.byte_count for read in tier.reads.values()), "bytes read are off"
            is_alone = sum(len(read.blocks) for read in tier.reads.values()) <= 1
            assert is_alone or tier.reading_bytes <= self._reading_max, "a tier reads into more than its share"
            books = tier.books
            if books is not None and len(books) <= CHECK_BLOCKS_MAX:
                books.check_invariants()
                assert books.writing() == tier.queue.writing(), "books and writes of a tier differ"
                reads = Counter(block.key for read in tier.reads.values() for block in read.blocks)
                assert books.pinned() == reads, "books and reads of a tier differ"
