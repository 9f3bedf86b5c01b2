"""Blocks of one shard: which key is in which slot, who stored it, and what is evicted to make room.

BlockStore uses the slot table and the eviction policy and keeps the two consistent. Everything that must become visible
in memory or in the directory is passed to `emit` as an action. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from kvservice.core.actions import Action, Announce, AssignSlab, ClearHeader, Retract, WriteHeader
from kvservice.core.block.tenants import NOBODY, tag_of
from kvservice.core.explain.evictions import EvictionCause, EvictionHistory
from kvservice.core.messages import MissReason
from kvservice.core.segment.geometry import Geometry, slab_of
from kvservice.core.segment.header import SlotFlags, SlotHeader
from kvservice.core.segment.refs import BlockHandle, BlockRef
from kvservice.core.store.eviction import EvictionPolicy, Hintable, SelfExplaining
from kvservice.core.store.kinds import Expected
from kvservice.core.store.reasons import NOT_BY_WORTH
from kvservice.core.store.removals import Removals
from kvservice.core.store.slots import Block, BlockOrigin, Slot, SlotEvent, SlotState, SlotTable, loops
from kvservice.core.store.worth import RuleState
from kvservice.units import BlockKey, BootEpoch, SlotIndex, SpanRoute

NO_KEY = BlockKey(bytes(16))
EVICTED = {cause: f"evicted_{cause.value}" for cause in EvictionCause}  # counters
FETCHES = "blocks fetched from other nodes"
MayGo = Callable[[str], bool]  # from an account to whether its blocks may be evicted


@dataclass(frozen=True, slots=True)
class Want:
    """What a slot is needed for."""

    payload_bytes: int  # of each slot
    now: float
    account: str = NOBODY  # the tenant that is charged; at its quota it evicts its own blocks
    room_for: str = FETCHES  # named as the cause when somebody asks why a block was evicted


@dataclass(frozen=True, slots=True)
class Reservation:
    """Reserved slots in WRITING. `short_because` says why there are fewer than requested; NONE when there are not."""

    slots: tuple[Slot, ...]
    short_because: MissReason = MissReason.NONE


class BlockStore:
    """Owner ids are 16-byte engine ids. The shard's own fetches write as NO_KEY."""

    def __init__(
        self,
        geometry: Geometry,
        epoch: BootEpoch,
        policy: EvictionPolicy,
        emit: Callable[[Action], None],
        change: Callable[[Announce | Retract], None] | None = None,  # by default they are emitted, too
    ) -> None:
        self._epoch = epoch
        self.policy = policy
        self._explaining = policy if isinstance(policy, SelfExplaining) else None
        self._hintable = policy if isinstance(policy, Hintable) else None
        self._emit = emit
        self._change = change or emit
        self.table = SlotTable(geometry)
        self.accounts = self.table.accounts
        self._slots: dict[BlockKey, Slot] = {}  # by the key of the block in them: the sealed and leased ones
        self.secondary_bytes = 0  # payload bytes of the secondary copies: room for what no other node has
        self.retired: set[Slot] = set()  # leased slots whose blocks are no more: nobody new reads them
        self._shown_secondary: set[BlockKey] = set()  # primary blocks with another header: see make_primary
        self._held_back: set[BlockKey] = set()  # pinned blocks whose pins the policy was told of
        self._origin = BlockOrigin()  # of the block that was sealed last
        self.on_insert: Callable[[Block], None] | None = None
        self.on_evict: Callable[[Block, float], None] | None = None  # to make room, at this time
        self.evictions = EvictionHistory()
        self.removals = Removals()
        self.counters: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._slots

    @property
    def eviction_rule(self) -> RuleState | None:
        """Which of the policy's rules chooses victims. None for a policy of one rule."""
        return None if self._explaining is None else self._explaining.rule()

    def has_none(self, keys: Iterable[BlockKey]) -> bool:
        return self._slots.keys().isdisjoint(keys)

    def get(self, key: BlockKey) -> Block | None:
        slot = self._slots.get(key)
        return None if slot is None else slot.block

    def slot_of(self, key: BlockKey, payload_bytes: int) -> Slot | None:
        """Where the block of this key lies, if it has this size."""
        slot = self._slots.get(key)
        return slot if slot is not None and slot.payload_bytes == payload_bytes else None

    def blocks(self) -> list[Block]:
        """A snapshot, for full announcements."""
        return [self._in(slot) for slot in self._slots.values()]

    def handle(self, block: Block) -> BlockHandle:
        slot = block.slot
        name = (block.key, slot.index, slot.generation, slot.payload_bytes, block.digest, block.position)
        return BlockHandle(*name, block.stored_at)

    def take(self, keys: Sequence[BlockKey], payload_bytes: int) -> list[Slot]:
        """Pin the leading blocks of a chain that are here with this size."""
        found = loops.leading(self._slots, keys, payload_bytes)
        self.table.pin(found)
        return found

    def touch(self, chain: Sequence[BlockKey], now: float, expected: Expected = Expected.NOTHING_SAID) -> None:
        """Note that a client uses these consecutive blocks of one chain, and what it expects of them."""
        if expected and self._hintable is not None:
            self._hintable.expect(expected)
        self.policy.touch(chain, now)

    def pin(self, slots: Iterable[Slot]) -> None:
        """One more reader for each of these slots. The policy is not told: see `_victim`."""
        self.table.pin(slots)

    def unpin(self, slots: Iterable[Slot]) -> None:
        """One reader less for each of these slots, in one pass."""
        last = self.table.unpin(slots)
        for slot in [slot for slot in last if slot in self.retired] if self.retired else ():
            self.retired.discard(slot)
            self._free(slot, SlotEvent.EVICT)
        if self._held_back:
            self._offer_again([slot.block.key for slot in last if slot.block is not None])

    def _offer_again(self, keys: Iterable[BlockKey]) -> None:
        """Nobody reads these blocks any more: the policy may name them again."""
        told = [key for key in keys if key in self._held_back]
        self._held_back.difference_update(told)
        self.policy.unpin(told)

    def _victim(self, size: int | None, may_go: MayGo | None) -> BlockKey | None:
        """The policy's next victim that nobody reads. The policy is told of a pin only here, when it names a pinned
        block. So pins cost it no work at a hit, however long the chain is."""
        while (key := self.policy.victim(size, may_go)) is not None and self._slots[key].pins:
            self._hold_back([key])
        return key

    def coldest(self, count: int) -> list[Block]:
        """Up to `count` blocks that nobody reads, in the order in which they would be evicted."""
        keys = self.policy.coldest(count)
        while pinned := [key for key in keys if self._slots[key].pins]:
            self._hold_back(pinned)
            keys = self.policy.coldest(count)
        return [self._in(self._slots[key]) for key in keys]

    def _hold_back(self, keys: Sequence[BlockKey]) -> None:
        self._held_back.update(keys)
        self.policy.pin(keys)

    @staticmethod
    def _in(slot: Slot) -> Block:
        assert slot.block is not None, f"no block lies in {slot}"
        return slot.block

    def retire(self, key: BlockKey, cause: EvictionCause, now: float) -> None:
        """Give a block up, even while it is read. Nobody new gets it, and its slot becomes free when the last reader
        ends."""
        slot = self._slots[key]
        if slot.pins:
            self._offer_again([key])
            self.retired.add(slot)
        self._take_out(slot, Want(slot.payload_bytes, now, room_for=""), cause)
        if not slot.pins:
            self._free(slot, SlotEvent.EVICT)

    def forget_free(self, slot: Slot) -> None:
        """Clear the header of a free slot. What was evicted may still lie in it, and a restart would find it."""
        if slot.state is SlotState.FREE:
            self._emit(ClearHeader(slot.index))

    def _free(self, slot: Slot, event: SlotEvent) -> None:
        """Give a slot back, and leave nothing in it that a restart would find."""
        self._emit(ClearHeader(slot.index))
        self.table.free(slot, event)

    def reserve(self, count: int, owner: bytes, want: Want) -> Reservation:
        """Up to `count` slots, evicting as needed. Headers with odd generations are emitted at once."""
        wanted = self._within_flight(count, want.account)
        short_because = MissReason.NONE if wanted == count else MissReason.QUOTA
        reserved: list[Slot] = []
        may_steal = True  # the search for a slab to steal visits every slot; it is not repeated after it found none
        while len(reserved) < wanted:
            if not self._keep_quota(want):
                short_because = MissReason.QUOTA
                self.accounts.count(want.account, "quota_refused", wanted - len(reserved))
                self.counters["quota_refused"] += wanted - len(reserved)
                break
            slot = self._take_free(owner, want)
            if slot is None:
                if self._grow(want, may_steal):
                    continue
                may_steal = False
                # When we have no block of our own left to evict, any slab may be stolen.
                if not self._evict_one(want) and not self._grow(want, may_steal=True):
                    short_because = MissReason.NO_ROOM if wanted == count else MissReason.QUOTA
                    break
                continue
            reserved.append(slot)
        self.counters["slots_reserved"] += len(reserved)
        return Reservation(tuple(reserved), short_because)

    def _take_free(self, owner: bytes, want: Want) -> Slot | None:
        """A slot in WRITING, whose header says so at once. None when no slot of this size is free."""
        slot = self.table.take_free(want.payload_bytes, owner, want.account)
        if slot is not None:
            slot.reserved_at = want.now
            self._emit(WriteHeader(slot.index, self._writing_header(slot)))
        return slot

    def _within_flight(self, count: int, account: str) -> int:
        allowed = self.accounts.may_write(account)
        if allowed is None or allowed >= count:
            return count
        self.accounts.count(account, "in_flight_refused", count - allowed)
        self.counters["in_flight_refused"] += count - allowed
        return allowed

    def _keep_quota(self, want: Want) -> bool:
        """Make room for one more slot within the account's quota, from its own blocks. False when there is none."""
        while self.accounts.over_quota(want.account, want.payload_bytes):
            victim = self._victim(None, lambda other: other == want.account)
            if victim is None:
                return False
            self._evict(victim, EvictionCause.QUOTA, want)
        return True

    def reserve_for_handover(self, used_at: float, want: Want, *, may_steal: bool) -> Slot | None:
        """A slot in WRITING for a block that was last used at `used_at`. None when there is no such slot.

        A block that was used later is evicted for it only if it is a secondary copy. Another node has that block too,
        and the leaving node may be the last one to have this block. A slab of another size goes over for it only when
        all its blocks may be evicted. `may_steal`: as in `reserve`, once for the blocks of an offer.
        """
        payload_bytes, account = want.payload_bytes, want.account
        while self.accounts.over_quota(account, payload_bytes):
            if not self._evict_older(None, used_at, lambda other: other == account, EvictionCause.QUOTA, want):
                return None
        slot = self._take_free(NO_KEY, want)
        if slot is None:
            may_go = self.accounts.takes_from(account, payload_bytes)
            if not (
                self._grow(want, may_steal, used_at)
                or self._evict_older(payload_bytes, used_at, may_go, EvictionCause.PRESSURE, want)
                or self._grow(want, may_steal=True, used_at=used_at)
            ):
                return None
            slot = self._take_free(NO_KEY, want)
            assert slot is not None, "room for it was just made"
        return slot

    def _evict_older(
        self, size: int | None, used_at: float, may_go: MayGo | None, cause: EvictionCause, want: Want
    ) -> bool:
        victim = self._victim(size, may_go)
        if victim is None:
            return False
        if not self._makes_way(self._in(self._slots[victim]), used_at):
            return False
        self._evict(victim, cause, want)
        return True

    def _makes_way(self, block: Block, used_at: float) -> bool:
        """Whether a block may go for a handed over one that was last used at this time."""
        return block.is_secondary or self.policy.used_at(block.key) < used_at

    def make_primary(self, key: BlockKey) -> None:
        """Make a secondary copy the primary one, because the primary copy's node leaves.

        Its header says so too, for the next start, unless somebody is reading the block: readers compare the header.
        """
        slot = self._slots[key]
        block = self._in(slot)
        if block.is_secondary:
            slot.block = replace(block, is_secondary=False)
            self.secondary_bytes -= block.payload_bytes
            self.policy.make_primary(key)
            if not slot.pins:
                self._emit(WriteHeader(slot.index, self._sealed_header(slot.block)))
            else:
                self._shown_secondary.add(key)

    def by_heat(self) -> list[Block]:
        """All blocks, the most recently used first, and each prefix before the blocks that extend it."""
        return [self._in(self._slots[key]) for key in self.policy.by_heat()]

    def parent_of(self, block: Block) -> BlockKey | None:
        return self.policy.parent_of(block.key)

    def idle_seconds(self, block: Block, now: float) -> float:
        return max(now - self.policy.used_at(block.key), 0.0)

    def written_by(self, ref: BlockRef, owner: bytes) -> Slot | None:
        """The slot of a reservation that is still this owner's, else None."""
        slot = self.table.get(ref.slot)
        if slot is None or slot.state is not SlotState.WRITING:
            return None
        return slot if slot.generation == ref.generation and slot.owner == owner else None

    def promised_as(self, ref: BlockRef) -> Block | None:
        """The block that an engine was promised as this, else None: it is gone, or there never was one."""
        slot = self.table.get(ref.slot)
        return None if slot is None or slot.generation != ref.generation else slot.block

    def write_header_again(self, block: Block) -> None:
        """Write a header again that may have been damaged in memory. It is written as it was, so readers of a sound
        one see no change."""
        as_shown = replace(block, is_secondary=block.is_secondary or block.key in self._shown_secondary)
        self._emit(WriteHeader(block.slot.index, self._sealed_header(as_shown)))

    def seal(
        self,
        slot: Slot,
        key: BlockKey,
        parent: BlockKey | None,
        block_position: int,
        route: SpanRoute,
        digest: int,
        now: float,
        *,
        is_secondary: bool,
        model: str = "",
        fingerprint: bytes = b"",
        stored_at: float = 0.0,
    ) -> Block:
        """WRITING -> SEALED. The key must not be held yet."""
        assert key not in self._slots
        origin = BlockOrigin(b"" if slot.owner == NO_KEY else slot.owner, model, fingerprint)
        if origin != self._origin:
            self._origin = origin
        above = None if parent is None else self.get(parent)
        if above is not None:  # use the parent's objects, so that each block does not keep equal ones
            parent, route = above.key, above.route if above.route == route else route
        self.table.seal(slot)
        block = Block(key, slot, digest, block_position, route, is_secondary, now, stored_at, self._origin)
        self._insert(block, parent, now)
        self._emit(WriteHeader(slot.index, self._sealed_header(block)))
        self._change(Announce(key, route))
        self.counters["blocks_sealed"] += 1
        return block

    def abort(self, slot: Slot) -> None:
        """WRITING -> FREE. Nothing may write the slot any more."""
        self._free(slot, SlotEvent.ABORT)

    def quarantine(self, slot: Slot) -> None:
        """WRITING or SEALED -> QUARANTINED: somebody may still write the slot, or its bytes were wrong."""
        self.table.quarantine(slot)
        self.counters["slots_quarantined"] += 1

    def end_quarantine(self, slot: Slot) -> None:
        """QUARANTINED -> FREE."""
        self._free(slot, SlotEvent.END_QUARANTINE)

    def writers(self) -> set[bytes]:
        """Ids of engines that may still write quarantined slots."""
        resting = (slot for slot in self.table.all_slots() if slot.state is SlotState.QUARANTINED)
        return {slot.owner for slot in resting if len(slot.owner) == len(NO_KEY) and slot.owner != NO_KEY}

    def slots_of(self, owner: bytes, state: SlotState) -> list[Slot]:
        return [slot for slot in self.table.all_slots() if slot.state is state and slot.owner == owner]

    def adopt(self, index: SlotIndex, payload_bytes: int, header: SlotHeader, now: float, *, verified: bool) -> None:
        """Take over a slot that an earlier boot left. A wrong or duplicate block is dropped; so is one that its tenant
        has no quota for, because what was evicted at the quota may still lie there.

        A slot that an engine was writing is quarantined under that engine's id.
        """
        if self.table.get(index) is None and self.table.assign_slab(payload_bytes, slab_of(index)) is None:
            return
        slot = self.table[index]
        account = self.accounts.account_of(header.account_tag)
        if not header.is_stable:
            if header.key == NO_KEY:  # our own fetch: its transport ended with the process
                self._emit(ClearHeader(index))
            else:
                self.table.adopt(index, header.generation, owner=bytes(header.key), account=account)
            return
        is_over = self.accounts.over_quota(account, payload_bytes)
        if not verified or header.key in self._slots or header.length != payload_bytes or is_over:
            self._emit(ClearHeader(index))
            self.counters["adopt_dropped"] += 1
            if not verified:
                self.evictions.add(header.key, EvictionCause.CORRUPT, "", now)
            return
        self.table.adopt(index, header.generation, owner=None, account=account)
        is_secondary = bool(header.flags & SlotFlags.SECONDARY)
        block = Block(header.key, slot, header.digest, header.position, header.route, is_secondary, now)
        self._insert(block, None, now)
        self._emit(WriteHeader(index, self._sealed_header(block)))
        self._change(Announce(block.key, block.route))
        self.counters["blocks_adopted"] += 1

    def _insert(self, block: Block, parent: BlockKey | None, now: float) -> None:
        self._slots[block.key] = block.slot
        block.slot.block = block
        self.secondary_bytes += block.is_secondary * block.payload_bytes
        self.policy.add(
            block.key,
            parent,
            block.position,
            now,
            is_secondary=block.is_secondary,
            size_class=block.payload_bytes,
            account=block.account,
        )
        if self.on_insert is not None:
            self.on_insert(block)

    def _evict(self, key: BlockKey, cause: EvictionCause, want: Want) -> None:
        slot = self._slots[key]
        if self.on_evict is not None:
            self.on_evict(self._in(slot), want.now)
        self._take_out(slot, want, cause)
        self.table.free(slot, SlotEvent.EVICT)

    def _take_out(self, slot: Slot, want: Want, cause: EvictionCause) -> None:
        """Nobody finds the block of this slot any more. The slot itself is left alone."""
        block = self._in(slot)
        key, slot.block = block.key, None
        del self._slots[key]
        self.secondary_bytes -= block.is_secondary * block.payload_bytes
        self._shown_secondary.discard(key)
        self.evictions.add(
            key,
            cause,
            want.room_for,
            want.now,
            held_seconds=want.now - block.sealed_at,
            idle_seconds=want.now - self.policy.used_at(key),
            reason=self._reason(key, cause),
        )
        self.accounts.count(slot.account, "evicted")
        self.removals.add(key, slot.account)
        self.policy.remove(key)
        self._change(Retract(key, block.route))
        self.counters["evicted_secondary" if block.is_secondary else "evicted_primary"] += 1
        self.counters[EVICTED[cause]] += 1

    def _reason(self, key: BlockKey, cause: EvictionCause) -> int:
        """Why the policy chose this block, if it was the policy that chose it."""
        is_victim = cause in (EvictionCause.PRESSURE, EvictionCause.QUOTA)
        return self._explaining.reason(key) if is_victim and self._explaining is not None else NOT_BY_WORTH

    def _grow(self, want: Want, may_steal: bool, used_at: float = math.inf) -> bool:
        """Assign one more slab to this size: an unused one, or one of another size with blocks older than our own that
        make way for a block used at this time."""
        if self._assign_slab(want):
            return True
        if not may_steal:
            return False
        victim = self._victim_for(want)
        own_tick = math.inf if victim is None else self.policy.last_touch(victim)
        stolen = self._slab_to_steal(want, own_tick, used_at)
        if stolen is None:
            return False
        self._move_slab(stolen, want)
        return True

    def _assign_slab(self, want: Want, slab: int | None = None) -> bool:
        """Assign an unused slab, or this one, to this size. False when there is none."""
        slab = self.table.assign_slab(want.payload_bytes, slab)
        if slab is not None:
            self._emit(AssignSlab(slab, want.payload_bytes))
        return slab is not None

    def _evict_one(self, want: Want) -> bool:
        victim = self._victim_for(want)
        if victim is None:
            return False
        self._evict(victim, EvictionCause.PRESSURE, want)
        return True

    def _victim_for(self, want: Want) -> BlockKey | None:
        may_go = self.accounts.takes_from(want.account, want.payload_bytes)
        return self._victim(want.payload_bytes, may_go)

    def _slab_to_steal(self, want: Want, own_tick: float, used_at: float) -> int | None:
        """The oldest slab of another size whose blocks are all older than our own victim and make way."""
        best: tuple[int, int] | None = None
        for size in self.table.payload_sizes:
            if size == want.payload_bytes:
                continue
            for slab in self.table.slabs_of(size):
                slots = self.table.slots_of_slab(slab)
                newest = self._newest_of(slots, own_tick if best is None else best[0], used_at)
                if newest is not None and self._all_can_spare(slots, want.account):
                    best = (newest, slab)
        return None if best is None else best[1]

    def _newest_of(self, slots: list[Slot], before: float, used_at: float) -> int | None:
        """The last touch of a slab's blocks. None if that is not before this tick, or one of its slots is in use. Most
        slabs have such a slot among their first, so a look at each of a large pool takes no time."""
        newest = 0
        for slot in slots:
            if slot.state is SlotState.FREE:
                continue
            if slot.state is not SlotState.SEALED or not self._makes_way(self._in(slot), used_at):
                return None
            newest = max(newest, self.policy.last_touch(self._in(slot).key))
            if newest >= before:
                return None
        return newest

    def _all_can_spare(self, slots: list[Slot], taker: str) -> bool:
        lost: Counter[str] = Counter()
        for slot in slots:
            if slot.account and slot.account != taker:
                lost[slot.account] += slot.payload_bytes
        return all(self.accounts.can_spare(account, count) for account, count in lost.items())

    def _move_slab(self, slab: int, want: Want) -> None:
        for slot in self.table.slots_of_slab(slab):
            if slot.block is not None:
                self._evict(slot.block.key, EvictionCause.SLAB_MOVED, want)
        self.table.unassign_slab(slab)
        self._assign_slab(want, slab)
        self.counters["slabs_moved"] += 1

    def _writing_header(self, slot: Slot) -> SlotHeader:
        return SlotHeader(
            self._epoch,
            slot.generation,
            BlockKey(slot.owner),
            slot.payload_bytes,
            SpanRoute(0),
            digest=0,
            position=0,
            account_tag=tag_of(slot.account),
        )

    def _sealed_header(self, block: Block) -> SlotHeader:
        flags = SlotFlags.SECONDARY if block.is_secondary else SlotFlags.NONE
        return SlotHeader(
            self._epoch,
            block.slot.generation,
            block.key,
            block.payload_bytes,
            block.route,
            block.digest,
            block.position,
            flags,
            tag_of(block.account),
        )

    def check_invariants(self) -> None:
        self.table.check_invariants()
        holding = {slot for slot in self.table.all_slots() if slot.state in (SlotState.SEALED, SlotState.LEASED)}
        assert holding == set(self._slots.values()) | self.retired, "sealed slots and known blocks differ"
        assert all(slot.block is None and slot.pins for slot in self.retired), "a block that was given up is kept"
        for key, slot in self._slots.items():
            assert self._in(slot).key == key, "a block lies in another slot"
        copies = (self._in(slot).payload_bytes for slot in self._slots.values() if self._in(slot).is_secondary)
        assert self.secondary_bytes == sum(copies), "secondary copies are miscounted"
        pinned = {key for key, slot in self._slots.items() if slot.pins}
        assert self._shown_secondary <= self._slots.keys(), "a header is remembered whose block is gone"
        assert self._held_back <= pinned, "the policy holds a block back that nobody reads"
