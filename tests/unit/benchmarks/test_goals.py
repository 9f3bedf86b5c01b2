"""Each goal has the figure of a clean result, and a goal that is missed says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import goals
from benchmarks.committed import Results
from benchmarks.goals import NO_FIGURE, Goal, NoFigure, judged, read
from benchmarks.report import RESULTS

ROWS = [{"way": "new", "size": 1, "ratio": 2.0}, {"way": "old", "size": 1, "ratio": 1.0}]


def results(folder: Path, figures: object, commit: str = "0123456789ab") -> Results:
    document = {"benchmark": "some", "command": "python -m benchmarks.some", "commit": commit, "figures": figures}
    (folder / "some.json").write_text(json.dumps(document))
    return Results(folder)


@pytest.mark.parametrize(
    ("path", "seen"),
    [
        (("a", "b"), [1.5]),
        (("a", ["b", "c"]), [1.5, 3.0]),
        (("rows", 0, "ratio"), [2.0]),
        (("rows", {"way": "old"}, "ratio"), [1.0]),
        (("rows", {"size": 1}, "ratio"), [2.0, 1.0]),
        (("rows", {"way": ["old", "third"]}, "ratio"), [1.0]),
        (("rows",), [2]),
    ],
)
def test_a_path_leads_to_its_figures(tmp_path: Path, path: tuple[goals.Step, ...], seen: list[float]) -> None:
    found = results(tmp_path, {"a": {"b": 1.5, "c": 3.0}, "rows": ROWS})
    assert Goal("it", "some", path, at_least=1).values(found) == seen


@pytest.mark.parametrize("path", [("z",), ("a",), ("a", "b", "c"), ("rows", {"way": "third"}), ("rows", {"x": 1})])
def test_a_path_to_no_number_is_no_figure(tmp_path: Path, path: tuple[goals.Step, ...]) -> None:
    found = results(tmp_path, {"a": {"b": 1.5}, "rows": ROWS})
    with pytest.raises(NoFigure):
        Goal("it", "some", path, at_least=1).values(found)


def beside(folder: Path, **goal: object) -> Goal:
    """A goal of goals.toml as it is written there."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in goal.items()]
    (folder / "goals.toml").write_text("\n".join(["[[goal]]", 'what = "it"', "at_least = 0", *lines]))
    return read(folder / "goals.toml")[0]


@pytest.mark.parametrize(
    ("more", "seen"),
    [
        ({"less": ["some", "was", ["x", "y"]]}, [-1.0, 3.0]),
        ({"to": ["some", "was", ["x", "y"]]}, [0.5, 4.0]),
        ({"less": ["some", "was", ["x", "y"]], "mean": True}, [1.0]),
    ],
    ids=["less", "to", "mean"],
)
def test_a_goal_may_be_against_other_figures(tmp_path: Path, more: dict[str, object], seen: list[float]) -> None:
    found = results(tmp_path, {"now": {"x": 1.0, "y": 4.0}, "was": {"x": 2.0, "y": 1.0}})
    assert beside(tmp_path, figure=["some", "now", ["x", "y"]], **more).values(found) == seen


def test_figures_without_as_many_beside_them_are_none(tmp_path: Path) -> None:
    found = results(tmp_path, {"x": 1.0, "y": 4.0})
    with pytest.raises(NoFigure, match="1 numbers for 2"):
        beside(tmp_path, figure=["some", ["x", "y"]], to=["some", "x"]).values(found)


def test_a_result_beside_a_goal_is_one_of_its_results(tmp_path: Path) -> None:
    assert beside(tmp_path, figure=["some", "x"], less=["other", "x"]).results == {"some", "other"}


def test_a_goal_is_met_when_all_its_figures_meet_it(tmp_path: Path) -> None:
    found = results(tmp_path, {"fast": 1.0, "slow": 3.0})
    both = ("some", (["fast", "slow"],))
    rows = judged([Goal("x", *both, at_most=3), Goal("y", *both, at_most=2), Goal("z", *both, at_least=1)], found)
    assert [(seen, met) for _, seen, met in rows] == [("1 / 3", "yes"), ("1 / 3", "no"), ("1 / 3", "yes")]


def test_results_that_may_not_be_cited_are_no_figures(tmp_path: Path) -> None:
    found = results(tmp_path, {"a": 1.0}, commit="0123456789ab-dirty")
    wanted = [Goal("x", "some", ("a",), at_least=1), Goal("y", "nothing", ("a",), at_least=1)]
    assert [met for _, _, met in judged(wanted, found)] == [NO_FIGURE, NO_FIGURE]


def test_a_goal_without_a_bound_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "goals.toml"
    path.write_text('[[goal]]\nwhat = "x"\nfigure = ["some", "a"]\n')
    with pytest.raises(ValueError, match="x: give either at_least or at_most"):
        read(path)


@pytest.mark.parametrize(
    ("bound", "tried", "commit", "code"),
    [
        ("at_most = 2", "", "", 0),
        ("at_most = 1", "all of it", "", 0),
        ("at_most = 1", "", "", 1),
        ("at_most = 2", "", "-dirty", 1),
    ],
    ids=["met", "missed", "nothing tried", "unclean"],
)
@pytest.mark.processes
def test_the_command_fails_for_what_nobody_can_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, tried: str, commit: str, code: int
) -> None:
    known = json.loads((RESULTS / "startup.json").read_text())["commit"]
    found = results(tmp_path, {"a": 2.0}, commit=f"{known}{commit}")
    written = tmp_path / "goals.toml"
    written.write_text(f'[[goal]]\nwhat = "x"\nfigure = ["some", "a"]\n{bound}\ntried = "{tried}"\n')
    wanted = read(written)
    monkeypatch.setattr(goals, "read", lambda: wanted)
    monkeypatch.setattr(goals, "Results", lambda: found)
    monkeypatch.setattr("sys.argv", ["goals"])
    assert goals.main() == code


@pytest.mark.processes
def test_a_commit_of_another_history_is_named(tmp_path: Path) -> None:
    found = results(tmp_path, {}, commit="0" * 12)
    assert goals.unknown_commits(["some"], found) == [f"some.json: its commit {'0' * 12} is not in this history"]


def test_every_goal_with_a_result_has_a_figure() -> None:
    """One without a result yet is for `make bench-goals` to refuse."""
    rows = [
        row for row in judged(read(), Results()) if all((RESULTS / f"{name}.json").exists() for name in row[0].results)
    ]
    assert len(rows) > 20
    assert not [(goal.what, seen) for goal, seen, met in rows if met == NO_FIGURE]
    assert not [goal.what for goal, _, met in rows if met == "no" and not goal.tried]
