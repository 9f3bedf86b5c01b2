"""The receiving side of a drain: blocks that a leaving node offers are read, verified and kept as primary copies. Pure.

One TakeOver call is one pull, as in core.acquire, but for blocks that no engine here has requested. So they get only
free room, and the room of blocks that were used less recently. The call is answered when every block is decided, or
when its time is up. Blocks that arrive later are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from kvservice.core.acquire.pulls import LOCATE_GIVE_UP_SECONDS, PULL_BLOCKS_MAX, Pulls
from kvservice.core.actions import Reply
from kvservice.core.context import ShardContext
from kvservice.core.events import PeerTakeOver, PullResult
from kvservice.core.messages import LocateResult, TakeOverResult, names_of
from kvservice.core.segment.refs import BlockHandle
from kvservice.core.store.blocks import Want
from kvservice.core.store.slots import Slot
from kvservice.core.transitions import step
from kvservice.errors import Exhausted
from kvservice.units import BlockKey

TAKES_MAX = 16  # take-overs at once, of all leaving nodes; more are refused with Exhausted and offered again
WAIT_SECONDS_MAX = 30.0  # an answer comes no later, even when the leaving node allows more
ITEMS_MAX = PULL_BLOCKS_MAX


class TakeOverState(Enum):
    LOCATING = "locating"  # the leaving node is asked for a lease
    READING = "reading"
    ANSWERED = "answered"  # its time was up: blocks being read are kept; blocks leased only now are released
    OVER = "over"


class TakeOverEvent(Enum):
    READ = "read"  # blocks are leased, and there is room for some
    ANSWER = "answer"  # its time is up, or the leaving node has given up
    END = "end"  # each block is decided, or nobody will say which blocks are leased


TRANSITIONS: dict[tuple[TakeOverState, TakeOverEvent], TakeOverState] = {
    (TakeOverState.LOCATING, TakeOverEvent.READ): TakeOverState.READING,
    (TakeOverState.LOCATING, TakeOverEvent.ANSWER): TakeOverState.ANSWERED,
    (TakeOverState.LOCATING, TakeOverEvent.END): TakeOverState.OVER,
    (TakeOverState.READING, TakeOverEvent.ANSWER): TakeOverState.ANSWERED,
    (TakeOverState.READING, TakeOverEvent.END): TakeOverState.OVER,
    (TakeOverState.ANSWERED, TakeOverEvent.END): TakeOverState.OVER,
}


@dataclass(slots=True)
class _Take:
    number: int  # of its pull
    offer: PeerTakeOver
    until: float
    kept: list[bool]
    wanted: list[int]  # positions among the offered items of the requested blocks, then of those being read
    asked_at: float
    state: TakeOverState = TakeOverState.LOCATING
    full: bool = False


def room_bytes(free_slabs: int, slab_bytes: int, slot_bytes: Mapping[str, int], secondary_bytes: int) -> int:
    """How many bytes a node could take over: in slots and slabs that nobody uses, and in secondary copies, which make
    way. An estimate, because slots have sizes."""
    return free_slabs * slab_bytes + slot_bytes.get("free", 0) + secondary_bytes


class TakeOvers:
    """The take-overs under way at this node."""

    def __init__(self, shard: ShardContext, pulls: Pulls, sealed: Callable[[BlockKey, float], None]) -> None:
        """`sealed(key, now)` is called when a block has become readable here."""
        self._shard = shard
        self._store = shard.store
        self._emit = shard.emit
        self._counters = shard.counters
        self._pulls = pulls
        self._sealed = sealed
        self._takes: dict[int, _Take] = {}

    def start(self, offer: PeerTakeOver, now: float) -> None:
        """Read and keep offered blocks; answers with a TakeOverResult within its `wait_seconds`. Raises Exhausted when
        too many take-overs are under way."""
        if len(self._takes) >= TAKES_MAX:
            raise Exhausted(f"{TAKES_MAX} take-overs are under way already: offer these blocks again later")
        self._shard.freshness.learn(names_of(offer.items))  # no engine here may have had these names
        kept = [item.key in self._store for item in offer.items]
        for item, held in zip(offer.items, kept, strict=True):
            if held:
                self._store.make_primary(item.key)
        wanted = [position for position, held in enumerate(kept) if not held]
        self._counters["takeover_blocks_offered"] += len(offer.items)
        self._counters["takeover_blocks_held"] += sum(kept)
        if not wanted:
            self._emit(Reply(offer.op, TakeOverResult(tuple(kept), full=False)))
            return
        number = self._pulls.open(self, offer.leaver, offer.payload_bytes)
        until = now + min(offer.wait_seconds, WAIT_SECONDS_MAX)
        self._takes[number] = _Take(number, offer, until, kept, wanted, now)
        self._pulls.locate(number, tuple(offer.items[position].key for position in wanted))

    # -- what pulls report ----

    def located(self, number: int, result: LocateResult | None, sent_at: float, now: float) -> None:
        take = self._takes[number]
        handles: list[BlockHandle] = []
        slots: list[Slot] = []
        if result is not None and take.state is TakeOverState.LOCATING:
            handles, slots = self._take_room(take, result, now)
        if result is None or not slots:
            self._pulls.drop(number, result)
            self._end(take)
            return
        self._move(take, TakeOverEvent.READ)
        self._pulls.begin(number, result, handles, slots, sent_at, take.until)

    def _take_room(self, take: _Take, result: LocateResult, now: float) -> tuple[list[BlockHandle], list[Slot]]:
        """Slots for those leased blocks that are worth them."""
        offer, size, freshness = take.offer, take.offer.payload_bytes, self._shard.freshness
        positions: list[int] = []
        handles: list[BlockHandle] = []
        slots: list[Slot] = []
        room_for = f"blocks that node {offer.leaver.node_id} offered"  # it leaves, or is short of memory
        for position, handle in zip(take.wanted, result.handles, strict=False):
            item = offer.items[position]
            if handle is None or handle.key != item.key or handle.length != size:
                continue  # the leaving node does not have it any more
            account = self._store.accounts.account_of(item.account_tag)
            if not freshness.accepts(freshness.scopes(item.key, account, item.fingerprint), handle.stored_at, now):
                continue  # it would not be kept, so it is not read
            used_at = take.asked_at - item.idle_seconds
            slot = self._store.reserve_for_handover(used_at, Want(size, now, account, room_for), may_steal=not slots)
            if slot is None and self._store.accounts.over_quota(account, size):
                continue  # blocks of other tenants may still get room
            if slot is None:
                take.full = True
                break
            positions.append(position)
            handles.append(handle)
            slots.append(slot)
        take.wanted = positions
        return handles, slots

    def arrived(self, number: int, position: int, handle: BlockHandle, slot: Slot, now: float) -> None:
        take = self._takes[number]
        position = take.wanted[position]
        item = take.offer.items[position]
        is_held = item.key in self._store
        if not is_held and not self._shard.may_keep(handle, slot, slot.account, item.fingerprint, now):
            self._store.abort(slot)
            return
        take.kept[position] = True
        if is_held:  # an engine of this node, or a fetch, was faster
            self._store.abort(slot)
            self._store.make_primary(item.key)
        else:
            # It counts as used now, not when the leaving node used it: a receiver has one clock and one order.
            self._store.seal(
                slot,
                item.key,
                item.parent,
                item.position,
                item.route,
                handle.digest,
                now,
                is_secondary=False,
                model=item.model,
                fingerprint=item.fingerprint,
                stored_at=handle.stored_at,
            )
            self._counters["takeover_blocks_taken"] += 1
            self._counters["takeover_bytes"] += take.offer.payload_bytes
        self._sealed(item.key, now)

    def pulled(self, number: int, results: tuple[PullResult, ...], now: float) -> None:
        for result in results:
            if result is not PullResult.OK:
                self._counters[f"takeover_{result.value}"] += 1
        self._end(self._takes[number])

    # -- time ----

    def tick(self, now: float) -> None:
        """Drop take-overs whose leaving node does not say what is leased, and answer those whose time is up."""
        for take in [take for take in self._locating() if take.asked_at + LOCATE_GIVE_UP_SECONDS <= now]:
            self._counters["takeovers_overdue"] += 1
            self._pulls.drop(take.number)
            self._end(take)
        for take in [take for take in self._unanswered() if take.until <= now]:
            self._move(take, TakeOverEvent.ANSWER)
            self._reply(take)

    def next_deadline(self) -> float | None:
        times = [take.until for take in self._unanswered()]
        times += [take.asked_at + LOCATE_GIVE_UP_SECONDS for take in self._locating()]
        return min(times, default=None)

    def cancel(self, op: int) -> None:
        """The leaving node has given up. Blocks on their way are kept."""
        for take in self._unanswered():
            if take.offer.op == op:
                self._move(take, TakeOverEvent.ANSWER)

    # -- inside ----

    def _unanswered(self) -> list[_Take]:
        return [take for take in self._takes.values() if take.state is not TakeOverState.ANSWERED]

    def _locating(self) -> list[_Take]:
        """Those whose leaving node has not said what is leased; some of them may be answered."""
        return [take for take in self._takes.values() if self._pulls.is_locating(take.number)]

    def _end(self, take: _Take) -> None:
        waits = take.state is not TakeOverState.ANSWERED
        self._move(take, TakeOverEvent.END)
        if waits:
            self._reply(take)

    def _reply(self, take: _Take) -> None:
        self._emit(Reply(take.offer.op, TakeOverResult(tuple(take.kept), take.full)))

    def _move(self, take: _Take, event: TakeOverEvent) -> None:
        take.state = step(TRANSITIONS, take.state, event, f"take-over {take.number}")
        if take.state is TakeOverState.OVER:
            del self._takes[take.number]

    def check_invariants(self) -> None:
        assert len(self._takes) <= TAKES_MAX
        assert self._takes.keys() == self._pulls.owned_by(self), "a take-over without a pull, or a pull without one"
        for number, take in self._takes.items():
            assert take.number == number and take.state is not TakeOverState.OVER
            assert len(take.kept) == len(take.offer.items)
            if take.state is not TakeOverState.ANSWERED:
                locates = take.state is TakeOverState.LOCATING
                assert self._pulls.is_locating(number) == locates, "a take-over and its pull differ"
