"""Waits with a deadline, and ends tasks, without ever losing a cancellation.

`asyncio.wait_for` of Python 3.10 and 3.11 swallows a cancellation that arrives together with what it waits for. The
task then runs on, and whoever cancelled it once waits for ever. So nothing here calls it: these functions take its
place, on the event loop that runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")

CANCEL_AGAIN_SECONDS = 1.0  # a task that has not ended by then is cancelled once more


async def within(seconds: float, work: Awaitable[T]) -> T:
    """The result of `work`, which runs as a task of its own and has ended when this returns or raises.

    Raises asyncio.TimeoutError after `seconds` or when somebody else cancelled the work, CancelledError whenever the
    caller was cancelled, and what `work` raises.
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
    """Whether the event is set, waiting for it for so long at most."""
    if event.is_set():
        return True
    try:
        await within(seconds, event.wait())
    except asyncio.TimeoutError:
        return False
    return True


async def in_thread(work: Callable[[], T], threads: Executor | None = None) -> T:
    """The result of `work`, computed on one of `threads`, or of the loop's own.

    Where no thread takes work any more, it is done here and blocks the loop. That is so once the interpreter has begun
    to end: then the loop has nothing left to do but end as well.
    """
    try:
        future = asyncio.get_running_loop().run_in_executor(threads, work)
    except RuntimeError:
        return work()
    return await future


async def end_tasks(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks until all of them have ended. What they return or raise is of no interest any more.

    Cancel the caller to leave behind a task that refuses to end.
    """
    ended = list(tasks)
    while pending := [task for task in ended if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=CANCEL_AGAIN_SECONDS)
    for task in ended:
        if not task.cancelled():
            task.exception()  # otherwise asyncio logs that nobody asked for it
