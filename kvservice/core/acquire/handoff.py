"""Hand-offs: a prompt that one engine computes for another one. This is the part of the writer's node. Pure.

The writer's engine opens a hand-off when the request arrives. It closes the hand-off when everything that it will store
is sealed, or when it stops. Readers follow it: they name the blocks that they want and get them as they are sealed. A
hand-off promises nothing: a reader only gets sealed blocks, under a lease. When the writer dies, aborts or evicts, the
reader is told at once that no more will come.

An Open or a Close may be lost, late, duplicated or overtaken by the other (core.reconcile). Closed is final: a Close
that comes first leaves a mark that the Open finds. Statements of the writer's engine open the hand-offs that they name,
keep them open, and close those that they deny. Of a writer that sends nothing, but whose attachment lives, a hand-off
stays open for OPEN_SECONDS at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from kvservice.core.actions import Reply
from kvservice.core.block.tenants import NOBODY
from kvservice.core.context import ShardContext
from kvservice.core.events import PeerFollow
from kvservice.core.messages import FollowResult, HandoffState, Statement
from kvservice.core.reconcile import STATED_HANDOFFS_MAX, is_settled
from kvservice.core.store.slots import Block
from kvservice.core.transitions import step
from kvservice.errors import Exhausted, InvalidRequest
from kvservice.units import AttachmentId, BlockKey, HandoffId

HANDOFF_ID_BYTES = 16  # random, so that no two are equal; other lengths are refused
OPEN_MAX = 4096  # entries of one shard, open and closed. At the limit closed ones go first, then Exhausted is raised.
OPEN_OF_ONE_MAX = 1024  # of one attachment, so that none of them uses up all entries
# A tenant has no more hand-offs open than are left for others: one alone half of OPEN_MAX, each of two a third.
OPEN_SECONDS = 120.0  # without a message of its writer: longer than any pause that an engine survives. Then it closes.
# Readers ask and are answered late. If news were pushed to them, nobody would notice that one of them is gone. A reader
# has one question for each request that follows a writer; above this limit Exhausted is raised.
FOLLOWS_MAX = 4096
CLOSED_SECONDS = 30.0  # a closed hand-off is forgotten after this, and later readers are told "unknown"
APPEAR_SECONDS = 3.0  # a reader may ask before the writer has opened; after this the hand-off will not appear
GATHER_SECONDS = 0.01  # blocks of one engine step are sealed within this, and are answered together
WAIT_SECONDS_MAX = 10.0  # an answer comes no later, even when the reader allows more; it then asks again
assert OPEN_OF_ONE_MAX <= STATED_HANDOFFS_MAX, "a statement must have room for every open hand-off"
assert OPEN_OF_ONE_MAX < OPEN_MAX
assert APPEAR_SECONDS < WAIT_SECONDS_MAX < OPEN_SECONDS


def check_handoff_id(handoff: bytes) -> HandoffId:
    """The id, checked. Raises InvalidRequest when it does not have 16 bytes."""
    if len(handoff) != HANDOFF_ID_BYTES:
        raise InvalidRequest(f"a hand-off id is {HANDOFF_ID_BYTES} bytes, not {len(handoff)}", length=len(handoff))
    return HandoffId(handoff)


class HandoffEvent(Enum):
    OPEN = "open"
    CLOSE = "close"


HANDOFF_TRANSITIONS: dict[tuple[HandoffState, HandoffEvent], HandoffState] = {
    (HandoffState.UNKNOWN, HandoffEvent.OPEN): HandoffState.OPEN,
    (HandoffState.UNKNOWN, HandoffEvent.CLOSE): HandoffState.CLOSED,
    (HandoffState.OPEN, HandoffEvent.OPEN): HandoffState.OPEN,
    (HandoffState.OPEN, HandoffEvent.CLOSE): HandoffState.CLOSED,
    (HandoffState.CLOSED, HandoffEvent.CLOSE): HandoffState.CLOSED,
    (HandoffState.CLOSED, HandoffEvent.OPEN): HandoffState.CLOSED,
}


class FollowState(Enum):
    WAITING = "waiting"  # none of the requested blocks is sealed
    GATHERING = "gathering"  # some are; those sealed within GATHER_SECONDS are answered together with them
    OVER = "over"


class FollowEvent(Enum):
    SEALED = "sealed"  # the next requested block
    ANSWER = "answer"  # all blocks are there, the hand-off is closed, or time is up
    CANCEL = "cancel"  # the reader is gone


FOLLOW_TRANSITIONS: dict[tuple[FollowState, FollowEvent], FollowState] = {
    (FollowState.WAITING, FollowEvent.SEALED): FollowState.GATHERING,
    (FollowState.WAITING, FollowEvent.ANSWER): FollowState.OVER,
    (FollowState.WAITING, FollowEvent.CANCEL): FollowState.OVER,
    (FollowState.GATHERING, FollowEvent.SEALED): FollowState.GATHERING,
    (FollowState.GATHERING, FollowEvent.ANSWER): FollowState.OVER,
    (FollowState.GATHERING, FollowEvent.CANCEL): FollowState.OVER,
}


@dataclass(slots=True)
class _Handoff:
    attachment: AttachmentId
    account: str  # the tenant of the attachment
    state: HandoffState
    until: float  # an open one is closed then; a closed one is forgotten
    call: int  # number of the Open, as far as it is known; statements composed before that call do not count here
    is_heard: bool  # the Open itself has arrived


@dataclass(slots=True)
class _Follow:
    """A reader's question that has not been answered yet."""

    call: PeerFollow
    due: float  # it is answered then, with whatever is there
    have: int = 0  # leading keys that are sealed
    state: FollowState = FollowState.WAITING

    @property
    def next_key(self) -> BlockKey | None:
        """The first key that is not sealed; None when all are."""
        return self.call.keys[self.have] if self.have < len(self.call.keys) else None


@dataclass(slots=True)
class _Watch:
    """A reader on this node. It sees the blocks itself and only needs to be told of the end."""

    handoff: HandoffId
    until: float  # a hand-off that is unknown at this time will not appear


class Handoffs:
    """The hand-offs whose writers are on this node, and everybody who follows them."""

    def __init__(
        self, shard: ShardContext, ended: Callable[[int, float], None], account_of: Callable[[AttachmentId], str]
    ) -> None:
        """`ended(op, now)` is called when the hand-off that this watcher waits for has ended. `account_of` says whose
        an attachment is."""
        self._shard = shard
        self._account_of = account_of
        self._store = shard.store
        self._counters = shard.counters
        self._ended = ended
        self._handoffs: dict[HandoffId, _Handoff] = {}
        self._follows: dict[int, _Follow] = {}
        self._next_key: dict[BlockKey, list[int]] = {}  # first key that a follow lacks -> ops
        self._watches: dict[int, _Watch] = {}

    @property
    def open_count(self) -> int:
        return sum(known.state is HandoffState.OPEN for known in self._handoffs.values())

    # -- the writer ----

    def open(self, handoff: HandoffId, attachment: AttachmentId, call: int, now: float) -> None:
        """Open a hand-off. A repetition of the same call has no effect, and a closed hand-off stays closed."""
        known = self._enter(handoff, attachment, call, now)
        if known is None:
            raise Exhausted(
                f"{self.open_count} hand-offs are open already: one engine may have {OPEN_OF_ONE_MAX}, all {OPEN_MAX}, "
                "and a tenant as many as it leaves for others"
            )
        if known.attachment != attachment or (known.is_heard and not 0 < call == known.call):
            raise InvalidRequest(f"hand-off {handoff.hex()} exists already: use a fresh random id for each request")
        known.call, known.is_heard = call, True
        self._move(known, HandoffEvent.OPEN, now)

    def close(self, handoff: HandoffId, attachment: AttachmentId, now: float) -> None:
        """The writer will seal nothing more for it. Closing another engine's hand-off is counted and ignored."""
        known = self._enter(handoff, attachment, 0, now)
        if known is None or known.attachment != attachment:
            self._counters["handoff_close_ignored"] += 1
            return
        self._close(handoff, known, now)

    def reconcile(self, statement: Statement, attachment: AttachmentId, now: float) -> None:
        """Take over which of its hand-offs the writer says are open."""
        for handoff in statement.handoffs:
            # Its Open may still be on the way. Statements composed before it have lower numbers than this one.
            known = self._enter(handoff, attachment, statement.calls, now)
            if known is not None and known.attachment == attachment:
                self._move(known, HandoffEvent.OPEN, now)
        stated = frozenset(statement.handoffs)
        for handoff, known in list(self._handoffs.items()):
            is_mine = known.attachment == attachment and known.state is HandoffState.OPEN
            if is_mine and handoff not in stated and is_settled(known.call, statement):
                self._counters["handoffs_reconciled"] += 1
                self._close(handoff, known, now)

    def _enter(self, handoff: HandoffId, attachment: AttachmentId, call: int, now: float) -> _Handoff | None:
        """The known entry, or a new one whose state the caller changes at once. None when there is no room."""
        known = self._handoffs.get(handoff)
        if known is None and self._has_room(attachment, account := self._account_of(attachment)):
            known = _Handoff(attachment, account, HandoffState.UNKNOWN, now, call, is_heard=False)
            self._handoffs[handoff] = known
        return known

    def _has_room(self, attachment: AttachmentId, account: str) -> bool:
        """Make room for one more entry, by forgetting the closed one that is due first. False when there is none."""
        if len(self._handoffs) < OPEN_OF_ONE_MAX:
            return True
        is_open = [known for known in self._handoffs.values() if known.state is HandoffState.OPEN]
        if len(is_open) == OPEN_MAX or sum(known.attachment == attachment for known in is_open) >= OPEN_OF_ONE_MAX:
            return False
        if account != NOBODY and sum(known.account == account for known in is_open) >= OPEN_MAX - len(is_open):
            return False
        if len(self._handoffs) == OPEN_MAX:
            closed = [(h.until, name) for name, h in self._handoffs.items() if h.state is HandoffState.CLOSED]
            del self._handoffs[min(closed)[1]]
        return True

    def _move(self, known: _Handoff, event: HandoffEvent, now: float) -> None:
        before, known.state = known.state, step(HANDOFF_TRANSITIONS, known.state, event, "a hand-off")
        if known.state is HandoffState.OPEN:
            known.until = now + OPEN_SECONDS
        elif before is not HandoffState.CLOSED:
            known.until = now + CLOSED_SECONDS
        is_open = known.state is HandoffState.OPEN
        self._counters["handoffs_opened"] += is_open and before is not HandoffState.OPEN
        self._counters["handoffs_closed"] += before is HandoffState.OPEN and not is_open

    def _close(self, handoff: HandoffId, known: _Handoff, now: float) -> None:
        self._move(known, HandoffEvent.CLOSE, now)
        for follow in [f for f in self._follows.values() if f.call.handoff == handoff]:
            self._answer(follow, now)
        for op in [op for op, watch in self._watches.items() if watch.handoff == handoff]:
            self._end_watch(op, now)

    def end_attachment(self, attachment: AttachmentId, now: float) -> None:
        """The writer is gone: close all its hand-offs."""
        for handoff, known in list(self._handoffs.items()):
            if known.attachment == attachment and known.state is HandoffState.OPEN:
                self._counters["handoffs_broken"] += 1
                self._close(handoff, known, now)

    def sealed(self, key: BlockKey, now: float) -> None:
        """A block has become readable."""
        for op in self._next_key.pop(key, ()):
            follow = self._follows[op]
            self._advance(follow)
            if follow.state is FollowState.WAITING:
                follow.due = min(follow.due, now + GATHER_SECONDS)
            self._move_follow(follow, FollowEvent.SEALED)
            if follow.next_key is None:
                self._answer(follow, now)

    # -- readers ----

    def follow(self, call: PeerFollow, now: float) -> None:
        """Answer with a FollowResult of the leading keys that are sealed: as soon as there are any, when the hand-off
        is closed, or after its `wait_seconds`. Raises Exhausted when too many readers follow."""
        if len(self._follows) >= FOLLOWS_MAX:
            raise Exhausted(f"{FOLLOWS_MAX} readers follow hand-offs here already")
        follow = self._follows[call.op] = _Follow(call, now + min(call.wait_seconds, WAIT_SECONDS_MAX))
        self._advance(follow)
        self._counters["follows"] += 1
        if follow.have or self._state(call.handoff) is HandoffState.CLOSED or follow.due <= now:
            self._answer(follow, now)

    def watch(self, op: int, handoff: HandoffId, now: float) -> None:
        """Call `ended(op)` once, when this hand-off has ended or did not appear in time."""
        self._watches[op] = _Watch(handoff, now + APPEAR_SECONDS)
        if self._state(handoff) is HandoffState.CLOSED:
            self._end_watch(op, now)

    def cancel(self, op: int) -> None:
        """The caller of `follow`, or the reader that watches, is gone."""
        self._watches.pop(op, None)
        follow = self._follows.get(op)
        if follow is not None:
            self._move_follow(follow, FollowEvent.CANCEL)

    # -- time ----

    def tick(self, now: float) -> None:
        for follow in [f for f in self._follows.values() if f.due <= now]:
            self._answer(follow, now)
        for op, watch in list(self._watches.items()):
            if watch.until <= now and self._state(watch.handoff) is HandoffState.UNKNOWN:
                self._end_watch(op, now)
        for handoff, known in [item for item in self._handoffs.items() if item[1].until <= now]:
            if known.state is HandoffState.CLOSED:
                del self._handoffs[handoff]
            else:
                self._counters["handoffs_silent"] += 1
                self._close(handoff, known, now)

    def next_deadline(self) -> float | None:
        if not (self._follows or self._watches or self._handoffs):
            return None
        times = [follow.due for follow in self._follows.values()]
        times += [w.until for w in self._watches.values() if self._state(w.handoff) is HandoffState.UNKNOWN]
        times += [h.until for h in self._handoffs.values()]
        return min(times, default=None)

    # -- inside ----

    def _state(self, handoff: HandoffId) -> HandoffState:
        known = self._handoffs.get(handoff)
        return HandoffState.UNKNOWN if known is None else known.state

    def _advance(self, follow: _Follow) -> None:
        keys, have = follow.call.keys, follow.have
        while have < len(keys) and keys[have] in self._store:
            have += 1
        follow.have = have
        if follow.next_key is not None:
            self._next_key.setdefault(follow.next_key, []).append(follow.call.op)

    def _move_follow(self, follow: _Follow, event: FollowEvent) -> None:
        follow.state = step(FOLLOW_TRANSITIONS, follow.state, event, f"question {follow.call.op}")
        if follow.state is FollowState.OVER:
            del self._follows[follow.call.op]
            self._unlist(follow)

    def _unlist(self, follow: _Follow) -> None:
        key = follow.next_key
        if key is not None:
            ops = [op for op in self._next_key.get(key, ()) if op != follow.call.op]
            if ops:
                self._next_key[key] = ops
            else:
                self._next_key.pop(key, None)

    def _answer(self, follow: _Follow, now: float) -> None:
        self._move_follow(follow, FollowEvent.ANSWER)
        blocks: list[Block] = []
        for key in follow.call.keys:
            block = self._store.get(key)
            if block is None:  # never sealed, or evicted since
                break
            blocks.append(block)
        self._store.policy.touch(follow.call.keys[: len(blocks)], now)
        self._counters["followed_blocks"] += len(blocks)
        located = self._shard.lend(follow.call.reader, blocks, now)
        self._shard.emit(Reply(follow.call.op, FollowResult(self._state(follow.call.handoff), located)))

    def _end_watch(self, op: int, now: float) -> None:
        del self._watches[op]
        self._ended(op, now)

    def check_invariants(self) -> None:
        listed = Counter(op for ops in self._next_key.values() for op in ops)
        for op, follow in self._follows.items():
            assert follow.state is not FollowState.OVER
            key = follow.next_key
            assert key is not None, "a reader waits for nothing"
            assert op in self._next_key.get(key, ()), "a reader waits and nobody would tell it"
        assert listed.keys() == self._follows.keys(), "a key is awaited by a reader that is gone"
        assert all(count == 1 for count in listed.values())
        for known in self._handoffs.values():
            assert known.state is not HandoffState.UNKNOWN
