"""The Ray Serve demo's verdict: what counts as better."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvservice.cli.demo.conversation import Shape, Turn
from kvservice.cli.demo.serve_report import Played, save, shortfalls


def played(name: str, cached: int, seconds: float, slowest: float) -> Played:
    turns = [Turn(user, 0, 1000, cached, seconds, seconds + 1) for user in range(10)]
    turns.append(Turn(10, 0, 1000, cached, slowest, slowest + 1))
    return Played(name, tuple(turns), 10.0, 0)


BEFORE = played("before", 400, 2.0, 5.0)


def test_better_in_everything_has_no_shortfall() -> None:
    assert shortfalls(BEFORE, played("after", 900, 0.5, 1.0)) == []


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (played("after", 390, 0.5, 1.0), ["hit rate 39.0%, before 40.0%", "6,710 tokens recomputed, before 6,600"]),
        (played("after", 900, 2.0, 1.0), ["time to first token p50 2.00 s, before 2.00 s"]),
        (played("after", 900, 0.5, 5.5), ["time to first token p99 5.50 s, before 5.00 s"]),
    ],
)
def test_what_is_not_better_is_named_with_both_figures(after: Played, words: list[str]) -> None:
    assert shortfalls(BEFORE, after) == words


def test_an_equal_hit_rate_is_not_worse() -> None:
    assert shortfalls(BEFORE, played("after", 398, 0.5, 1.0)) == []


def test_table_and_plot_are_saved(tmp_path: Path) -> None:
    data, picture = save([BEFORE, played("after", 900, 0.5, 1.0)], Shape(), tmp_path)
    rows = json.loads(data.read_text())["apps"]
    assert [(row["app"], row["hit_rate"], row["recomputed_tokens"]) for row in rows] == [
        ("before", 0.4, 6600),
        ("after", 0.9, 1100),
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")
