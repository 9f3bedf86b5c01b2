"""Logs as event name + fields: `log.info("shard_started", extra={"node": …})`.

Owns how such a record becomes a line of text or of JSON. Any thread may log.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TextIO

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """What the caller gave as `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class TextFormatter(logging.Formatter):
    """12:00:00.123 INFO kvservice.shard shard_started node=n0 address=127.0.0.1:7000"""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        head = f"{clock}.{int(record.msecs):03d} {record.levelname} {record.name} {record.getMessage()}"
        pairs = [f"{name}={value}" for name, value in fields_of(record).items()]
        line = " ".join([head, *pairs])
        return line if record.exc_info is None else f"{line}\n{self.formatException(record.exc_info)}"


class JsonFormatter(logging.Formatter):
    """One object a line: time (seconds since 1970), level, logger, event, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line.update({name: value for name, value in fields_of(record).items() if name not in line})
        if record.exc_info is not None:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(*, json_lines: bool = False, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """For processes of our own. Engines keep their logging: nothing there calls this. Repeating it replaces."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if json_lines else TextFormatter())
    logger = logging.getLogger("kvservice")
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False
