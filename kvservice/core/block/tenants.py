"""Tenants in the pool's decisions: accounts that slots are charged to, and how much each account may hold.

An account is a tenant's name. NOBODY is the account of a service without tenants, and of blocks whose owner is not
known. A quota works in both directions: a tenant never holds more than its quota, and no tenant is pushed below its
quota to make room for another. When the quotas together exceed the pool, each is protected in proportion. Pure.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

NOBODY = ""
TAG_MAX = (1 << 15) - 1  # the slot header has 15 bits for it (segment.header). tag_of says what happens at a collision.
TENANTS_LISTED_MAX = 64  # bounds the metric series of one shard; further tenants are added up under OTHERS
OTHERS = "(others)"


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """0 means no limit."""

    quota_bytes: int = 0  # of payloads in slots that are reserved, being fetched, sealed or quarantined
    in_flight: int = 0  # slots reserved or being fetched at once
    tier_bytes: Mapping[str, int] = field(default_factory=dict)  # of files in each tier of a node, by the tier's name


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """One tenant's figures at one moment."""

    name: str
    used_bytes: int
    quota_bytes: int  # 0 = none
    in_flight: int
    counters: Mapping[str, int]
    disk_used_bytes: int = 0
    disk_quota_bytes: int = 0  # 0 = none


def tag_of(account: str) -> int:
    """15 bits that stand for this account in a slot header, so that a restarted shard knows whom to charge.

    0 stands for NOBODY. Two accounts may have the same tag: then nobody is charged for their blocks after a restart.
    """
    if account == NOBODY:
        return 0
    found = int.from_bytes(hashlib.blake2b(account.encode(), digest_size=4).digest(), "little") % TAG_MAX
    return found + 1


class Accounts:
    """What each account holds and may hold. Only the accounts of tenants are counted; NOBODY has no limits."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._limits: dict[str, TenantLimits] = {}
        self._floors: dict[str, int] = {}
        self._by_tag: dict[int, str] = {}
        self.used: Counter[str] = Counter()  # bytes of slots that are not free
        self.writing: Counter[str] = Counter()  # slots reserved or being fetched
        self.counters: dict[str, Counter[str]] = {}

    def set_limits(self, limits: Mapping[str, TenantLimits]) -> None:
        """Replace the tenants. Blocks of tenants that are gone stay until they are evicted, without protection."""
        self._limits = dict(limits)
        total = sum(limit.quota_bytes for limit in limits.values())
        self._floors = {
            name: limit.quota_bytes * min(total, self._capacity_bytes) // total
            for name, limit in limits.items()
            if limit.quota_bytes
        }
        self._by_tag = {}
        for name in limits:
            tag = tag_of(name)
            self._by_tag[tag] = NOBODY if tag in self._by_tag else name
        for name in self.counters.keys() - limits.keys():
            del self.counters[name]

    def quota_of(self, account: str) -> int:
        """In bytes; 0 = none."""
        limit = self._limits.get(account)
        return 0 if limit is None else limit.quota_bytes

    def account_of(self, tag: int) -> str:
        """The account with this tag. NOBODY when the tag is unknown or stands for several tenants."""
        return self._by_tag.get(tag, NOBODY)

    def over_quota(self, account: str, payload_bytes: int) -> bool:
        """Whether one more slot of this size would exceed the account's quota."""
        limit = self._limits.get(account)
        return limit is not None and 0 < limit.quota_bytes < self.used[account] + payload_bytes

    def may_write(self, account: str) -> int | None:
        """How many more slots the account may reserve or fetch now; None = any number."""
        limit = self._limits.get(account)
        if limit is None or not limit.in_flight:
            return None
        return max(limit.in_flight - self.writing[account], 0)

    def takes_from(self, account: str, payload_bytes: int) -> Callable[[str], bool] | None:
        """Which accounts' blocks of that size may be evicted to make room for this account; None = every account's.

        They are its own blocks, and those of accounts that stay at or above their quota without the block.
        """
        if not self._floors:
            return None
        return lambda other: other == account or self.can_spare(other, payload_bytes)

    def can_spare(self, account: str, byte_count: int) -> bool:
        floor = self._floors.get(account)
        return floor is None or self.used[account] - byte_count >= floor

    def count(self, account: str, name: str, by: int = 1) -> None:
        if account in self._limits and by:
            self.counters.setdefault(account, Counter())[name] += by

    def usage(self, count_max: int = TENANTS_LISTED_MAX) -> list[TenantUsage]:
        """A row for each tenant, in the order of the limits. Tenants after `count_max` are added up in one row."""
        names = list(self._limits)
        rows = [self._row(name) for name in names[:count_max]]
        rest = [self._row(name) for name in names[count_max:]]
        if rest:
            counters: Counter[str] = Counter()
            for row in rest:
                counters.update(row.counters)
            rows.append(
                TenantUsage(
                    OTHERS,
                    sum(r.used_bytes for r in rest),
                    sum(r.quota_bytes for r in rest),
                    sum(r.in_flight for r in rest),
                    counters,
                )
            )
        return rows

    def _row(self, name: str) -> TenantUsage:
        counters = self.counters.get(name, Counter())
        return TenantUsage(name, self.used[name], self._limits[name].quota_bytes, self.writing[name], dict(counters))
