"""What one sees of the lookup partitions: a part of the overview."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LookupOverview:
    address: str
    partition: int
    partition_count: int
    keys: int
    nodes_alive: int
    error: str  # "" when it answers


def misplaced(lookups: Sequence[LookupOverview]) -> list[str]:
    """What is wrong with this list, as problems: a shard that has it shares nothing. It should have every partition, in
    their order."""
    return [
        f"lookup partition {row.address} is {row.partition} of {row.partition_count}, and was given as {index} of "
        f"{len(lookups)}; every shard and `kvservice check` need --lookup of all {row.partition_count}, in their order"
        for index, row in enumerate(lookups)
        if not row.error and (row.partition, row.partition_count) != (index, len(lookups))
    ]
