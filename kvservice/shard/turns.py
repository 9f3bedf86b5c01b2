"""Whose turn it is: the tenant that has had the least of the shard's time, and of its connections the one that has.

Time is counted as it was really spent, so long calls cost more than short ones. Whoever comes back after a pause starts
beside the one that was served last, with a small credit: nobody can save up silence and then keep others waiting. The
idea is that of start-time fair queueing (Goyal, Vin and Cheng, 1996), twice: over tenants, and within each. Pure.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Generic, TypeVar

REST_SECONDS = 0.01  # of credit that is left after any silence: a polite caller is served before a flood goes on


class _Waits:
    """Something that may wait for its turn."""

    had = 0.0  # seconds, on the clock of those that it waits with
    waits = False


T = TypeVar("T")
W = TypeVar("W", bound=_Waits)


class _LeastFirst(Generic[W]):
    """Those that wait, with the one that has had least first; of equals, the one that has waited longest."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, W]] = []
        self._count = 0
        self._floor = 0.0  # what the one that was served last had had

    def add(self, one: W, *, rested: bool) -> None:
        """`rested`: it comes back after a pause."""
        if rested:
            one.had = max(one.had, self._floor - REST_SECONDS)
        one.waits = True
        self._count += 1
        heapq.heappush(self._heap, (one.had, self._count, one))

    def pop(self) -> W:
        self._floor, _, one = heapq.heappop(self._heap)
        one.waits = False
        return one

    def __len__(self) -> int:
        return len(self._heap)


@dataclass(eq=False)
class Queuer(_Waits, Generic[T]):
    """The place of `who`, a connection, among all of its tenant."""

    who: T
    tenant: _Tenant[T]


class _Tenant(_Waits, Generic[T]):
    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: _LeastFirst[Queuer[T]] = _LeastFirst()
        self.count = 0  # of its lines


class Turns(Generic[T]):
    """Every line that joins leaves in the end."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant[T]] = {}
        self._waiting: _LeastFirst[_Tenant[T]] = _LeastFirst()

    def join(self, who: T, tenant: str) -> Queuer[T]:
        found = self._tenants.setdefault(tenant, _Tenant(tenant))
        found.count += 1
        return Queuer(who, found)

    def leave(self, line: Queuer[T]) -> None:
        """If it still waits, its turn will find nothing to do."""
        line.tenant.count -= 1
        if not line.tenant.count:
            self._tenants.pop(line.tenant.name, None)

    def wait(self, line: Queuer[T]) -> None:
        """It has something to do. No effect if it waits already."""
        if not line.waits:
            line.tenant.lines.add(line, rested=True)
            if not line.tenant.waits:
                self._waiting.add(line.tenant, rested=True)

    def next(self) -> Queuer[T] | None:
        """The one whose turn it is, which does not wait any more; None when nobody waits. Call `spent` after it."""
        return self._waiting.pop().lines.pop() if self._waiting else None

    def spent(self, line: Queuer[T], seconds: float, *, more: bool) -> None:
        """What its turn took, and whether it has more to do."""
        line.had += seconds
        line.tenant.had += seconds
        if more and not line.waits:
            line.tenant.lines.add(line, rested=False)
        if line.tenant.lines and not line.tenant.waits:
            self._waiting.add(line.tenant, rested=False)

    def __bool__(self) -> bool:
        return bool(self._waiting)
