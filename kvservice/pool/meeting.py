"""Meets peers before they are needed, as core.directory.meetings decides: a handshake, a connection, one small read.

Runs on the pool's loop. Nothing waits for it: a request that needs a peer meanwhile makes its own handshake.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from kvservice.aio import within
from kvservice.core.directory.meetings import OVERDUE_SECONDS, Meeting, Meetings
from kvservice.core.messages import Holder
from kvservice.errors import KVServiceError
from kvservice.pool.remote import RemoteShards
from kvservice.pool.runtime_ports import PullerPort
from kvservice.units import NodeId

log = logging.getLogger("kvservice.pool")

HANDSHAKE_SECONDS = 1.0  # a peer answers from memory in milliseconds
READ_SECONDS = 2.0  # the connection is made on the transport's thread, which may be reading blocks
assert HANDSHAKE_SECONDS + READ_SECONDS < OVERDUE_SECONDS


class PeerMeetings:
    """`spawn` runs a coroutine that ends with the pool."""

    def __init__(
        self,
        state: Meetings,
        remote: RemoteShards,
        puller: PullerPort | None,
        clock: Callable[[], float],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self.state = state
        self._remote = remote
        self._puller = puller
        self._clock = clock
        self._spawn = spawn
        self._loop = asyncio.get_running_loop()
        self._no_request = contextvars.copy_context()  # a meeting is in no request's trace
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0  # when the timer wakes it
        self._is_closed = False

    def heard(self, holder: Holder, is_here: bool) -> None:
        """The directory names a node."""
        self.state.heard(holder, is_here, self._clock())
        if self.state.has_news:
            self._arm()

    def asked(self, node_id: NodeId) -> None:
        """A request fetches from this node."""
        self.state.asked(node_id, self._clock())
        if self.state.has_news:
            self._arm()

    def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        due = self.state.next_deadline()
        if due is None or self._puller is None or self._is_closed:
            return
        if self._timer is not None:
            if self._due <= due:
                return
            self._timer.cancel()
        self._due = due
        delay = max(due - self._clock(), 0.0) + 0.001  # clocks of loops are coarse
        self._timer = self._loop.call_later(delay, self._begin, context=self._no_request)

    def _begin(self) -> None:
        self._timer = None
        for meeting in self.state.due(self._clock()):
            self._spawn(self._meet(meeting))
        self._arm()

    async def _meet(self, meeting: Meeting) -> None:
        is_met = False
        try:
            is_met = await self._greet(meeting.holder)
        except KVServiceError as error:
            log.info("peer_not_met", extra={"node": meeting.holder.node_id, "reason": error.message})
        finally:
            self.state.ended(meeting.number, is_met, self._clock())
            self._arm()

    async def _greet(self, holder: Holder) -> bool:
        info = await self._remote.meet(holder, HANDSHAKE_SECONDS)
        if info is None or self._puller is None:
            return False
        answer: asyncio.Future[bool] = self._loop.create_future()
        self._puller.greet(holder.node_id, info.epoch, info.description, partial(self._tell, answer))
        try:
            return await within(READ_SECONDS, answer)
        except asyncio.TimeoutError:
            log.info("peer_not_met", extra={"node": holder.node_id, "reason": "one page could not be read in time"})
            return False

    def _tell(self, answer: asyncio.Future[bool], is_met: bool) -> None:
        """Runs on the puller's thread."""

        def tell() -> None:
            if not answer.done():
                answer.set_result(is_met)

        try:
            self._loop.call_soon_threadsafe(tell)
        except RuntimeError:
            log.debug("event_after_close", extra={"event": "greeting"})
