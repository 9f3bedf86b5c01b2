"""docs/reliability.md names a test that exists for every attack, or says that nothing guards against it."""

from __future__ import annotations

import re

from tests.tidy.test_security_table import ROOT, names_in

ROW = re.compile(r"^\| (?P<tried>[^|]+) \| (?P<what>[^|]+) \| (?P<tests>[^|]+) \|$")
TEST = re.compile(r"`tests/([\w/]+\.py)::(?:test_)?(\w+)`")


def rows() -> list[re.Match[str]]:
    section = (ROOT / "docs/reliability.md").read_text().partition("\n## Attacks\n")[2].partition("\n## ")[0]
    found = [match for line in section.splitlines() if (match := ROW.match(line))]
    return [row for row in found if row["tried"] != "tried"]


def test_every_attack_has_a_test_that_exists_or_is_not_guarded() -> None:
    assert len(rows()) >= 24
    for row in rows():
        named = TEST.findall(row["tests"])
        assert named or "not guarded" in row["what"], row["tried"]
        assert not TEST.sub("", row["tests"]).strip(" ,–"), (
            f"{row['tried']}: {row['tests']} has words that name no test"
        )
        for file, name in named:
            assert name in names_in(ROOT / "tests" / file), f"{row['tried']}: tests/{file} has no test_{name}"


def test_every_test_that_the_page_names_exists() -> None:
    named = TEST.findall((ROOT / "docs/reliability.md").read_text())
    assert len(named) >= 40
    for file, name in named:
        assert name in names_in(ROOT / "tests" / file), f"tests/{file} has no test_{name}"
