"""Which blocks are too old to be served: those from before a clear, and those that reached the age limit. Pure.

A block carries the time when its bytes were computed, on the clock of that node's wall, through fetches and tiers. In
doubt it is too old: when its time is not known although it matters, or lies in the future.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kvservice.core.block.engine_names import EngineNames
from kvservice.core.block.marks import CLOCK_SKEW_SECONDS, BlockScopes, Mark, Marks
from kvservice.core.bounded_table import BoundedTable
from kvservice.units import BlockKey

# Fingerprints whose engines are remembered. The blocks of a forgotten one go with every clear of a model or namespace.
FINGERPRINTS_MAX = 1024
NAMES_MAX = 16  # of one fingerprint. The blocks of one with more go with every such clear, too.


class Freshness:
    """The marks of one shard, and its age limit. `wall_offset` makes seconds since 1970 of the shard's clock."""

    def __init__(self, max_age_seconds: float = 0.0, wall_offset: float = 0.0) -> None:
        self.max_age_seconds = max_age_seconds  # 0 = no limit
        self.marks = Marks()
        self._applied = Marks()  # the same, at the times of the shard's clock when it heard of them
        self._wall_offset = wall_offset
        self._names: BoundedTable[bytes, frozenset[tuple[str, str]]] = BoundedTable(FINGERPRINTS_MAX)

    def wall(self, now: float) -> float:
        """Seconds since 1970."""
        return now + self._wall_offset

    def set_clock(self, wall_offset: float) -> None:
        """Believe another wall clock from now on. Marks and blocks keep the times that they have."""
        self._wall_offset = wall_offset

    def learn(self, names: EngineNames) -> bool:
        """Engines of these names have these blocks, beside those that are known. Returns whether any is new."""
        is_new = False
        for fingerprint, found in names.items():
            known = self._names.get(fingerprint) or frozenset()
            if len(known) <= NAMES_MAX and not found <= known:
                self._names.put(fingerprint, known | found)
                is_new = True
        return is_new

    def names(self) -> EngineNames:
        """All that are known."""
        return dict(self._names.items())

    def names_of(self, fingerprint: bytes) -> frozenset[tuple[str, str]] | None:
        """All names of the engines with this fingerprint. None when some may not be known."""
        names = self._names.get(fingerprint) if fingerprint else None
        return None if names is None or len(names) > NAMES_MAX else names

    def scopes(self, key: BlockKey, account: str, fingerprint: bytes) -> BlockScopes:
        return BlockScopes(key, account, self.names_of(fingerprint))

    def clear(self, marks: Iterable[Mark], now: float) -> None:
        """Take over marks, from now on."""
        marks = tuple(marks)
        self.marks.add(marks)
        self.marks.expire(self.wall(now))
        self._applied.add(replace(mark, at=now) for mark in marks)

    def not_before(self, block: BlockScopes, now: float) -> float:
        """Seconds since 1970: a block of these scopes that was stored earlier is too old. 0 = none is."""
        cleared = self.marks.cleared_at(block)
        floor = cleared + CLOCK_SKEW_SECONDS if cleared else 0.0
        if self.max_age_seconds:
            floor = max(floor, self.wall(now) - self.max_age_seconds)
        return floor

    def accepts(self, block: BlockScopes, stored_at: float, now: float) -> bool:
        """Whether a block that comes from another place may be served."""
        floor = self.not_before(block, now)
        return not floor or floor <= stored_at <= self.wall(now) + CLOCK_SKEW_SECONDS

    def was_cleared(self, block: BlockScopes, since: float) -> bool:
        """Whether such blocks were cleared since this time of the shard's clock: what was under way then is dropped."""
        cleared = self._applied.cleared_at(block)
        return cleared > 0 and cleared >= since
