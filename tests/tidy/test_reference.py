"""The pages of docs/reference that are made from the code are what the code says."""

from __future__ import annotations

from scripts.settings_reference import PAGE, page


def test_page_of_settings_is_current() -> None:
    assert PAGE.read_text() == page(), "run `make docs-reference`"
