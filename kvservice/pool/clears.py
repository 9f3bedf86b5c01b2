"""Clears: a pool gives blocks up, here and in its tiers, and keeps the marks that say so.

Runs on the pool's loop. The marks are core.block.marks, and their files pool.mark_files.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from kvservice.aio import in_thread
from kvservice.core.acquire.clearing import CLEAR_MARKS_MAX, ClearResult
from kvservice.core.block.marks import Mark
from kvservice.core.store.freshness import Freshness
from kvservice.errors import KVServiceError, TierError, Unavailable
from kvservice.pool.mark_files import MarkFiles, missed, unfinished
from kvservice.pool.tiers import PoolTiers

log = logging.getLogger("kvservice.pool")


class PoolClears:
    """`clear_blocks` has core give up the blocks of some marks, at once."""

    def __init__(
        self,
        freshness: Freshness,
        files: MarkFiles,
        tiers: PoolTiers,
        clock: Callable[[], float],
        clear_blocks: Callable[[Sequence[Mark]], Awaitable[ClearResult]],
    ) -> None:
        self._freshness = freshness
        self._files = files
        self._tiers = tiers
        self._clock = clock
        self._clear_blocks = clear_blocks

    async def load(self) -> tuple[Mark, ...]:
        """Learn the marks of the files, and return them."""
        marks = await in_thread(self._files.load)
        self._freshness.marks.add(marks)
        return marks

    async def learn(self, marks: Sequence[Mark]) -> None:
        """Take the marks that lay beside a disk which answers only now, and keep all that are known there. Raises
        Unavailable when they cannot be kept. Of the disk nothing that they cover is served, whatever else fails."""
        new, _ = missed(marks, set(self._freshness.marks.all()), self._freshness.wall(self._clock()))
        self._freshness.marks.add(marks)
        await self._take(new)
        await self._keep()

    async def finish(self, marks: Sequence[Mark], used_at: float) -> None:
        """Do the clears again that the last boot, alive until `used_at`, may not have finished."""
        await self._take(unfinished(marks, used_at, self._freshness.wall(self._clock())))

    async def clear(self, marks: Sequence[Mark]) -> ClearResult:
        """Give these blocks up, here and in the tiers, and keep the marks. Raises InvalidRequest for marks that make no
        sense, Unavailable if the marks cannot be kept: the blocks are gone all the same."""
        result = await self._clear_blocks(marks)
        try:
            await self._keep()
        finally:  # a tier is told also when a file cannot be written
            await self._tell_tiers(marks)
        return result

    async def take(self, marks: Sequence[Mark]) -> tuple[Mark, ...]:
        """Clear what was cleared elsewhere while this node was away. Returns all marks that are known afterwards.
        Raises Unavailable when some are ahead of this node's clock; the others are taken all the same."""
        wall = self._freshness.wall(self._clock())
        new, ahead = missed(marks, set(self._freshness.marks.all()), wall)
        await self._take(new)
        if ahead:
            seconds = max(mark.at for mark in ahead) - wall
            raise Unavailable(f"a clear is of {seconds:.0f} s after this node's time: set the clocks", transient=True)
        return self._freshness.marks.all()

    async def _take(self, marks: Sequence[Mark]) -> None:
        for start in range(0, len(marks), CLEAR_MARKS_MAX):
            try:
                await self._clear_blocks(marks[start : start + CLEAR_MARKS_MAX])
                await self._keep()
            except KVServiceError as error:
                log.warning("marks_not_taken", extra={"reason": error.message})

    async def _keep(self) -> None:
        await self._files.keep_in_time(self._freshness.marks.all())

    async def _tell_tiers(self, marks: Sequence[Mark]) -> None:
        try:
            await self._tiers.keep_marks(marks)
        except TierError as error:
            raise Unavailable(f"the marks of what was cleared cannot be kept in a tier: {error.message}") from error
