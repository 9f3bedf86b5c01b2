"""Finds where a stored prefix ends by looking at few of its blocks, many of them at once. Pure.

Tiers evict the last block of a chain first, so a stored prefix has no holes: what is there below some index is there
below all smaller ones. Each look is a round trip of tens of milliseconds, so rounds count more than looks.
"""

from __future__ import annotations

from collections.abc import Mapping

LOOKS_MAX = 16  # of one round after the first: seventeen parts each time, so three rounds narrow 4,900 blocks to one


def first_looks(low: int, high: int) -> list[int]:
    """Where to look first when all before `low` are there and nothing is from `high` on: at growing distances, and at
    the last one, because most prefixes are there as a whole or not at all."""
    found: list[int] = []
    distance = 1
    while low + distance - 1 < high - 1:
        found.append(low + distance - 1)
        distance *= 2
    return [*found, high - 1] if low < high else found


def next_looks(low: int, high: int) -> list[int]:
    """Where to look next: evenly between `low` and `high`."""
    count = min(LOOKS_MAX, high - low)
    return sorted({low + (place + 1) * (high - low) // (count + 1) for place in range(count)})


def narrowed(low: int, high: int, seen: Mapping[int, bool | None]) -> tuple[int, int]:
    """`low` and `high` after these looks; None says nothing. A hole ends the prefix, whatever lies behind it."""
    high = min([high, *(index for index, there in seen.items() if there is False)])
    low = max([low, *(index + 1 for index, there in seen.items() if there and index < high)])
    return low, high
