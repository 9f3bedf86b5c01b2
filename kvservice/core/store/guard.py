"""Who chooses the next victim: LRU, or worth where it finds more.

A policy that learns will be wrong on something, and only a comparison bounds what that costs. Two shadow caches
(core.store.shadows) are asked for the same blocks. LRU rules at first. Worth takes over when its shadow is ahead of
LRU's, and LRU when that is. A change of rule moves no block: it only changes who is asked for the next victim. Pure.
"""

from __future__ import annotations

MARGIN = 0.0003  # of the blocks asked for: how far one must be ahead of the other to take over
HALF_LIFE = 2.0  # of what was found: in capacities of blocks that LRU's shadow evicted


class RuleGuard:
    def __init__(self) -> None:
        self.is_by_worth = False
        self.switches = 0
        self._asked = 0.0
        self._found_lru = 0.0
        self._found_worth = 0.0

    def fade(self, capacities: float) -> None:
        """So much was evicted, in capacities: what was found before counts less."""
        share = 0.5 ** (capacities / HALF_LIFE)
        self._asked *= share
        self._found_lru *= share
        self._found_worth *= share

    def compare(self, asked: int, found_lru: int, found_worth: int) -> bool:
        """What both shadows found of a prompt. Returns whether the rule changes."""
        self._asked += asked
        self._found_lru += found_lru
        self._found_worth += found_worth
        lead, margin = self._found_worth - self._found_lru, MARGIN * self._asked
        by_worth = lead >= -margin if self.is_by_worth else lead > margin
        if by_worth == self.is_by_worth:
            return False
        self.is_by_worth = by_worth
        self.switches += 1
        return True

    @property
    def hit_rates(self) -> tuple[float, float]:
        """Of late, of the shadows of LRU and of worth; (0, 0) before anything was asked."""
        if not self._asked:
            return (0.0, 0.0)
        return (self._found_lru / self._asked, self._found_worth / self._asked)
