"""A shard that leaves: which blocks it hands to which node, and when it may go. Pure; the other side is the receiver.

While it finds takers and hands over, the shard still serves everything but writes. When it settles, it promises nothing
new: the directory has been told that the node leaves, and readers finish. A drain that is undone before it settles has
no effect.

`plan` decides which node gets what, the most recently used blocks first. A block follows its parent as long as the
parent's node is not far above its share, so that a prefix stays together on one node. The first block of a chain goes
to the node furthest below its share. Shares are by free room, where secondary copies count as free, and grow with a
shard's age: a shard that has just joined has the most room, and would otherwise get everything at once. A node gets no
more than half of its free room as long as others have more, however young they are. Only what fits into no free room
goes by the size of pools, and pushes out primary copies that were used earlier.

A block that other nodes hold goes to one of them, by free room alone: that copy becomes primary, and nothing is read.
When these nodes have used up half of their free room, it goes where more is left, like a block that nobody holds.

A peer that did not answer gets nothing for a while, and then is asked again: it may only have been busy. What it would
have got goes to the others. A block that a peer could not read is offered again as well. Both end after TRIES_MAX.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import median_high

from kvservice.core.actions import Farewell, FindTakers, Offer
from kvservice.core.context import OFFER_BLOCKS_MAX, ShardContext
from kvservice.core.drain.receiver import ITEMS_MAX, WAIT_SECONDS_MAX
from kvservice.core.events import Offered
from kvservice.core.messages import Holder, Peer
from kvservice.core.store.slots import Block
from kvservice.core.transitions import step
from kvservice.units import BlockKey, NodeId, counted

DRAIN_SECONDS_MAX = 3600.0  # an hour: a hand-over of any pool ends sooner; a longer drain is refused
RAMP_SECONDS = 300.0  # at most, until a shard that joined gets its whole share: it serves its own engines meanwhile
RAMP_FLOOR = 0.1  # the part of its share that it gets at first, so that it takes part at all
OFFERS_PER_PEER = 2  # one is being read while the next is on its way
OFFERS_MAX = 16  # under way to all peers: each of them asks this node for a lease, and more at once would time out
OFFER_SECONDS_MAX = 10.0  # for a peer to read one offer; without an answer, other nodes are asked
TRIES_MAX = 5  # failed offers of one peer in a row, and offers of one block; about 4 s when they fail at once
RETRY_SECONDS = 0.25  # until the second try, and twice as long until each further one
FIND_SECONDS = 3.0  # for finding takers; then the shard leaves without handing over
SETTLE_SHARE = 0.3  # the part of a drain's time that is kept for readers to finish
LOOKED_UP_MAX = 262_144  # blocks that are looked up; of more, only the most recently used are handed over
NO_KEEPERS: Mapping[BlockKey, Collection[NodeId]] = {}  # blocks that may go to any node
assert OFFER_BLOCKS_MAX <= ITEMS_MAX, "the receiver would refuse the offer"
assert OFFER_SECONDS_MAX <= WAIT_SECONDS_MAX, "the receiver would answer earlier than asked"
assert 0 < RAMP_FLOOR <= 1 and 0 < SETTLE_SHARE < 1


class DrainPhase(Enum):
    """The states of a drain."""

    SERVING = "serving"
    CLOSED = "closed"  # takes no writes, and stays
    FINDING_TAKERS = "finding_takers"
    HANDING_OVER = "handing_over"
    SETTLING = "settling"
    GONE = "gone"


class DrainEvent(Enum):
    CLOSE = "close"  # stop accepting writes
    BEGIN = "begin"  # leave, and hand over hot blocks
    FOUND = "found"  # the nodes that stay, and which blocks they hold already
    SETTLE = "settle"  # nothing more is handed over
    LEAVE = "leave"  # nothing is read here any more, or time is up
    UNDO = "undo"


_D, _E = DrainPhase, DrainEvent
TRANSITIONS: dict[tuple[DrainPhase, DrainEvent], DrainPhase] = {
    (_D.SERVING, _E.CLOSE): _D.CLOSED,
    (_D.SERVING, _E.BEGIN): _D.FINDING_TAKERS,
    (_D.SERVING, _E.SETTLE): _D.SETTLING,
    (_D.SERVING, _E.UNDO): _D.SERVING,
    (_D.CLOSED, _E.BEGIN): _D.FINDING_TAKERS,
    (_D.CLOSED, _E.SETTLE): _D.SETTLING,
    (_D.CLOSED, _E.UNDO): _D.SERVING,
    (_D.FINDING_TAKERS, _E.FOUND): _D.HANDING_OVER,
    (_D.FINDING_TAKERS, _E.SETTLE): _D.SETTLING,
    (_D.FINDING_TAKERS, _E.UNDO): _D.SERVING,
    (_D.HANDING_OVER, _E.SETTLE): _D.SETTLING,
    (_D.HANDING_OVER, _E.UNDO): _D.SERVING,
    (_D.SETTLING, _E.LEAVE): _D.GONE,
}


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """The progress of a drain. Each block counts once: as handed over, held elsewhere anyway, or lost."""

    phase: DrainPhase
    leases: int = 0
    blocks_total: int = 0
    blocks_handed: int = 0
    blocks_elsewhere: int = 0
    bytes_handed: int = 0
    seconds: float = 0.0
    note: str = ""
    receivers: tuple[tuple[str, int], ...] = ()

    @property
    def blocks_lost(self) -> int:
        """Blocks that no other node has, so far."""
        return self.blocks_total - self.blocks_handed - self.blocks_elsewhere


class RoomPart(Enum):
    """What of a peer is filled, in this order. The next is used when no peer has more of the one before."""

    HALF = "half"  # of what is free: its own engines go on fetching and storing
    FREE = "free"
    POOL = "pool"  # a primary copy makes way, if it was used earlier


@dataclass(slots=True)
class _Share:
    peer: Peer
    ramp: float  # the part of its share that it gets at its age
    left_bytes: int  # of its pool, for what it is offered
    queue: deque[Block] = field(default_factory=deque)
    out: int = 0  # offers under way
    full: set[int] = field(default_factory=set)  # payload sizes that it has no more room for
    failures: int = 0  # offers in a row that it did not answer, or refused
    trouble: str = ""  # what came in place of its last answer, for people
    rests_until: float = -math.inf  # it is offered nothing before

    @property
    def is_given_up(self) -> bool:
        return self.failures >= TRIES_MAX

    def of(self, room: RoomPart) -> tuple[float, int]:
        """Its weight, and how many bytes it can still be offered of this room."""
        peer = self.peer
        if room is RoomPart.POOL:
            return peer.capacity_bytes * self.ramp, self.left_bytes
        kept = peer.free_bytes // 2 if room is RoomPart.HALF else 0
        return peer.free_bytes * self.ramp, self.left_bytes - (peer.capacity_bytes - peer.free_bytes) - kept


def pause(tries: int) -> float:
    """Seconds until the next try, after this many."""
    return RETRY_SECONDS * 2.0 ** (tries - 1)


def ramps(ages_seconds: Sequence[float]) -> list[float]:
    """The part of its share that a shard of each age gets, between RAMP_FLOOR and 1. One that is as old as half of all
    is not young: in a rolling restart, the few that are still old would get nearly everything."""
    whole = min(RAMP_SECONDS, median_high(ages_seconds))
    return [1.0 if age >= whole else max(RAMP_FLOOR, age / whole) for age in ages_seconds]


def plan(
    blocks: Sequence[Block],
    parent_of: Callable[[Block], BlockKey | None],
    shares: Sequence[tuple[NodeId, float, int]],
    keepers: Mapping[BlockKey, Collection[NodeId]],
) -> dict[NodeId, list[Block]]:
    """Which blocks each node is offered. `blocks` begin with the most recently used one. `shares` holds (node, weight,
    bytes that it can hold at most). A block that is among `keepers` goes to one of these nodes: they hold it."""
    left = {node: room for node, _, room in shares}
    given: dict[NodeId, int] = {node: 0 for node, _, _ in shares}
    whole = sum(part for _, part, _ in shares)
    weight = {node: max(part / whole if whole else 0.0, 1e-9) for node, part, _ in shares}
    # A chain may take its node a little above its share; otherwise no chain would stay together.
    total = sum(block.payload_bytes for block in blocks)
    cap = {node: 1.25 * weight[node] * total for node in left}
    place: dict[BlockKey, NodeId] = {}
    found: dict[NodeId, list[Block]] = {node: [] for node in left}
    for block in blocks:
        size = block.payload_bytes
        parent = parent_of(block)
        node = None if parent is None else place.get(parent)
        among = keepers.get(block.key, left)
        if node is None or node not in among or left[node] < size or given[node] + size > max(cap[node], size):
            open_nodes = [other for other in left if other in among and left[other] >= size]
            if not open_nodes:
                continue
            node = min(open_nodes, key=lambda other: ((given[other] + size) / weight[other], other))
        place[block.key] = node
        found[node].append(block)
        left[node] -= size
        given[node] += size
    return {node: offered for node, offered in found.items() if offered}


class Leaving:
    """One drain of this shard, from beginning to end."""

    def __init__(self, shard: ShardContext) -> None:
        self._shard = shard
        self._store = shard.store
        self._emit = shard.emit
        self._counters = shard.counters
        self._leases = shard.leases
        self.phase = DrainPhase.SERVING
        self._began = 0.0
        self._deadline = math.inf
        self._step_until = math.inf  # the end of finding takers, then of handing over
        self._total = 0
        self._used_at: dict[BlockKey, float] = {}  # at the beginning: a receiver's read must not count as a use
        self._keepers: dict[BlockKey, list[NodeId]] = {}  # nodes that hold it already, of the blocks that have any
        self._tries: Counter[BlockKey] = Counter()  # how often a peer answered that it did not keep the block
        self._waiting: dict[NodeId | None, list[Block]] = {}  # for a peer, by the one that did not keep them
        self._waits_until = math.inf  # then the waiting blocks are offered again
        self._wake_at = math.inf  # while handing over, the end of that wait, of a peer's rest, or of the time for it
        self._handed: set[BlockKey] = set()
        self._handed_bytes = 0
        self._shares: dict[NodeId, _Share] = {}
        self._offers: dict[int, tuple[NodeId, tuple[Block, ...]]] = {}
        self._next = 1
        self._notes: list[str] = []
        self._received: Counter[str] = Counter()

    @property
    def is_open(self) -> bool:
        """Whether the drain may still be undone."""
        return self.phase in (DrainPhase.CLOSED, DrainPhase.FINDING_TAKERS, DrainPhase.HANDING_OVER)

    @property
    def promises_nothing(self) -> bool:
        return self.phase in (DrainPhase.SETTLING, DrainPhase.GONE)

    def close(self) -> None:
        if self.phase is DrainPhase.SERVING:
            self._move(DrainEvent.CLOSE)

    def undo(self) -> None:
        self._move(DrainEvent.UNDO)
        self._end_offers()
        self._deadline = math.inf

    def begin(self, timeout_seconds: float, handover: bool, now: float) -> None:
        """Begin to leave. A second call can only shorten the time."""
        if self.phase is DrainPhase.GONE:
            return
        if self.phase not in (DrainPhase.SERVING, DrainPhase.CLOSED):
            self._deadline = min(self._deadline, now + timeout_seconds)
            if self.is_open:
                self._step_until = min(self._step_until, now + timeout_seconds * (1 - SETTLE_SHARE))
            return
        self._began, self._deadline = now, now + timeout_seconds
        self._keepers, self._handed, self._handed_bytes, self._tries = {}, set(), 0, Counter()
        self._notes, self._received = [], Counter()
        self._total = len(self._store)
        self._counters["drains_begun"] += 1
        if not handover or not self._shard.has_directory or self._total == 0:
            if self._total and not handover:
                self._notes.append("asked not to hand over")
            elif self._total:
                self._notes.append("this node is alone")
            self._settle()
            return
        self._move(DrainEvent.BEGIN)
        self._step_until = min(now + FIND_SECONDS, now + timeout_seconds * (1 - SETTLE_SHARE))
        blocks = self._store.by_heat()[:LOOKED_UP_MAX]
        self._emit(FindTakers(tuple((block.key, block.route) for block in blocks)))

    def takers_found(self, peers: Sequence[Peer], holders: Mapping[BlockKey, tuple[Holder, ...]], now: float) -> None:
        """`holders` are the other nodes that hold each of the blocks, as far as the directory knows."""
        if self.phase is not DrainPhase.FINDING_TAKERS:
            return
        self._move(DrainEvent.FOUND)
        self._step_until = self._began + (self._deadline - self._began) * (1 - SETTLE_SHARE)
        staying = {peer.holder.node_id: peer for peer in peers if not peer.draining}
        if not staying:
            self._notes.append("no other node stays")
            self._settle()
            return
        parts = ramps([peer.age_seconds for peer in staying.values()])
        for (node, peer), part in zip(staying.items(), parts, strict=True):
            self._shares[node] = _Share(peer, part, peer.capacity_bytes)
        blocks = self._store.by_heat()[:LOOKED_UP_MAX]
        self._used_at = {block.key: now - self._store.idle_seconds(block, now) for block in blocks}
        kept: list[Block] = []
        unheld: set[BlockKey] = set()
        for block in blocks:
            nodes = [holder.node_id for holder in holders.get(block.key, ()) if holder.node_id in staying]
            if not nodes:
                unheld.add(block.key)
                continue
            self._keepers[block.key] = nodes
            if not block.is_secondary:
                kept.append(block)
            elif len(nodes) == 1:  # of more, one has the primary copy, and a second one would push out last copies
                self._shares[nodes[0]].queue.append(block)  # it most often is primary there, and takes no new room
        # First what they hold: room for the rest is made of secondary copies, and these are such until then.
        halves = [(node, share.peer.free_bytes, share.of(RoomPart.HALF)[1]) for node, share in self._shares.items()]
        unheld.update(block.key for block in self._queue(kept, halves, self._keepers))
        self._place([block for block in blocks if block.key in unheld], now)
        self._offer_more(now)

    def offered(self, answer: Offered, now: float) -> None:
        """A peer's answer."""
        result = answer.result
        node, blocks = self._offers.pop(answer.offer, (NodeId(""), ()))
        share = self._shares.get(node)
        if share is None or self.phase is not DrainPhase.HANDING_OVER:
            return
        share.out -= 1
        kept = () if result is None else result.kept
        for block, held in zip(blocks, kept, strict=False):
            if not held:
                self._does_not_hold(node, block)  # the directory was out of date
            elif block.key not in self._keepers and block.key not in self._handed:
                self._handed.add(block.key)
                self._handed_bytes += block.payload_bytes
                self._received[node] += 1
        rest = [block for place, block in enumerate(blocks) if not (place < len(kept) and kept[place])]
        share.left_bytes += sum(block.payload_bytes for block in rest)
        if result is None:
            self._let_rest(share, rest, answer.refusal, now)
        else:
            share.failures, share.rests_until = 0, -math.inf
            self._note_trouble(share, "")
            if result.full:
                self._leave_out(share, rest, now)
            else:
                self._try_again(rest, node, now)
        self._offer_more(now)

    def tick(self, now: float) -> None:
        if now >= self._step_until and self.phase in (DrainPhase.FINDING_TAKERS, DrainPhase.HANDING_OVER):
            what = "the directory did not answer" if self.phase is DrainPhase.FINDING_TAKERS else "out of time"
            self._notes.append(what)
            self._settle()
        elif now >= self._wake_at:
            if now >= self._waits_until:
                waiting, self._waiting, self._waits_until = self._waiting, {}, math.inf
                for node, blocks in waiting.items():
                    self._place(blocks, now, besides=node)
            self._offer_more(now)
        self.look(now)

    def look(self, now: float) -> None:
        """Check whether readers have finished. Called after every event."""
        if self.phase is DrainPhase.SETTLING and (not self._leases or now >= self._deadline):
            if self._leases:
                self._notes.append(f"{counted(len(self._leases), 'lease')} still out")
            self._move(DrainEvent.LEAVE)
            self._step_until = self._deadline = math.inf
            self._counters["drains_done"] += 1

    def next_deadline(self) -> float | None:
        until = min(self._wake_at, self._step_until, self._deadline)
        return None if until == math.inf else until

    def progress(self, now: float) -> DrainProgress:
        if self.phase in (DrainPhase.SERVING, DrainPhase.CLOSED):
            return DrainProgress(self.phase, len(self._leases))
        return DrainProgress(
            self.phase,
            len(self._leases),
            self._total,
            len(self._handed),
            len(self._keepers),
            self._handed_bytes,
            now - self._began,
            "; ".join(self._notes),
            tuple(sorted(self._received.items())),
        )

    # -- inside ----

    def _move(self, event: DrainEvent) -> None:
        self.phase = step(TRANSITIONS, self.phase, event, "the drain")

    def _place(self, blocks: Sequence[Block], now: float, besides: NodeId | None = None) -> None:
        """Queue blocks for the peers that may still have room for them, separately for each size. `besides` gets none
        if there is another peer. Blocks wait when only peers that rest could take them."""
        there = [block for block in blocks if block.key in self._store]
        for size in sorted({block.payload_bytes for block in there}):
            unplaced = [block for block in there if block.payload_bytes == size]
            able = {
                node: share
                for node, share in self._shares.items()
                if not share.is_given_up and size not in share.full and share.left_bytes >= size
            }
            rests = [share.rests_until for share in able.values() if share.rests_until > now]
            awake = {node: share for node, share in able.items() if share.rests_until <= now}
            chosen = {node: share for node, share in awake.items() if node != besides} or awake
            for room in RoomPart:
                keepers = self._keepers if room is RoomPart.POOL else NO_KEEPERS
                unplaced = self._queue(unplaced, [(node, *share.of(room)) for node, share in chosen.items()], keepers)
            if rests and unplaced:
                self._wait(unplaced, None, max(rests))

    def _queue(
        self,
        blocks: Sequence[Block],
        shares: Sequence[tuple[NodeId, float, int]],
        keepers: Mapping[BlockKey, Collection[NodeId]],
    ) -> list[Block]:
        """Queue blocks by these shares. Returns those for which there is no room."""
        placed: set[BlockKey] = set()
        for node, offered in plan(blocks, self._store.parent_of, shares, keepers).items():
            share = self._shares[node]
            share.queue += offered
            share.left_bytes -= sum(block.payload_bytes for block in offered)
            placed.update(block.key for block in offered)
        return [block for block in blocks if block.key not in placed]

    def _does_not_hold(self, node: NodeId, block: Block) -> None:
        nodes = [other for other in self._keepers.pop(block.key, ()) if other != node]
        if nodes:
            self._keepers[block.key] = nodes

    def _wait(self, blocks: list[Block], besides: NodeId | None, until: float) -> None:
        """Blocks that are added to others which wait already are offered together with those."""
        if not self._waiting:
            self._waits_until = until
        self._waiting.setdefault(besides, []).extend(blocks)

    def _let_rest(self, share: _Share, rest: list[Block], refusal: str, now: float) -> None:
        """Offer nothing for a while to a peer that was silent or refused, and the others what it would have got."""
        node = share.peer.holder.node_id
        if now >= share.rests_until:  # two offers that fail together count once
            share.failures += 1
            share.rests_until = now + pause(share.failures)
        self._note_trouble(share, f"node {node} refused: {refusal}" if refusal else f"node {node} did not answer")
        for block in (*rest, *share.queue) if share.is_given_up and not refusal else ():
            self._does_not_hold(node, block)  # it is dead, and the directory does not know yet
        self._take_back(share, rest, list(share.queue), now, keep_own=not share.is_given_up)

    def _note_trouble(self, share: _Share, trouble: str) -> None:
        self._notes = [note for note in self._notes if note != share.trouble] + [trouble] * bool(trouble)
        share.trouble = trouble

    def _leave_out(self, share: _Share, rest: list[Block], now: float) -> None:
        """Offer no more blocks of this size to a peer that has no room for them."""
        note = f"node {share.peer.holder.node_id} has no room for more"
        if note not in self._notes:
            self._notes.append(note)
        if rest:
            size = rest[0].payload_bytes
            share.full.add(size)
            queued = [block for block in share.queue if block.payload_bytes == size]
            self._take_back(share, rest, queued, now, keep_own=False)

    def _take_back(self, share: _Share, rest: list[Block], queued: list[Block], now: float, *, keep_own: bool) -> None:
        """Offer to the other peers what this one did not take and what is queued for it. Blocks that it holds already
        stay in its queue if `keep_own`; nobody needs to read them."""
        gone = {block.key for block in queued}
        node = share.peer.holder.node_id
        own = [block for block in (*rest, *queued) if keep_own and node in self._keepers.get(block.key, ())]
        share.queue = deque([*own, *(block for block in share.queue if block.key not in gone)])
        share.left_bytes += sum(block.payload_bytes for block in queued) - sum(block.payload_bytes for block in own)
        self._place([block for block in (*rest, *queued) if block.key not in self._keepers], now)

    def _try_again(self, rest: list[Block], node: NodeId, now: float) -> None:
        """A read failed, or the tenant's quota at this peer is full: offer these blocks again, first to others."""
        self._tries.update(block.key for block in rest)
        again = [block for block in rest if self._tries[block.key] < TRIES_MAX]
        if again:
            self._wait(again, node, now + pause(max(self._tries[block.key] for block in again)))

    def _offer_more(self, now: float) -> None:
        left = self._step_until - now
        while left > 0 and len(self._offers) < OFFERS_MAX and (share := self._next_peer(now)):
            batch, count = self._shard.next_offer(block.key for block in share.queue)
            for _ in range(count):
                share.queue.popleft()
            if batch:
                self._offer(share, tuple(batch), min(left, OFFER_SECONDS_MAX), now)
        queued = [share for share in self._shares.values() if share.queue]
        if not self._offers and not queued and not self._waiting:
            self._settle()
            return
        rests = [share.rests_until for share in queued if share.rests_until > now]
        self._wake_at = min(self._waits_until, self._step_until, *rests)

    def _next_peer(self, now: float) -> _Share | None:
        """The peer with the fewest offers under way, of those that may be offered more."""
        ready = (
            share
            for share in self._shares.values()
            if share.queue and share.out < OFFERS_PER_PEER and share.rests_until <= now
        )
        return min(ready, key=lambda share: share.out, default=None)

    def _offer(self, share: _Share, batch: tuple[Block, ...], wait_seconds: float, now: float) -> None:
        items = tuple(self._shard.offered(block, now - self._used_at.get(block.key, now)) for block in batch)
        number = self._next
        self._next += 1
        self._offers[number] = (share.peer.holder.node_id, batch)
        share.out += 1
        self._emit(Offer(number, share.peer.holder, batch[0].payload_bytes, items, wait_seconds))

    def _settle(self) -> None:
        self._move(DrainEvent.SETTLE)
        self._end_offers()
        lost = self._total - len(self._handed) - len(self._keepers)
        self._counters["drain_blocks_handed"] += len(self._handed)
        self._counters["drain_blocks_lost"] += max(lost, 0)
        if lost > 0 and self._tries:
            self._notes.append(f"{counted(lost, 'block')} kept by no other node")
        self._emit(Farewell())

    def _end_offers(self) -> None:
        self._offers, self._shares, self._waiting = {}, {}, {}
        self._step_until = self._waits_until = self._wake_at = math.inf

    def check_invariants(self) -> None:
        out = Counter(node for node, _ in self._offers.values())
        for node, share in self._shares.items():
            assert share.out == out[node], "offers under way are miscounted"
        assert not self._offers or self.phase is DrainPhase.HANDING_OVER
        assert not self._shares or self.phase is DrainPhase.HANDING_OVER, "shares of a hand-over that is over"
        assert len(self._offers) <= OFFERS_MAX
        assert bool(self._waiting) == (self._waits_until < math.inf), "blocks wait for nothing, or nothing waits"
        if self.phase is DrainPhase.HANDING_OVER:
            queued = any(share.queue for share in self._shares.values())
            assert self._offers or self._waiting or queued, "a hand-over with nothing left to offer"
        timed = self.phase in (DrainPhase.FINDING_TAKERS, DrainPhase.HANDING_OVER)
        assert timed == (self._step_until < math.inf), "a step of the drain would never end, or ends nothing"
