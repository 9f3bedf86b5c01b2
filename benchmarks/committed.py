"""Reads committed results: what a page or a goal may cite."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS

AGAIN = "to be measured again"
Figures = dict[str, Any]


class Unclean(Exception):
    """A result of a tree with uncommitted changes, which nobody can check out again."""

    def __init__(self, command: str) -> None:
        super().__init__(f"{AGAIN}: `{command}`")


class Results:
    def __init__(self, folder: Path = RESULTS) -> None:
        self._folder = folder

    def document(self, name: str) -> Figures:
        """The result, if it may be cited. Raises Unclean if not, or if there is none yet."""
        path = self._folder / f"{name}.json"
        if not path.exists():
            raise Unclean(f"python -m benchmarks.{name}")
        found: Figures = json.loads(path.read_text())
        if not is_clean(found):
            raise Unclean(_command(name, found))
        return found

    def figures(self, name: str) -> Figures:
        found: Figures = self.document(name)["figures"]
        return found


def _command(name: str, document: Figures) -> str:
    """The command that measures this result again."""
    command = re.sub(r" --out \S+", "", document["command"])
    return command if name == document["benchmark"] else f"{command} --out benchmarks/results/{name}.json"


def origin(name: str, document: Figures) -> str:
    """Where and when the figures of a result were seen, as a sentence. Results are of different machines."""
    return f"Measured at commit {document['commit'][:7]}, {seen_on(document)} (`{name}.json`)."


def seen_on(document: Figures) -> str:
    """The day and the processor."""
    machine = document["machine"]
    processor = " ".join(re.sub(r"\(R\)|\bProcessor\b|@", " ", machine["cpu"]).split())
    return f"{document['date'][:10]}, {machine['cpu_count']} cores, {processor}"


def is_clean(document: Figures) -> bool:
    return re.fullmatch(r"[0-9a-f]{12}", document["commit"]) is not None
