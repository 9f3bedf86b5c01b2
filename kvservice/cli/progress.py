"""Progress of what takes longer than a moment: a line that moves on a terminal, a line now and then elsewhere.

It goes to stderr, so that what a command prints for programs stays clean.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from kvservice.cli.output import console

FIRST_SECONDS = 2.0  # what ends sooner needs no line in a log
LINE_SECONDS = 10.0  # between two lines in a log: often enough to see that it goes on, seldom enough to read


class Progress:
    """`with Progress("draining") as progress: progress.update("3 of 9 blocks", done=3, total=9)`.

    Call `update` as often as you like, on one thread."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._console = console(stderr=True)
        self._bar: Any = None
        self._task: Any = None
        self._started = self._told = time.monotonic()
        self._first = True

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TimeElapsedColumn(),
            )
            self._bar = Bar(*columns, console=self._console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self._what, total=None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, text: str = "", done: float | None = None, total: float | None = None) -> None:
        """Say how far it is. `done` of `total` draws a bar, in any unit."""
        line = f"{self._what}: {text}" if text else self._what
        if self._bar is not None:
            self._bar.update(self._task, description=line, completed=done, total=total)
            return
        now = time.monotonic()
        if now - self._told < (FIRST_SECONDS if self._first else LINE_SECONDS):
            return
        self._told, self._first = now, False
        share = f" ({done / total:.0%})" if done is not None and total else ""
        self._console.print(f"{line}{share}, {now - self._started:.0f} s", markup=False, soft_wrap=True)
