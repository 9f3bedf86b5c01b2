"""docs/security-table.md says for every asset what holds it from whom: a test that exists, or that nothing does."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (?P<asset>[^|]+) \| (?P<who>[^|]+) \| (?P<what>[^|]+) \| (?P<tests>[^|]+) \|$")
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")
WHO = {
    "other user of the node",
    "other pod of the node",
    "other host of the network",
    "a tenant",
    "holder of one node's certificate",
}


def rows() -> list[re.Match[str]]:
    lines = (ROOT / "docs/security-table.md").read_text().splitlines()
    found = [match for line in lines if (match := ROW.match(line))]
    return [row for row in found if row["tests"] != "tests" and not row["asset"].startswith("-")]


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    return {name.removeprefix("test_") for name in names if name.startswith("test_")}


def test_every_asset_has_a_row_for_everybody() -> None:
    by_asset: dict[str, set[str]] = {}
    for row in rows():
        if row["who"] in WHO:
            by_asset.setdefault(row["asset"], set()).add(row["who"])
    assert len(by_asset) >= 8
    assert {asset: WHO - who for asset, who in by_asset.items() if who != WHO} == {}


def test_every_row_has_tests_or_says_that_it_has_none() -> None:
    known: dict[str, set[str]] = {}
    for row in rows():
        named = TEST.findall(row["tests"])
        where = f"{row['asset']}, {row['who']}"
        assert named or "not guarded" in row["what"], where
        assert not TEST.sub("", row["tests"]).strip(" ,–"), f"{where}: {row['tests']} has words that name no test"
        for file, name in named:
            if file not in known:
                known[file] = names_in(ROOT / "tests" / file)
            assert known[file], f"{where}: tests/{file} has no tests"
            assert name in known[file], f"{where}: tests/{file} has no test_{name}"
