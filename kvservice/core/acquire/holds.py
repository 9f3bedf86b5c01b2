"""Blocks that are held for nobody who reads them: warmed ones for a bounded time, pinned ones until they are unpinned.

Both are leases, so what they cover is never evicted. Both have a budget, so that engines find room in any case. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence, Set
from dataclasses import dataclass

from kvservice.core.block.tenants import NOBODY
from kvservice.core.context import ShardContext
from kvservice.core.messages import Pin
from kvservice.core.store.leases import Lease, LeaseOwner
from kvservice.core.store.slots import Slot
from kvservice.errors import Exhausted, InvalidRequest
from kvservice.units import LeaseId, format_bytes

# The parts of the pool, and of a tenant's quota, that warmed and pinned blocks may take. Together they leave half of it
# to blocks that engines store and read.
WARM_SHARE, PIN_SHARE = 0.25, 0.25
HOLD_SECONDS_MAX = 600.0  # a longer time is refused: what is to stay is pinned
PINS_MAX = 256  # names of one shard: a person keeps an overview of far fewer. More are refused with Exhausted.
PIN_NAME_CHARS_MAX = 128  # a longer name is refused
assert WARM_SHARE + PIN_SHARE <= 0.5


@dataclass(frozen=True, slots=True)
class _Pinned:
    lease_id: LeaseId
    byte_count: int
    model: str
    since: float


class Holds:
    """Everything that is held here. Slots are pinned by whoever calls, and given back by leases that end."""

    def __init__(self, shard: ShardContext) -> None:
        self._shard = shard
        self._pins: dict[tuple[str, str], _Pinned] = {}  # by tenant and name

    # -- warmed blocks ----

    def warm(self, account: str, slots: Sequence[Slot], seconds: float, now: float) -> int:
        """Hold the first of these pinned slots, as many as the tenant's budget takes, and unpin the others. What it
        warmed longest ago is let go first, and an earlier hold of the same blocks is replaced. Returns how many are
        held."""
        holder, budget = ("warm", account), self._budget(account, WARM_SHARE)
        held = self._within(slots, budget)
        again = frozenset(slots[:held])
        for lease in self._shard.leases.of_holder(holder):
            if lease.expires_at <= now + seconds and again.issuperset(lease.slots):
                self._end(lease)
        wanted = self._bytes(slots[:held])
        for lease in self._shard.leases.of_holder(holder):
            if wanted + self._held_by(holder) <= budget:
                break
            self._end(lease)
            self._shard.counters["warm_let_go"] += 1
        self._shard.store.unpin(slots[held:])
        if held:
            self._shard.leases.grant(holder, tuple(slots[:held]), now, seconds)
        self._shard.counters["warm_held_blocks"] += held
        return held

    # -- pins ----

    def pin(self, account: str, name: str, model: str, slots: Sequence[Slot], now: float) -> None:
        """Hold these pinned slots under this name, in place of what it named before. Raises Exhausted, and unpins them,
        when they are more than there is room for."""
        ended = self._take(account, name)
        if not slots:
            return
        room = min(
            self._budget(account, PIN_SHARE) - self._pinned_bytes(of=account),
            self._budget("", PIN_SHARE) - self._pinned_bytes(),
        )
        wanted = self._bytes(slots)
        if wanted > room or len(self._pins) >= PINS_MAX:
            self._shard.store.unpin(slots)
            self._shard.counters["pins_refused"] += 1
            raise Exhausted(
                f"pinning {name!r} takes {format_bytes(wanted)} and there are {format_bytes(max(room, 0))} left for "
                f"pins, which get {PIN_SHARE:.0%} of the pool and of a tenant's quota, and {len(self._pins)} of "
                f"{PINS_MAX} names are taken{', this one until now' if ended else ''}: unpin another prompt, or make "
                "the pool larger"
            )
        lease = self._shard.leases.grant(("pin", f"{account} {name}"), tuple(slots), now, math.inf)
        self._pins[account, name] = _Pinned(lease.lease_id, wanted, model, now)

    def unpin(self, account: str, name: str, now: float) -> Pin | None:
        """End a pin. Returns what it was; None if there is none of this name."""
        known = next((pin for pin in self.pins(now) if (pin.account, pin.name) == (account, name)), None)
        self._take(account, name)
        return known

    def pins(self, now: float) -> tuple[Pin, ...]:
        """By tenant and name."""
        return tuple(
            Pin(name, account, pinned.model, len(lease.slots), pinned.byte_count, now - pinned.since)
            for (account, name), pinned in sorted(self._pins.items())
            for lease in self._leases_of(account, name)
        )

    def let_go_of_others(self, tenants: Container[str]) -> None:
        """End the pins of tenants that are gone: nobody could unpin them."""
        for account, name in list(self._pins):
            if account != NOBODY and account not in tenants:
                self._take(account, name)

    def let_go(self) -> None:
        """This node leaves: nothing is held any more."""
        for account, name in list(self._pins):
            self._take(account, name)
        for holder in [holder for holder in self._shard.leases.holders() if holder[0] == "warm"]:
            for lease in self._shard.leases.of_holder(holder):
                self._end(lease)

    def let_go_of(self, retired: Set[Slot]) -> None:
        """Nothing is held whose block is no more."""
        if not retired:
            return
        for holder in [holder for holder in self._shard.leases.holders() if holder[0] in ("warm", "pin")]:
            for lease in self._shard.leases.of_holder(holder):
                if not retired.isdisjoint(lease.slots):
                    self._pins = {name: pin for name, pin in self._pins.items() if pin.lease_id != lease.lease_id}
                    self._end(lease)

    # -- inside ----

    def _take(self, account: str, name: str) -> bool:
        if self._pins.pop((account, name), None) is None:
            return False
        for lease in self._leases_of(account, name):
            self._end(lease)
        return True

    def _leases_of(self, account: str, name: str) -> list[Lease]:
        return self._shard.leases.of_holder(("pin", f"{account} {name}"))

    def _end(self, lease: Lease) -> None:
        self._shard.leases.release(lease.lease_id, lease.holder)
        self._shard.store.unpin(lease.slots)

    def _budget(self, account: str, share: float) -> int:
        quota = self._shard.store.accounts.quota_of(account)
        pool = self._shard.geometry.slabs_bytes
        return int(share * min(pool, quota or pool))

    def _within(self, slots: Sequence[Slot], budget: int) -> int:
        """How many of the first slots have together at most `budget` bytes."""
        total = 0
        for count, slot in enumerate(slots):
            total += slot.payload_bytes
            if total > budget:
                return count
        return len(slots)

    def _bytes(self, slots: Iterable[Slot]) -> int:
        return sum(slot.payload_bytes for slot in slots)

    def _held_by(self, holder: LeaseOwner) -> int:
        return sum(self._bytes(lease.slots) for lease in self._shard.leases.of_holder(holder))

    def _pinned_bytes(self, of: str | None = None) -> int:
        return sum(pin.byte_count for (account, _), pin in self._pins.items() if of in (None, account))

    def check_invariants(self) -> None:
        pinned = {holder for holder in self._shard.leases.holders() if holder[0] == "pin"}
        assert pinned == {("pin", f"{account} {name}") for account, name in self._pins}, "a pin without its blocks"
        for (account, name), pin in self._pins.items():
            held = sum(self._bytes(lease.slots) for lease in self._leases_of(account, name))
            assert pin.byte_count == held, "the bytes of a pin are off"


def check_pin_name(name: str) -> str:
    """The same name. Raises InvalidRequest for one that cannot be printed or is too long."""
    if not name.isprintable() or not 0 < len(name) <= PIN_NAME_CHARS_MAX:
        raise InvalidRequest(f"a pin's name has 1 to {PIN_NAME_CHARS_MAX} printable characters")
    return name
