"""Which peers a shard meets before it needs one: a shard whose connection is open answers its first fetch sooner. Pure.

Told which nodes the directory names and which of them were asked for blocks, it says whom to meet and when. Only few
peers are met ahead, so that a large cluster does not connect everybody with everybody: those asked last, then others in
an order that differs from node to node. Meetings are spread over time by the number of nodes, so that a node that
joins is not met by all others at one moment. Requests never wait for a meeting, and never need one.

    waiting  to be met, at its time
    meeting  the handshake and one small read are under way
    met      in the present boot of the peer
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import Counter
from dataclasses import dataclass
from enum import Enum

from kvservice.core.bounded_table import NODES_MAX, BoundedTable
from kvservice.core.messages import Holder
from kvservice.core.transitions import step
from kvservice.units import NodeId

# Connections cost memory in the transport, and a cluster of thousands would have millions of them.
MEET_PEERS = 64
MEETINGS_MAX = 4  # at once: each takes the transport's thread for milliseconds, in which it reads no blocks
SETTLE_SECONDS = 0.01  # news are gathered for so long: a snapshot of the directory names all nodes one by one
# Between two nodes that meet one that joins, on average: about a hundred handshakes a second arrive there.
SPREAD_SECONDS = 0.01
OVERDUE_SECONDS = 5.0  # the performer answers sooner; a meeting that takes longer is a bug
PAUSE_SECONDS_FIRST = 1.0  # after a failure; it doubles with each further one
PAUSE_SECONDS_MAX = 60.0  # a node that answers nobody costs a call a minute
AGAIN_SECONDS = 30.0  # a node that was hidden is met again after its return, but not more often than this


class MeetingState(Enum):
    WAITING = "waiting"
    MEETING = "meeting"
    MET = "met"


class MeetingEvent(Enum):
    BEGIN = "begin"
    SUCCEED = "succeed"
    FAIL = "fail"  # it did not answer in time
    RESTART = "restart"  # the directory names a newer boot of it
    RETURN = "return"  # it was hidden, and counts again: its connection may have broken


_S, _E = MeetingState, MeetingEvent
TRANSITIONS: dict[tuple[MeetingState, MeetingEvent], MeetingState] = {
    (_S.WAITING, _E.BEGIN): _S.MEETING,
    (_S.WAITING, _E.RESTART): _S.WAITING,
    (_S.WAITING, _E.RETURN): _S.WAITING,
    (_S.MEETING, _E.SUCCEED): _S.MET,
    (_S.MEETING, _E.FAIL): _S.WAITING,
    (_S.MEETING, _E.RESTART): _S.WAITING,
    (_S.MEETING, _E.RETURN): _S.MEETING,
    (_S.MET, _E.RESTART): _S.WAITING,
    (_S.MET, _E.RETURN): _S.WAITING,
}


@dataclass(frozen=True, slots=True)
class Meeting:
    """One peer to meet now. Answered by `Meetings.ended` with its number."""

    number: int
    holder: Holder


@dataclass(slots=True)
class _Peer:
    """What is known of one peer. Mutable: it is the table's own record."""

    holder: Holder
    spread: float  # from 0 to 1, another one for each pair of nodes
    heard_at: float
    is_here: bool = True
    state: MeetingState = MeetingState.WAITING
    not_before: float = 0.0  # it failed, or was met a moment ago
    failures: int = 0  # in a row


class Meetings:
    """`peers_max` are met ahead; 0 = none. `now` is monotonic, in seconds."""

    def __init__(self, node_id: NodeId, peers_max: int, counters: Counter[str]) -> None:
        self._node_id = node_id
        self._peers_max = peers_max
        self._peers: BoundedTable[NodeId, _Peer] = BoundedTable(NODES_MAX)
        self._asked: BoundedTable[NodeId, bool] = BoundedTable(max(1, peers_max))
        self._wanted: list[_Peer] = []  # those met ahead, of the last plan
        self._here_count = 0  # nodes that counted at the last plan
        self._open: dict[int, tuple[NodeId, float]] = {}  # by number: who, and since when
        self._changed_at: float | None = None  # since the last plan
        self._next_number = 1
        self.counters = counters

    @property
    def has_news(self) -> bool:
        """Whether something was heard that no plan knows yet."""
        return self._changed_at is not None

    # -- events ----

    def heard(self, holder: Holder, is_here: bool, now: float) -> None:
        """The directory names this node; `is_here`: it counts now. Cheap when that is known."""
        if holder.node_id == self._node_id or not self._peers_max:
            return
        peer = self._peers.get(holder.node_id)
        if peer is None:
            if is_here:
                self._end_open(holder.node_id)  # of a record that was dropped for newer ones
                self._peers.put(holder.node_id, _Peer(holder, self._spread(holder.node_id), now))
                self._change(now)
            return
        if (peer.holder, peer.is_here) == (holder, is_here) or holder.epoch < peer.holder.epoch:
            return
        if holder.epoch > peer.holder.epoch:
            self._end_open(holder.node_id)
            self._move(peer, MeetingEvent.RESTART)
            peer.failures, peer.not_before, peer.heard_at = 0, now, now
        elif is_here and not peer.is_here:
            self._move(peer, MeetingEvent.RETURN)
        peer.holder, peer.is_here = holder, is_here
        self._change(now)

    def asked(self, node_id: NodeId, now: float) -> None:
        """A request fetches from this node: it is among the first to be met after its next start."""
        if self._peers_max and not self._asked.get(node_id):
            self._asked.put(node_id, True)
            self._change(now)

    def ended(self, number: int, is_met: bool, now: float) -> None:
        """The meeting with this number has ended. One with an earlier boot is ignored."""
        found = self._open.pop(number, None)
        peer = None if found is None else self._peers.get(found[0])
        if peer is None:
            return
        if is_met:
            self.counters["peers_met"] += 1
            self._move(peer, MeetingEvent.SUCCEED)
            peer.failures, peer.not_before = 0, now + AGAIN_SECONDS
        else:
            self._fail(peer, now)

    def due(self, now: float) -> list[Meeting]:
        """The meetings to begin now. At most MEETINGS_MAX are under way at once."""
        if self._changed_at is not None and now >= self._changed_at + SETTLE_SECONDS:
            self._plan()
        found = []
        for peer in self._wanted:
            if len(self._open) >= MEETINGS_MAX:
                break
            if peer.is_here and peer.state is MeetingState.WAITING and now >= self._due_at(peer):
                self._move(peer, MeetingEvent.BEGIN)
                self._open[self._next_number] = (peer.holder.node_id, now)
                found.append(Meeting(self._next_number, peer.holder))
                self._next_number += 1
        return found

    def next_deadline(self) -> float | None:
        """When `due` has something to do next, if no event comes before."""
        times = [] if self._changed_at is None else [self._changed_at + SETTLE_SECONDS]
        if len(self._open) < MEETINGS_MAX:
            waiting = [peer for peer in self._wanted if peer.is_here and peer.state is MeetingState.WAITING]
            times += map(self._due_at, waiting)
        return min(times, default=None)

    # -- inside ----

    def _plan(self) -> None:
        self._changed_at = None
        last = {node_id: -rank for rank, node_id in enumerate(self._asked)}
        here = [peer for _, peer in self._peers.items() if peer.is_here]
        self._here_count = len(here)
        self._wanted = heapq.nsmallest(
            self._peers_max, here, key=lambda peer: (last.get(peer.holder.node_id, 1), peer.spread)
        )

    def _due_at(self, peer: _Peer) -> float:
        return max(peer.heard_at + peer.spread * self._here_count * SPREAD_SECONDS, peer.not_before)

    def _fail(self, peer: _Peer, now: float) -> None:
        self.counters["meetings_failed"] += 1
        self._move(peer, MeetingEvent.FAIL)
        peer.not_before = now + min(PAUSE_SECONDS_MAX, PAUSE_SECONDS_FIRST * 2 ** min(peer.failures, 16))
        peer.failures += 1

    def _end_open(self, node_id: NodeId) -> None:
        for number, (who, _) in list(self._open.items()):
            if who == node_id:
                del self._open[number]

    def _change(self, now: float) -> None:
        if self._changed_at is None:
            self._changed_at = now

    def _spread(self, node_id: NodeId) -> float:
        digest = hashlib.blake2b(f"{self._node_id}\0{node_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / math.ldexp(1.0, 64)

    def _move(self, peer: _Peer, event: MeetingEvent) -> None:
        peer.state = step(TRANSITIONS, peer.state, event, f"peer {peer.holder.node_id}")

    def check_invariants(self) -> None:
        open_with = [node_id for node_id, _ in self._open.values()]
        assert len(open_with) <= MEETINGS_MAX and len(set(open_with)) == len(open_with)
        known = {node_id: peer for node_id, peer in self._peers.items()}
        assert self._node_id not in known
        meeting = {node_id for node_id, peer in known.items() if peer.state is MeetingState.MEETING}
        assert meeting == {node_id for node_id in open_with if node_id in known}
        assert len(self._wanted) <= self._peers_max

    def check_progress(self, now: float) -> None:
        """Each wanted peer is met, or will be soon. Only while the performer is neither paused nor slow."""
        late = [node_id for node_id, since in self._open.values() if now > since + OVERDUE_SECONDS]
        for peer in self._wanted:
            if peer.is_here and peer.state is MeetingState.WAITING:
                soon = now - OVERDUE_SECONDS <= self._due_at(peer) <= now + PAUSE_SECONDS_MAX
                late += [] if soon else [peer.holder.node_id]
        assert not late, f"{self._node_id} is late to meet {late}"
