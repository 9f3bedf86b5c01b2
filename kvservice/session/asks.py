"""The acquires of a session that are under way, each with the request that waits for it.

An engine may use the id of a request that ended again at once, so an id alone does not say which acquire is meant.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass

from kvservice.core.messages import AcquireResult


@dataclass(slots=True, eq=False)
class Ask:
    """One acquire."""

    request_id: str
    call: asyncio.Future[AcquireResult] | None = None  # used on the session's loop only


class Asks:
    """May be called from any thread. Nothing here blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waited_for: dict[str, list[Ask]] = {}

    def __len__(self) -> int:
        return len(self._waited_for)

    def open(self, request_id: str) -> Ask:
        ask = Ask(request_id)
        with self._lock:
            self._waited_for.setdefault(request_id, []).append(ask)
        return ask

    def abandon(self, request_id: str) -> list[Ask]:
        """The request waits no more. Returns what it asked."""
        with self._lock:
            return self._waited_for.pop(request_id, [])

    def close(self, ask: Ask) -> bool:
        """The acquire is done. Returns whether its request still waits for the result."""
        with self._lock:
            asks = self._waited_for.get(ask.request_id, [])
            if ask not in asks:
                return False
            asks.remove(ask)
            if not asks:
                del self._waited_for[ask.request_id]
            return True
