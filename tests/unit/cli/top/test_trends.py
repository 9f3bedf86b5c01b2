"""NodeRates between two readings, and the lines of `kvservice top --plain`."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from kvservice.cli.top.app import chart
from kvservice.cli.top.plain import HEAD, follow, lines
from kvservice.cli.top.trends import HISTORY_MAX, NO_RATES, Trends
from kvservice.client.overview import Overview
from kvservice.units import MiB
from tests.unit.cli.overviews import make_node, make_overview


def reading(second: float, asked: int) -> Overview:
    nodes = (make_node(0, asked), make_node(1, asked), make_node(2, state="silent"))
    return replace(make_overview(nodes), at=1000.0 + second)


def test_rates_are_of_one_second_and_of_all_nodes() -> None:
    trends = Trends()
    trends.add(reading(0, 1000))
    assert (trends.total, trends.history()) == (NO_RATES, [])
    trends.add(reading(2, 1800))
    first, second = trends.of("526d7a5fe830"), trends.of("526d7a5fe831")
    assert (first.asked_blocks, second.asked_blocks, trends.total.asked_blocks) == (400, 800, 1200)
    assert (first.hit_rate, first.hit_bytes) == (0.75, 400 * MiB)
    assert trends.of("526d7a5fe832") is NO_RATES and NO_RATES.hit_rate is None
    assert [one.asked_blocks for one in trends.history("526d7a5fe830")] == [400]


def test_a_restarted_node_has_no_rate_until_its_second_reading() -> None:
    trends = Trends()
    trends.add(reading(0, 1000))
    restarted = replace(make_node(0, 10), epoch=1764000009)
    for second in (1, 2):
        trends.add(replace(make_overview((restarted, make_node(1, 1000))), at=1000.0 + second))
        assert trends.of(restarted.node_id).asked_blocks == 0
    trends.add(replace(make_overview((replace(make_node(0, 30), epoch=1764000009), make_node(1, 1000))), at=1003.0))
    assert trends.of(restarted.node_id).asked_blocks == 20


def test_history_is_bounded() -> None:
    trends = Trends()
    for second in range(HISTORY_MAX + 20):
        trends.add(reading(second, second))
    assert len(trends.history()) == len(trends.history("526d7a5fe830")) == HISTORY_MAX


def test_plain_lines_have_the_columns_of_their_heading() -> None:
    trends = Trends()
    trends.add(reading(0, 1000))
    seen = reading(1, 1800)
    trends.add(seen)
    node, _, silent, *problems = lines(seen, trends)
    assert len(node) == len(HEAD)
    assert node.split()[1:] == (
        "gpu-a.rack1 ok 75 % 2.0 GiB 75.0 % 800 800.0 MiB 200.0 MiB 200.0 MiB 0".split()  # noqa: SIM905
    )
    assert "silent" in silent and silent.split()[3] == "-"
    assert problems == [f"problem: {problem}" for problem in seen.problems]


def test_a_first_round_has_no_rates() -> None:
    """They were 0 under load: with --count 1 one sees nothing else."""
    trends = Trends()
    trends.add(seen := reading(0, 1000))
    assert lines(seen, trends, is_first=True)[0].split()[-6:] == ["%", *"-----"]


def test_plain_rounds_end_after_their_count() -> None:
    written: list[str] = []
    rounds = iter(range(100))

    async def read() -> Overview:
        return reading(next(rounds), 1000)

    asyncio.run(follow(read, written.append, 0.0, 25))
    assert (written[0], written.count(HEAD), len(written)) == (HEAD, 2, 25 * 5 + 2)


def test_a_chart_fills_its_lines_from_the_bottom() -> None:
    assert chart([0.0, 0.5, 1.0, 2.0], 2, 1.0) == "  ██\n▁███"
    assert chart([0.0, 0.0], 1, 0.0) == "▁▁"
