"""The log of a process, written to a real pipe."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvservice.observe import log_writer
from kvservice.observe.log_writer import LINES_MAX, LogWriter
from kvservice.observe.logs import JsonFormatter

END = "the end"


@contextmanager
def written_to_pipe() -> Iterator[tuple[logging.Logger, int]]:
    """A logger that writes lines of JSON to a pipe, and the end of it that is read."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        handler = LogWriter(stream)
        handler.setFormatter(JsonFormatter())
        logger = logging.Logger("kvservice.test")
        logger.addHandler(handler)
        yield logger, reader
        handler.flush()
    os.close(reader)


def events(reader: int, last: str) -> list[dict[str, object]]:
    """What is read up to the event `last`."""
    text = b""
    while last.encode() not in text or not text.endswith(b"\n"):
        text += os.read(reader, 1 << 16)
    return [json.loads(line) for line in text.splitlines()]


def test_lines_that_nobody_reads_are_lost_and_counted() -> None:
    with written_to_pipe() as (logger, reader):
        count = 3 * LINES_MAX
        for number in range(count):
            logger.info("x" * 1000, extra={"number": number})
        found = events(reader, "log_lines_lost")
        lost = found.pop()
        numbers = [int(str(event["number"])) for event in found]
        assert numbers == sorted(set(numbers)) and numbers[:LINES_MAX] == list(range(LINES_MAX))
        assert (lost["level"], lost["lines"]) == ("warning", count - len(found))
        logger.info(END)
        assert [event["event"] for event in events(reader, END)] == [END]


def test_a_pipe_that_does_not_wait_loses_no_line() -> None:
    """Whoever shares it, or a terminal, may have set it so."""
    with written_to_pipe() as (logger, reader):
        handler = logger.handlers[0]
        assert isinstance(handler, LogWriter)
        os.set_blocking(handler._stream.fileno(), False)
        for number in range(LINES_MAX // 2):
            logger.info("x" * 1000, extra={"number": number})
        logger.info(END)
        found = events(reader, END)
        assert [event.get("number") for event in found[:-1]] == list(range(LINES_MAX // 2))


def test_lost_lines_are_counted_also_at_the_end() -> None:
    """`logging.shutdown` holds the handler's lock while it waits for the last lines."""
    with written_to_pipe() as (logger, reader):
        for _ in range(3 * LINES_MAX):
            logger.info("x" * 1000)
        handler = logger.handlers[0]
        handler.acquire()
        try:
            assert events(reader, "log_lines_lost")
        finally:
            handler.release()


def test_who_exits_at_once_has_written_what_was_logged() -> None:
    text = """
import logging
from kvservice.observe import logs
logs.configure()
for number in range(500):
    logging.getLogger("kvservice.test").info("line", extra={"number": number})
logs.exit_at_once(3)
"""
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 3
    assert ended.stderr.count("line number=") == 500, ended.stderr[-2000:]


def test_who_exits_at_once_waits_for_no_other_log() -> None:
    """A thread of an engine waits in its own handler, for a pipe that nobody reads."""
    text = """
import logging, os, threading
from kvservice.observe import logs
reader, writer = os.pipe()
engine, fills = logging.getLogger("engine"), threading.Event()
engine.addHandler(logging.StreamHandler(os.fdopen(writer, "w")))
def fill():
    fills.set()
    engine.error("x" * (1 << 20))
threading.Thread(target=fill, daemon=True).start()
fills.wait()
os.read(reader, 1)
logs.exit_at_once(3)
"""
    assert subprocess.run([sys.executable, "-c", text], timeout=60).returncode == 3


def test_who_has_no_stderr_does_not_wait_for_it() -> None:
    text = """
import logging, sys
from kvservice.observe import log_writer, logs
log_writer.FLUSH_SECONDS = 60.0
assert sys.stderr is None
logs.configure()
logging.getLogger("kvservice.test").info("line")
"""
    closed = ["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, text]
    assert subprocess.run(closed, timeout=30).returncode == 0


def test_the_last_lines_are_waited_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "FLUSH_SECONDS", 0.05)
    with written_to_pipe() as (logger, reader):
        logger.info("x" * 4000)
        logger.handlers[0].flush()
        assert len(os.read(reader, 1 << 16)) > 4000
        for _ in range(100):
            logger.info("x" * 4000)
        logger.handlers[0].flush()  # returns, although it is not read
        logger.info(END)
        events(reader, END)
