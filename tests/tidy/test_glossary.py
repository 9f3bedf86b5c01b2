"""The glossary: short, each word defined once, and the same words in the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tidy.trees import sources
from tests.tidy.words import names_of

ROOT = Path(__file__).resolve().parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"
ENTRIES_MAX = 25
SENTENCES_MAX = 2
ROWS = re.findall(r"^\| \*\*(.+?)\*\* \| (.+?) \| `(.+?)` \|$", GLOSSARY.read_text(), re.MULTILINE)


def test_glossary_is_short_and_defines_each_word_once() -> None:
    words = [word for word, _, _ in ROWS]
    assert 0 < len(words) <= ENTRIES_MAX
    assert len(set(words)) == len(words)
    assert len(words) == GLOSSARY.read_text().count("\n| **"), "a row that is not read: word, meaning, file"
    long = [word for word, meaning, _ in ROWS if len(re.findall(r"[.?!](?= |$)", meaning)) > SENTENCES_MAX]
    assert not long


@pytest.mark.parametrize("page", ["README.md", "docs/ARCHITECTURE.md"])
def test_glossary_is_linked(page: str) -> None:
    assert "glossary.md" in (ROOT / page).read_text()


def test_words_of_the_glossary_are_names_in_the_code() -> None:
    names = {split for path in sources(ROOT, "kvservice", "actors") for _, split in names_of(path, path.read_text())}
    used = "".join(names)
    assert [word for word, _, _ in ROWS if f" {word.replace('-', ' ').lower()} " not in used] == []


def test_each_word_has_a_file_to_start_at() -> None:
    assert [where for _, _, where in ROWS if not (ROOT / where).is_file()] == []
