"""The calls that wait for an answer of the core, and how long an engine's calls took. Used on the pool's loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from kvservice.core import events as ev
from kvservice.core.messages import AcquireResult
from kvservice.errors import KVServiceError
from kvservice.observe.timings import Timings
from kvservice.units import AttachmentId

Later = Callable[[Callable[[], None]], object]  # runs what it is given when it is the caller's turn again


class Waiter(Protocol):
    """Who waits for an answer: an asyncio.Future, or a connection that writes the answer down. It must not raise."""

    def done(self) -> bool:
        """Whether nobody waits any more: what was promised is then taken back."""
        ...

    def set_result(self, value: Any, /) -> None: ...

    def set_exception(self, error: KVServiceError, /) -> None: ...


@dataclass(slots=True)
class OpenCall:
    """A call that the core has not answered yet. Nothing changes it; a frozen one would take three times as long to
    make."""

    waiter: Waiter
    attachment: AttachmentId | None  # None: not an engine's
    event: ev.Event
    began: float  # on the clock of OpenCalls
    later: Later | None


class OpenCalls:
    """Numbers calls, and keeps them until they are answered or cancelled."""

    def __init__(self, clock: Callable[[], float], timings: Timings) -> None:
        self._clock = clock
        self._timings = timings
        self._open: dict[int, OpenCall] = {}
        self._next_op = 1

    def add(
        self,
        make: Callable[[int], ev.Event],
        attachment: AttachmentId | None,
        waiter: Waiter,
        later: Later | None = None,
    ) -> tuple[int, ev.Event]:
        """The number of a new call, and the event that `make` makes of it."""
        op = self._next_op
        self._next_op += 1
        event = make(op)
        self._open[op] = OpenCall(waiter, attachment, event, self._clock(), later)
        return op, event

    def pop(self, op: int) -> OpenCall | None:
        """The call, which is not open any more. None: it was answered or cancelled."""
        return self._open.pop(op, None)

    def later(self, op: int) -> Later | None:
        """Where this call says that its work goes on."""
        call = self._open.get(op)
        return None if call is None else call.later

    def refuse_all(self, error: KVServiceError) -> None:
        calls, self._open = self._open, {}
        for call in calls.values():
            if not call.waiter.done():
                call.waiter.set_exception(error)

    def time(self, call: OpenCall, value: object) -> None:
        """Record how long an engine waited for this answer."""
        event, seconds = call.event, self._clock() - call.began
        if isinstance(event, ev.Acquire) and isinstance(value, AcquireResult):
            source = value.farthest or ("local" if value.blocks else "none")
            self._timings.add("acquire_seconds", seconds, source, event.request.request_id)
        elif isinstance(event, ev.Seal):
            self._timings.add("seal_seconds", seconds)
