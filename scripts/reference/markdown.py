"""What the tables of the generated pages share."""

from __future__ import annotations

import re


def cell(text: str) -> str:
    """A text for one cell of a Markdown table: one line, without signs that end the cell or begin a tag."""
    return re.sub(r"<(?=\w)", "&lt;", " ".join(text.split())).replace("|", "\\|") or "–"
