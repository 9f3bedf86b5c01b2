"""`kvservice top --plain`: a line for each node, tier and round, for pipes, logs and people without a full screen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from kvservice.cli.drawing import percent, used_of
from kvservice.cli.status import node_names
from kvservice.cli.top.trends import NO_RATES, Trends
from kvservice.units import format_bytes, printable

if TYPE_CHECKING:
    from kvservice.client.overview import NodeOverview, Overview
    from kvservice.client.tier_overview import TierOverview

HEAD_EVERY = 20  # rounds between two headings, so that one is on the screen
# 119 characters, so that a line fits where tables do.
_COLUMNS = "{:8}  {:16}  {:8}  {:>5}  {:>9}  {:>8}  {:>7}  {:>10}  {:>10}  {:>10}  {:>9}"
HEAD = _COLUMNS.format(
    "time", "node", "state", "used", "reserved", "hits", "asked/s", "loaded/s", "stored/s", "read/s", "evicted/s"
)


async def follow(
    read: Callable[[], Awaitable[Overview]], write: Callable[[str], None], seconds: float, count: int | None
) -> None:
    """Write a round of lines every `seconds`, `count` rounds or for ever. The first round has the hit rate since
    the start, and no rates."""
    trends = Trends()
    rounds = 0
    while count is None or rounds < count:
        if rounds:
            await asyncio.sleep(seconds)
        seen = await read()
        trends.add(seen)
        if rounds % HEAD_EVERY == 0:
            write(HEAD)
        for line in lines(seen, trends, is_first=rounds == 0):
            write(line)
        rounds += 1


def lines(seen: Overview, trends: Trends, *, is_first: bool = False) -> list[str]:
    names = node_names(seen)
    found = [_line(seen.at, printable(names[node.node_id]), node, trends, is_first) for node in seen.nodes]
    found += [_tier_line(seen.at, printable(names[node.node_id]), tier) for node in seen.nodes for tier in node.tiers]
    return [*found, *(f"problem: {printable(problem)}" for problem in seen.problems)]


def _line(at: float, name: str, node: NodeOverview, trends: Trends, is_first: bool) -> str:
    rates = trends.of(node.node_id)
    hit_rate = rates.hit_rate
    if is_first and node.windows:
        hit_rate = node.windows[0].hit_rate
    per_second = (
        f"{rates.asked_blocks:.0f}",
        format_bytes(int(rates.hit_bytes)),
        format_bytes(int(rates.stored_bytes)),
        format_bytes(int(rates.fetched_bytes)),
        f"{rates.evicted_blocks:.0f}",
    )
    reserved = next(usage.bytes for usage in node.pool.states if usage.state == "reserved")
    return _COLUMNS.format(
        _clock(at),
        name,
        node.state,
        f"{node.pool.used_percent:.0f} %" if node.pool.total_bytes else "-",
        format_bytes(reserved),
        percent(hit_rate),
        *(per_second if rates is not NO_RATES else "-" * len(per_second)),  # one reading says nothing of a second
    )


def _tier_line(at: float, name: str, tier: TierOverview) -> str:
    """Totals since the node's start, in words: tiers change too slowly for rates of a second."""
    parts = (
        f"{_clock(at):8}  {name:16}  tier {printable(tier.name)} {printable(tier.state)}: {tier.blocks:,} blocks",
        f"{used_of(tier)}; {tier.waiting_blocks:,} waiting; written {format_bytes(tier.written_bytes)}",
        f"read {format_bytes(tier.read_bytes)}; hits {percent(tier.hit_share)}; busy {tier.busy:,}",
        f"dropped {tier.dropped_blocks:,}, failed {tier.failed_blocks:,}",
    )
    return ", ".join(parts)


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))
