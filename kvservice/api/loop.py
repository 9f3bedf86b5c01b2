"""A thread with an event loop, on which everything of one pool runs: leases are renewed while the program computes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from kvservice.errors import InvalidRequest

T = TypeVar("T")
END_SECONDS = 10.0  # for work that was given up to let go of files and memory


class LoopThread:
    """Starts at once. Any thread may call, but in the process that made it only."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kvservice-pool", daemon=True)
        self._thread.start()
        self._stopped = False

    @property
    def is_usable(self) -> bool:
        """Whether it runs, in this process."""
        return not self._stopped and os.getpid() == self._pid

    def submit(
        self, work: Coroutine[Any, Any, T], ended: threading.Event | None = None
    ) -> concurrent.futures.Future[T]:
        """Run this on the loop. Cancelling the future cancels the work, and `ended` is set when that has ended. Raises
        InvalidRequest after `stop`, and in a child of a fork."""
        if not self.is_usable:
            work.close()
            if os.getpid() != self._pid:
                raise InvalidRequest(f"this pool belongs to process {self._pid}: connect() again after a fork")
            raise InvalidRequest("this pool is closed: connect() again")
        return asyncio.run_coroutine_threadsafe(work if ended is None else _noting(work, ended), self._loop)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run this on the loop and wait for its result. A KeyboardInterrupt cancels it, and waits for its end."""
        ended = threading.Event()
        future = self.submit(work, ended)
        try:
            return future.result()
        except BaseException:
            if future.cancel():
                ended.wait(END_SECONDS)
            raise

    async def wait_async(self, work: Coroutine[Any, Any, T]) -> T:
        """The same for a coroutine of another loop, which runs on meanwhile."""
        ended = threading.Event()
        try:
            return await asyncio.wrap_future(self.submit(work, ended))
        except asyncio.CancelledError:
            await asyncio.to_thread(ended.wait, END_SECONDS)
            raise

    def stop(self) -> None:
        """End the thread. Idempotent. Blocks until it has ended."""
        if self.is_usable:
            self._stopped = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


async def _noting(work: Coroutine[Any, Any, T], ended: threading.Event) -> T:
    try:
        return await work
    finally:
        ended.set()
