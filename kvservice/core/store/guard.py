"""Who chooses the next victim: LRU, S3-FIFO or worth, whichever finds most.

A policy that learns will be wrong on something, and only a comparison bounds what that costs. Three shadow caches
(core.store.shadows) are asked for the same blocks, one for each rule. LRU rules at first. Another rule takes over when
its shadow is ahead. A change of rule moves no block: it only changes who is asked for the next victim. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

MARGIN = 0.0003  # of the blocks asked for: how far a rule must be ahead to take over
HALF_LIFE = 2.0  # of what was found: in capacities of blocks that LRU's shadow evicted
RULE_FIGURE = "eviction_rule"  # says which rule rules, by its place in Rule
PPM = 1_000_000  # figures are whole numbers


class Rule(Enum):
    """With its name for people. Of equal ones the first is taken."""

    LRU = "lru"
    S3_FIFO = "s3-fifo"
    WORTH = "worth"

    @property
    def hits_figure(self) -> str:
        """The name of the figure with what its shadow finds, in parts per million."""
        return f"eviction_{self.name.lower()}_hits_ppm"


class RuleGuard:
    def __init__(self) -> None:
        self.rule = Rule.LRU
        self.switches = 0
        self._asked = 0.0
        self._found = dict.fromkeys(Rule, 0.0)

    def fade(self, capacities: float) -> None:
        """So much was evicted, in capacities: what was found before counts less."""
        share = 0.5 ** (capacities / HALF_LIFE)
        self._asked *= share
        for rule in self._found:
            self._found[rule] *= share

    def compare(self, asked: int, found: Mapping[Rule, int]) -> bool:
        """What each shadow found of a prompt. Returns whether the rule changes."""
        self._asked += asked
        for rule, blocks in found.items():
            self._found[rule] += blocks
        best = max(self._found, key=self._found.__getitem__)
        if self._found[best] - self._found[self.rule] <= MARGIN * self._asked:
            return False
        self.rule = best
        self.switches += 1
        return True

    @property
    def hit_rates(self) -> dict[Rule, float]:
        """Of late, of the shadow of each rule; 0 before anything was asked."""
        return {rule: found / self._asked if self._asked else 0.0 for rule, found in self._found.items()}
