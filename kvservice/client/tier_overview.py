"""What one sees of the tiers below the memory, of one node and of all together, and of their codecs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvservice.units import counted
from kvservice.wire.v1 import shard_pb2

OPEN = "open"
UNUSABLE = "failed"  # the others are opening and closed
# Counters of blocks that were not written although they should have been, and of writes and reads that went wrong.
_DROPPED = ("dropped_full", "dropped_evicted", "dropped_no_room")
_NOT_DECODED = ("codec_key_unknown", "codec_unknown")
_FAILED = ("write_failed", "read_failed", "read_corrupt")


@dataclass(frozen=True, slots=True)
class TierOverview:
    name: str  # "disk", "objects"
    state: str  # open, opening, failed or closed; of several nodes, the worst
    detail: str  # why it failed, or does not take every block while it is open
    shared: bool  # by all nodes: `blocks` and `used_bytes` are then those that the node knows of
    blocks: int
    used_bytes: int
    budget_bytes: int  # 0 = no bound
    waiting_blocks: int  # to be written
    counters: dict[str, int]  # without the tier's name: "written_bytes"
    asked_blocks: int  # by engines of the node, wherever the blocks were
    hit_share: float | None  # of the asked blocks, those that the tier gave, 0 to 1; None when none was asked
    written_bytes: int
    read_bytes: int  # brought back
    busy: int  # times that it was not asked, because it owed an answer or too much was being read
    dropped_blocks: int  # not written although they should have been
    failed_blocks: int  # that could not be written or read, or came back wrong


def not_decoded(tier: TierOverview) -> str:
    """What to say of blocks whose key or codec the node lacks; empty when there were none."""
    count = sum(tier.counters.get(name, 0) for name in _NOT_DECODED)
    if not count:
        return ""
    left = "" if tier.shared else ", since dropped"
    return f"a key or a codec is missing here for {counted(count, 'block')} read from it{left}"


def tiers_of(reply: shard_pb2.StatsReply, counters: Mapping[str, int]) -> tuple[TierOverview, ...]:
    return tuple(
        _overview(
            row,
            (row.blocks, row.used_bytes, row.budget_bytes, row.waiting_blocks),
            {
                name.removeprefix(f"tier_{row.name}_"): count
                for name, count in counters.items()
                if name.startswith(f"tier_{row.name}_")
            },
            counters.get("asked_blocks", 0),
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
    return _overview(
        worst,
        (
            total(row.blocks for row in rows),
            total(row.used_bytes for row in rows),
            total(row.budget_bytes for row in rows),
            sum(row.waiting_blocks for row in rows),
        ),
        {name: sum(row.counters.get(name, 0) for row in rows) for name in names},
        sum(row.asked_blocks for row in rows),
    )


def _overview(
    row: shard_pb2.TierNumbers | TierOverview, sizes: tuple[int, int, int, int], counters: dict[str, int], asked: int
) -> TierOverview:
    """`sizes` are the blocks, used bytes, budget and waiting blocks; `row` has the rest."""
    return TierOverview(
        row.name,
        row.state,
        row.detail,
        row.shared,
        *sizes,
        counters,
        asked,
        counters.get("hit_blocks", 0) / asked if asked else None,
        counters.get("written_bytes", 0),
        counters.get("read_bytes", 0),
        counters.get("busy", 0),
        sum(counters.get(name, 0) for name in _DROPPED),
        sum(counters.get(name, 0) for name in _FAILED),
    )


@dataclass(frozen=True, slots=True)
class DriftOverview:
    """What a lossy codec lost of one model's blocks on one node, since the node's start."""

    node_id: str
    model: str
    blocks: int  # encoded
    checked: int  # of them, looked at
    keys: float  # the largest drift of a block's K
    values: float  # of its V
    limit: float
    is_off: bool  # it drifted further, and its blocks are stored exactly


def drifts_of(node_id: str, reply: shard_pb2.StatsReply) -> list[DriftOverview]:
    return [
        DriftOverview(node_id, row.model, row.blocks, row.checked, row.keys, row.values, row.limit, row.off)
        for row in reply.drifts
    ]
