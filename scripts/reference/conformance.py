"""docs/reference/conformance.md: what other caches and engines do, whether it is here, and which test shows it.

The mechanisms stand in tests/conformance/mechanisms, one file a subject, and name tests by file and name.
After a run of the tests, `python -m scripts.reference.conformance FOLDER` compares the page with pytest's reports
(JUnit) in this folder: it exits with 1 if a test that the page relies on did not run there, or did not pass.
"""

from __future__ import annotations

import argparse
import ast
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path

import tomllib

from scripts.reference.markdown import cell

ROOT = Path(__file__).parent.parent.parent
MECHANISMS = ROOT / "tests" / "conformance" / "mechanisms"
AGAIN = ".again.xml"  # ends the name of the report of what failed at first and was run once more
# Public suites that every implementation of a seam runs: their tests are methods there, and run in tests/contract.
SUITES = sorted((ROOT / "kvservice" / "testing").glob("*_contract.py"))

HEAD = """# Conformance

<!-- Made from tests/conformance/mechanisms by `make docs-reference`. Do not edit. -->

Public projects have shown what a KV cache beside an engine can do. This page lists their mechanisms, one a row, and
says whether each is here:

- **yes**: the tests show it, and they run in every build.
- **partly**, **no**: the row says what is missing.
- **refused**: left out on purpose, and the row says why.

The tests of `tests/conformance` retell the projects' own examples with their numbers. Where an example is wrong, the
test says so and asserts what is right. `make test` fails if a test of a row that says yes did not run or did not pass;
those that are slow run in `make test-all`. `make mutants-conformance` plants a mistake for each example.

"""


class Status(Enum):
    YES = "yes"
    PARTLY = "partly"
    NO = "no"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Case:
    """A test function or method."""

    path: Path  # relative to the root
    name: str  # without `test_`
    marks: frozenset[str]  # of the function, its class and its file

    @property
    def shown(self) -> str:
        return f"{self.path}::test_{self.name}" if self.name[0].islower() else f"{self.path}::{self.name}"


@dataclass(frozen=True, slots=True)
class Mechanism:
    what: str
    status: Status
    tests: tuple[str, ...]  # `file::name`, without tests/ and `test_`; or the name alone, if it is unique
    why: str  # "" if the status is yes


@dataclass(frozen=True, slots=True)
class Subject:
    title: str
    of: str
    mechanisms: tuple[Mechanism, ...]


@cache
def subjects() -> tuple[Subject, ...]:
    """In the order of their files. Raises KeyError or ValueError for a row that lacks something."""
    found = []
    for path in sorted(MECHANISMS.glob("*.toml")):
        given = tomllib.loads(path.read_text(encoding="utf-8"))
        rows = [
            Mechanism(row["what"], Status(row["status"]), tuple(row.get("tests", ())), row.get("why", ""))
            for row in given["mechanism"]
        ]
        found.append(Subject(given["title"], given["of"], tuple(rows)))
    return tuple(found)


@cache
def cases() -> dict[str, list[Case]]:
    """Name without `test_`, or name of a class that Hypothesis made → the tests that have it."""
    found: dict[str, list[Case]] = defaultdict(list)
    for path in [*sorted((ROOT / "tests").rglob("test_*.py")), *SUITES]:
        tree = ast.parse(path.read_bytes())
        whole = frozenset(mark for node in tree.body if _sets(node, "pytestmark") for mark in _marks(node))
        for name, marks in _tests_in(tree):
            found[name].append(Case(path.relative_to(ROOT), name, whole | marks))
    return found


def _tests_in(
    tree: ast.Module | ast.ClassDef, outer: frozenset[str] = frozenset()
) -> Iterator[tuple[str, frozenset[str]]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            own = frozenset(mark for decorator in node.decorator_list for mark in _marks(decorator))
            yield node.name.removeprefix("test_"), outer | own
        elif isinstance(node, ast.ClassDef):
            own = frozenset(mark for decorator in node.decorator_list for mark in _marks(decorator))
            yield from _tests_in(node, outer | own)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("Test"):
            yield ast.unparse(node.targets[0]), outer


def _sets(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.Assign) and any(isinstance(at, ast.Name) and at.id == name for at in node.targets)


def _marks(node: ast.AST) -> Iterator[str]:
    """The names of all `pytest.mark.NAME` in it."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and ast.unparse(inner.value) == "pytest.mark":
            yield inner.attr


def case_of(test: str) -> Case:
    """Raises LookupError unless exactly one test has this name."""
    place, _, name = test.rpartition("::")
    found = [case for case in cases().get(name, ()) if str(case.path).endswith(place)]
    if len(found) != 1:
        at = ", ".join(str(case.path) for case in found) or "nowhere"
        raise LookupError(f"one test should be called {test!r}, and it is {at}")
    return found[0]


def page() -> str:
    """Raises LookupError for a test that does not exist."""
    rows = [row for subject in subjects() for row in subject.mechanisms]
    counts = Counter(row.status for row in rows)
    said = ", ".join(f"{counts[status]} {status.value}" for status in Status)
    return f"{HEAD}{len(rows)} mechanisms: {said}.\n{''.join(map(section, subjects()))}"


def section(subject: Subject) -> str:
    lines = [f"\n## {subject.title}\n", f"{subject.of}.\n", "| mechanism | here | shown by, and what is missing |"]
    lines.append("|---|---|---|")
    for row in subject.mechanisms:
        shown = [f"`{case_of(test).shown}`" for test in row.tests]
        lines.append(f"| {cell(row.what)} | {row.status.value} | {cell(' '.join([row.why, *shown]).strip())} |")
    return "\n".join([*lines, ""])


PAGES = {"conformance.md": page}


# -- after a run of the tests ----


def outcomes(folder: Path) -> dict[tuple[str, str], set[str]]:
    """(module, function without its parameters) → how its cases ended: passed, skipped or failed. Tests of public
    suites are found in the module that runs them. What was run again ended as it did then."""
    ends: dict[tuple[str, str], str] = {}
    for path in sorted(folder.glob("*.xml"), key=lambda path: (path.name.endswith(AGAIN), path)):
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            ended = {child.tag for child in case} & {"skipped", "failure", "error"}
            outcome = "passed" if not ended else "skipped" if ended == {"skipped"} else "failed"
            ends[case.get("classname", ""), case.get("name", "")] = outcome
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for (place, name), outcome in ends.items():
        parts = place.split(".")
        last = next((index for index, part in enumerate(parts) if part.startswith("test_")), len(parts) - 1)
        module = ".".join(parts[: last + 1])
        found[module, name.partition("[")[0]].add(outcome)
        for made in parts[last + 1 :]:
            found[module, made].add(outcome)
    return found


def not_shown(ended: dict[tuple[str, str], set[str]], left_out: Collection[str] = ()) -> list[str]:
    """What the page relies on and did not pass. Tests with a mark of `left_out` may be missing."""
    problems = []
    for subject in subjects():
        for row in subject.mechanisms:
            if row.status is not Status.YES:
                continue
            for case in map(case_of, row.tests):
                found = outcome_of(case, ended)
                if "failed" in found or not (found or case.marks & set(left_out)):
                    problems.append(f"{case.shown} {'failed' if found else 'did not run'}: {row.what}")
                elif found == {"skipped"}:
                    problems.append(f"{case.shown} was skipped: {row.what}")
    return sorted(set(problems))


def outcome_of(case: Case, ended: dict[tuple[str, str], set[str]]) -> set[str]:
    function = case.name if case.name[0].isupper() else f"test_{case.name}"
    if ROOT / case.path in SUITES:
        found = [how for (module, name), how in ended.items() if name == function and ".contract." in module]
        return set().union(*found)
    return ended.get((".".join(case.path.with_suffix("").parts), function), set())


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the page `conformance` with pytest's reports of a run.")
    parser.add_argument("folder", type=Path, help="with reports as `pytest --junitxml` writes them")
    parser.add_argument(
        "--left-out", nargs="*", default=[], metavar="MARK", help="marks of tests that did not have to run"
    )
    options = parser.parse_args()
    problems = not_shown(outcomes(options.folder), options.left_out)
    print("\n".join(problems) or "every test that the page conformance relies on ran and passed")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
