"""Rules of what `kvservice status`, `top` and `warm` show of tiers below the memory."""

from __future__ import annotations

import io
import json
import re
from dataclasses import asdict, replace

from rich.console import Console

from kvservice.cli import hold
from kvservice.cli.status import draw
from kvservice.cli.top.details import detail_of
from kvservice.cli.top.plain import lines
from kvservice.cli.top.trends import Trends
from kvservice.client.overview import hit_window
from kvservice.client.tier_overview import TierOverview, drifts_of, sum_tiers, tiers_of
from kvservice.core.messages import CodecDrift, TierFigures
from kvservice.wire.figures import encode_drifts, encode_tiers
from kvservice.wire.v1 import shard_pb2
from tests.unit.cli.overviews import make_node, make_overview, make_tiers

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


def test_a_share_of_hits_is_of_all_blocks_that_were_asked() -> None:
    disk, objects = make_tiers(asked=80_000)
    assert (disk.hit_share, disk.dropped_blocks, disk.failed_blocks, disk.busy) == (0.045, 4, 3, 6)
    assert (objects.hit_share, make_tiers(asked=0)[0].hit_share) == (0.0, None)
    assert sum_tiers([*make_tiers(80_000), *make_tiers(40_000)])[0].hit_share == 0.06


SHOWN = ("open", "7", "3.0 GiB", "1.0 TiB", "2", "5.0 GiB", "2.0 GiB", "4.5 %", "4", "3")


def test_status_has_a_line_for_each_tier_of_a_node() -> None:
    seen = make_overview([replace(make_node(0), tiers=make_tiers()), make_node(1)])
    text = _plain(seen)
    assert "Tiers below the memory" in text and "from tiers" in text
    (line,) = [line for line in text.splitlines() if " disk " in line]
    assert re.split(r"\s{2,}", line.strip())[2:] == list(SHOWN)
    assert "Tiers below" not in _plain(make_overview())


def test_status_tells_of_blocks_that_need_another_key() -> None:
    disk, objects = make_tiers()
    wrong = replace(disk, counters={"codec_key_unknown": 1_200, "codec_unknown": 34})
    texts = [
        " ".join(_plain(make_overview([replace(make_node(0), tiers=(first, objects)), make_node(1)])).split())
        for first in (disk, wrong)
    ]
    assert "codec_key_file" not in texts[0] and "codec_key_file" in texts[1]
    assert "disk of gpu-a.rack1: a key or a codec is missing here for 1,234 blocks read from it" in texts[1]


def test_status_tells_what_a_lossy_codec_loses() -> None:
    rows = (CodecDrift("hurt", 0.05, 40, 33, float("inf"), 0.004, is_off=True), CodecDrift("m", 0.1, 20, 20, 0.008))
    reply = shard_pb2.StatsReply(drifts=encode_drifts(rows))
    drifts = drifts_of("526d7a5fe830", reply)
    json.dumps([asdict(one) for one in drifts], allow_nan=False)
    text = _plain(replace(make_overview(), drifts=tuple(drifts)))
    found = [line.split() for line in text.splitlines() if " hurt " in line or "  m  " in line]
    assert found == [
        ["gpu-a.rack1", "hurt", "off", "40", "33", "1000000.0000", "0.0040", "0.05"],
        ["gpu-a.rack1", "m", "on", "20", "20", "0.0080", "0.0000", "0.1"],
    ]
    assert "Drift" not in _plain(make_overview())


SAID = (
    "  gpu-a.rack1       tier disk open: 7 blocks, 3.0 GiB of 1.0 TiB; 2 waiting; written 5.0 GiB, read 2.0 GiB; "
    "hits 4.5 %; busy 6, dropped 4, failed 3"
)


def test_warm_names_a_tier_in_words() -> None:
    report = hold.HeldReport((hold.HeldPrompts("n0", 1, 4, 0, {"~disk": 4}, 4, 0, {}),), 60.0)
    out = io.StringIO()
    Console(file=out, width=120).print(hold.draw(report))
    assert "4 from disk tier" in out.getvalue()


def test_top_says_that_a_full_tier_does_not_take_every_block() -> None:
    """As status does: a full disk takes blocks as others leave it. It said that the tier takes none."""
    full = tuple(replace(tier, detail="no space") for tier in make_tiers()[:1])
    node = replace(make_node(0), tiers=full)
    out = io.StringIO()
    Console(file=out, width=200).print(
        detail_of(make_overview([node, make_node(1)]), Trends(), "tiers", f"{node.node_id} disk")[1]
    )
    assert "why it does not take every block" in out.getvalue()


def test_plain_lines_of_top_follow_with_the_tiers() -> None:
    seen = make_overview([replace(make_node(0), tiers=make_tiers()), make_node(1)])
    _, _, disk, objects, *_ = lines(seen, Trends())
    assert disk.endswith(SAID) and "tier objects failed: 0 blocks, 0 B; " in objects


def _plain(seen: object) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(draw(seen, wide=False))  # type: ignore[arg-type]
    return out.getvalue()
