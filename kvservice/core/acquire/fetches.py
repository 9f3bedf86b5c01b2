"""Fetches: runs of blocks on their way to this node, each from one holder at a time. Pure.

A holder is another node, which leases the blocks and is read, or a tier, which is read without locating. What a holder
does not give is fetched from the next one that has it. One fetch serves every acquisition that waits for its blocks,
and goes on when all of them have given up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from kvservice.core.acquire.acquisition import Acquisition, Fetch
from kvservice.core.acquire.arrivals import Arrivals
from kvservice.core.acquire.estimate import FetchEstimates
from kvservice.core.acquire.pulls import LOCATE_GIVE_UP_SECONDS, PULL_SECONDS_MAX, Pulls
from kvservice.core.block.keys import span_route
from kvservice.core.block.tenants import tag_of
from kvservice.core.context import ShardContext
from kvservice.core.events import PullResult
from kvservice.core.messages import Holder, LocateResult, MissReason
from kvservice.core.segment.refs import BlockHandle
from kvservice.core.store.blocks import NO_KEY, Want
from kvservice.core.store.slots import Slot
from kvservice.core.tier.rules import is_tier, name_of_tier
from kvservice.core.tier.tier_block import TierBlock
from kvservice.core.tier.tiers import Tiers
from kvservice.units import BlockKey, NodeId

PULL_GRACE_SECONDS = 5.0  # a pull is reported by its deadline; this long after it, its blocks are given up
MISS_OF = {
    PullResult.STALE: MissReason.STALE,
    PullResult.CORRUPT: MissReason.CORRUPT,
    PullResult.FAILED: MissReason.PEER_FAILED,
    PullResult.STUCK: MissReason.DEADLINE,
}


class FetchWaiters(Protocol):
    """Those who wait for blocks."""

    def came(self, key: BlockKey, origin: NodeId, now: float) -> None: ...

    def failed(self, key: BlockKey, reason: MissReason, now: float, miss_node: str) -> None: ...


class Fetches:
    """Every fetch that is under way. `arrivals` says which fetch brings a block."""

    def __init__(
        self, shard: ShardContext, pulls: Pulls, tiers: Tiers, arrivals: Arrivals, waiters: FetchWaiters
    ) -> None:
        self._shard = shard
        self._store = shard.store
        self._counters = shard.counters
        self._pulls = pulls
        self._tiers = tiers
        self._arrivals = arrivals
        self._waiters = waiters
        self._open: dict[int, Fetch] = {}  # by the number of the pull
        self.estimates = FetchEstimates()

    # -- what acquisitions ask ----

    def start(
        self, acquisition: Acquisition, holder: Holder, alternates: list[Holder], indices: list[int], now: float
    ) -> None:
        self._ask(self._new(acquisition, holder, alternates, indices), now)

    def start_leased(
        self,
        acquisition: Acquisition,
        holder: Holder,
        indices: list[int],
        located: LocateResult,
        sent_at: float,
        now: float,
    ) -> None:
        """Fetch blocks that the holder has leased already."""
        self._pull(self._new(acquisition, holder, [], indices), located, sent_at, now)

    def _new(self, acquisition: Acquisition, holder: Holder, alternates: list[Holder], indices: list[int]) -> Fetch:
        fetch = Fetch(
            self._pulls.open(self, holder, acquisition.payload_bytes),
            holder,
            alternates,
            acquisition.request.keys,
            indices,
            acquisition.payload_bytes,
            acquisition.base,
            acquisition.account,
            self._shard.model_of(acquisition.attachment),
            fingerprint=self._shard.fingerprint_of(acquisition.attachment),
            until=acquisition.deadline,
            urgent=not acquisition.request.hold_seconds,
        )
        self._register(fetch)
        self._counters["fetches_started"] += 1
        return fetch

    def _register(self, fetch: Fetch) -> None:
        self._open[fetch.number] = fetch
        for index in fetch.indices:
            self._arrivals.expect(fetch.chain[index], fetch.number)

    def _ask(self, fetch: Fetch, now: float) -> None:
        if is_tier(fetch.holder.node_id):
            self._bring_back(fetch, now)
            return
        fetch.give_up_at = now + LOCATE_GIVE_UP_SECONDS
        keys = tuple(fetch.chain[index] for index in fetch.indices)
        self._pulls.locate(fetch.number, keys, max(fetch.until - now, 0.0))

    # -- what pulls report ----

    def located(self, number: int, result: LocateResult | None, sent_at: float, now: float) -> None:
        fetch = self._open[number]
        if result is None:
            self._pulls.drop(number)
            self._end(fetch, 0, MissReason.PEER_FAILED, now)
            return
        self.estimates.of(fetch.holder).observe_overhead(now - sent_at)
        self._pull(fetch, result, sent_at, now)

    def _pull(self, fetch: Fetch, result: LocateResult, sent_at: float, now: float) -> None:
        """Read the blocks that the peer leased, if they are what was requested and there is room for them."""
        handles: list[BlockHandle] = []
        for index, handle in zip(fetch.indices, result.handles, strict=False):
            if handle is None or handle.key != fetch.chain[index] or handle.length != fetch.payload_bytes:
                break
            handles.append(handle)
        slots, reason = self._room_for(fetch, len(handles), now)
        if not slots:
            self._pulls.drop(fetch.number, result)
            self._end(fetch, 0, reason, now)
            return
        self._cut(fetch, len(slots), reason, now)
        deadline = self._pulls.begin(fetch.number, result, handles[: len(slots)], slots, sent_at)
        fetch.started, fetch.give_up_at = now, max(deadline, now) + PULL_GRACE_SECONDS

    def _bring_back(self, fetch: Fetch, now: float) -> None:
        """Read blocks of a tier, as far as it has them and there is room. If it may not give all of them at once, and
        nobody else has them, the others are asked of it again after these."""
        number, node = fetch.number, fetch.holder.node_id
        until = min(fetch.until, now + PULL_SECONDS_MAX)
        blocks = self._tiers.begin_read(number, node, [self._wanted(fetch, i, now) for i in fetch.indices], until, now)
        slots, reason = self._room_for(fetch, len(blocks), now)
        if len(slots) < len(blocks):
            self._tiers.end_read(number, node, (), now)
            blocks = self._tiers.begin_read(number, node, blocks[: len(slots)], until, now) if slots else ()
        elif not slots:
            self._tiers.end_read(number, node, (), now)
        if not slots:
            self._pulls.drop(number)
            self._end(fetch, 0, reason, now)
            return
        if reason is MissReason.STALE and not fetch.alternates:
            fetch.later, fetch.indices = fetch.indices[len(slots) :], fetch.indices[: len(slots)]
        self._cut(fetch, len(slots), reason, now)
        fetch.blocks = {block.key: block for block in blocks}
        self._pulls.bring_back(number, name_of_tier(node), blocks, slots, until, urgent=fetch.urgent)
        fetch.started, fetch.give_up_at = now, max(until, now) + PULL_GRACE_SECONDS

    def _wanted(self, fetch: Fetch, index: int, now: float) -> TierBlock:
        """What is asked of a tier that this node keeps no books of. It gives nothing that is older than asked."""
        key, position, route = fetch.chain[index], fetch.base + index, span_route(fetch.chain, index)
        tag, print_ = tag_of(fetch.account), fetch.fingerprint
        oldest = self._shard.freshness.not_before(self._shard.freshness.scopes(key, fetch.account, print_), now)
        return TierBlock(key, fetch.payload_bytes, 0, position, route, tag, print_, oldest)

    def _room_for(self, fetch: Fetch, count: int, now: float) -> tuple[tuple[Slot, ...], MissReason]:
        """Slots for so many blocks, and why the blocks without one do not come."""
        reserved = self._store.reserve(count, NO_KEY, Want(fetch.payload_bytes, now, fetch.account))
        return reserved.slots, reserved.short_because if len(reserved.slots) < count else MissReason.STALE

    def _cut(self, fetch: Fetch, count: int, reason: MissReason, now: float) -> None:
        """Only the first `count` blocks are read."""
        rest = fetch.indices[count:]
        del fetch.indices[count:]
        lost = self._ask_next if reason is MissReason.STALE else self._fail
        lost(fetch, rest, reason, now)

    def arrived(self, number: int, position: int, handle: BlockHandle, slot: Slot, now: float) -> None:
        fetch, key = self._open[number], handle.key
        index, block = fetch.indices[position], fetch.blocks.get(key)
        # A peer's request has no fingerprint; the books of a tier do.
        fingerprint = fetch.fingerprint if block is None else block.fingerprint or fetch.fingerprint
        if key in self._store:  # an engine of this node sealed the same block meanwhile
            self._store.abort(slot)
        elif not self._shard.may_keep(handle, slot, fetch.account, fingerprint, now):
            self._store.abort(slot)
            self._tiers.not_kept(fetch.holder.node_id, key)
        else:
            parent = fetch.chain[index - 1] if index else None
            route = span_route(fetch.chain, index) if block is None else block.route
            place = fetch.base + index if block is None else block.position
            # What this node brought back is no copy of another node's block.
            is_secondary = block is None
            self._store.seal(
                slot,
                key,
                parent,
                place,
                route,
                handle.digest,
                now,
                is_secondary=is_secondary,
                model=fetch.model,
                fingerprint=fingerprint,
                stored_at=handle.stored_at,
            )
        self._arrivals.end(key, number)
        self._waiters.came(key, fetch.holder.node_id, now)

    def pulled(self, number: int, results: tuple[PullResult, ...], now: float) -> None:
        fetch = self._open[number]
        node, size = fetch.holder.node_id, fetch.payload_bytes
        good = results.count(PullResult.OK)
        if good:
            self.estimates.of(fetch.holder).observe_pull(good * size, now - fetch.started)
        if is_tier(node):
            self._tiers.end_read(number, node, results, now)
        else:
            for result in results:
                self._counters[f"pull_{result.value}"] += 1
            self._counters["fetched_blocks"] += good
            self._counters["fetched_bytes"] += good * size
        bad = next((position for position, result in enumerate(results) if result is not PullResult.OK), None)
        if bad is not None:
            self._end(fetch, bad, MISS_OF[results[bad]], now)
            return
        del self._open[number]
        if fetch.later:
            self._read_on(fetch, now)

    def _read_on(self, fetch: Fetch, now: float) -> None:
        """A tier gave what it might give at once: ask it for the rest, if that is still wanted."""
        if self._shard.is_draining():
            self._fail(fetch, fetch.later, MissReason.DRAINING, now)
        elif now >= fetch.until:
            self._fail(fetch, fetch.later, MissReason.DEADLINE, now)
        else:
            self._ask_again(fetch, fetch.holder, fetch.alternates, fetch.later, now)

    # -- what does not come ----

    def _end(self, fetch: Fetch, from_position: int, reason: MissReason, now: float) -> None:
        """The blocks from this position on did not come: ask the next holder, or fail their waiters.

        Blocks that did come are not expected any more, so both ways skip them.
        """
        rest = (*fetch.indices[from_position:], *fetch.later)
        left = [i for i in rest if self._arrivals.is_brought_by(fetch.chain[i], fetch.number)]
        self._counters["fetches_failed"] += 1
        del self._open[fetch.number]
        self._ask_next(fetch, left, reason, now)

    def _ask_next(self, fetch: Fetch, left: list[int], reason: MissReason, now: float) -> None:
        """Fetch from the next holder what this one did not give; without a next holder it does not come."""
        if not left or not fetch.alternates:
            self._fail(fetch, left, reason, now)
            return
        holder, *others = fetch.alternates
        self._ask_again(fetch, holder, others, left, now)

    def _ask_again(self, fetch: Fetch, holder: Holder, others: list[Holder], indices: list[int], now: float) -> None:
        # An id names one pull: a late WritesEnded of the old pull must not touch the slots of the new one.
        number = self._pulls.open(self, holder, fetch.payload_bytes)
        again = replace(
            fetch, number=number, holder=holder, alternates=others, indices=indices, later=[], started=0.0, blocks={}
        )
        self._register(again)
        self._ask(again, now)

    def _give_up(self, fetch: Fetch, now: float) -> None:
        """The performer's answer does not come: whoever wants the blocks may fetch them again."""
        self._counters["fetches_overdue"] += 1
        if self._pulls.is_locating(fetch.number):
            self._pulls.drop(fetch.number)
            self._end(fetch, 0, MissReason.PEER_FAILED, now)
            return
        fetch.give_up_at = math.inf  # its slots stay reserved until its answer: they may still be written
        later, fetch.later = fetch.later, []
        self._fail(fetch, [*fetch.indices, *later], MissReason.DEADLINE, now)

    def _fail(self, fetch: Fetch, indices: Sequence[int], reason: MissReason, now: float) -> None:
        """These blocks, which the fetch still brings, do not come."""
        for index in indices:
            key = fetch.chain[index]
            self._arrivals.end(key, fetch.number)
            self._waiters.failed(key, reason, now, fetch.holder.node_id)

    # -- time ----

    def tick(self, now: float) -> None:
        for fetch in [f for f in self._open.values() if f.give_up_at <= now]:
            self._give_up(fetch, now)

    def next_deadline(self) -> float | None:
        return min((f.give_up_at for f in self._open.values() if f.give_up_at < math.inf), default=None)

    @property
    def is_idle(self) -> bool:
        return not self._open

    def check_invariants(self) -> None:
        owned = self._pulls.owned_by(self)
        assert self._open.keys() == owned, "a fetch without a pull, or a pull without a fetch"
        reads = {number for number, fetch in self._open.items() if is_tier(fetch.holder.node_id)}
        assert reads == self._tiers.reading(), "a read of a tier without a fetch, or a fetch without a read"

    def numbers(self) -> set[int]:
        """For checks."""
        return set(self._open)
