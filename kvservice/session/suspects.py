"""Slots that did not hold what was promised, until a heartbeat has named them to the pool."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from kvservice.core.acquire.suspects import NAMED_MAX
from kvservice.core.segment.refs import BlockRef


class UnnamedSuspects:
    """Each slot once. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refs: dict[BlockRef, None] = {}

    def __bool__(self) -> bool:
        return bool(self._refs)

    def add(self, refs: Iterable[BlockRef]) -> None:
        """Beyond as many as one heartbeat names they are left out: who meets them again adds them again."""
        with self._lock:
            for ref in refs:
                if len(self._refs) < NAMED_MAX:
                    self._refs[ref] = None

    def take(self) -> list[BlockRef]:
        """All of them. Add them again if nobody has heard of them."""
        with self._lock:
            found = list(self._refs)
            self._refs.clear()
            return found
