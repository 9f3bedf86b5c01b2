"""Rules of what `kvservice status` shows of tiers below the memory."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from kvservice.cli.status import draw
from kvservice.client.overview import hit_window
from kvservice.client.tier_overview import TierOverview, sum_tiers, tiers_of
from kvservice.core.messages import TierFigures
from kvservice.wire.figures import encode_tiers
from kvservice.wire.v1 import shard_pb2
from tests.unit.cli.overviews import make_node, make_overview

COUNTERS = {"tier_disk_written_bytes": 5 << 30, "tier_disk_read_bytes": 2 << 30, "tier_disk_read_corrupt": 3}


def tiers(*figures: TierFigures) -> tuple[TierOverview, ...]:
    return tiers_of(shard_pb2.StatsReply(tiers=encode_tiers(figures)), COUNTERS)


def test_figures_of_a_tier_arrive_with_its_counters() -> None:
    (disk,) = tiers(TierFigures("disk", "open", "", False, 7, 70, 100, 2))
    assert (disk.blocks, disk.used_bytes, disk.budget_bytes, disk.waiting_blocks) == (7, 70, 100, 2)
    assert disk.counters == {"written_bytes": 5 << 30, "read_bytes": 2 << 30, "read_corrupt": 3}


def test_disks_are_summed_and_a_shared_store_is_not() -> None:
    rows = tiers(TierFigures("disk", "open", blocks=7), TierFigures("objects", "open", is_shared=True, blocks=7))
    more = tiers(
        TierFigures("disk", "failed", "no space", blocks=5), TierFigures("objects", "open", is_shared=True, blocks=9)
    )
    disk, objects = sum_tiers([*rows, *more])
    assert (disk.blocks, disk.state, disk.detail, objects.blocks) == (12, "failed", "no space", 9)
    assert disk.counters["read_corrupt"] == 6


def test_blocks_of_tiers_are_hits() -> None:
    window = hit_window("1m", 60.0, {"asked_blocks": 8, "hit_local_blocks": 1, "hit_tier_blocks": 3})
    assert (window.hit_rate, window.tier_hit_rate, window.local_hit_rate) == (0.5, 0.375, 0.125)


def test_status_has_a_line_for_each_tier_of_a_node() -> None:
    found = tiers(TierFigures("disk", "open", "", False, 7, 3 << 30, 1 << 40, 2))
    seen = make_overview([replace(make_node(0), tiers=found), make_node(1)])
    seen = replace(seen, tiers=found)
    out = io.StringIO()
    Console(file=out, width=120).print(draw(seen, wide=False))
    text = out.getvalue()
    assert "Tiers below the memory" in text and "from tiers" in text
    (line,) = [line for line in text.splitlines() if " disk " in line]
    assert "3.0 GiB" in line and "1.0 TiB" in line and "5.0 GiB" in line and "2.0 GiB" in line
    assert "Tiers below" not in _plain(make_overview())


def _plain(seen: object) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(draw(seen, wide=False))  # type: ignore[arg-type]
    return out.getvalue()
