"""Check that each link of a markdown page leads to a file that exists and to a heading that is in it.

    python scripts/check_links.py

Prints a line for each broken link and exits with 1 if there are any. Links to other hosts are not followed, because a
check must not depend on them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from urllib.parse import unquote

FENCE = re.compile(r"^ *(```|~~~).*?^ *\1[^\n]*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
NAMED = re.compile(r"<a (?:id|name)=\"([^\"]+)\"")
ELSEWHERE = re.compile(r"^[a-z][a-z0-9+.-]*:", re.IGNORECASE)  # https:, mailto:


def pages(root: Path) -> list[Path]:
    """All markdown files that git knows, or would know after `git add`."""
    command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "-z", "*.md"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    return [root / name for name in names if name and (root / name).is_file()]


def broken_links(checked: Iterable[Path]) -> list[str]:
    found = []
    for page in checked:
        text = FENCE.sub(blank, page.read_text(encoding="utf-8"))
        for match in LINK.finditer(CODE.sub(blank, text)):
            target = unquote(match[1] or match[2])
            if ELSEWHERE.match(target):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path) if path else page
            line = text.count("\n", 0, match.start()) + 1
            if not file.exists():
                found.append(f"{page}:{line}: {path} is not there")
            elif anchor and file.suffix == ".md" and anchor not in anchors(file.resolve()):
                found.append(f"{page}:{line}: {path or page.name} has no heading #{anchor}")
    return found


def blank(match: re.Match[str]) -> str:
    """Keep as many lines, so that line numbers stay right."""
    return "\n" * match[0].count("\n")


@cache
def anchors(page: Path) -> frozenset[str]:
    """The names by which headings of this page are linked to, as GitHub makes them."""
    text = FENCE.sub(blank, page.read_text(encoding="utf-8"))
    found = set(NAMED.findall(text))
    for heading in HEADING.findall(text):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        count = 1
        while (unique := name if count == 1 else f"{name}-{count - 1}") in found:
            count += 1
        found.add(unique)
    return frozenset(found)


if __name__ == "__main__":
    broken = broken_links(pages(Path(__file__).resolve().parents[1]))
    print("\n".join(broken) or "all links of all pages lead somewhere")
    sys.exit(1 if broken else 0)
