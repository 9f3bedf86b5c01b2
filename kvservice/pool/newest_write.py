"""Writes the newest value of something on threads. Used on one event loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from kvservice.aio import DaemonThreads, in_thread, within

T = TypeVar("T")


class NewestWrite(Generic[T]):
    """Writes one after the other, each the newest value: a thread that hung may go on much later, and must not write
    what was there before."""

    def __init__(self, write: Callable[[T], None], thread_name: str) -> None:
        """`write` blocks, for as long as a disk takes."""
        self._write = write
        self._thread_name = thread_name
        self._newest: T
        self._is_writing = threading.Lock()

    async def write(self, value: T, seconds: float) -> None:
        """Raises what `write` raises, and asyncio.TimeoutError after so long; the thread goes on then."""
        self._newest = value
        await within(seconds, in_thread(self._write_newest, DaemonThreads(self._thread_name)))

    def _write_newest(self) -> None:
        with self._is_writing:
            self._write(self._newest)
