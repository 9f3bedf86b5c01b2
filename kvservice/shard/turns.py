"""Tenants take turns: one call after the other, of each tenant that has some waiting, so that a tenant whose engines
ask for the most does not hold up the others. Runs on the shard's event loop.

A turn ends with its call, or sooner when the call waits for other nodes: the loop's time is what is shared.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator

TURN_SECONDS = 0.003  # a call that is not done by then waits for something


class Turns:
    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # by tenant, the next one first
        self._turn: object | None = None  # whose it is
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Entered when it is this call's turn."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        if self._turn is None:
            self._next()
        try:
            await turn
            yield
        finally:
            turn.cancel()  # of a call that gave up before its turn
            self._end(turn)

    def _next(self) -> None:
        """Begin the turn of the tenant that has waited longest."""
        while self._waiting:
            tenant, queue = self._waiting.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # behind the others
            if not turn.done():
                turn.set_result(None)
                self._turn = turn
                self._timer = turn.get_loop().call_later(TURN_SECONDS, self._end, turn)
                return

    def _end(self, turn: object) -> None:
        if self._turn is turn:
            assert self._timer is not None
            self._timer.cancel()
            self._turn = None
            self._next()
