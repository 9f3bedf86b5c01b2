"""What an overview says of the eviction policy of one node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvservice.core.store.guard import PPM, RULE_FIGURE, Rule


@dataclass(frozen=True, slots=True)
class EvictionOverview:
    """The default policy compares three rules with shadow caches, and the best one chooses who is evicted."""

    rule: str  # a key of `hit_rates`, or "another"
    changes: int  # since the node's start
    hit_rates: Mapping[str, float]  # of the shadow of each rule, of late


def eviction_of(counters: Mapping[str, int]) -> EvictionOverview | None:
    """None for a policy of one rule, or when the node did not answer."""
    if RULE_FIGURE not in counters:
        return None
    rates = {rule.value: counters.get(rule.hits_figure, 0) / PPM for rule in Rule}
    rule = dict(enumerate(rates)).get(counters[RULE_FIGURE], "another")  # the shard may be newer than this
    return EvictionOverview(rule, counters.get("eviction_rule_changes", 0), rates)
