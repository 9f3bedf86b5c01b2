"""Pulls: lease blocks of other nodes, read them into reserved slots of this node and verify them, or fail. Pure.

Fetches (core.acquire.acquisitions) and take-overs (core.drain.receiver) consist of pulls. They decide which blocks and
which slots. This module keeps the rules common to both: no slot is used again while a transfer may still write it;
slots with bytes that failed verification are quarantined; a peer's lease is released when nothing reads under it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from kvservice.core.actions import BringBack, Locate, Pull, ReleaseRemote
from kvservice.core.block.keys import KEYS_PER_REQUEST_MAX
from kvservice.core.context import ShardContext
from kvservice.core.events import BroughtBlock, PullResult
from kvservice.core.messages import Holder, LocateResult
from kvservice.core.segment.refs import BlockHandle, BlockRef
from kvservice.core.store.slots import Slot, SlotState
from kvservice.core.tier.rules import is_tier
from kvservice.core.tier.tier_block import TierBlock
from kvservice.core.transitions import step
from kvservice.units import BlockKey

LOCATE_SECONDS_MAX = 1.0  # a peer answers from memory in milliseconds; after this it counts as failed
LOCATE_WAIT_SECONDS_MAX = 0.8  # of these, a peer may spend bringing blocks back from its disk; it then says what it has
# Connecting and asking take LOCATE_SECONDS_MAX each; after this no answer will come, and the owner drops the pull.
LOCATE_GIVE_UP_SECONDS = 3.0
PULL_BLOCKS_MAX = 512  # of one pull: bounds remote leases and headers in flight; longer runs are several pulls
PULL_SECONDS_MAX = 60.0  # a pull ends after this even if the peer's lease is longer
LEASE_MARGIN_SECONDS = 1.0  # reading stops this long before the peer's lease ends, so clocks need not run equally fast
SUSPECT_SECONDS = 60.0  # a slot whose bytes failed verification is not used for this long, if something still writes it
assert LOCATE_WAIT_SECONDS_MAX < LOCATE_SECONDS_MAX
assert LOCATE_GIVE_UP_SECONDS > 2 * LOCATE_SECONDS_MAX
_NOT_AS_LEASED = (PullResult.STALE, PullResult.CORRUPT)  # its holder looks at such a block: core.acquire.suspects
assert PULL_BLOCKS_MAX <= KEYS_PER_REQUEST_MAX, "a Locate must have room for a pull"
assert LEASE_MARGIN_SECONDS < PULL_SECONDS_MAX


class PullState(Enum):
    LOCATING = "locating"  # the peer is asked for a lease
    PULLING = "pulling"  # the transport reads into slots that are reserved for it
    STUCK = "stuck"  # it has ended, but some of its slots may still be written
    OVER = "over"


class PullEvent(Enum):
    BEGIN = "begin"  # blocks are leased, and there are slots for them
    DROP = "drop"  # there is nothing to read, or nobody waits for it any more
    FINISH = "finish"  # each slot was sealed or given back
    STICK = "stick"  # some slots were, and the others may still be written
    WRITES_END = "writes end"  # nothing writes those any more


TRANSITIONS: dict[tuple[PullState, PullEvent], PullState] = {
    (PullState.LOCATING, PullEvent.BEGIN): PullState.PULLING,
    (PullState.LOCATING, PullEvent.DROP): PullState.OVER,
    (PullState.PULLING, PullEvent.FINISH): PullState.OVER,
    (PullState.PULLING, PullEvent.STICK): PullState.STUCK,
    (PullState.STUCK, PullEvent.WRITES_END): PullState.OVER,
}


class PullOwner(Protocol):
    """The part of the core that wants the blocks of a pull."""

    def located(self, number: int, result: LocateResult | None, sent_at: float, now: float) -> None:
        """The peer's answer; None when it failed. The owner must begin the pull or drop it."""
        ...

    def arrived(self, number: int, position: int, handle: BlockHandle, slot: Slot, now: float) -> None:
        """This block is in its slot and verified. The owner must seal the slot or abort it."""
        ...

    def pulled(self, number: int, results: tuple[PullResult, ...], now: float) -> None:
        """The pull has ended, with one result for each handle. Slots that got no block have been discarded."""
        ...


@dataclass(slots=True)
class PeerPull:
    """One pull. Mutable: it is the record that `Pulls` keeps."""

    number: int  # names it in Locate, Pull and their answers; never used again
    owner: PullOwner
    holder: Holder
    payload_bytes: int
    state: PullState = PullState.LOCATING
    leased: LocateResult | None = None
    handles: tuple[BlockHandle, ...] = ()  # the blocks being read
    slots: tuple[Slot, ...] = ()  # their targets, one for each handle
    stuck: list[Slot] = field(default_factory=list)


class Pulls:
    """Every pull that has not ended, of all owners."""

    def __init__(self, shard: ShardContext) -> None:
        self._shard = shard
        self._open: dict[int, PeerPull] = {}
        self._suspects: list[tuple[float, Slot]] = []  # (free again at, slot)
        self._next_number = 1

    # -- what owners ask ----

    def open(self, owner: PullOwner, holder: Holder, payload_bytes: int) -> int:
        """Make a pull and return its number. Call `locate` next, or `begin` when the blocks are leased already."""
        number = self._next_number
        self._next_number += 1
        self._open[number] = PeerPull(number, owner, holder, payload_bytes)
        return number

    def locate(self, number: int, keys: tuple[BlockKey, ...], wait_seconds: float = 0.0) -> None:
        """Ask the peer to lease these blocks. It may take `wait_seconds` to bring back what it has only in a tier. The
        owner's `located` gets the answer."""
        wait = min(wait_seconds, LOCATE_WAIT_SECONDS_MAX)
        self._shard.emit(Locate(number, self._open[number].holder, keys, LOCATE_SECONDS_MAX, wait))

    def begin(
        self,
        number: int,
        leased: LocateResult,
        handles: Sequence[BlockHandle],
        slots: Sequence[Slot],
        sent_at: float,
        until: float = math.inf,
    ) -> float:
        """Read leased blocks, each into its reserved slot. `sent_at` is the local clock before the lease was requested.
        Returns the time by which the transport must have ended, which is at most `until`."""
        pull = self._open[number]
        self._move(pull, PullEvent.BEGIN)
        pull.leased, pull.handles, pull.slots = leased, tuple(handles), tuple(slots)
        items = tuple((handle, slot.index) for handle, slot in zip(handles, slots, strict=True))
        deadline = min(sent_at + min(leased.lease_seconds, PULL_SECONDS_MAX) - LEASE_MARGIN_SECONDS, until)
        self._shard.emit(Pull(number, pull.holder, leased.epoch, pull.payload_bytes, items, deadline))
        return deadline

    def bring_back(
        self, number: int, tier: str, blocks: Sequence[TierBlock], slots: Sequence[Slot], until: float, *, urgent: bool
    ) -> None:
        """Read blocks of a tier, each into its reserved slot. Nothing is located, and nothing is leased."""
        pull = self._open[number]
        self._move(pull, PullEvent.BEGIN)
        pull.slots = tuple(slots)
        pull.handles = tuple(
            BlockHandle(b.key, s.index, s.generation, b.payload_bytes, b.digest, b.position, b.stored_at)
            for b, s in zip(blocks, slots, strict=True)
        )
        items = tuple((block, slot.index) for block, slot in zip(blocks, slots, strict=True))
        self._shard.emit(BringBack(number, tier, items, until, urgent))

    def drop(self, number: int, leased: LocateResult | None = None) -> None:
        """End a pull without reading. Releases what was leased."""
        pull = self._open[number]
        self._move(pull, PullEvent.DROP)
        self._release(pull.holder, leased)

    def is_locating(self, number: int) -> bool:
        return self._open[number].state is PullState.LOCATING

    # -- what the performer reports ----

    def located(self, number: int, result: LocateResult | None, sent_at: float, now: float) -> None:
        pull = self._open.get(number)
        if pull is None or pull.state is not PullState.LOCATING:
            return  # too late: a lease that came with the answer expires
        pull.owner.located(number, result, sent_at, now)

    def pulled(self, number: int, results: Sequence[PullResult], now: float) -> None:
        """Take the results of the transport. A slot without a result may still be written."""
        pull = self._open.get(number)
        if pull is not None and pull.state is PullState.PULLING:
            count = len(pull.slots)
            self._finish(pull, (*results[:count], *[PullResult.STUCK] * (count - len(results))), now)

    def brought_back(self, number: int, blocks: Sequence[BroughtBlock], now: float) -> None:
        """Take the answer of a tier."""
        pull = self._open.get(number)
        if pull is not None and pull.state is PullState.PULLING:
            self._finish(pull, self._as_brought(pull, blocks), now)

    def _finish(self, pull: PeerPull, known: tuple[PullResult, ...], now: float) -> None:
        number, slots, pull.slots = pull.number, pull.slots, ()
        for position, (slot, result) in enumerate(zip(slots, known, strict=True)):
            if result is PullResult.OK:
                pull.owner.arrived(number, position, pull.handles[position], slot, now)
            else:
                self._discard(pull, slot, result, now)
        if pull.stuck:
            self._move(pull, PullEvent.STICK)
        else:
            self._move(pull, PullEvent.FINISH)
            results = zip(pull.handles, known, strict=True)
            self._release(pull.holder, pull.leased, [handle for handle, result in results if result in _NOT_AS_LEASED])
        pull.owner.pulled(number, known, now)

    @staticmethod
    def _as_brought(pull: PeerPull, blocks: Sequence[BroughtBlock]) -> tuple[PullResult, ...]:
        """Give each block the digest and the time that the tier verified: a codec that loses bits changes the one, and
        of what others wrote neither was known. A block without a digest did not come, and a tier that has answered
        writes no slot."""
        handles: list[BlockHandle] = []
        known: list[PullResult] = []
        for place, handle in enumerate(pull.handles):
            block = blocks[place] if place < len(blocks) else BroughtBlock(PullResult.FAILED)
            handles.append(handle._replace(digest=block.digest or handle.digest, stored_at=block.stored_at))
            lost = block.result is PullResult.STUCK or (block.result is PullResult.OK and not handles[-1].digest)
            known.append(PullResult.FAILED if lost else block.result)
        pull.handles = tuple(handles)
        return tuple(known)

    def writes_ended(self, number: int) -> None:
        pull = self._open.get(number)
        if pull is None or pull.state is not PullState.STUCK:
            return
        for slot in pull.stuck:
            self._shard.store.end_quarantine(slot)
        self._move(pull, PullEvent.WRITES_END)

    # -- time ----

    def tick(self, now: float) -> None:
        for until, slot in self._suspects:
            if until <= now:
                self._shard.store.end_quarantine(slot)
        self._suspects = [(until, slot) for until, slot in self._suspects if until > now]

    def next_deadline(self) -> float | None:
        return min((until for until, _ in self._suspects), default=None)

    # -- inside ----

    def _discard(self, pull: PeerPull, slot: Slot, result: PullResult, now: float) -> None:
        if result is PullResult.STUCK:
            self._shard.store.quarantine(slot)
            pull.stuck.append(slot)
        elif result is PullResult.CORRUPT and not is_tier(pull.holder.node_id):  # a tier that answered writes no more
            self._shard.store.quarantine(slot)
            self._suspects.append((now + SUSPECT_SECONDS, slot))
        else:
            self._shard.store.abort(slot)

    def _release(self, holder: Holder, leased: LocateResult | None, doubted: Sequence[BlockHandle] = ()) -> None:
        if leased is not None and leased.lease_id:
            suspects = tuple(BlockRef(handle.slot, handle.generation) for handle in doubted)
            self._shard.emit(ReleaseRemote(holder, leased.epoch, leased.lease_id, suspects))

    def _move(self, pull: PeerPull, event: PullEvent) -> None:
        pull.state = step(TRANSITIONS, pull.state, event, f"pull {pull.number}")
        if pull.state is PullState.OVER:
            del self._open[pull.number]

    def owned_by(self, owner: PullOwner) -> set[int]:
        """Numbers of the pulls that this owner will still hear of, for checks."""
        states = (PullState.LOCATING, PullState.PULLING)
        return {pull.number for pull in self._open.values() if pull.owner is owner and pull.state in states}

    def writing(self) -> tuple[int, int]:
        """How many slots are being read into, and their bytes."""
        pulls = self._open.values()
        return sum(len(pull.slots) for pull in pulls), sum(len(pull.slots) * pull.payload_bytes for pull in pulls)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being read and no slot is quarantined."""
        return not (self._open or self._suspects)

    def check_invariants(self) -> None:
        resting = [slot for _, slot in self._suspects]
        for number, pull in self._open.items():
            assert pull.number == number
            assert pull.state is not PullState.OVER, "a pull that is over is kept"
            assert bool(pull.slots) == (pull.state is PullState.PULLING), "slots are held and nothing writes them"
            assert bool(pull.stuck) == (pull.state is PullState.STUCK), "slots are held back for nothing"
            assert len(pull.slots) in (0, len(pull.handles)), "a slot without a block to read"
            for slot in pull.slots:
                assert slot.state is SlotState.WRITING, "a pull writes a slot that is not reserved for it"
            resting += pull.stuck
        for slot in resting:
            assert slot.state is SlotState.QUARANTINED, "a slot does not rest as it should"
        assert len(resting) == len({slot.index for slot in resting}), "a slot is to be given back twice"
