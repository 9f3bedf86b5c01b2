"""Slots that did not hold what was promised, for as long as the pool takes to look at them. Pure.

Until then it may promise them again, and such a load would only fail once more. A slot that is met again is left alone
for twice as long: a pool of an earlier version does not look, and a fault of this engine is none of the pool's.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import NamedTuple

from kvservice.core.bounded_table import BoundedTable
from kvservice.core.segment.refs import BlockRef

PAUSE_SECONDS = 10.0  # suspects are named to the pool within one, and again if nobody answered
PAUSE_SECONDS_MAX = 3600.0  # one failed load an hour is no burden, and what has healed is used again some day
SUSPECTS_MAX = 4096  # of more, the newest are kept, and a load from an older one fails once more


class _Pause(NamedTuple):
    until: float
    seconds: float


class RecentSuspects:
    """`now` never goes back."""

    def __init__(self) -> None:
        self._pauses: BoundedTable[BlockRef, _Pause] = BoundedTable(SUSPECTS_MAX)  # also those that are over
        self._now = 0.0

    @property
    def slots(self) -> Set[BlockRef]:
        """Those that are not to be loaded from now."""
        return {ref for ref, pause in self._pauses.items() if pause.until > self._now} if self._pauses else frozenset()

    def begin_step(self, now: float) -> None:
        self._now = now

    def add(self, refs: Iterable[BlockRef]) -> None:
        for ref in refs:
            before = self._pauses.get(ref)
            seconds = PAUSE_SECONDS if before is None else min(2 * before.seconds, PAUSE_SECONDS_MAX)
            self._pauses.put(ref, _Pause(self._now + seconds, seconds))

    def clear(self) -> None:
        """The pool that they are of is gone."""
        self._pauses = BoundedTable(SUSPECTS_MAX)
