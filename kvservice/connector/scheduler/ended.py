"""Requests that ended before each of their blocks had found a slot. What they have left is stored in later steps.

Nothing is pinned for them: their blocks lie in the engine's own cache until it takes them for others, and are looked up
there again in each step. Used on the scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvservice.connector.scheduler.handoff import WriterHandoffs
from kvservice.connector.scheduler.request import EngineRequest
from kvservice.connector.scheduler.store_plan import StorePart
from kvservice.connector.scheduler.stores import Stores

# A request waits so long, and again so long whenever one of them finds a slot: the others may be behind it. Slots come
# within milliseconds unless the pool is lost or every block in it is in use, and until then an idle engine goes on
# stepping.
WAIT_SECONDS_MAX = 2.0
LOOK_BLOCKS_MAX = 512  # looked up in one step, which takes less than a millisecond
WAITING_MAX = 1024  # requests; what further ones have left is dropped


@dataclass(slots=True)
class _Waiting:
    request: EngineRequest
    stored: int  # of its blocks, in the step before
    until: float = 0.0  # from its first step on


class EndedRequests:
    def __init__(self, stores: Stores, handoffs: WriterHandoffs) -> None:
        self._stores = stores
        self._handoffs = handoffs
        self._waiting: list[_Waiting] = []
        self._all_until = 0.0  # none is given up before

    def __iter__(self) -> Iterator[EngineRequest]:
        return (it.request for it in self._waiting)

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    def add(self, request: EngineRequest) -> None:
        """It has blocks left to store. If it waits, it keeps what it has expected of the session, and its hand-off."""
        if len(self._waiting) < WAITING_MAX:
            self._waiting.append(_Waiting(request, request.stored))

    def begin_step(self, now: float) -> None:
        """Give up those that have waited too long."""
        if any(it.request.stored > it.stored for it in self._waiting):
            self._all_until = now + WAIT_SECONDS_MAX
        for it in list(self._waiting):
            it.stored, it.until = it.request.stored, it.until or now + WAIT_SECONDS_MAX
            if now >= max(it.until, self._all_until):
                self._drop(it)

    def parts(self, part_of: Callable[[EngineRequest, int], StorePart | None]) -> list[StorePart]:
        """What they have left, by `part_of`, which looks at so many leading blocks of a request. Those that have
        nothing more are done."""
        found: list[StorePart] = []
        room = LOOK_BLOCKS_MAX
        for it in list(self._waiting):
            part = part_of(it.request, it.request.stored + room)
            if part is None or part.end <= it.request.stored:
                self._drop(it)
                continue
            found.append(part)
            room -= part.end - it.request.stored
            if not room:
                break
        return found

    def clear(self) -> None:
        for it in list(self._waiting):
            self._drop(it)

    def _drop(self, it: _Waiting) -> None:
        self._stores.expect(it.request, -it.request.expected)
        self._handoffs.request_ended(it.request.writes)
        self._waiting.remove(it)
