"""docs/incidents.md names a test for every fault of the field, and each of them exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (?P<what>[^|]+) \| (?P<rule>[^|]+) \| (?P<tests>[^|]+) \|$")


def rows() -> list[re.Match[str]]:
    lines = (ROOT / "docs/incidents.md").read_text().splitlines()
    found = [match for line in lines if (match := ROW.match(line))]
    return [row for row in found if row["what"] != "what happened"]


def all_tests() -> set[str]:
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                found.add(node.name.removeprefix("test_"))
    return found


def test_every_incident_has_tests_and_they_exist() -> None:
    named = {row["what"]: re.findall(r"`([a-z0-9_]+)`", row["tests"]) for row in rows()}
    assert len(named) > 40
    assert [what for what, tests in named.items() if not tests] == []
    known = all_tests()
    assert {test for tests in named.values() for test in tests} - known == set()
