"""The calls of other shards: they lease blocks to read, follow blocks as they are sealed, and offer blocks. Pure.

Part of core.shard, which routes the events here. Each ends in one Reply, or raises the error that the caller gets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvservice.core import events as ev
from kvservice.core.acquire.acquisition import TIMEOUT_SECONDS_MAX, Acquisition, check_seconds
from kvservice.core.acquire.acquisitions import Acquisitions
from kvservice.core.acquire.handoff import Handoffs, check_handoff_id
from kvservice.core.acquire.pulls import LOCATE_WAIT_SECONDS_MAX
from kvservice.core.acquire.suspects import Suspects
from kvservice.core.actions import Reply
from kvservice.core.block.keys import check_chain, check_keys
from kvservice.core.context import ShardContext
from kvservice.core.drain.receiver import ITEMS_MAX, WAIT_SECONDS_MAX, TakeOvers
from kvservice.core.drain.sender import DrainPhase, Leaving
from kvservice.core.messages import AcquireRequest
from kvservice.core.store.slots import Block, Slot
from kvservice.core.tier.tier_block import TierBlock
from kvservice.core.tier.tiers import Tiers
from kvservice.errors import Forbidden, InvalidRequest, StaleEpoch, Unavailable, UnsupportedLayout
from kvservice.units import AttachmentId, BlockKey, BootEpoch

assert WAIT_SECONDS_MAX <= TIMEOUT_SECONDS_MAX


class PeerCalls:
    """Handlers for the events that calls of other shards cause. A handler raises KVServiceError to refuse."""

    def __init__(
        self,
        shard: ShardContext,
        handoffs: Handoffs,
        takeovers: TakeOvers,
        leaving: Leaving,
        tiers: Tiers,
        acquisitions: Acquisitions,
        suspects: Suspects,
    ) -> None:
        self._shard = shard
        self._handoffs = handoffs
        self._takeovers = takeovers
        self._leaving = leaving
        self._tiers = tiers
        self._acquisitions = acquisitions
        self._suspects = suspects

    def handlers(self) -> dict[type, Callable[..., None]]:
        return {
            ev.PeerFollow: self._follow,
            ev.PeerLocate: self._locate,
            ev.PeerRelease: self._release,
            ev.PeerTakeOver: self._take_over,
        }

    def _follow(self, event: ev.PeerFollow, now: float) -> None:
        self._check_epoch(event.epoch)
        check_handoff_id(event.handoff)
        check_chain(event.keys)
        check_seconds("wait", event.wait_seconds)
        if self._leaving.promises_nothing:
            raise Unavailable(f"shard {self._shard.node_id} is leaving")
        self._handoffs.follow(event, now)

    def _check_epoch(self, epoch: BootEpoch) -> None:
        ours = self._shard.epoch
        if epoch != ours:
            raise StaleEpoch(
                f"shard {self._shard.node_id} is in epoch {ours}, not {epoch}", epoch=ours, asked_epoch=epoch
            )

    def _locate(self, event: ev.PeerLocate, now: float) -> None:
        self._check_epoch(event.epoch)
        check_seconds("wait", event.wait_seconds)
        first = self._to_bring_back(event, now)
        if first is None:
            self._lend(event, now)
            return
        check_keys(event.keys)
        request = AcquireRequest(event.keys, 0, min(event.wait_seconds, LOCATE_WAIT_SECONDS_MAX))

        def answer(part: Acquisition, slots: list[Slot], _: int, now: float) -> None:
            self._lend(event, now)
            self._shard.store.unpin(slots)

        account, size = self._shard.store.accounts.account_of(first.account_tag), first.payload_bytes
        start = self._acquisitions.start
        start(event.op, AttachmentId(0), account, request, size, now, on_answer=answer, is_for_here=True)

    def _to_bring_back(self, event: ev.PeerLocate, now: float) -> TierBlock | None:
        """The first requested block that only a tier of this node has, if the reader waits for it."""
        if event.wait_seconds == 0 or self._leaving.promises_nothing or len(set(event.keys)) < len(event.keys):
            return None
        return self._tiers.first_of((key for key in event.keys if key not in self._shard.store), now)

    def _lend(self, event: ev.PeerLocate, now: float) -> None:
        """Lease what is in memory."""
        going = self._leaving.promises_nothing
        blocks = [None if going else self._to_lend(key, now) for key in event.keys]
        held = len(blocks) - blocks.count(None)
        spill = self._tiers.spill
        used = spill.used(event.keys) if spill.is_offering else event.keys
        self._shard.store.policy.touch(used, now)
        if self._tiers.hears_uses:
            self._tiers.used(used, now)
        self._shard.admission.on_peer_read(min(held, len(used)))
        self._shard.counters["peer_located_blocks"] += held
        self._shard.counters["peer_absent_blocks"] += len(blocks) - held
        self._shard.emit(Reply(event.op, self._shard.lend(event.reader, blocks, now)))

    def _to_lend(self, key: BlockKey, now: float) -> Block | None:
        """The block in memory, unless the reader would read it in vain: no other node keeps a block of unknown age, as
        a restart finds it, after a clear of its like, nor one that was stored in the seconds behind the clear. Names
        that are not known count as others: the reader knows its own. A block from ahead of this node's clock is lent:
        the reader's clock may be right."""
        block, freshness = self._shard.store.get(key), self._shard.freshness
        if block is None or not (freshness.marks or freshness.max_age_seconds):
            return block
        scopes = freshness.scopes(key, block.account, block.origin.fingerprint)
        known = scopes if scopes.names is not None else replace(scopes, names=frozenset())
        return block if block.stored_at >= freshness.not_before(known, now) else None

    def _release(self, event: ev.PeerRelease, now: float) -> None:
        self._check_epoch(event.epoch)
        # The reader is its name and proof: nothing is remembered of readers, so nobody can take a name first.
        if self._shard.leases.is_of_another(event.lease_id, ("peer", event.reader)):
            self._shard.counters["peer_forbidden"] += 1
            raise Forbidden(f"lease {event.lease_id} is not this reader's")
        lease = self._shard.leases.release(event.lease_id, ("peer", event.reader))
        if lease is not None:
            leased = {slot.index for slot in lease.slots}  # a reader has a say on nothing else
            self._suspects.named(ref for ref in event.suspects if ref.slot in leased)
            self._shard.store.unpin(lease.slots)
        self._shard.emit(Reply(event.op, None))

    def _take_over(self, event: ev.PeerTakeOver, now: float) -> None:
        self._check_epoch(event.epoch)
        check_chain([item.key for item in event.items], ITEMS_MAX)
        check_seconds("wait", event.wait_seconds)
        if self._leaving.phase is not DrainPhase.SERVING:
            raise Unavailable(f"shard {self._shard.node_id} is draining itself")
        if event.payload_bytes <= 0 or self._shard.geometry.slots_per_slab(event.payload_bytes) == 0:
            raise UnsupportedLayout(f"blocks of {event.payload_bytes} bytes do not fit a slab here")
        if event.leaver.node_id == self._shard.node_id:
            raise InvalidRequest("an offer to oneself")
        self._takeovers.start(event, now)
