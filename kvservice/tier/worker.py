"""The threads of one tier, and the order in which they do its work.

What an engine waits for comes first, then other reads, then erasing, which makes room, then writing. Inside a class the
oldest comes first. The order is LMCache's (its local disk backend: prefetch, delete, put).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import IntEnum

log = logging.getLogger("kvservice.tier")

CLOSE_SECONDS = 10.0  # `close` waits so long for what runs: a device that hangs must not keep a process from ending

NICENESS = 10  # more than the process has: engines wait for the pool's loop, which must not wait for a core

Work = Callable[[], None]


class Urgency(IntEnum):
    URGENT_READ = 0  # an engine waits for it
    READ = 1
    ERASE = 2
    WRITE = 3


class TierWorker:
    """A few threads and what waits for them. Everything but `close` returns at once, from any thread."""

    def __init__(self, name: str, threads: int, writes_max: int) -> None:
        """`writes_max`: so many writes may wait; further ones are refused. Nothing else is ever refused."""
        self._name = name
        self._writes_max = writes_max
        self._waiting: tuple[deque[tuple[Work, Work]], ...] = tuple(deque() for _ in Urgency)
        self._changed = threading.Condition()
        self._closing = False
        # daemons: a thread that hangs in a device's driver can be ended by nobody, and must not outlive the process
        self._threads = [
            threading.Thread(target=self._run, name=f"kvservice-{name}-{index}", daemon=True)
            for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, urgency: Urgency, work: Work, drop: Work) -> bool:
        """Do `work` on one of the threads; or `drop`, if `work` raises or still waits in `close`.

        False: nothing is done, because too many writes wait or the worker was closed.
        """
        with self._changed:
            waiting = self._waiting[urgency]
            if self._closing or (urgency is Urgency.WRITE and len(waiting) >= self._writes_max):
                return False
            waiting.append((work, drop))
            self._changed.notify()
        return True

    def waiting(self) -> int:
        """How many pieces of work have not begun."""
        with self._changed:
            return sum(map(len, self._waiting))

    def close(self) -> bool:
        """Drop what waits, wait for what runs, and end the threads. Blocks, for CLOSE_SECONDS at most. Idempotent.

        False: a piece of work still runs. Its thread ends with it, or with the process.
        """
        with self._changed:
            self._closing = True
            dropped = [drop for waiting in self._waiting for _, drop in waiting]
            for waiting in self._waiting:
                waiting.clear()
            self._changed.notify_all()
        for drop in dropped:
            drop()
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        hanging = sum(thread.is_alive() for thread in self._threads)
        if hanging:
            log.warning("tier_hangs_at_its_end", extra={"tier": self._name, "threads": hanging})
        return not hanging

    def _run(self) -> None:
        _yield_to_others()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or any(self._waiting))
                waiting = next((one for one in self._waiting if one), None)
                if waiting is None:
                    return
                work, drop = waiting.popleft()
            try:
                work()
            except Exception:  # a mistake in one piece of work must not end the thread of all others
                log.exception("tier_work_failed", extra={"tier": self._name})
                drop()


def _yield_to_others() -> None:
    """Let the threads of the process that are not a tier's run before the calling one."""
    with contextlib.suppress(OSError):  # where the kernel does not let it, it is a thread like the others
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)
