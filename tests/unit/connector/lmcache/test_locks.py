"""Locks are leases: when a lease ends, and which lock goes."""

from __future__ import annotations

from typing import Any

from kvservice.connector.lmcache.locks import LOCK_SECONDS_MAX, ObjectLocks, PromisedObject, SharedLease
from tests.unit.connector.lmcache.test_names import LAYOUT, Key

ANYTHING: Any = None


class Lease:
    """Counts how often it ended."""

    def __init__(self, objects: int) -> None:
        self.ended = 0
        self.shared = SharedLease(self._end, objects)

    def _end(self) -> None:
        self.ended += 1

    def object(self, layout: Any = LAYOUT) -> PromisedObject:
        return PromisedObject(layout, ANYTHING, ANYTHING, ANYTHING, self.shared)


def test_a_lease_ends_with_the_last_of_its_locks() -> None:
    locks, lease = ObjectLocks(), Lease(2)
    locks.add(Key(b"a"), lease.object(), 0.0)
    locks.add(Key(b"b"), lease.object(), 0.0)
    assert locks.remove(Key(b"b")) and lease.ended == 0
    assert locks.remove(Key(b"a")) and lease.ended == 1 and len(locks) == 0
    assert not locks.remove(Key(b"a")) and lease.ended == 1


def test_of_several_locks_the_oldest_goes() -> None:
    locks, first, second = ObjectLocks(), Lease(1), Lease(1)
    locks.add(Key(), first.object(), 0.0)
    locks.add(Key(), second.object(), 1.0)
    assert locks.find(Key(), LAYOUT) is not None and locks.remove(Key())
    assert (first.ended, second.ended, len(locks)) == (1, 0, 1)


def test_an_object_is_found_in_its_layout_only() -> None:
    locks, lease = ObjectLocks(), Lease(1)
    other: Any = "other"
    locks.add(Key(), lease.object(other), 0.0)
    assert locks.find(Key(), LAYOUT) is None and locks.find(Key(), other) is not None
    assert locks.find(Key(b"b"), LAYOUT) is None


def test_a_lock_that_nobody_takes_back_ends() -> None:
    locks, old, new = ObjectLocks(), Lease(1), Lease(1)
    locks.add(Key(), old.object(), 0.0)
    locks.add(Key(), new.object(), 1.0)
    assert locks.expire(LOCK_SECONDS_MAX - 0.1) == 0 and locks.expire(LOCK_SECONDS_MAX) == 1
    assert (old.ended, new.ended, len(locks)) == (1, 0, 1)
    locks.clear()
    assert (new.ended, len(locks)) == (1, 0) and locks.expire(10 * LOCK_SECONDS_MAX) == 0
