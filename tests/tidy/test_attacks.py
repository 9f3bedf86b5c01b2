"""The page of attacks names a test that exists for each, or says that nothing guards against it."""

from __future__ import annotations

import re

from tests.tidy.test_security_table import ROOT, names_in

ITEM = re.compile(r"^- \*\*(?P<tried>.+?)\*\*(?P<what>.*?)(?: Test: (?P<tests>`.+))?$")
TEST = re.compile(r"`tests/([\w/]+\.py)::(?:test_)?(\w+)`")


def text() -> str:
    return (ROOT / "docs" / "attacks.md").read_text()


def items() -> list[re.Match[str]]:
    lines = re.sub(r"\n  (?=\S)", " ", text()).splitlines()
    found = [ITEM.match(line) for line in lines if line.startswith("- ")]
    assert None not in found
    return [item for item in found if item]


def test_every_attack_has_a_test_that_exists_or_is_not_guarded() -> None:
    assert len(items()) >= 24
    for item in items():
        named = TEST.findall(item["tests"] or "")
        assert named or "not guarded" in item["what"].lower(), item["tried"]
        assert not TEST.sub("", item["tests"] or "").strip(" ,–"), (
            f"{item['tried']}: {item['tests']} has words that name no test"
        )
        for file, name in named:
            assert name in names_in(ROOT / "tests" / file), f"{item['tried']}: tests/{file} has no test_{name}"


def test_every_test_that_the_page_names_exists() -> None:
    named = TEST.findall(text())
    assert len(named) >= 40
    for file, name in named:
        assert name in names_in(ROOT / "tests" / file), f"tests/{file} has no test_{name}"
