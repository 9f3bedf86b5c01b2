"""A shell in which the commands of a journey are typed one after the other, as a reader would type them."""

from __future__ import annotations

import contextlib
import os
import queue
import shlex
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvservice.testing.eventually import eventually, patience
from tests.interruptible import interruptible

INTERRUPTED = (0, 130, -signal.SIGINT, 128 + signal.SIGTERM)  # exit codes of a program that Ctrl-C ended in good order
KILLED = 128 + signal.SIGKILL
END_SECONDS = 60.0  # for a program to end after Ctrl-C; an engine takes some seconds


@dataclass(slots=True)
class Staying:
    """A command that runs on behind the others, with what it prints."""

    command: str
    pid: int  # also of its process group
    output: Path


class Terminal:
    """One bash. What a command exports, or activates, holds for those after it."""

    def __init__(self, folder: Path, environment: Mapping[str, str], logs: Path) -> None:
        """`logs`: where the output of commands goes that stay."""
        self._shell = subprocess.Popen(
            interruptible(["bash", "--noprofile", "--norc"]),
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._logs = logs
        self._lines: queue.Queue[str | None] = queue.Queue()
        self.staying: list[Staying] = []
        threading.Thread(target=self._read, daemon=True).start()
        self._type("set -m\n")  # each command has a process group of its own

    def run(self, command: str, seconds: float) -> tuple[int, str]:
        """Type a command and wait for its end. Returns its exit code and what it printed. Raises AssertionError after
        `seconds`, times the patience of the tests."""
        mark = f"--{uuid.uuid4().hex}--"
        self._type(f"{{ {command}\n}} </dev/null\nprintf '\\n%s %d\\n' {mark} $?\n")
        until = time.monotonic() + seconds * patience()
        printed: list[str] = []
        while True:
            try:
                line = self._lines.get(timeout=max(until - time.monotonic(), 0.0))
            except queue.Empty:
                raise AssertionError(f"not within {seconds:g} s: {command}\n{''.join(printed)}") from None
            if line is None:
                raise AssertionError(f"the shell ended: {command}\n{''.join(printed)}")
            if line.startswith(mark):
                return int(line.split()[1]), "".join(printed).removesuffix("\n")
            printed.append(line)

    def start(self, command: str) -> Staying:
        """Type a command that does not end by itself."""
        output = self._logs / f"staying-{uuid.uuid4().hex[:8]}.log"
        output.touch()
        code, said = self.run(f"{{ {command}\n}} >{shlex.quote(str(output))} 2>&1 &\necho $!", 10.0)
        assert code == 0, said
        started = Staying(command, int(said.split()[-1]), output)
        self.staying.append(started)
        return started

    def end(self) -> list[str]:
        """Press Ctrl-C in everything that stays, the last first, then leave. Returns what went wrong."""
        wrong: list[str] = []
        for each in reversed(self.staying):
            allowed = INTERRUPTED
            try:
                os.killpg(each.pid, signal.SIGINT)
            except ProcessLookupError:
                allowed = (*INTERRUPTED, KILLED)  # by a command of the page
            try:
                code, _ = self.run(f"wait {each.pid}", END_SECONDS)
            except AssertionError:
                wrong.append(f"still there {END_SECONDS:g} s after Ctrl-C: {each.command}")
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(each.pid, signal.SIGKILL)
                continue
            if code not in allowed:
                wrong.append(f"ended with {code} after Ctrl-C: {each.command}\n{each.output.read_text()[-2000:]}")
        self.staying.clear()
        self._type("exit\n")
        eventually(lambda: self._shell.poll() is not None, "the end of the shell", END_SECONDS)
        return wrong

    def _type(self, text: str) -> None:
        assert self._shell.stdin is not None
        self._shell.stdin.write(text)
        self._shell.stdin.flush()

    def _read(self) -> None:
        assert self._shell.stdout is not None
        for line in self._shell.stdout:
            self._lines.put(line)
        self._lines.put(None)
