"""A thread with an event loop, on which everything of one pool runs: leases are renewed while the program computes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from kvservice.aio import end_tasks, ended
from kvservice.errors import InvalidRequest

T = TypeVar("T")
CLOSED = "this pool is closed: connect() again"
END_SECONDS = 10.0  # for work that was given up to let go of files and memory
LEFT_SECONDS = 0.5  # for calls that the end of the thread finds under way; then they are told that the pool is closed


class GivenWork:
    """Work for a caller on another thread, who may be interrupted at any moment: also before he knows its future."""

    def __init__(self) -> None:
        self.ended = concurrent.futures.Future[None]()
        self._task: asyncio.Task[Any] | None = None
        self._is_given_up = False

    # -- on the loop ----

    def begin(self) -> None:
        """Raises CancelledError when the caller has given up."""
        self._task = asyncio.current_task()
        if self._is_given_up:
            raise asyncio.CancelledError

    def end(self) -> None:
        self._task = None  # its result would live as long as the error of a caller who gave up
        if not self.ended.done():
            self.ended.set_result(None)

    def give_up(self) -> None:
        """Cancel the work. It may not have begun, or not have been submitted: then it never does."""
        self._is_given_up = True
        if self._task is not None:
            self._task.cancel()
        else:
            asyncio.get_running_loop().call_soon(self._end_unbegun)  # behind its first step, if there is one

    def _end_unbegun(self) -> None:
        if self._task is None:
            self.end()


class LoopThread:
    """Starts at once. Any thread may call, but in the process that made it only."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._stopped = False
        self._is_ending = False  # of the loop's thread
        self._gives_up = False  # what is under way then ends by the thread, not by its caller
        # Nothing is submitted once it is stopped: nobody would run it. The handler of a signal may stop it amid a call
        # of its thread.
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="kvservice-pool", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # a KeyboardInterrupt may come when it runs already
            self._loop.call_soon_threadsafe(self._begin_end)
            raise

    @property
    def is_current(self) -> bool:
        """Whether its own thread asks: the garbage collector may run a program's `__del__` on any thread."""
        return threading.get_ident() == self._thread.ident

    @property
    def is_usable(self) -> bool:
        """Whether it runs, in this process."""
        return not self._stopped and os.getpid() == self._pid

    def submit(self, work: Coroutine[Any, Any, T], given: GivenWork | None = None) -> concurrent.futures.Future[T]:
        """Run this on the loop. Cancelling the future cancels the work, and `given` says when that has ended. Raises
        InvalidRequest after `stop`, and in a child of a fork; work that `stop` finds under way ends with it too."""
        if os.getpid() != self._pid:
            work.close()
            raise InvalidRequest(f"this pool belongs to process {self._pid}: connect() again after a fork")
        doing = self._do(work, given)
        with self._lock:
            if not self._stopped:
                with contextlib.suppress(RuntimeError):  # a handler has stopped it just now, so the loop is closed
                    future = asyncio.run_coroutine_threadsafe(doing, self._loop)
                    if future.done() or not self._loop.is_closed():
                        return future
        doing.close()
        work.close()
        raise InvalidRequest(CLOSED)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run this on the loop and wait for its result. A KeyboardInterrupt cancels it, and waits for its end. Raises
        InvalidRequest on its own thread, which would wait for itself."""
        if self.is_current:
            work.close()
            raise InvalidRequest("this is the pool's own thread, on which nothing may wait for it: call on another one")
        given = GivenWork()
        try:
            return self.submit(work, given).result()
        except BaseException:
            if self.is_usable and not given.ended.done():
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(given.give_up)
                    concurrent.futures.wait([given.ended], END_SECONDS)
            raise

    def wait_for_end(self, work: Coroutine[Any, Any, None]) -> None:
        """`wait` for what lets go of something: nothing is left to do where the thread has ended. On its own thread
        it is begun only."""
        with contextlib.suppress(InvalidRequest):
            self.submit(work) if self.is_current else self.wait(work)

    async def wait_async(self, work: Coroutine[Any, Any, T]) -> T:
        """The same for a coroutine of another loop, which runs on meanwhile."""
        given = GivenWork()
        try:
            return await asyncio.wrap_future(self.submit(work, given))
        except asyncio.CancelledError:
            await ended(asyncio.ensure_future(asyncio.wait([asyncio.wrap_future(given.ended)], timeout=END_SECONDS)))
            raise

    def stop(self) -> None:
        """End the thread, and what it is doing. Idempotent. Blocks until it has ended, but on itself."""
        if os.getpid() != self._pid:
            return
        with self._lock, contextlib.suppress(RuntimeError):  # the loop is closed
            self._stopped = True
            self._loop.call_soon_threadsafe(self._begin_end)
        if not self.is_current:
            self._thread.join()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._end())
        self._loop.close()

    def _begin_end(self) -> None:
        if not self._is_ending:
            self._is_ending = True
            self._loop.stop()

    async def _end(self) -> None:
        await self._loop.shutdown_default_executor()
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            # Who waited for a thread has its result now, and may have to let go of it.
            _, left = await asyncio.wait(others, timeout=LEFT_SECONDS)
            self._gives_up = True
            await end_tasks(left)

    async def _do(self, work: Coroutine[Any, Any, T], given: GivenWork | None) -> T:
        try:
            if given is not None:
                given.begin()
            return await work
        except asyncio.CancelledError:
            if self._gives_up:
                raise InvalidRequest(CLOSED) from None
            raise
        finally:
            work.close()
            if given is not None:
                given.end()
