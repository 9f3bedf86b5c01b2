"""Read leases: promises that a set of slots stays unchanged for a time.

A lease has a holder, and only its holder ends or renews it. Deadlines are on the clock of the process that owns the
table. The holder counts the time from before it sent its request, so it always stops reading first. Ids are used once.
Releasing an unknown lease is counted and has no effect; it is never an error (naming each pin by an id is the idea of
PegaFlow's lease.rs). Pure.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvservice.core.store.slots import Slot
from kvservice.units import LeaseId, SlotIndex

# ("engine", attachment id), ("peer", node id), ("warm", tenant) or ("pin", tenant and name)
LeaseOwner = tuple[str, int | str]


@dataclass(slots=True)
class Lease:
    """One lease. Mutable: it is the table's own record."""

    lease_id: LeaseId
    holder: LeaseOwner
    slots: tuple[Slot, ...]
    expires_at: float  # seconds on the owner's monotonic clock


class LeaseTable:
    """All leases of one shard, by id, holder and deadline."""

    def __init__(self) -> None:
        self._leases: dict[LeaseId, Lease] = {}
        self._by_holder: dict[LeaseOwner, set[LeaseId]] = {}
        self._deadlines: list[tuple[float, LeaseId]] = []  # heap; entries of renewed or ended leases are skipped
        self._next_id = 1
        self.counters: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, holder: LeaseOwner, slots: tuple[Slot, ...], now: float, duration: float) -> Lease:
        """A new lease over slots that the caller has pinned, until it is ended if `duration` is infinite. The caller
        unpins them when the lease is returned."""
        assert slots
        lease = Lease(LeaseId(self._next_id), holder, slots, now + duration)
        self._next_id += 1
        self._leases[lease.lease_id] = lease
        self._by_holder.setdefault(holder, set()).add(lease.lease_id)
        heapq.heappush(self._deadlines, (lease.expires_at, lease.lease_id))
        self.counters["leases_granted"] += 1
        return lease

    def of_holder(self, holder: LeaseOwner) -> list[Lease]:
        """The leases of one holder, the oldest first."""
        return [self._leases[lease_id] for lease_id in sorted(self._by_holder.get(holder, set()))]

    def holders(self) -> list[LeaseOwner]:
        """Everybody who has a lease, in order."""
        return sorted(self._by_holder, key=str)

    def is_of_another(self, lease_id: LeaseId, holder: LeaseOwner) -> bool:
        lease = self._leases.get(lease_id)
        return lease is not None and lease.holder != holder

    def release(self, lease_id: LeaseId, holder: LeaseOwner) -> Lease | None:
        """End one lease. Returns None, without effect, when it is unknown or another holder's."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.holder != holder:
            self.counters["lease_release_ignored"] += 1
            return None
        self._drop(lease)
        self.counters["leases_released"] += 1
        return lease

    def renew(self, holder: LeaseOwner, lease_ids: Sequence[LeaseId], now: float, duration: float) -> None:
        """Extend the leases among these that are the holder's."""
        for lease_id in self._by_holder.get(holder, set()).intersection(lease_ids):
            lease = self._leases[lease_id]
            lease.expires_at = max(lease.expires_at, now + duration)

    def end_holder(self, holder: LeaseOwner) -> list[Lease]:
        """End all leases of a holder that is gone, and return them."""
        leases = self.of_holder(holder)
        for lease in leases:
            self._drop(lease)
        self.counters["leases_fenced"] += len(leases)
        return leases

    def expire(self, now: float) -> list[Lease]:
        """End all leases that have expired, and return them."""
        expired: list[Lease] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, lease_id = heapq.heappop(self._deadlines)
            lease = self._leases.get(lease_id)
            if lease is None:
                continue
            if lease.expires_at > now:
                heapq.heappush(self._deadlines, (lease.expires_at, lease_id))
                continue
            self._drop(lease)
            expired.append(lease)
        self.counters["leases_expired"] += len(expired)
        return expired

    def next_deadline(self) -> float | None:
        """A time not later than the first expiry. It may be too early after a renewal."""
        first = self._deadlines[0][0] if self._deadlines else math.inf
        return None if first == math.inf else first

    def slots(self) -> Counter[SlotIndex]:
        """How many leases cover each slot."""
        return Counter(slot.index for lease in self._leases.values() for slot in lease.slots)

    def _drop(self, lease: Lease) -> None:
        del self._leases[lease.lease_id]
        left = self._by_holder[lease.holder]
        left.discard(lease.lease_id)
        if not left:
            del self._by_holder[lease.holder]
        while self._deadlines and self._deadlines[0][1] not in self._leases:  # else they are all looked at when due
            heapq.heappop(self._deadlines)

    def check_invariants(self) -> None:
        held = {lease_id for ids in self._by_holder.values() for lease_id in ids}
        assert held == set(self._leases), "leases and holders differ"
        timed = {lease_id for _, lease_id in self._deadlines}
        assert held <= timed, "a lease would never expire"
