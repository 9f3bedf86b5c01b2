"""What an overview says of the eviction policy of one node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvservice.observe.metrics import PPM, SHADOW_HITS_PPM


@dataclass(frozen=True, slots=True)
class EvictionOverview:
    """The default policy compares two rules with shadow caches, and the better one chooses who is evicted."""

    rule: str  # "worth" or "lru"
    changes: int  # since the node's start
    worth_hit_rate: float  # of the shadow of each rule, of late
    lru_hit_rate: float


def eviction_of(counters: Mapping[str, int]) -> EvictionOverview | None:
    """None for a policy of one rule, or when the node did not answer."""
    if "eviction_by_worth" not in counters:
        return None
    rates = {rule: counters.get(name, 0) / PPM for rule, name in SHADOW_HITS_PPM.items()}
    rule = "worth" if counters["eviction_by_worth"] else "lru"
    return EvictionOverview(rule, counters.get("eviction_rule_changes", 0), rates["worth"], rates["lru"])
