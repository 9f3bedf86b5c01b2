"""Who chooses the next victim: worth while it is ahead, LRU otherwise.

A policy that learns will be wrong on something, and only a comparison bounds what that costs. Two shadow caches
(core.store.shadows) are asked for the same blocks. Worth begins to rule when its shadow is ahead by a margin, and rules
as long as it is not behind. A change of rule moves no block: it only changes who is asked for the next victim. Pure.
"""

from __future__ import annotations

MARGIN = 0.003  # of the blocks asked for: how far ahead worth must be to begin
HALF_LIFE = 4.0  # of what was found: in capacities of blocks that LRU's shadow evicted
PROMPTS_MIN = 200  # that LRU rules at least
START = False
BACK = 0.0


class Guard:
    def __init__(self) -> None:
        self.is_by_worth = START
        self.switches = 0
        self._prompts = 0
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
        self._prompts += 1
        self._asked += asked
        self._found_lru += found_lru
        self._found_worth += found_worth
        lead = self._found_worth - self._found_lru
        by_worth = (
            lead >= -BACK * self._asked
            if self.is_by_worth
            else lead > MARGIN * self._asked and self._prompts > PROMPTS_MIN
        )
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
