"""Runs a server on an event loop of its own thread inside an actor process.

The server then starts with the process, also when Ray restarts it and nobody calls a method, and it goes on when the
actor's own threads wait for a Ray that is away.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from kvservice.errors import KVServiceError, Unavailable

log = logging.getLogger("kvservice.actors")

T = TypeVar("T")
START_SECONDS = 120.0
CALL_SECONDS = 30.0


class HostedServer:
    """`start` is awaited on the loop and may be tried again after a failure."""

    def __init__(self, start: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._start = start
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._started = False
        threading.Thread(target=self._loop.run_forever, name="kvservice-server", daemon=True).start()
        try:
            self.ensure_started()
        except KVServiceError as error:
            log.error(
                "start failed: %s", error.message
            )  # an exception in a constructor would make Ray give the actor up

    def ensure_started(self) -> None:
        """Blocks until the server runs. Raises the KVServiceError that keeps it from starting."""
        with self._lock:
            if not self._started:
                self.call(self._start(), START_SECONDS)
                self._started = True

    def call(self, work: Coroutine[Any, Any, T], timeout: float = CALL_SECONDS) -> T:
        """Run a coroutine on the server's loop and wait for it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError as error:  # not the built-in one before Python 3.11
            future.cancel()
            raise Unavailable(f"the server did not answer within {timeout} s") from error

    def close(self, work: Coroutine[Any, Any, object]) -> None:
        self.call(work)
        self._loop.call_soon_threadsafe(self._loop.stop)
