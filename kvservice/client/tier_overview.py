"""What one sees of the tiers below the memory, of one node and of all together. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvservice.wire.v1 import shard_pb2

OPEN = "open"
UNUSABLE = "failed"  # the others are opening and closed


@dataclass(frozen=True, slots=True)
class TierOverview:
    name: str  # "disk", "objects"
    state: str  # open, opening, failed or closed; of several nodes, the worst
    detail: str  # why it failed
    shared: bool  # by all nodes: `blocks` and `used_bytes` are then those that the node knows of
    blocks: int
    used_bytes: int
    budget_bytes: int  # 0 = no bound
    waiting_blocks: int  # to be written
    counters: dict[str, int]  # without the tier's name: "written_bytes"


def tiers_of(reply: shard_pb2.StatsReply, counters: Mapping[str, int]) -> tuple[TierOverview, ...]:
    return tuple(
        TierOverview(
            row.name,
            row.state,
            row.detail,
            row.shared,
            row.blocks,
            row.used_bytes,
            row.budget_bytes,
            row.waiting_blocks,
            {
                name.removeprefix(f"tier_{row.name}_"): count
                for name, count in counters.items()
                if name.startswith(f"tier_{row.name}_")
            },
        )
        for row in reply.tiers
    )


def sum_tiers(tiers: Iterable[TierOverview]) -> tuple[TierOverview, ...]:
    """One row for each name. Of a shared tier no node knows all blocks, so the largest figures stand for it."""
    found: dict[str, list[TierOverview]] = {}
    for tier in tiers:
        found.setdefault(tier.name, []).append(tier)
    return tuple(_summed(rows) for rows in found.values())


def _summed(rows: list[TierOverview]) -> TierOverview:
    first, total = rows[0], max if rows[0].shared else sum
    worst = next((row for row in rows if row.state == UNUSABLE), next((r for r in rows if r.state != OPEN), first))
    names = sorted({name for row in rows for name in row.counters})
    return TierOverview(
        first.name,
        worst.state,
        worst.detail,
        first.shared,
        total(row.blocks for row in rows),
        total(row.used_bytes for row in rows),
        total(row.budget_bytes for row in rows),
        sum(row.waiting_blocks for row in rows),
        {name: sum(row.counters.get(name, 0) for row in rows) for name in names},
    )
