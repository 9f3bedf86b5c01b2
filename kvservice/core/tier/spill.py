"""Memory nodes: cold blocks are offered to shards that accept what others evict, before they are evicted here. Pure.

One more destination of what the cleaner writes down. An offer is that of a leaving node (core.drain): the receiver
reads the blocks if it has room, or holds blocks that were used longer ago. Nothing here waits for a receiver. A block
that waits is not pinned, and one that is offered is pinned only while the receiver reads it. A receiver that is full or
fails gets no offers for a while, and blocks that nobody takes are lost, as without memory nodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from kvservice.core.actions import FindTakers, Offer
from kvservice.core.bounded_table import BoundedTable
from kvservice.core.context import OFFER_BYTES_MAX, ShardContext
from kvservice.core.events import Offered
from kvservice.core.messages import Holder, Peer
from kvservice.core.store.slots import Block
from kvservice.units import BlockKey, NodeId

QUEUE_MAX = 4096  # blocks that wait; further ones are dropped
DECIDED_MAX = 65_536  # blocks here that a receiver took or refused, about 10 MB; a forgotten one is offered again
REFUSED_SECONDS = 10.0  # until a refused block is offered again: the receiver may just not have reached this node
OFFERED_SHARE = 1 / 16  # of the memory, in one offer: a receiver pins it while it reads
OFFERS_MAX = 2  # under way: one is being read while the next is on its way
OFFER_SECONDS = 10.0  # for a receiver to read one offer
ANSWER_SECONDS = 20.0  # then an offer counts as failed, and a question for receivers as not answered
RECEIVERS_SECONDS = 10.0  # between two questions who accepts blocks, and how much room there is
NONE_SECONDS = 60.0  # the same after nobody did; it doubles, because most services have no memory nodes
NONE_SECONDS_MAX = 600.0  # so that a new memory node is found within minutes
OFFER_NUMBERS_FROM = 1 << 40  # those of a leaving node are below


def is_spill_offer(number: int) -> bool:
    """Whether an offer is of this module, or of a node that leaves."""
    return number >= OFFER_NUMBERS_FROM


@dataclass(slots=True)
class _Receiver:
    peer: Peer
    free_bytes: int


@dataclass(slots=True)
class _SpillOffer:
    node: NodeId
    keys: dict[BlockKey, None]  # in their order
    until: float


class Spill:
    def __init__(self, shard: ShardContext, *, is_on: bool) -> None:
        self.is_on = is_on and shard.has_directory
        self._shard = shard
        self._counters = shard.counters
        self._offer_bytes_max = min(OFFER_BYTES_MAX, int(shard.geometry.slabs_bytes * OFFERED_SHARE))
        self._waiting: dict[BlockKey, None] = {}  # in their order
        self._decided: BoundedTable[BlockKey, float] = BoundedTable(DECIDED_MAX)  # until when it is not offered again
        self._receivers: dict[NodeId, _Receiver] = {}  # those that get offers
        self._offers: dict[int, _SpillOffer] = {}
        self._next_offer = OFFER_NUMBERS_FROM
        self._ask_at = 0.0  # when to ask again who accepts blocks; while a question is out, when it counts as lost
        self._none_seconds = NONE_SECONDS

    @property
    def is_offering(self) -> bool:
        """Whether receivers read offered blocks now."""
        return bool(self._offers)

    def used(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """Those of the keys that another node reads for itself: a receiver's reading is no use of the block."""
        return [key for key in keys if not self._is_offered(key)]

    def _is_offered(self, key: BlockKey) -> bool:
        return any(key in offer.keys for offer in self._offers.values())

    def put(self, block: Block, now: float) -> None:
        """Queue a cold block, unless a receiver has decided on it, or nobody accepts blocks."""
        if self._is_known(block.key, now) or (not self._receivers and now < self._ask_at):
            return
        if len(self._waiting) >= QUEUE_MAX:
            self._counters["spill_blocks_dropped"] += 1
            return
        self._waiting[block.key] = None

    def count_lost(self, key: BlockKey, now: float) -> None:
        """A block makes room here before it was queued, although somebody accepts blocks. One that waits is counted
        when its turn comes."""
        if self._receivers and not self._is_known(key, now):
            self._counters["spill_blocks_evicted"] += 1

    def _is_known(self, key: BlockKey, now: float) -> bool:
        return now < (self._decided.get(key) or 0.0) or key in self._waiting or self._is_offered(key)

    def left_memory(self, key: BlockKey) -> None:
        """A block was evicted here. If it is ever computed again, the receiver has lost it, too."""
        self._decided.pop(key)

    def work(self, now: float) -> None:
        """Ask who accepts blocks, and offer some. Called after every event; cheap when nothing waits."""
        for number in [number for number, offer in self._offers.items() if offer.until <= now]:
            self.offered(Offered(number, None), now)
        if not self._waiting or self._shard.is_draining():
            return
        if now >= self._ask_at:
            self._ask_at = now + ANSWER_SECONDS
            self._shard.emit(FindTakers((), is_spill=True))
        while self._receivers and len(self._offers) < OFFERS_MAX and self._waiting:
            self._offer(now)

    def takers_found(self, peers: Sequence[Peer], holders: Mapping[BlockKey, tuple[Holder, ...]], now: float) -> None:
        """The other nodes of the service, as far as they answered. Nothing was asked about holders."""
        accepting = [peer for peer in peers if peer.accepts_spill and not peer.draining]
        self._receivers = {peer.holder.node_id: _Receiver(peer, peer.free_bytes) for peer in accepting}
        if accepting:
            self._ask_at, self._none_seconds = now + RECEIVERS_SECONDS, NONE_SECONDS
        else:
            self._ask_at = now + self._none_seconds
            self._none_seconds = min(2 * self._none_seconds, NONE_SECONDS_MAX)
            self._waiting.clear()

    def _offer(self, now: float) -> None:
        """Offer the next blocks of one size to the receiver with the most room."""
        receiver = max(self._receivers.values(), key=lambda each: each.free_bytes)
        blocks, count = self._shard.next_offer(self._waiting, self._offer_bytes_max)
        for key in list(islice(self._waiting, count)):
            del self._waiting[key]
        self._counters["spill_blocks_evicted"] += count - len(blocks)  # too late: they have left the memory
        if not blocks:
            return
        size = blocks[0].payload_bytes
        items = tuple(self._shard.offered(block, self._shard.store.idle_seconds(block, now)) for block in blocks)
        receiver.free_bytes -= size * len(items)
        number, self._next_offer = self._next_offer, self._next_offer + 1
        keys = dict.fromkeys(block.key for block in blocks)
        self._offers[number] = _SpillOffer(receiver.peer.holder.node_id, keys, now + ANSWER_SECONDS)
        self._counters["spill_blocks_offered"] += len(items)
        self._shard.emit(Offer(number, receiver.peer.holder, size, items, OFFER_SECONDS))

    def offered(self, answer: Offered, now: float) -> None:
        """The answer to an offer. Numbers of others' offers are ignored."""
        offer, result = self._offers.pop(answer.offer, None), answer.result
        if offer is None:
            return
        kept = () if result is None else result.kept
        for key, is_kept in zip(offer.keys, kept, strict=False):
            if is_kept:
                self._decided.put(key, math.inf)
            elif result is not None and not result.full:  # refused with room left: it would be refused again at once
                self._decided.put(key, now + REFUSED_SECONDS)
        self._counters["spill_blocks_taken"] += sum(kept)
        if result is None or result.full:
            self._counters["spill_refused"] += 1
            self._receivers.pop(offer.node, None)  # until the next question
            if not self._receivers:
                self._ask_at = now + RECEIVERS_SECONDS
                self._waiting.clear()

    def check_invariants(self) -> None:
        assert len(self._waiting) <= QUEUE_MAX and len(self._offers) <= OFFERS_MAX
        keys = [key for offer in self._offers.values() for key in offer.keys]
        assert len(keys) == len(set(keys)), "a block is offered twice at once"
        assert not self._waiting.keys() & set(keys), "a block that is offered waits to be offered"
