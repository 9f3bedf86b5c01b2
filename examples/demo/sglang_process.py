"""The other end of `sglang_engine` and `vllm_engine`: starts an engine's process, here or in another network namespace,
and asks it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar

from examples.demo.sglang_engine import environment
from kvservice.errors import Unavailable

E = TypeVar("E", bound="EngineProcess")
START_SECONDS = 900.0  # a CPU takes half a minute when nothing else runs, and many when much does
ANSWER_SECONDS = 600.0
IDLE_SECONDS = 30.0
SHARED_MEMORY = Path("/dev/shm")
LEFT_BEHIND = ("sglang_loads_*", "sgl_shm_mq_*", "sem.mp-*")
END_SECONDS = 30.0


class EngineProcess:
    """Starts at once. `ready` waits for the engine; use it in a `with`, which ends it and all of its processes, at once
    if something has failed."""

    def __init__(
        self, module: str, settings: Mapping[str, Any], before: Sequence[str], variables: Mapping[str, str]
    ) -> None:
        """`module` is one that reads calls as `sglang_engine` does. `before` stands before the command."""
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by __exit__
        self._folder = tempfile.TemporaryDirectory(prefix="kvd-")  # SGLang leaves its sockets where temporary files are
        self._process = subprocess.Popen(
            [*before, sys.executable, "-m", module, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env={**variables, "TMPDIR": self._folder.name},
            start_new_session=True,
        )
        self._answers: queue.Queue[str | None] = queue.Queue()
        assert self._process.stdout is not None
        threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True).start()

    @property
    def said(self) -> str:
        """What it printed so far."""
        return os.pread(self._said.fileno(), 1 << 20, 0).decode(errors="replace")

    def ready(self, seconds: float = START_SECONDS) -> None:
        """Wait until it answers. Raises Unavailable."""
        self._next(seconds)

    def ask(self, prompt: str | Sequence[int], tokens: int, salt: str = "") -> dict[str, Any]:
        """One greedy answer. Raises Unavailable when there is none."""
        given = prompt if isinstance(prompt, str) else list(prompt)
        return self._call({"ask": given, "tokens": tokens, "salt": salt})

    def counters(self) -> dict[str, int]:
        """What its connector counted. SGLang counts with `enable_metrics` only."""
        return self._call({"counters": True})

    def forget(self) -> None:
        """Empty its own memories of prompts, in the KV cache and on the host. Waits until it is idle: it stores pages
        behind its answers."""
        self._call_idle({"forget": True}, "forgotten")

    def __enter__(self: E) -> E:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        held = shared_memory_of_session(self._process.pid)
        if self._process.stdin is not None:
            self._process.stdin.close()  # it ends with its input
        try:
            self._process.wait(END_SECONDS if kind is None else 0)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._end()
            for path in held:
                path.unlink(missing_ok=True)

    def _end(self) -> None:
        """Kill what is left of its session: SGLang's own processes are in it."""
        for number in processes_of_session(self._process.pid):
            try:
                os.kill(number, 9)
            except ProcessLookupError:
                continue
        self._process.wait()
        self._said.close()
        self._folder.cleanup()

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(call) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise Unavailable(f"the engine has ended: {self.said[-2000:]}") from error
        return self._next(ANSWER_SECONDS)

    def _call_idle(self, call: Mapping[str, Any], done: str) -> None:
        """Repeat a call that a busy engine refuses. Raises Unavailable if it is refused for too long."""
        deadline = time.monotonic() + IDLE_SECONDS
        while not (found := self._call(call))[done]:
            if time.monotonic() > deadline:
                raise Unavailable(f"the engine is not idle after {IDLE_SECONDS:.0f} s: {found}")
            time.sleep(0.1)

    def _next(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise Unavailable(f"the engine did not answer in {seconds:.0f} s: {self.said[-2000:]}") from None
        if line is None:
            raise Unavailable(f"the engine has ended: {self.said[-2000:]}")
        found: dict[str, Any] = json.loads(line)
        return found

    def _listen(self, answers: IO[str]) -> None:
        for line in answers:
            self._answers.put(line)
        self._answers.put(None)


class SGLangProcess(EngineProcess):
    def __init__(
        self, settings: Mapping[str, Any], before: Sequence[str] = (), variables: Mapping[str, str] | None = None
    ) -> None:
        """`settings` as `sglang_engine.settings` reads them. `before` stands before the command."""
        super().__init__("examples.demo.sglang_engine", settings, before, {**environment(), **(variables or {})})

    def attach(self, *, attached: bool) -> None:
        """Attach its storage or detach it, as soon as it is idle. Raises Unavailable."""
        self._call_idle({"attach": attached}, "done")

    def change_weights(self, model: Path) -> None:
        """Load the weights of this model in place, as soon as it is idle. Raises Unavailable."""
        self._call_idle({"weights": str(model)}, "done")


def processes_of_session(session: int) -> list[int]:
    """The processes of this session that live now."""
    found = []
    for number in (int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()):
        try:
            if os.getsid(number) == session:
                found.append(number)
        except (ProcessLookupError, PermissionError):
            continue
    return found


def shared_memory_of_session(session: int) -> set[Path]:
    """Files in /dev/shm that processes of this session map and nobody removes: SGLang leaves those of its load figures,
    and a process that is killed its queues between ranks and its semaphores."""
    mapped: set[int] = set()  # by inode: who makes a semaphore maps it under a name that is gone
    for number in processes_of_session(session):
        with contextlib.suppress(OSError):  # it has ended
            lines = Path(f"/proc/{number}/maps").read_text().splitlines()
            mapped |= {int(line.split()[4]) for line in lines if f" {SHARED_MEMORY}/" in line}
    found: set[Path] = set()
    for path in (path for pattern in LEFT_BEHIND for path in SHARED_MEMORY.glob(pattern)):
        with contextlib.suppress(OSError):  # its owner removes it
            found |= {path} if path.stat().st_ino in mapped else set()
    return found
