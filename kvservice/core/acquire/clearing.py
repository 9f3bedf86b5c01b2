"""Clears blocks everywhere on this node, and drops those that reached the age limit. Pure; a part of ShardState."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from kvservice.core import events as ev
from kvservice.core.acquire.holds import Holds
from kvservice.core.actions import Reply
from kvservice.core.block.marks import FUTURE_SECONDS_MAX, MARK_SECONDS, Mark, check_mark, covers
from kvservice.core.context import ShardContext
from kvservice.core.explain.evictions import EvictionCause
from kvservice.core.store.blocks import Block
from kvservice.core.tier.tier_block import TierBlock
from kvservice.core.tier.tiers import Tiers
from kvservice.errors import InvalidRequest
from kvservice.units import BlockKey

CLEAR_MARKS_MAX = 16  # of one call; one that clears a long prompt has several
# Between two looks for old blocks in a tier, as a share of the age limit: a block may stay there so much longer. It is
# not served meanwhile, because its age is looked at when it is read.
AGE_LOOK_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class ClearResult:
    """What a clear found on one node."""

    blocks: int  # in memory
    bytes: int
    reading: int  # given up here by any clear and still read; their memory is free when that ends
    tier_blocks: int  # in tiers of this node


class Clearing:
    """Handles Clear, and old blocks."""

    def __init__(self, shard: ShardContext, tiers: Tiers, holds: Holds) -> None:
        self._shard = shard
        self._store = shard.store
        self._freshness = shard.freshness
        self._tiers = tiers
        self._holds = holds
        self._by_age: list[tuple[float, BlockKey]] = []  # heap; entries of blocks that are gone are skipped
        self._looked_at = float("-inf")
        if self._freshness.max_age_seconds:
            self._store.on_insert = self._inserted

    def clear(self, event: ev.Clear, now: float) -> None:
        if not 0 < len(event.marks) <= CLEAR_MARKS_MAX:
            raise InvalidRequest(f"{len(event.marks)} marks: 1 to {CLEAR_MARKS_MAX}")
        wall = self._freshness.wall(now)
        for mark in event.marks:
            check_mark(mark)
            if not wall - MARK_SECONDS < mark.at < wall + FUTURE_SECONDS_MAX:
                raise InvalidRequest(
                    f"this clear is of a time {mark.at - wall:+.0f} s from this node's: set the clocks of both machines"
                )
        self._freshness.clear(event.marks, now)
        in_tiers = self._tiers.clear(lambda block: self._is_marked(event.marks, block))
        found = [block for block in self._store.blocks() if self._is_marked(event.marks, block)]
        for block in found:
            self._store.retire(block.key, EvictionCause.CLEARED, now)
        self._store.forget_free()
        self._holds.let_go_of(self._store.retired)
        self._shard.counters["clears"] += 1
        size = sum(block.payload_bytes for block in found)
        self._shard.emit(Reply(event.op, ClearResult(len(found), size, len(self._store.retired), in_tiers)))

    def tick(self, now: float) -> None:
        """Drop what has become too old."""
        limit = self._freshness.max_age_seconds
        if not limit:
            return
        oldest = self._freshness.wall(now) - limit
        while self._by_age and self._by_age[0][0] < oldest:
            stored_at, key = heapq.heappop(self._by_age)
            block = self._store.get(key)
            if block is not None and block.stored_at == stored_at:
                self._store.retire(key, EvictionCause.AGED, now)
        if now >= self._looked_at + AGE_LOOK_SHARE * limit:
            self._looked_at = now
            self._tiers.clear(lambda block: block.stored_at < oldest)
            self._holds.let_go_of(self._store.retired)

    def next_deadline(self) -> float | None:
        limit = self._freshness.max_age_seconds
        if not limit:
            return None
        look = self._looked_at + AGE_LOOK_SHARE * limit
        first = self._by_age[0][0] + limit - self._freshness.wall(0.0) if self._by_age else look
        return max(min(first, look), 0.0)

    # -- inside ----

    def _inserted(self, block: Block) -> None:
        heapq.heappush(self._by_age, (block.stored_at, block.key))

    def _is_marked(self, marks: tuple[Mark, ...], block: Block | TierBlock) -> bool:
        if isinstance(block, Block):
            account = self._store.account_of(block)
        else:
            account = self._store.accounts.account_of(block.account_tag)
        scopes = self._freshness.scopes(block.key, account, block.fingerprint)
        return any(covers(mark, scopes) for mark in marks)
