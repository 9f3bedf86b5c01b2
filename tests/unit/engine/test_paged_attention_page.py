"""The page on paged attention shows what the code says: each of its examples runs."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[3] / "docs" / "paged-attention.md"
EXAMPLES_MIN = 40  # lines of code: the page is not to lose them unseen


def test_the_examples_of_the_page_print_what_it_shows() -> None:
    blocks = re.findall(r"^```pycon\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    page = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, PAGE.name, str(PAGE), None)
    assert len(page.examples) >= EXAMPLES_MIN
    said: list[str] = []
    doctest.DocTestRunner().run(page, out=said.append)
    assert not said, "".join(said)
