"""Logs broken connections and malformed requests of clients: a line now and then, without a traceback.

Clients decide how often these happen, so they must not decide how much is logged. Runs on the proxy's event loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

# Between two lines. Events in between are counted into the next line: at most 8,640 lines a day, whatever clients do.
LINE_SECONDS = 10.0
BY_CLIENTS = (ConnectionError, HttpProcessingError, web.RequestPayloadError)


class ClientLog(logging.LoggerAdapter):  # type: ignore[type-arg]  # not generic before Python 3.11
    """The logger of an HTTP server. Records that are not caused by a client pass unchanged, with their traceback."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logger, {})
        self._clock = clock
        self._times = 0  # events since the last line
        self._next_line_at = clock()

    def log(self, level: int, msg: object, *args: object, exc_info: Any = None, **rest: Any) -> None:
        if not isinstance(exc_info, BY_CLIENTS):
            super().log(level, msg, *args, exc_info=exc_info, **rest)
            return
        self._times += 1
        now = self._clock()
        if now >= self._next_line_at:
            self._next_line_at = now + LINE_SECONDS
            detail = f"{type(exc_info).__name__}: {exc_info}"[:200]
            self.logger.warning("client_connection_failed", extra={"detail": detail, "times": self._times})
            self._times = 0
