"""Waits until something becomes true, and says what it waited for if that does not happen.

Every wait of the tests and the benchmarks uses this module, so that one environment variable makes all of them longer
on a slow machine: KVSERVICE_TEST_PATIENCE=3 gives each wait three times its seconds.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar, overload

Read = TypeVar("Read")

PATIENCE_VARIABLE = "KVSERVICE_TEST_PATIENCE"
DEADLINE_SECONDS = 120.0  # of a wait that names none: what Ray and engines may take on a busy machine of two cores
PAUSE_SECONDS_MIN = 0.001  # after the first look: most waits end within milliseconds
PAUSE_SECONDS_MAX = 0.05  # between the looks of a long wait: each look takes processor time from what is awaited


class NotInTime(AssertionError):
    """What a test waited for did not become true before its deadline."""


def patience() -> float:
    """The factor that KVSERVICE_TEST_PATIENCE puts on every deadline; 1 if it is not set."""
    return float(os.environ.get(PATIENCE_VARIABLE, "") or 1.0)


def eventually(
    read: Callable[[], Read | None],
    what: str,
    seconds: float = DEADLINE_SECONDS,
    *,
    detail: Callable[[], object] | None = None,
) -> Read:
    """Calls `read` again and again until its result is true. Returns that result. Blocks the thread meanwhile.

    `what` names what is awaited; `detail` is called when the wait has failed, for a log or counters to show.
    `read` may raise to end the wait at once, for example because the process that is awaited has died.

    Raises NotInTime after `seconds`, times the patience. `read` has its last look after the deadline, so that a wait
    fails only when the condition is false now.
    """
    for pause in _pauses(what, seconds, detail):
        found = read()
        if found:
            return found
        time.sleep(pause)
    raise AssertionError("the pauses end by raising")


@overload
async def eventually_async(
    read: Callable[[], Awaitable[Read | None]],
    what: str,
    seconds: float = DEADLINE_SECONDS,
    *,
    detail: Callable[[], object] | None = None,
) -> Read: ...


@overload
async def eventually_async(
    read: Callable[[], Read | None],
    what: str,
    seconds: float = DEADLINE_SECONDS,
    *,
    detail: Callable[[], object] | None = None,
) -> Read: ...


async def eventually_async(
    read: Callable[[], Any],
    what: str,
    seconds: float = DEADLINE_SECONDS,
    *,
    detail: Callable[[], object] | None = None,
) -> Any:
    """Like `eventually`, for a coroutine: other tasks run between the looks. `read` may be a coroutine function."""
    for pause in _pauses(what, seconds, detail):
        found = read()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        await asyncio.sleep(pause)
    raise AssertionError("the pauses end by raising")


def _pauses(what: str, seconds: float, detail: Callable[[], object] | None) -> Iterator[float]:
    """The pause after each look, a little longer each time. Raises NotInTime when the time is over."""
    begun = time.monotonic()
    allowed = seconds * patience()
    pause, is_over = PAUSE_SECONDS_MIN, False
    while not is_over:
        waited = time.monotonic() - begun
        is_over = waited >= allowed  # read before the look, so that the last look comes after the deadline
        yield pause
        pause = min(1.5 * pause, PAUSE_SECONDS_MAX)
    shown = "" if detail is None else f"\n{detail()}"
    raise NotInTime(f"not within {allowed:g} s: {what}{shown}")
