"""Pages of the site that moved: a small page at each old address that leads to the new one.

    python scripts/redirects.py build/site

Writes one HTML file for each old address below the folder of the built site. It works without a server and without
scripts. A page that moves or goes gets a row here in the same commit.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Old page of docs/ → the page that says it now.
MOVED = {
    "attacks-inside.md": "attacks.md",
    "design/explain.md": "howto/hit-rate-is-low.md",
    "incidents-here.md": "incidents.md",
    "operations.md": "howto/troubleshooting.md",
    "user-guide.md": "start/one-machine.md",
}

PAGE = """<!doctype html>
<meta charset="utf-8">
<title>Moved</title>
<meta name="robots" content="noindex">
<link rel="canonical" href="{target}">
<meta http-equiv="refresh" content="0; url={target}">
<p>This page moved to <a href="{target}">{target}</a>.</p>
"""


def stub(old: str, new: str) -> str:
    """The page at the address of `old` that leads to `new`, by a link that also works from a folder."""
    target = os.path.relpath(Path(new).with_suffix(".html"), Path(old).parent)
    return PAGE.format(target=target)


def write(site: Path) -> None:
    """Raises FileExistsError where a page of the site is at an old address."""
    for old, new in MOVED.items():
        path = site / Path(old).with_suffix(".html")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(stub(old, new))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
