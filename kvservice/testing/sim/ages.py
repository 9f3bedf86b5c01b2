"""The checks of the age limit on one simulated node. They go by what the world knows: when an engine last computed a
block's bytes."""

from __future__ import annotations

from collections.abc import Iterable

from kvservice.core.shard import ShardState
from kvservice.testing.sim.world import Violation, World
from kvservice.units import BlockKey

# Limits that schedules have: one that blocks reach while there are requests, and one that no run reaches.
SOON_SECONDS, NEVER_SECONDS = 0.5, 10_000.0
SLACK_SECONDS = 0.3  # a block's age counts from when its shard sealed it, and old ones are dropped in turns


class Ages:
    """`limit_seconds` is the node's max_age_seconds; 0 = none."""

    def __init__(self, world: World, name: str, limit_seconds: float) -> None:
        self._world = world
        self._name = name
        self.limit_seconds = limit_seconds

    def check_promised(self, keys: Iterable[BlockKey], asked_at: float) -> None:
        """Check the answer to a question that came at this time of the world."""
        oldest = asked_at - self.limit_seconds - SLACK_SECONDS
        for key in keys if self.limit_seconds else ():
            if self._world.computed.get(key, 0.0) < oldest:
                raise Violation(f"{self._name} promised a block that had been too old when it was asked for")

    def check(self, state: ShardState) -> None:
        if self.limit_seconds == NEVER_SECONDS and state.all_counters().get("arrived_too_old"):
            raise Violation(f"{self._name} dropped a block as too old, and none is")
