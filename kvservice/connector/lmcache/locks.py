"""Which objects a server has locked, and the leases of the pool that keep their promise.

A lookup locks the objects that it finds, and gets one lease for those that are promised together. The lease ends with
the last lock on one of its objects. LMCache unlocks by name only, so of several locks on an object the oldest goes.
Used on one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvservice.api.mapped import MappedPool
from kvservice.connector.lmcache.names import ObjectKeyPort, ObjectLayout
from kvservice.core.segment.refs import BlockRef
from kvservice.units import BlockKey

# A lock that nobody has taken back after this time is forgotten by LMCache, whose own locks end after five minutes.
LOCK_SECONDS_MAX = 600.0


@dataclass(slots=True)
class SharedLease:
    """A lease for several objects."""

    end: Callable[[], None]
    left: int  # of its objects, those that are locked

    def let_go(self) -> None:
        """One of its objects is not needed any more."""
        self.left -= 1
        if not self.left:
            self.end()


@dataclass(frozen=True, slots=True)
class PromisedObject:
    """An object that stays in its slot while its lease lasts."""

    layout: ObjectLayout
    mapped: MappedPool
    ref: BlockRef
    key: BlockKey
    lease: SharedLease


class ObjectLocks:
    def __init__(self) -> None:
        self._number = 0
        self._locks: dict[int, tuple[float, ObjectKeyPort, PromisedObject]] = {}  # by number, the oldest first
        self._of: dict[ObjectKeyPort, list[int]] = {}

    def __len__(self) -> int:
        return len(self._locks)

    @property
    def next_end(self) -> float | None:
        """When the oldest lock is forgotten; None without locks."""
        return next((ends_at for ends_at, _, _ in self._locks.values()), None)

    def add(self, key: ObjectKeyPort, promised: PromisedObject, now: float) -> None:
        self._number += 1
        self._locks[self._number] = now + LOCK_SECONDS_MAX, key, promised
        self._of.setdefault(key, []).append(self._number)

    def find(self, key: ObjectKeyPort, layout: ObjectLayout) -> PromisedObject | None:
        """The object that was locked last under this name and layout."""
        for number in reversed(self._of.get(key, ())):
            promised = self._locks[number][2]
            if promised.layout == layout:
                return promised
        return None

    def remove(self, key: ObjectKeyPort) -> bool:
        """Returns whether there was a lock on the object."""
        numbers = self._of.get(key)
        if not numbers:
            return False
        self._end(numbers[0])
        return True

    def expire(self, now: float) -> int:
        """End the locks that nobody took back. Returns how many."""
        count = 0
        while self._locks:
            number = next(iter(self._locks))
            if now < self._locks[number][0]:
                break
            self._end(number)
            count += 1
        return count

    def clear(self) -> None:
        for number in list(self._locks):
            self._end(number)

    def _end(self, number: int) -> None:
        _, key, promised = self._locks.pop(number)
        numbers = self._of[key]
        numbers.remove(number)
        if not numbers:
            del self._of[key]
        promised.lease.let_go()
