"""The receiving side of a drain: blocks that a leaving node offers are read, verified and kept as primary copies.

One TakeOver call is one Locate and one Pull, as in core.acquire, but for blocks that no engine here has asked for: they
may take free room, and the room of blocks that were used less recently than they were, and nothing else. The call is
answered when all of it is decided, or when its time is up; a transfer that goes on after that keeps its slots.

    locating -> pulling -> over
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvservice.core.acquire.acquisitions import (
    LEASE_MARGIN_SECONDS,
    LOCATE_SECONDS_MAX,
    PULL_BLOCKS_MAX,
    PULL_SECONDS_MAX,
    SUSPECT_SECONDS,
)
from kvservice.core.actions import Locate, Pull, ReleaseRemote, Reply
from kvservice.core.context import ShardContext
from kvservice.core.events import PullResult
from kvservice.core.messages import Holder, LocateResult, TakeOverItem, TakeOverResult
from kvservice.core.segment.refs import BlockHandle
from kvservice.core.store.blocks import Want
from kvservice.core.store.slots import Slot
from kvservice.errors import Exhausted
from kvservice.units import BlockKey, LeaseId, SlotIndex

TAKES_MAX = 16  # at once, of all leaving nodes
WAIT_SECONDS_MAX = 30.0
ITEMS_MAX = PULL_BLOCKS_MAX


@dataclass(slots=True)
class _Take:
    number: int  # negative: core.acquire.acquisitions counts its own upwards
    op: int
    leaver: Holder
    payload_bytes: int
    items: tuple[TakeOverItem, ...]
    until: float
    kept: list[bool]
    wanted: list[int]  # positions in `items` that are asked for, then those that are being pulled
    asked_at: float
    full: bool = False
    answered: bool = False
    pulling: bool = False
    lease: tuple[Holder, LocateResult] | None = None
    handles: list[BlockHandle] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)


class TakeOvers:
    def __init__(self, shard: ShardContext, sealed: Callable[[BlockKey, float], None]) -> None:
        """`sealed(key, now)`: a block can be read here from now on."""
        self._store = shard.store
        self._emit = shard.emit
        self._counters = shard.counters
        self._sealed = sealed
        self._takes: dict[int, _Take] = {}
        self._stuck: dict[int, list[SlotIndex]] = {}
        self._suspects: list[tuple[float, SlotIndex]] = []
        self._next = -1

    def owns(self, number: int) -> bool:
        """This Located, Pulled or WritesEnded is for a take-over."""
        return number < 0

    def start(
        self, op: int, leaver: Holder, payload_bytes: int, items: tuple[TakeOverItem, ...], wait_seconds: float,
        now: float,
    ) -> None:  # fmt: skip
        """Answered by a TakeOverResult within `wait_seconds`. Raises Exhausted when too many are under way."""
        if len(self._takes) >= TAKES_MAX:
            raise Exhausted(f"{TAKES_MAX} take-overs are under way already: offer these blocks again later")
        kept = [item.key in self._store for item in items]
        for item, held in zip(items, kept, strict=True):
            if held:
                self._store.make_primary(item.key)
        wanted = [position for position, held in enumerate(kept) if not held]
        self._counters["takeover_blocks_offered"] += len(items)
        self._counters["takeover_blocks_held"] += sum(kept)
        until = now + min(wait_seconds, WAIT_SECONDS_MAX)
        take = _Take(self._next, op, leaver, payload_bytes, items, until, kept, wanted, now)
        self._next -= 1
        if not wanted:
            self._answer(take)
            return
        self._takes[take.number] = take
        keys = tuple(items[position].key for position in wanted)
        self._emit(Locate(take.number, leaver, keys, LOCATE_SECONDS_MAX))

    def located(self, number: int, result: LocateResult | None, sent_at: float, now: float) -> None:
        take = self._takes.get(number)
        if take is None or take.pulling:
            if result is not None and result.lease_id and take is None:
                self._counters["takeover_late_leases"] += 1  # ends by itself: whose it was is forgotten
            return
        if result is None or take.answered:
            if result is not None and result.lease_id:
                self._emit(ReleaseRemote(take.leaver, result.epoch, result.lease_id))
            self._end(take)
            return
        take.lease = (take.leaver, result)
        self._take_room(take, result, now)
        if not take.slots:
            self._end(take)
            return
        take.pulling = True
        pulled = tuple((handle, slot.index) for handle, slot in zip(take.handles, take.slots, strict=True))
        deadline = min(sent_at + min(result.lease_seconds, PULL_SECONDS_MAX) - LEASE_MARGIN_SECONDS, take.until)
        self._emit(Pull(number, take.leaver, result.epoch, take.payload_bytes, pulled, deadline))

    def _take_room(self, take: _Take, result: LocateResult, now: float) -> None:
        positions: list[int] = []
        room_for = f"blocks of node {take.leaver.node_id}, which leaves"
        for position, handle in zip(take.wanted, result.handles, strict=False):
            item = take.items[position]
            if handle is None or handle.key != item.key or handle.length != take.payload_bytes:
                continue  # gone over there meanwhile
            account = self._store.accounts.account_of(item.account_tag)
            used_at = take.asked_at - item.idle_seconds
            slot = self._store.reserve_for_handover(used_at, Want(take.payload_bytes, now, account, room_for))
            if slot is None and self._store.accounts.over_quota(account, take.payload_bytes):
                continue  # others may have room for theirs
            if slot is None:
                take.full = True
                break
            positions.append(position)
            take.handles.append(handle)
            take.slots.append(slot)
        take.wanted = positions

    def pulled(self, number: int, results: Sequence[PullResult], now: float) -> None:
        take = self._takes.get(number)
        if take is None or not take.pulling:
            return
        for place, (position, slot) in enumerate(zip(take.wanted, take.slots, strict=True)):
            result = results[place] if place < len(results) else PullResult.STUCK
            if result is PullResult.OK:
                self._keep(take, position, take.handles[place], slot, now)
            else:
                self._discard(number, slot, result, now)
        take.slots = []
        self._end(take)

    def writes_ended(self, number: int) -> None:
        for index in self._stuck.pop(number, []):
            self._store.end_quarantine(self._store.table[index])

    def tick(self, now: float) -> None:
        for take in [take for take in self._takes.values() if take.until <= now]:
            self._answer(take)
        resting = [(until, index) for until, index in self._suspects if until > now]
        for until, index in self._suspects:
            if until <= now:
                self._store.end_quarantine(self._store.table[index])
        self._suspects = resting

    def next_deadline(self) -> float | None:
        times = [take.until for take in self._takes.values() if not take.answered]
        times += [until for until, _ in self._suspects]
        return min(times, default=None)

    def cancel(self, op: int) -> None:
        """The leaving node asks no more: what is on its way is kept all the same."""
        for take in self._takes.values():
            if take.op == op:
                take.answered = True

    # -- inside ----

    def _keep(self, take: _Take, position: int, handle: BlockHandle, slot: Slot, now: float) -> None:
        item = take.items[position]
        take.kept[position] = True
        if item.key in self._store:  # an engine of this node, or a fetch, was faster
            self._store.abort(slot)
            self._store.make_primary(item.key)
        else:
            self._store.seal(
                slot, item.key, item.parent, item.position, item.route, handle.digest, now, is_secondary=False
            )
            self._counters["takeover_blocks_taken"] += 1
            self._counters["takeover_bytes"] += take.payload_bytes
        self._sealed(item.key, now)

    def _discard(self, number: int, slot: Slot, result: PullResult, now: float) -> None:
        self._counters[f"takeover_{result.value}"] += 1
        if result is PullResult.STUCK:
            self._store.quarantine(slot)
            self._stuck.setdefault(number, []).append(slot.index)
        elif result is PullResult.CORRUPT:
            self._store.quarantine(slot)
            self._suspects.append((now + SUSPECT_SECONDS, slot.index))
        else:
            self._store.abort(slot)

    def _end(self, take: _Take) -> None:
        del self._takes[take.number]
        if take.lease is not None and take.number not in self._stuck:
            holder, result = take.lease
            if result.lease_id != LeaseId(0):
                self._emit(ReleaseRemote(holder, result.epoch, result.lease_id))
        self._answer(take)

    def _answer(self, take: _Take) -> None:
        if not take.answered:
            take.answered = True
            take.until = math.inf
            self._emit(Reply(take.op, TakeOverResult(tuple(take.kept), take.full)))

    def check_invariants(self) -> None:
        for take in self._takes.values():
            assert len(take.slots) == len(take.handles), "a slot without a block to read"
            assert take.pulling == bool(take.slots), "slots are held and nothing writes them"
            assert len(take.kept) == len(take.items)
