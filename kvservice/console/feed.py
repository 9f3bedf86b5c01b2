"""One gatherer, many listeners: asks the service at intervals and keeps the latest page for whoever listens.

A listener that is slow misses pages in between and holds nobody up. However many listen, the service is asked once.
Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator

from kvservice.aio import is_set_within
from kvservice.console.source import Json, Source
from kvservice.console.view import View
from kvservice.errors import Exhausted, KVServiceError

log = logging.getLogger("kvservice.console")

LISTENERS_MAX = 32  # pages that are open at once; each has a connection. A further one is told to wait.
POINTS_MAX = 900  # of the charts: a quarter of an hour at one a second. The oldest is dropped.
IDLE_SECONDS = 10.0  # between two readings while nobody listens, so that the charts of the next page begin earlier
SILENT_SECONDS = 15.0  # then a listener gets an empty line, which shows a dead connection to both ends


class PageFeed:
    """Call `run` in a task and cancel it to stop. `listen` gives the events of one page."""

    def __init__(self, source: Source, interval_seconds: float) -> None:
        self._source = source
        self._interval = interval_seconds
        self._view = View()
        self._points: deque[Json] = deque(maxlen=POINTS_MAX)
        self._page: Json | None = None
        self._failure = ""
        self._number = 0  # of the latest reading
        self._latest = b""  # its event, for those who have the one before
        self._news = asyncio.Event()  # set and replaced at each reading
        self._wanted = asyncio.Event()  # a listener came
        self.listeners = 0

    async def run(self) -> None:
        while True:
            started = time.monotonic()
            await self.read()
            pause = self._interval if self.listeners else IDLE_SECONDS
            self._wanted.clear()
            while (left := started + pause - time.monotonic()) > 0:
                if await is_set_within(left, self._wanted):
                    pause = self._interval
                    self._wanted.clear()

    async def read(self) -> None:
        """Ask the service once, and tell everybody. Never raises: a failure is told instead of a page."""
        try:
            page, point = self._view.take(await self._source.overview(), time.monotonic())
            self._page, self._failure = page, ""
            self._points.append(point)
            event = {"page": page, "points": [point]}
        except KVServiceError as error:
            self._failure = error.message
            event = {"failure": self._failure}
        except Exception:  # a page that never changed again would look like a service that does nothing
            log.exception("console_reading_failed")
            self._failure = "the console could not read the service; see its log"
            event = {"failure": self._failure}
        self._number += 1
        self._latest = _event("tick", event)
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def listen(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events: `all` with the page and all points first, then a `tick` for each reading.

        Raises Exhausted when enough pages are open.
        """
        if self.listeners >= LISTENERS_MAX:
            raise Exhausted(f"{LISTENERS_MAX} pages are open already: close one, and reload this one")
        self.listeners += 1
        self._wanted.set()
        try:
            seen = -1
            while True:
                news = self._news
                if seen == self._number:
                    if not await is_set_within(SILENT_SECONDS, news):
                        yield b":\n\n"
                    continue
                follows = seen == self._number - 1 and seen > 0
                seen = self._number
                yield self._latest if follows else self._all()
        finally:
            self.listeners -= 1

    def _all(self) -> bytes:
        return _event("all", {"page": self._page, "points": list(self._points), "failure": self._failure})


def _event(name: str, data: Json) -> bytes:
    # json escapes line ends, which would end the event
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'), allow_nan=False)}\n\n".encode()
