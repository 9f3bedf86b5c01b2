"""The goals of goals.toml, each with the figure of a committed result, and whether it is met.

    python -m benchmarks.goals [--missed]      # or `make bench-goals`

Measures nothing. It ends with 1 if a goal has no figure from a clean commit of this tree's history, or if a goal is
missed and goals.toml does not say what was tried. A missed goal alone is no failure: it is said here and in the docs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import sub, truediv
from pathlib import Path
from typing import Any

from benchmarks.committed import Results, Unclean
from benchmarks.report import ROOT, git, print_table

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GOALS = ROOT / "benchmarks" / "goals.toml"
Step = str | int | Sequence[str] | Mapping[str, object]
NO_FIGURE = "no figure"


class NoFigure(Exception):
    """The result does not hold the figure of a goal."""


@dataclass(frozen=True, slots=True)
class Goal:
    """One line of goals.toml: where the figure is, and what it must reach.

    `path` leads from the result's `figures` to a number: a name or an index for each step. A list of names takes each
    of them, and a table of names and values takes each row of a list that has them, or one of several values. What is a
    list in the end counts as its length. The goal is met when all are.

    `less` and `to` lead, from the name of a result, to as many figures, which are subtracted, or divide. With `mean`
    the mean of all counts.
    """

    what: str
    result: str
    path: tuple[Step, ...]
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None
    tried: str = ""
    less: tuple[Step, ...] = ()
    to: tuple[Step, ...] = ()
    mean: bool = False

    def values(self, results: Results) -> list[float]:
        """Raises NoFigure if the result does not hold them, and Unclean if it may not be cited."""
        found = _numbers(results, self.result, self.path)
        for beside, apply in ((self.less, sub), (self.to, truediv)):
            if beside:
                others = _numbers(results, str(beside[0]), beside[1:])
                if len(others) != len(found):
                    raise NoFigure(f"{beside[0]}.json has {len(others)} numbers for {len(found)}")
                found = [apply(one, other) for one, other in zip(found, others, strict=True)]
        return [statistics.mean(found)] if self.mean else found

    @property
    def results(self) -> set[str]:
        """The names of all results that it reads."""
        return {self.result, *(str(beside[0]) for beside in (self.less, self.to) if beside)}

    def is_met(self, values: Sequence[float]) -> bool:
        low, high = self.at_least, self.at_most
        return all((low is None or value >= low) and (high is None or value <= high) for value in values)

    @property
    def bound(self) -> str:
        sign, number = ("≤", self.at_most) if self.at_most is not None else ("≥", self.at_least or 0)
        return f"{sign} {_text(number)} {self.unit}".rstrip()


def _numbers(results: Results, name: str, path: Sequence[Step]) -> list[float]:
    found: list[Any] = [results.figures(name)]
    for step in path:
        found = [each for one in found for each in _below(one, step)]
    numbers = [len(each) if isinstance(each, list) else each for each in found]
    if not numbers or not all(isinstance(each, int | float) for each in numbers):
        raise NoFigure(f"{name}.json has no number at {tuple(path)}")
    return numbers


def _below(found: Any, step: Step) -> list[Any]:
    try:
        if isinstance(step, Mapping):
            return [row for row in found if all(_is(row[name], value) for name, value in step.items())]
        if isinstance(step, str | int):
            return [found[step]]
        return [found[name] for name in step]
    except (KeyError, IndexError, TypeError):
        raise NoFigure(f"the result has no {step!r}") from None


def _is(found: Any, wanted: object) -> bool:
    return found in wanted if isinstance(wanted, list) else bool(found == wanted)


def read(path: Path = GOALS) -> list[Goal]:
    """Raises ValueError for a goal that does not say which way it is met, or says both."""
    goals = []
    for row in tomllib.loads(path.read_text())["goal"]:
        result, *steps = row.pop("figure")
        beside = {name: tuple(row.pop(name, ())) for name in ("less", "to")}
        goal = Goal(**row, **beside, result=result, path=tuple(steps))
        if (goal.at_least is None) == (goal.at_most is None):
            raise ValueError(f"{goal.what}: give either at_least or at_most")
        goals.append(goal)
    return goals


def _text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def judged(goals: Sequence[Goal], results: Results) -> list[tuple[Goal, str, str]]:
    """Each goal with what was seen, and yes, no or why there is no figure."""
    rows = []
    for goal in goals:
        try:
            values = goal.values(results)
        except (NoFigure, Unclean) as error:
            rows.append((goal, str(error), NO_FIGURE))
        else:
            rows.append((goal, " / ".join(map(_text, values)), "yes" if goal.is_met(values) else "no"))
    return rows


def unknown_commits(names: Iterable[str], results: Results) -> list[str]:
    """Results of a commit that is not in this tree's history. Empty where the whole history is not there."""
    if git("rev-parse", "--is-shallow-repository") != "false":
        return []
    commits = {name: results.document(name)["commit"] for name in sorted(set(names))}
    return [
        f"{name}.json: its commit {commit} is not in this history"
        for name, commit in commits.items()
        if git("merge-base", "--is-ancestor", commit, "HEAD") is None
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--missed", action="store_true", help="show only what is missed, with what was tried")
    options = parser.parse_args()
    results = Results()
    rows = judged(read(), results)
    missed = [(goal, seen) for goal, seen, met in rows if met == "no"]
    if options.missed:
        for goal, seen in missed:
            print(f"{goal.what}: {seen}, goal {goal.bound}\n  {goal.tried}\n")
    else:
        print_table(
            ["goal", "bound", "seen", "met", "result"],
            [[goal.what, goal.bound, seen, met, goal.result] for goal, seen, met in rows],
        )
        print(f"{sum(met == 'yes' for _, _, met in rows)} of {len(rows)} goals are met")
    wrong = [f"{goal.what}: {seen}" for goal, seen, met in rows if met == NO_FIGURE]
    wrong += [f"{goal.what} is missed: goals.toml does not say what was tried" for goal, _ in missed if not goal.tried]
    wrong += unknown_commits((name for goal, _, met in rows if met != NO_FIGURE for name in goal.results), results)
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
