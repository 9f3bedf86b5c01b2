"""Logs as an event name with fields: `log.info("shard_started", extra={"node": …})`.

This module turns such a record into a line of text or of JSON. It also decides whose logger writes the line: ours in
our own processes, the engine's inside an engine. Any thread may log.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import json
import logging
import os
import sys
import threading
import time
from types import TracebackType
from typing import NoReturn

from kvservice.observe import tracing
from kvservice.observe.log_writer import FLUSH_SECONDS, LogWriter
from kvservice.units import printable

# Longer lines, and longer JSON fields, are cut here: a client may have chosen the text, and must not fill the disk with
# it.
TEXT_CHARS_MAX = 8192
_WRITTEN_LATER = frozenset({"message", "asctime", "taskName"})
_request: contextvars.ContextVar[str] = contextvars.ContextVar("kvservice_request", default="")


class about:  # noqa: N801  a context manager is named like a function
    """`with about(request_id):` names the request that is worked for. The records of this task, and of the tasks that
    it starts meanwhile, have it as a field."""

    __slots__ = ("_before", "_request_id")

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def __enter__(self) -> None:
        self._before = _request.set(self._request_id)

    def __exit__(self, *_: object) -> None:
        # A coroutine that is closed from outside its task ends in another context, in which nothing was set.
        with contextlib.suppress(ValueError):
            _request.reset(self._before)


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """The fields that the caller gave as `extra`, and those of the request that the caller works for."""
    # the attributes of every record, also those that an engine's record factory adds
    own = vars(logging.makeLogRecord({})).keys() | _WRITTEN_LATER
    found = {name: value for name, value in vars(record).items() if name not in own}
    for name, value in (("request_id", _request.get()), ("trace_id", tracing.trace_id())):
        if value:
            found.setdefault(name, value)
    return found


def _cut(value: object) -> object:
    return value[:TEXT_CHARS_MAX] if isinstance(value, str) else value


def _on_one_line(record: logging.LogRecord) -> str:
    """The message and its fields on one line. Names and ids in it may come from a client, so control characters are
    escaped: they could otherwise forge a second log line."""
    pairs = [f"{name}={value}" for name, value in fields_of(record).items()]
    return printable(" ".join([record.getMessage(), *pairs])[:TEXT_CHARS_MAX])


class TextFormatter(logging.Formatter):
    """Writes text: `12:00:00.123 INFO kvservice.shard shard_started node=n0 address=127.0.0.1:7000`."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        head = f"{clock}.{int(record.msecs):03d} {record.levelname} {record.name}"
        line = f"{head} {_on_one_line(record)}"
        return line if record.exc_info is None else f"{line}\n{self.formatException(record.exc_info)}"


class JsonFormatter(logging.Formatter):
    """Writes one JSON object a line: time (seconds since 1970), level, logger, event, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage()[:TEXT_CHARS_MAX],
        }
        line.update({name: _cut(value) for name, value in fields_of(record).items() if name not in line})
        if record.exc_info is not None:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class EngineHandler(logging.Handler):
    """Passes our records to the logger of the engine that we run in, so that they get its format, level and stream.
    Without this handler Python would drop our records below WARNING and print the others without time and level."""

    def __init__(self, engine: logging.Logger) -> None:
        super().__init__()
        self._engine = engine

    def emit(self, record: logging.LogRecord) -> None:
        passed = copy.copy(record)
        passed.msg, passed.args = f"kvservice: {_on_one_line(record)}", None
        self._engine.handle(passed)


class UnheardHandler(logging.Handler):
    """Prints our records while the program that we run in has configured no logging. Python would print the name of the
    event and leave its fields out, the reason among them."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            print(self.format(record), file=sys.stderr)


def exit_at_once(status: int) -> NoReturn:
    """End the process with what it has logged, but without waiting for its threads. Blocks for a second at most: the
    handlers of an engine may wait for ever for a log that nobody reads."""
    try:
        last_lines = threading.Thread(target=logging.shutdown, daemon=True)
        last_lines.start()
        last_lines.join(FLUSH_SECONDS)
    finally:
        os._exit(status)


def configure(*, json_lines: bool = False, level: int = logging.INFO) -> None:
    """Set up logging in a process of our own. A second call replaces the first. Inside an engine use
    `speak_through`."""
    handler = logging.NullHandler() if sys.stderr is None else LogWriter(sys.stderr)  # None: it was closed
    handler.setFormatter(JsonFormatter() if json_lines else TextFormatter())
    logger = logging.getLogger("kvservice")
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False
    if json_lines:  # warnings become log records too, so that every line is JSON
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        logging.captureWarnings(True)
        root = logging.getLogger()
        root.handlers = [each for each in root.handlers if not isinstance(each.formatter, JsonFormatter)] + [handler]
        sys.excepthook = _log_uncaught


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("kvservice").critical("uncaught", exc_info=(kind, error, trace))


def speak_through(name: str) -> None:
    """Inside an engine: send our records to the engine's logger of this name. Does nothing if somebody has configured
    our logger or the root logger, because our records are then written already."""
    ours, engine = logging.getLogger("kvservice"), logging.getLogger(name)
    if not ours.handlers and not logging.getLogger().handlers:
        ours.addHandler(EngineHandler(engine))
        ours.setLevel(engine.getEffectiveLevel())
        ours.propagate = False


def speak_up() -> None:
    """Inside a program: print warnings with their fields, unless somebody has configured our logger, or configures the
    root logger at any time."""
    ours = logging.getLogger("kvservice")
    if not ours.handlers:
        handler = UnheardHandler(logging.WARNING)
        handler.setFormatter(TextFormatter())
        ours.addHandler(handler)


def take_over(name: str) -> None:
    """Send the records of another library's logger `name` to where ours go."""
    theirs = logging.getLogger(name)
    theirs.handlers = list(logging.getLogger("kvservice").handlers)
    theirs.propagate = not theirs.handlers


def say(text: str) -> None:
    """Print one line on stdout for the person who started this process. Where logs are JSON, log it instead."""
    ours = logging.getLogger("kvservice")
    if _writes_json(ours):
        ours.info(text)
    else:
        print(text, flush=True)


def say_error(text: str) -> bool:
    """Log why the process ends, if logs are JSON. Returns False if they are not; the caller then prints for people."""
    ours = logging.getLogger("kvservice")
    if not _writes_json(ours):
        return False
    ours.error(text)
    return True


def _writes_json(logger: logging.Logger) -> bool:
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logger.handlers)
