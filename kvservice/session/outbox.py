"""What an engine's thread sends to the pool, gathered until the session's loop takes it.

A step of an engine ends many copies and requests at once. The loop is woken once for all of them, and what is alike
goes in one call: all seals, all slots that are given back, all leases that end. Put on any thread, taken on the loop.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from enum import Enum
from typing import Any

from kvservice.core.block.keys import KEYS_PER_REQUEST_MAX
from kvservice.core.segment.refs import BlockRef
from kvservice.errors import KVServiceError
from kvservice.pool.port import PoolPort
from kvservice.units import AttachmentId

# Values of one call: as many as one message may have (wire.codec). What is gathered beyond it goes in further calls.
CALL_MAX = KEYS_PER_REQUEST_MAX


class Parcel(Enum):
    SEAL = "seal"  # of SealItem
    ABORT = "abort"  # of BlockRef
    RELEASE = "release"  # of LeaseId


class Outbox:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gathered: dict[tuple[Parcel, AttachmentId], list[Any]] = {}

    def put(self, kind: Parcel, attachment: AttachmentId, values: Iterable[Any]) -> None:
        """Add values to the next call of this kind. Wake the loop behind it."""
        with self._lock:
            self._gathered.setdefault((kind, attachment), []).extend(values)

    def take(self) -> list[tuple[Parcel, AttachmentId, list[Any]]]:
        """The calls to make now, in the order in which their first values were put."""
        with self._lock:
            gathered, self._gathered = self._gathered, {}
        return [
            (kind, attachment, values[begin : begin + CALL_MAX])
            for (kind, attachment), values in gathered.items()
            for begin in range(0, len(values), CALL_MAX)
        ]


def giving_back(kind: Parcel, attachment: AttachmentId, values: list[Any]) -> Callable[[PoolPort], Awaitable[None]]:
    """The call that gives slots or leases back."""
    return lambda pool: (pool.abort if kind is Parcel.ABORT else pool.release)(attachment, values)


async def leave(pool: PoolPort, attachment: AttachmentId, unused: Sequence[BlockRef]) -> None:
    """Give back the slots that no worker was told to write, and detach. The others come back when the workers have
    ended. Raises KVServiceError."""
    if unused:
        with contextlib.suppress(KVServiceError):
            await pool.abort(attachment, unused)
    await pool.detach(attachment)
