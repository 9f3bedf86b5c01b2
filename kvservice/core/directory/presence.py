"""Whether the directory has known this node all the time. Pure.

A clear asks the nodes that any lookup partition knows. So a node may have missed one unless at each moment some
partition knew it. A partition forgets all nodes when it starts again, and hides one that is silent for `hide_seconds`.
It says so itself, because the clock of a machine that was suspended stood still meanwhile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class _Known:
    """What one lookup partition knows of the node."""

    stay: tuple[int, int] = (0, 0)  # (boot epoch of the partition, what it says: since when it has shown the node)
    since: float = math.inf  # it has known the node without a break since then
    until: float = -math.inf  # when the last announcement left that it answered


class KnownTimes:
    """Times are monotonic, in seconds."""

    def __init__(self, partition_count: int, hide_seconds: float) -> None:
        self._partitions = [_Known() for _ in range(partition_count)]
        self._hide_seconds = hide_seconds
        self._asked_at = -math.inf  # what was before this was said, and asked for

    def heard(self, partition: int, stay: tuple[int, int], sent_at: float, now: float) -> bool:
        """A partition has applied an announcement. Returns whether the node is to ask now what it has missed: no
        partition may have known it for a while, as before the first answer."""
        known = self._partitions[partition]
        until, is_same = known.until, known.stay == stay
        known.stay, known.until = stay, max(until, sent_at)
        if is_same and sent_at - until < self._hide_seconds:
            return False
        known.since = now
        since = max(until, self._asked_at)
        for other in self._partitions:
            if other is not known and other.since <= since and sent_at - other.until < self._hide_seconds:
                return False
        self._asked_at = now
        return True
