"""The signals that end a process of the service in good order, so that it leaves no files.

No heavy import in here: a command listens for its end before it loads what it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

T = TypeVar("T")
R = TypeVar("R")


def end_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM, Ctrl-C and a closed terminal. Whoever starts the process with `nohup` wants the last one ignored."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGTERM, signal.SIGINT, *hangup)


def mapped(pool: ProcessPoolExecutor, work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """As `pool.map` of a new pool. Ctrl-C ends its processes at once. They do not hear of it themselves: each
    would write a traceback."""
    from multiprocessing import active_children

    others = set(active_children())
    try:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # what is started now inherits it
        try:
            results = pool.map(work, items)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)  # a Ctrl-C from in between comes now
        yield from results
    except KeyboardInterrupt:
        for process in set(active_children()) - others:
            process.terminate()
        raise


class FirstSignal:
    """Waits for the first of these signals. A further SIGTERM or Ctrl-C then ends the process at once.

    Make it on the loop that waits, in the main thread.
    """

    def __init__(self, *numbers: signal.Signals) -> None:
        self._came = asyncio.Event()
        for number in numbers:
            asyncio.get_running_loop().add_signal_handler(number, self._came.set)

    async def wait(self) -> None:
        await self._came.wait()
        for number in (signal.SIGTERM, signal.SIGINT):  # not SIGHUP: a terminal that closes causes two
            asyncio.get_running_loop().remove_signal_handler(number)  # back to the default, which ends the process


class EndSignals:
    """What these signals have asked for so far: the first one to end, a further one to hurry.

    Make it in the main thread, on the loop that waits for it.
    """

    def __init__(self) -> None:
        self.to_end = asyncio.Event()
        self.to_hurry = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        # Not the loop's own handlers: they end with the loop, and a later signal would decide the exit status.
        for number in end_signals():
            signal.signal(number, self._tell)

    def _tell(self, number: int, _: object) -> None:
        event = self.to_hurry if self.to_end.is_set() else self.to_end
        if event is self.to_hurry and number == signal.SIGHUP:
            return  # the shell and the kernel both send one when a terminal closes, and nobody is in a hurry
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(event.set)
