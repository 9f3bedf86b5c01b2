"""The test's side of kvservice.observe.failpoints."""

from __future__ import annotations

from pathlib import Path

from kvservice.observe.failpoints import VARIABLE
from kvservice.testing.eventually import eventually

HIT_SECONDS = 20.0


class Failpoints:
    """`environment` is for the processes that are to be held."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {VARIABLE: str(folder)}

    def arm(self, name: str) -> None:
        (self.folder / f"{name}.arm").touch()

    def hit(self, name: str, seconds: float = HIT_SECONDS) -> int:
        """Blocks until some process is held there. Returns its id."""
        path = self.folder / f"{name}.hit"
        eventually(path.exists, f"a process at {name}", seconds)
        pid = int(path.read_text())
        path.unlink()
        return pid

    def release(self, name: str) -> None:
        (self.folder / f"{name}.release").touch()
