"""Blocks that left the store, for the engines that asked to hear of it. Pure.

An engine hears only of blocks of its own tenant, with its next heartbeat. What it does not fetch in time is dropped
from the oldest on, and counted: it then knows that it has not heard of everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvservice.core.messages import Removed
from kvservice.units import AttachmentId, BlockKey

# Keys kept for one engine, 128 KiB of an answer. An engine fetches them every second, and a pool evicts fewer.
REMOVALS_MAX = 8192


@dataclass(slots=True)
class _Listener:
    account: str  # the tenant that it belongs to
    keys: deque[BlockKey] = field(default_factory=deque)
    lost: int = 0


class Removals:
    def __init__(self) -> None:
        self._listeners: dict[AttachmentId, _Listener] = {}

    def listen(self, attachment: AttachmentId, account: str) -> None:
        self._listeners[attachment] = _Listener(account)

    def end(self, attachment: AttachmentId) -> None:
        self._listeners.pop(attachment, None)

    def add(self, key: BlockKey, account: str) -> None:
        """A block of this tenant is gone."""
        for listener in self._listeners.values():
            if listener.account == account:
                if len(listener.keys) == REMOVALS_MAX:
                    listener.keys.popleft()
                    listener.lost += 1
                listener.keys.append(key)

    def take(self, attachment: AttachmentId, is_here: Callable[[BlockKey], bool]) -> Removed:
        """What this engine has not heard of yet, but for blocks that are here again."""
        listener = self._listeners.get(attachment)
        if listener is None or not listener.keys:
            return NOTHING
        found = Removed(tuple(key for key in listener.keys if not is_here(key)), listener.lost)
        listener.keys.clear()
        listener.lost = 0
        return found


NOTHING = Removed()
