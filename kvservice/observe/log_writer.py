"""Writes the log of a process on a thread of its own, so that a log that nobody reads stops nothing else.

A pipe whose reader hangs, a terminal after Ctrl-S and a disk that hangs take no more bytes, and whoever writes to one
waits for ever. An event loop that logs would never serve again, nor hear a signal.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import queue
import select
import threading
from typing import TextIO

LINES_MAX = 1024  # that wait to be written; further ones are lost, and counted in the log. A line has at most 8 KiB
FLUSH_SECONDS = 1.0  # for the last lines of a process


class LogWriter(logging.Handler):
    """Writes to `stream`. Any thread may log, and none of them waits."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: queue.Queue[str] = queue.Queue(LINES_MAX)
        self._lost = 0  # ever; the writing thread has told of `_told`
        self._told = 0
        threading.Thread(target=self._run, name="kvservice-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._lost += 1
        except Exception:  # noqa: BLE001  as in every handler: a record that cannot be formatted stops nobody
            self.handleError(record)

    def flush(self) -> None:
        """Wait until everything is written, and FLUSH_SECONDS at most. `logging.shutdown` calls it at the end."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, FLUSH_SECONDS)

    def _run(self) -> None:
        while True:
            line = self._lines.get()
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, or the stream is closed
                self._write(line)
                if self._lost > self._told and self._lines.empty():
                    self._write(self.format(self._lost_lines()))
            self._lines.task_done()

    def _lost_lines(self) -> logging.LogRecord:
        count = self._lost - self._told  # without the handler's lock: `logging.shutdown` holds it while this writes
        self._told += count
        text = "log_lines_lost: they were not read in time"
        fields = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING", "msg": text, "lines": count}
        return logging.makeLogRecord(fields)

    def _write(self, line: str) -> None:
        """Past Python's buffer: the interpreter aborts at its end if a thread is in there."""
        try:
            descriptor = self._stream.fileno()
        except io.UnsupportedOperation:  # a stream in memory
            self._stream.write(f"{line}\n")
            return
        rest = f"{line}\n".encode(errors="backslashreplace")
        writable = select.poll()
        writable.register(descriptor, select.POLLOUT)
        while rest:
            writable.poll()  # whoever shares the pipe or terminal may have made it one that does not wait
            with contextlib.suppress(BlockingIOError):
                rest = rest[os.write(descriptor, rest) :]
