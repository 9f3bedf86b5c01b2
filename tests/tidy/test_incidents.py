"""docs/incidents.md: each rule has a room in the source, and tests that exist and reach that room."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.tidy.rules import SOURCE_FOLDERS, module_name, nearest
from tests.tidy.trees import imports_of, sources

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "incidents.md"
RULE = re.compile(r"^- \*\*(.+?)\.\*\*((?:.+|\n  )+)", re.MULTILINE)
TEST = re.compile(r"^\s*(?:async )?def test_(\w+)", re.MULTILINE)
# In texts: programs that a test starts, and modules as `python -m` and vLLM's configuration name them.
NAMED = re.compile(r"^(?:from|import) ((?:kvservice|tests)[\w.]+)|\"(kvservice(?:\.\w+)+)\"", re.MULTILINE)
COMMAND = re.compile(r"\"-m\",\s*\"kvservice\"|\[\"kvservice\", ")  # `python -m kvservice`, and LocalCluster's parts


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    rooms: tuple[str, ...]  # files or folders, the one to look at first
    tests: tuple[str, ...]  # names without `test_`


def rules() -> list[Rule]:
    found = []
    for name, body in RULE.findall(PAGE.read_text()):
        rooms, _, tests = body.partition("–")
        found.append(Rule(name, tuple(re.findall(r"`(\S+)`", rooms)), tuple(re.findall(r"`([a-z0-9_]+)`", tests))))
    return found


RULES = rules()
each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


@cache
def files_by_test() -> dict[str, list[Path]]:
    """Name of a test → the files that have one of this name."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name in TEST.findall(path.read_text(encoding="utf-8")):
            found[name].append(path)
    return found


@cache
def modules() -> dict[str, Path]:
    return {module_name(ROOT, path): path for path in sources(ROOT, "kvservice", *SOURCE_FOLDERS)}


@cache
def needs(path: Path) -> frozenset[Path]:
    """The files that this one imports, or names as programs."""
    named = [item.module for item in imports_of(ROOT, path)]
    text = path.read_text(encoding="utf-8")
    named += [first or second for first, second in NAMED.findall(text)]
    if COMMAND.search(text):
        named.append("kvservice.__main__")
    return frozenset(modules()[found] for module in named if (found := nearest(module, modules())))


def reached(starts: Iterable[Path]) -> set[Path]:
    """Everything that runs, or may run, when these files do."""
    seen: set[Path] = set()
    waiting = list(starts)
    while waiting:
        path = waiting.pop()
        if path not in seen:
            seen.add(path)
            waiting.extend(needs(path))
    return seen


def test_the_page_has_rules_and_each_is_said_once() -> None:
    names = [rule.name for rule in RULES]
    assert len(names) > 70
    assert len(set(names)) == len(names)


@each_rule
def test_the_room_of_each_rule_is_there(rule: Rule) -> None:
    assert rule.rooms
    assert [room for room in rule.rooms if not (ROOT / room).exists()] == []
    assert [room for room in rule.rooms if not room.startswith(("kvservice/", "actors/"))] == []


@each_rule
def test_each_rule_has_tests_and_they_exist(rule: Rule) -> None:
    assert rule.tests
    assert [test for test in rule.tests if test not in files_by_test()] == []


@each_rule
def test_the_tests_of_each_rule_reach_its_rooms(rule: Rule) -> None:
    run = reached(path for test in rule.tests for path in files_by_test()[test])
    for room in rule.rooms:
        assert any(path.is_relative_to(ROOT / room) for path in run), f"no test of this rule imports or runs {room}"
