"""The Ray Serve demo's conclusion: what counts as better."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.demo.conversation import Shape, Turn
from examples.demo.serve import worse_apps
from examples.demo.serve_report import Pairs, Played, routing_shortfall, save, shortfalls

ROOT = Path(__file__).parents[3]
USERS, TURNS = 10, 6


def played(name: str, cached: int, seconds: float, cold: float = 3.0, slow_users: int = 0, slow: float = 0.0) -> Played:
    """First turns take `cold`; later ones `seconds`, those of some users `slow`."""

    def taken(user: int, turn: int) -> float:
        return cold if turn == 0 else slow if user < slow_users else seconds

    turns = [
        Turn(user, turn, 1000, cached if turn else 0, taken(user, turn), taken(user, turn) + 1)
        for turn in range(TURNS)
        for user in range(USERS)
    ]
    return Played(name, tuple(turns), 10.0, 0)


WITHOUT = played("without", 400, 2.0)
BETTER = played("with", 900, 0.5)


def test_better_in_everything_has_no_shortfall() -> None:
    assert shortfalls(WITHOUT, BETTER) == []
    assert Pairs.of(WITHOUT, BETTER) == Pairs(50, 50, 1.5)


def test_what_is_new_to_every_app_is_not_judged() -> None:
    """The slowest request is a first turn, whatever the cache does."""
    assert shortfalls(WITHOUT, played("with", 900, 0.5, cold=30.0)) == []


@pytest.mark.parametrize(
    ("with_cache", "words"),
    [
        (played("with", 400, 0.5), ["hit rate", "tokens recomputed"]),
        (played("with", 900, 2.0), ["0 of 50 later turns", "first token p50 2.00 s", "first token p90"]),
        (played("with", 900, 0.5, slow_users=2, slow=5.0), ["first token p90 5.00 s, without the cache 2.00 s"]),
        (
            played("with", 900, 1.9, slow_users=5, slow=2.1),
            ["25 of 50 later turns", "first token p50", "first token p90"],
        ),
    ],
)
def test_what_is_not_better_is_named_with_both_figures(with_cache: Played, words: list[str]) -> None:
    found = shortfalls(WITHOUT, with_cache)
    assert len(found) == len(words)
    assert all(word in fault for word, fault in zip(words, found, strict=True))


@pytest.mark.parametrize(("faster", "believed"), [(25, False), (31, False), (32, True), (50, True)])
def test_so_many_pairs_are_faster_that_it_is_no_chance(faster: int, believed: bool) -> None:
    assert (Pairs(50, faster, 0.1).chance < 0.05) == believed


def test_routing_must_not_cost_hits_and_need_not_be_faster() -> None:
    (fault,) = routing_shortfall(BETTER, played("routed", 890, 0.4))
    assert fault == "15,500 tokens recomputed, with round-robin 15,000"
    assert routing_shortfall(BETTER, played("routed", 900, 0.9)) == []


def test_the_app_that_is_not_better_is_named() -> None:
    assert worse_apps([WITHOUT, BETTER, played("routed", 900, 0.4)]) == []
    (fault,) = worse_apps([WITHOUT, BETTER, played("routed", 900, 2.5)])
    assert fault.startswith("routed: ")


def test_the_default_shape_has_turns_enough_for_its_quantiles() -> None:
    shape = Shape()
    assert shape.users * (shape.turns - 1) >= 50  # five are slower than p90


def test_table_and_plot_are_saved(tmp_path: Path) -> None:
    data, picture = save([WITHOUT, BETTER], Shape(), tmp_path)
    rows = json.loads(data.read_text())["apps"]
    assert [(row["app"], row["later_turns"], row["pairs"]["faster"]) for row in rows] == [
        ("without", 50, 0),
        ("with", 50, 50),
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


SPEAKING = """
import subprocess, sys
from pathlib import Path
from examples.demo.serve import output_into
with output_into(Path(sys.argv[1]) / "new" / "demo.log") as console:
    print("a library")
    subprocess.run(["sh", "-c", "echo a child; echo its error >&2"], check=True)
    console.print("a result")
print("afterwards")
"""


@pytest.mark.processes
def test_results_go_to_stdout_and_others_output_to_the_log(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SPEAKING, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert done.stdout.split("\n") == ["a result", "afterwards", ""] and done.stderr == ""
    assert (tmp_path / "new" / "demo.log").read_text() == "a library\na child\nits error\n"
