"""Which nodes of a service have another time of day than the others. Pure.

Clears and ages go by it. The clock of the machine that asks does not count: it may be the one that is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

CLOCKS_DIFFER_SECONDS_MAX = 5.0  # docs/howto/warm-pin-clear.md: a clear allows for it


@dataclass(frozen=True, slots=True)
class ClockReading:
    """The clock of a node, against that of the machine that asked."""

    node: str  # for people
    ahead_seconds: float
    slack_seconds: float  # half of the round trip: what the reading may be wrong by

    @staticmethod
    def of(node: str, wall_seconds: float, asked_at: float, heard_at: float) -> ClockReading:
        """`wall_seconds` is the node's time of day in an answer to a question of `asked_at`, heard at `heard_at`."""
        middle, slack = (asked_at + heard_at) / 2, (heard_at - asked_at) / 2
        return ClockReading(node, wall_seconds - middle, slack)


def clock_problems(readings: Sequence[ClockReading]) -> Iterator[str]:
    """Yields a line for each node whose clock is not that of the node in the middle."""
    if not readings:
        return
    middle = sorted(readings, key=lambda each: each.ahead_seconds)[(len(readings) - 1) // 2]
    for each in readings:
        ahead = each.ahead_seconds - middle.ahead_seconds
        if abs(ahead) > CLOCKS_DIFFER_SECONDS_MAX + each.slack_seconds + middle.slack_seconds:
            way = "ahead of" if ahead > 0 else "behind"
            which = f"the clock of node {each.node} is {abs(ahead):.0f} s {way} that of node {middle.node}"
            yield f"{which}: set them, because clears and max_age_seconds go by them"
