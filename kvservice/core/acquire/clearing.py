"""Clears blocks everywhere on this node, and drops those that reached the age limit. Pure; a part of ShardState.

A mark counts from the moment when it is taken: nothing that it covers is taken in any more. What is here already is
found by a walk over all slots, and then over the books of the tiers. The walk is done in slices, one for each Tick, so
that no step takes long however much there is. The clear is answered when its walk has ended. A block that is stored
during the walk may go with it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import islice

from kvservice.core import events as ev
from kvservice.core.acquire.holds import Holds
from kvservice.core.actions import Reply
from kvservice.core.block.marks import CLOCK_SKEW_SECONDS, FUTURE_SECONDS_MAX, MARK_SECONDS, Mark, check_mark, covers
from kvservice.core.context import ShardContext
from kvservice.core.explain.evictions import EvictionCause
from kvservice.core.store.slots import Block
from kvservice.core.tier.tier_block import TierBlock
from kvservice.core.tier.tiers import Tiers
from kvservice.errors import InvalidRequest
from kvservice.units import BlockKey, SlotIndex

SLICE = 256  # slots, or blocks of a tier, that one step looks at: 3 ms if all of them go
CLEAR_MARKS_MAX = 16  # of one call; one that clears a long prompt has several
# Between two looks for old blocks in a tier, as a share of the age limit: a block may stay there so much longer. It is
# not served meanwhile, because its age is looked at when it is read.
AGE_LOOK_SHARE = 0.01
AGES_MIN = 1024  # entries of blocks and their ages before those of blocks that are gone are swept out
Walk = Generator[None, None, object]  # yields after each whole slice; what it returns says what it found
_ENDED = object()
_Age = tuple[float, BlockKey]  # when a block was stored


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
        self._by_age: list[_Age] = []  # heap; entries of blocks that are gone are skipped
        self._unswept: list[_Age] = []  # entries that were in it when a sweep began
        self._looked_at = float("-inf")
        self._walks: deque[Walk] = deque()  # the first one is under way
        self._now = 0.0  # of the step
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
        self._shard.counters["clears"] += 1
        self._begin(self._cleared(event), now)

    def clock_set(self, event: ev.ClockSet, now: float) -> None:
        """Blocks that were stored while the clock was ahead would reach their age too late, so they go."""
        before = self._freshness.wall(now)
        self._freshness.set_clock(event.wall_offset)
        self._shard.counters["clock_steps"] += 1
        latest = self._freshness.wall(now) + CLOCK_SKEW_SECONDS
        if self._freshness.max_age_seconds and latest < before:
            self._begin(self._swept(lambda block: block.stored_at > latest, EvictionCause.AGED), now)

    def tick(self, now: float) -> None:
        """Go on with the walks, and drop what has become too old."""
        self._step(now)
        limit = self._freshness.max_age_seconds
        if not limit:
            return
        oldest = self._freshness.wall(now) - limit
        for _ in range(SLICE):
            if not self._by_age or self._by_age[0][0] >= oldest:
                break
            entry = heapq.heappop(self._by_age)
            if self._is_true(entry):
                self._store.retire(entry[1], EvictionCause.AGED, now)
        self._holds.let_go_of(self._store.retired)
        if now >= self._looked_at + AGE_LOOK_SHARE * limit and not self._walks:
            self._looked_at = now
            self._begin(self._tiers.clear(lambda block: block.stored_at < oldest, SLICE), now)

    def next_deadline(self) -> float | None:
        if self._walks:
            return 0.0
        limit = self._freshness.max_age_seconds
        if not limit:
            return None
        look = self._looked_at + AGE_LOOK_SHARE * limit
        first = self._by_age[0][0] + limit - self._freshness.wall(0.0) if self._by_age else look
        return max(min(first, look), 0.0)

    # -- inside ----

    def _begin(self, walk: Walk, now: float) -> None:
        """Walk after those that have begun. Its first slice is done at once, if there are none."""
        self._walks.append(walk)
        if len(self._walks) == 1:
            self._step(now)

    def _step(self, now: float) -> None:
        """Do the next slice."""
        self._now = now
        if self._walks and next(self._walks[0], _ENDED) is _ENDED:
            self._walks.popleft()

    def _cleared(self, event: ev.Clear) -> Walk:
        swept = yield from self._swept(lambda block: self._is_marked(event.marks, block), EvictionCause.CLEARED)
        self._shard.emit(Reply(event.op, swept))
        return swept

    def _swept(
        self, goes: Callable[[Block | TierBlock], bool], cause: EvictionCause
    ) -> Generator[None, None, ClearResult]:
        """Memory goes first: what leaves it during the walk may be written into a tier."""
        blocks = size = 0
        slots, slot = self._store.table, SlotIndex(0)
        while found := list(islice(slots.slots_from(slot), SLICE)):
            for each in found:
                block = each.block
                if block is None:
                    self._store.forget_free(each)
                elif goes(block):
                    blocks, size = blocks + 1, size + block.payload_bytes
                    self._store.retire(block.key, cause, self._now)
            self._holds.let_go_of(self._store.retired)
            slot = SlotIndex(found[-1].index + 1)
            if len(found) == SLICE:
                yield
        in_tiers = yield from self._tiers.clear(goes, SLICE)
        return ClearResult(blocks, size, len(self._store.retired), in_tiers)

    def _inserted(self, block: Block) -> None:
        heapq.heappush(self._by_age, (block.stored_at, block.key))
        if len(self._by_age) > 2 * len(self._store) + AGES_MIN and not self._unswept:
            self._unswept, self._by_age = self._by_age, []
            self._walks.append(self._sweep())

    def _sweep(self) -> Generator[None, None, None]:
        """Forget the ages of blocks that are gone: of a busy pool they are far more than those of blocks."""
        while self._unswept:
            for _ in range(min(SLICE, len(self._unswept))):
                entry = self._unswept.pop()
                if self._is_true(entry):
                    heapq.heappush(self._by_age, entry)
            yield

    def _is_true(self, entry: _Age) -> bool:
        block = self._store.get(entry[1])
        return block is not None and block.stored_at == entry[0]

    def check_invariants(self) -> None:
        if self._freshness.max_age_seconds:
            listed = {*self._by_age, *self._unswept}
            ages = {(block.stored_at, block.key) for block in self._store.blocks()}
            assert ages <= listed, "a block would outlive the age limit"

    def _is_marked(self, marks: tuple[Mark, ...], block: Block | TierBlock) -> bool:
        if isinstance(block, Block):
            account, fingerprint = block.account, block.origin.fingerprint
        else:
            account, fingerprint = self._store.accounts.account_of(block.account_tag), block.fingerprint
        scopes = self._freshness.scopes(block.key, account, fingerprint)
        return any(covers(mark, scopes) for mark in marks)
