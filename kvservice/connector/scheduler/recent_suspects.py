"""Slots that did not hold what was promised, for as long as the pool takes to look at them. Pure.

Until then it may promise them again, and such a load would only fail once more. After that they hold what the pool
promises, or it promises them no more.
"""

from __future__ import annotations

from collections.abc import Iterable, KeysView
from itertools import islice

from kvservice.core.segment.refs import BlockRef

SUSPECT_SECONDS = 10.0  # they are named to the pool within one, and again if nobody answered
SUSPECTS_MAX = 4096  # of more, the newest are kept, and a load from an older one fails once more


class RecentSuspects:
    """`now` never goes back."""

    def __init__(self) -> None:
        self._until: dict[BlockRef, float] = {}  # the next one to forget first
        self._now = 0.0

    @property
    def slots(self) -> KeysView[BlockRef]:
        return self._until.keys()

    def begin_step(self, now: float) -> None:
        self._now = now
        while self._until and next(iter(self._until.values())) <= now:
            del self._until[next(iter(self._until))]

    def add(self, refs: Iterable[BlockRef]) -> None:
        for ref in refs:
            self._until.pop(ref, None)
            self._until[ref] = self._now + SUSPECT_SECONDS
        for ref in list(islice(self._until, max(len(self._until) - SUSPECTS_MAX, 0))):
            del self._until[ref]

    def clear(self) -> None:
        """The pool that they are of is gone."""
        self._until.clear()
