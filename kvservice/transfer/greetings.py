"""Reads one page of a peer before it is needed: transports finish their own wiring at the first read of a connection.

Owned by the puller's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvservice.core.segment.geometry import HEADER_BYTES, PAGE_BYTES
from kvservice.transfer.base import Copy, PeerHandle, TransferId, Transport
from kvservice.transfer.scratch import Scratch
from kvservice.units import NodeId

log = logging.getLogger("kvservice.transfer")

HEADERS = PAGE_BYTES // HEADER_BYTES  # of scratch, for each greeting under way
OnMet = Callable[[bool], None]  # whether the peer answered


@dataclass(frozen=True, slots=True)
class Greeting:
    peer: NodeId
    handle: PeerHandle
    scratch: int  # index of its first scratch header
    on_met: OnMet


class Greetings:
    """The greetings under way, one at a time for each peer."""

    def __init__(self, scratch: Scratch, scratch_offset: int) -> None:
        """`scratch_offset` is where the scratch area begins in the local segment."""
        self._scratch = scratch
        self._scratch_offset = scratch_offset
        self._open: dict[TransferId, Greeting] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def begin(self, transport: Transport, peer: NodeId, handle: PeerHandle, on_met: OnMet) -> bool:
        """Post the read. False if it cannot be posted now, and then `on_met` is not called."""
        if any(greeting.peer == peer for greeting in self._open.values()):
            return False  # it has not answered the last one
        scratch = self._scratch.take(HEADERS)
        if scratch is None:  # pulls take all the space
            return False
        try:
            local = self._scratch_offset + scratch * HEADER_BYTES
            transfer = transport.post_read(handle, [Copy(0, local, PAGE_BYTES)])
        except Exception as error:  # noqa: BLE001  thread boundary: one peer's failure must not end the thread
            log.info("greeting_failed", extra={"peer": peer, "error": str(error)})
            self._scratch.give(scratch, HEADERS)
            return False
        self._open[transfer] = Greeting(peer, handle, scratch, on_met)
        return True

    def end(self, transfer: TransferId) -> Greeting | None:
        """The greeting whose read has ended. None if the transfer is none of them."""
        greeting = self._open.pop(transfer, None)
        if greeting is not None:
            self._scratch.give(greeting.scratch, HEADERS)
        return greeting

    def give_up(self) -> list[Greeting]:
        """All of them: the transport is closed, and none is answered any more."""
        given_up, self._open = list(self._open.values()), {}
        return given_up
