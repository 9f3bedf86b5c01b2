"""Waiting with a deadline and ending tasks, without losing a cancellation.

`asyncio.wait_for` of Python 3.10 and 3.11 loses a cancellation that arrives together with the result it waits for. The
task then runs on, and whoever cancelled it waits for ever. So kvservice uses these functions instead. They run on the
calling task's event loop, and none of them blocks it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")

# A task that has not ended this long after its cancellation is cancelled again, because it may have lost the first one.
# Most tasks end within milliseconds. A second leaves others time to clean up, and delays the caller little.
CANCEL_AGAIN_SECONDS = 1.0


async def within(seconds: float | None, work: Awaitable[T]) -> T:
    """Await `work` for at most `seconds`, None = as long as it takes, and return its result.

    `work` runs as a task of its own, which has ended when this returns or raises.

    Raises:
        asyncio.TimeoutError: after `seconds`, or when somebody else cancelled the work.
        asyncio.CancelledError: whenever the caller was cancelled.
        Exception: whatever `work` raises.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=seconds)
    except asyncio.CancelledError:
        await end_tasks([task])
        raise
    if not task.done():
        await end_tasks([task])
    if task.cancelled():
        raise asyncio.TimeoutError
    return task.result()


async def is_set_within(seconds: float, event: asyncio.Event) -> bool:
    """Wait for the event for at most `seconds`. Returns whether it is set."""
    if event.is_set():
        return True
    try:
        await within(seconds, event.wait())
    except asyncio.TimeoutError:
        return False
    return True


async def in_thread(work: Callable[[], T], threads: Executor | None = None) -> T:
    """Run `work` on one of `threads`, or on the loop's own threads, and return its result.

    When the threads take no more work, it runs here and blocks the loop. That happens only once the interpreter has
    begun to shut down, when the loop has nothing else left to do.
    """
    try:
        future = asyncio.get_running_loop().run_in_executor(threads, work)
    except RuntimeError:
        return work()
    return await future


async def in_thread_to_its_end(work: Callable[[], T]) -> T:
    """`in_thread`, but whoever is cancelled meanwhile hears of it only when the thread has done its work."""
    doing = asyncio.ensure_future(in_thread(work))
    if await ended(doing):
        await end_tasks([doing])  # it has ended; its error, if it has one, is dropped
        raise asyncio.CancelledError
    return doing.result()


async def ended(doing: asyncio.Future[Any]) -> bool:
    """Wait for its end, however often the caller is cancelled meanwhile. Returns whether he was."""
    cancelled = False
    while not doing.done():
        try:
            await asyncio.wait([doing])
        except asyncio.CancelledError:
            cancelled = True
    return cancelled


async def to_its_end(work: Coroutine[Any, Any, T], under_way: set[asyncio.Task[Any]]) -> T:
    """Await `work`, which goes on when the caller is cancelled. It is in `under_way` until it has ended."""
    return await asyncio.shield(begun(work, under_way))


def begun(work: Coroutine[Any, Any, T], under_way: set[asyncio.Task[Any]]) -> asyncio.Task[T]:
    """A task that does `work`. It is in `under_way` until it has ended."""
    task = asyncio.create_task(work)
    under_way.add(task)
    task.add_done_callback(under_way.discard)
    return task


async def ask_each(ask: Callable[[A], Awaitable[T]], items: Iterable[A], at_once: int) -> list[T]:
    """Await `ask(item)` for each item, so many at a time. Returns the answers in the order of the items.

    Raises what one of them raises. None of them is under way any more then.
    """
    permits = asyncio.Semaphore(at_once)

    async def one(item: A) -> T:
        async with permits:
            return await ask(item)

    asked = [asyncio.ensure_future(one(item)) for item in items]
    try:
        return await asyncio.gather(*asked)
    finally:
        await end_tasks(asked)


class DaemonThreads(Executor):
    """One thread for each piece of work that may hang for ever, for `in_thread`.

    Neither the loop nor the interpreter waits for it at the end, unlike for threads of a ThreadPoolExecutor.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = work(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001  thread boundary: the caller's
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=run, name=self._name, daemon=True).start()
        return future


async def end_tasks(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel the tasks and wait until all of them have ended. Their results and errors are dropped.

    This waits for ever for a task that refuses to end, unless the caller is cancelled.
    """
    ended = list(tasks)
    while pending := [task for task in ended if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=CANCEL_AGAIN_SECONDS)
    for task in ended:
        if not task.cancelled():
            task.exception()  # without this call asyncio logs that the exception was never retrieved
