"""Runs a server on an event loop in a thread of its own, inside an actor process.

The server starts with the process, also when Ray restarts it and nobody calls a method. It goes on while the actor's
own threads wait for a Ray control plane that is away.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from kvservice.descriptors import raise_file_limit
from kvservice.errors import KVServiceError, Unavailable
from kvservice.garbage import keep_tables
from kvservice.observe import logs
from kvservice.observe.endpoint import on_loop

log = logging.getLogger("kvservice.actors")

T = TypeVar("T")
# For a server to start: a large pool is mapped and an earlier boot's blocks are verified. Then Unavailable is raised.
START_SECONDS = 120.0
# For one call on the server's loop, which takes milliseconds if it is well. Then Unavailable is raised.
CALL_SECONDS = 30.0


class HostedServer:
    """A server on its own loop. `start` is awaited on that loop, and is tried again after a failure."""

    def __init__(self, start: Callable[[], Coroutine[Any, Any, T]]) -> None:
        logs.configure()  # to stderr, which Ray writes into a file of this process
        raise_file_limit()
        self._start = start
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._started = False
        threading.Thread(target=self._loop.run_forever, name="kvservice-server", daemon=True).start()
        try:
            self.ensure_started()
        except KVServiceError as error:
            # An exception in the constructor would make Ray give the actor up.
            log.error("start failed: %s", error.message)

    def ensure_started(self) -> None:
        """Block until the server runs. Raises the KVServiceError that keeps it from starting."""
        with self._lock:
            if not self._started:
                self.call(self._start(), START_SECONDS)
                keep_tables()  # the process is the actor's alone
                self._started = True

    def call(self, work: Coroutine[Any, Any, T], timeout: float = CALL_SECONDS) -> T:
        """Run a coroutine on the server's loop and block until it ends. Raises Unavailable after `timeout` seconds."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError as error:  # it is another class than the built-in one before Python 3.11
            future.cancel()
            raise Unavailable(f"the server did not answer within {timeout} s") from error

    def reader(self, ask: Callable[[], T]) -> Callable[[], T | None]:
        """What asks on the server's loop, from any thread: see observe.endpoint.on_loop."""
        return on_loop(self._loop, ask)

    def close(self, work: Coroutine[Any, Any, object]) -> None:
        self.call(work)
        self._loop.call_soon_threadsafe(self._loop.stop)
