"""The event loop of one simulated process: its time is the process's clock, and calls that are due wait in the world's
heap.

So asyncio code of several processes runs in one thread, in one order, and a process that is paused or dead runs none of
it. Work for threads is done in the loop, a moment later. One loop is one life of its process.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from kvservice.errors import KVServiceError
from kvservice.testing.sim.world import Process, Violation

T = TypeVar("T")
TIMER_SECONDS_MIN = 1e-6  # No clock is finer, so a shorter wait would not advance the time.
THREAD_SECONDS = 0.001  # The longest that simulated threads take for their work.
EXPECTED = (KVServiceError, asyncio.TimeoutError, OSError)  # what a task may end with; anything else is a violation


@dataclass(slots=True, eq=False)
class Handle:
    """One call that is to be made."""

    callback: Callable[..., object]
    arguments: tuple[Any, ...]
    context: contextvars.Context | None
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def drop(self) -> None:
        """The call will never be made."""
        for argument in self.arguments:
            if inspect.iscoroutine(argument):  # it would have become a task
                argument.close()


class ProcessLoop:
    """What asyncio needs of a loop, while the process lives. Nobody runs it: the world steps."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._world = process.world
        self._life = process.life
        self._failure: BaseException | None = None
        self._tasks: dict[asyncio.Task[Any], None] = {}  # tasks that have not ended
        self._world.loops.append(self)
        self._as_loop: Any = self  # its type is not a subclass: most of asyncio's loop is about sockets

    def time(self) -> float:
        return self._process.clock()

    def call_soon(self, callback: Any, *arguments: Any, context: Any = None) -> Any:
        return self.call_later(0.0, callback, *arguments, context=context)

    def call_soon_threadsafe(self, callback: Any, *arguments: Any, context: Any = None) -> Any:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        return self.call_later(0.0, callback, *arguments, context=context)

    def call_at(self, when: float, callback: Any, *arguments: Any, context: Any = None) -> Any:
        return self.call_later(when - self.time(), callback, *arguments, context=context)

    def call_later(self, delay: float, callback: Any, *arguments: Any, context: Any = None) -> Any:
        handle = Handle(callback, arguments, context or contextvars.copy_context())
        if not self.is_closed():
            self._world.at(max(delay, TIMER_SECONDS_MIN) if delay > 0 else 0.0, self._run, handle)
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self._as_loop)

    def create_task(self, work: Any, *, name: Any = None, context: Any = None) -> Any:
        task = asyncio.Task(work, loop=self._as_loop, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._look_at)
        return task

    def run_in_executor(self, executor: Any, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()

        def work() -> None:
            try:
                result = function(*arguments)
            except Exception as error:  # noqa: BLE001  thread boundary: the caller's
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self.call_later(THREAD_SECONDS * self._world.random.random(), work)
        return future

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._process.life == self._life

    def is_closed(self) -> bool:
        return not self.is_running()

    def call_exception_handler(self, context: Any) -> None:
        """Called for tasks that a dead process left behind, and for errors that `create_task` has already seen."""

    # -- the world's side ----

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine from outside of any task."""
        task: asyncio.Task[Any] = self.create_task(work)
        return task

    def bury(self) -> None:
        """After the run: end what its tasks left open, in order, and not when memory happens to be collected."""
        for task in self._tasks:
            coroutine = task.get_coro()
            if not task.done() and inspect.iscoroutine(coroutine):
                with contextlib.suppress(RuntimeError):  # it waits for something while it is closed
                    coroutine.close()
        self._tasks.clear()

    def _run(self, handle: Handle) -> None:
        if handle.is_cancelled or self.is_closed():
            handle.drop()
            return
        if self._process.is_paused:
            self._world.at_moment(self._process.paused_until, self._run, handle)
            return
        assert handle.context is not None
        self._world.counters["turns"] += 1
        # It is private only by its name: it exists for event loops.
        asyncio._set_running_loop(self._as_loop)  # noqa: SLF001
        try:
            handle.context.run(handle.callback, *handle.arguments)
        finally:
            asyncio._set_running_loop(None)  # noqa: SLF001
        if self._failure is not None:
            raise Violation(f"a task of {self._process.name} failed: {self._failure!r}") from self._failure

    def _look_at(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, EXPECTED):
            self._failure = error
