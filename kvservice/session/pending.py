"""The acquires of a session that are under way, each with the request that waits for it.

An engine may use the id of a request that ended again at once, so an id alone does not say which acquire is meant.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass

from kvservice.core.messages import AcquireResult


@dataclass(slots=True, eq=False)
class PendingAcquire:
    """One acquire. Two are never equal."""

    request_id: str
    call: asyncio.Future[AcquireResult] | None = None  # used on the session's loop only


class PendingAcquires:
    """May be called from any thread. Nothing here blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_request: dict[str, list[PendingAcquire]] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def open(self, request_id: str) -> PendingAcquire:
        pending = PendingAcquire(request_id)
        with self._lock:
            self._by_request.setdefault(request_id, []).append(pending)
        return pending

    def is_open(self, pending: PendingAcquire) -> bool:
        """Whether its request still waits."""
        with self._lock:
            return pending in self._by_request.get(pending.request_id, [])

    def abandon(self, request_id: str) -> list[PendingAcquire]:
        """The request waits no more. Returns what it asked."""
        with self._lock:
            return self._by_request.pop(request_id, [])

    def close(self, pending: PendingAcquire) -> bool:
        """The acquire is done. Returns whether its request still waits for the result."""
        with self._lock:
            waiting = self._by_request.get(pending.request_id, [])
            if pending not in waiting:
                return False
            waiting.remove(pending)
            if not waiting:
                del self._by_request[pending.request_id]
            return True
