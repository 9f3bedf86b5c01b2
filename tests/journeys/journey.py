"""Plays a journey: a new user in an empty folder who has the wheel and the pages, and does only what the pages say.

    def test_…(wheel, tmp_path):
        with Journey("python", [PAGE], tmp_path, replace={"kvservice.whl": str(wheel)}) as journey:
            journey.play()
        assert journey.seconds < 600

The user has no package index. What the wheel needs is found in the environment of the tests, as the lock has it, and
pip checks that it is what the wheel asks for.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from kvservice.testing.eventually import eventually
from tests.journeys.pages import Command, Step, prints, steps_of
from tests.journeys.terminal import Terminal

COMMAND_SECONDS = 300.0  # the longest that one command may take; a journey as a whole has a bound of its own
KEPT = ("HOME", "LANG", "LC_ALL", "PATH", "TERM", "KVSERVICE_TEST_SESSION", "KVSERVICE_TEST_PATIENCE")


class Journey:
    """One user. Leaving the block ends what the user started; what does not end in good order is an error."""

    def __init__(
        self,
        name: str,
        pages: Sequence[Path],
        folder: Path,
        *,
        replace: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`folder` must be empty, and its path short: sockets go into it. `replace`: what the pages cannot know, such
        as where the wheel is; each text must occur in a command or a file."""
        assert not list(folder.iterdir()), f"{folder} is not empty"
        self._steps = steps_of(name, pages)
        self._folder = folder / "here"
        self._replace = dict(replace or {})
        self._unused = set(self._replace)
        self._logs, self._bin, run = folder / "logs", folder / "bin", folder / "run"
        for made in (self._folder, self._logs, self._bin, run):
            made.mkdir(mode=0o700)
        (self._bin / "python3").symlink_to(getattr(sys, "_base_executable", sys.executable))
        (self._bin / "python").symlink_to("python3")
        self._environment = {name: os.environ[name] for name in KEPT if name in os.environ}
        self._environment |= {
            "PATH": f"{self._bin}:{self._environment['PATH']}",
            "PYTHONPATH": sysconfig.get_path("purelib"),  # what the lock installed, in place of an index
            "PIP_NO_INDEX": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "KVSERVICE_RUNTIME_DIR": str(run),
            "TMPDIR": str(folder),
            **(environment or {}),
        }
        self._terminals: list[Terminal] = []
        self.took: list[tuple[str, float]] = []  # (page:line, seconds) of each step

    def __enter__(self) -> Journey:
        self._open_terminal()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        wrong = [text for terminal in reversed(self._terminals) for text in terminal.end()]
        if kind is None:
            assert not wrong, "\n".join(wrong)

    @property
    def folder(self) -> Path:
        """Where the user works."""
        return self._folder

    @property
    def seconds(self) -> float:
        """What all steps took."""
        return sum(seconds for _, seconds in self.took)

    def play(self) -> None:
        """Do every step. Raises AssertionError that names page and line when a command fails or prints something else
        than its page says."""
        for step in self._steps:
            begun = time.monotonic()
            self._do(step)
            self.took.append((step.place, time.monotonic() - begun))
            print(f"{self.took[-1][1]:7.1f} s  {step.place}")
        assert not self._unused, f"the pages nowhere say {', '.join(sorted(self._unused))}"

    def _do(self, step: Step) -> None:
        if step.new_terminal:
            self._open_terminal()
        if step.file:
            target = self._folder / step.file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(self._replaced(step.content))
        for number, command in enumerate(step.commands, 1):
            text, stays = self._replaced(command.text), step.stays and number == len(step.commands)
            if text.rstrip().endswith("&"):  # the reader sent it to the background
                text, stays = text.rstrip().removesuffix("&"), True
            if stays:
                self._stay(step, command, text)
            else:
                code, printed = self._terminals[-1].run(text, COMMAND_SECONDS)
                assert code == 0, f"{step.place}: exit code {code}: {text}\n{printed}"
                self._check(step, command, printed)

    def _stay(self, step: Step, command: Command, text: str) -> None:
        started = self._terminals[-1].start(text)
        shown = command.output
        if shown is not None:
            eventually(
                lambda: prints(shown, started.output.read_text(), so_far=True),
                f"{step.place}: {text}: {shown}",
                COMMAND_SECONDS,
                detail=started.output.read_text,
            )

    def _check(self, step: Step, command: Command, printed: str) -> None:
        if command.output is not None:
            assert prints(command.output, printed), (
                f"{step.place}: {command.text}\nthe page shows:\n{command.output}\nit printed:\n{printed}"
            )

    def _open_terminal(self) -> None:
        self._terminals.append(Terminal(self._folder, self._environment, self._logs))

    def _replaced(self, text: str) -> str:
        for what, by in self._replace.items():
            if what in text:
                self._unused.discard(what)
                text = text.replace(what, by)
        return text
