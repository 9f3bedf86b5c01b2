"""What a session heard of blocks that left the pool, until the scheduler takes it. May be used on any thread."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Iterable, Sequence

from kvservice.core.messages import Removed, SealItem, SealStatus
from kvservice.units import BlockKey

# Keys that nobody has taken yet, 1 MiB. Beyond it every block counts as gone, which is a later miss at worst.
KEYS_MAX = 1 << 16


class RemovalInbox:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: list[BlockKey] = []
        self._is_all = False

    def add(self, keys: Iterable[BlockKey], lost: int = 0) -> None:
        """These blocks are gone, and `lost` more whose keys are not known."""
        with self._lock:
            self._keys.extend(keys)
            if lost or len(self._keys) > KEYS_MAX:
                self._forget()

    async def hear(self, heartbeat: Awaitable[Removed]) -> None:
        """Take what the answer of a heartbeat says."""
        removed = await heartbeat
        self.add(removed.keys, removed.lost)

    def add_unsealed(self, items: Sequence[SealItem], statuses: Sequence[SealStatus]) -> None:
        """Of these blocks, the ones that did not come into the pool."""
        there = (SealStatus.SEALED, SealStatus.DUPLICATE)
        self.add(item.key for item, status in zip(items, statuses, strict=True) if status not in there)

    def add_all(self) -> None:
        """The pool is gone."""
        with self._lock:
            self._forget()

    def take(self) -> list[BlockKey] | None:
        """The blocks that have gone since the last call; None: all that were there, as far as anybody knows."""
        with self._lock:
            found = None if self._is_all else self._keys
            self._keys, self._is_all = [], False
            return found

    def _forget(self) -> None:
        self._keys, self._is_all = [], True
