"""What a session heard of blocks, until the scheduler takes it. May be used on any thread.

The pool's answers come in the order in which things happened there: a block that was sealed after a heartbeat was
answered is here, and one that a later heartbeat names is gone. So the last word on a block is the truth.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass, field

from kvservice.core.messages import Removed, SealItem, SealStatus
from kvservice.units import BlockKey

# Removed blocks that nobody has taken yet, 1 MiB. Beyond it every block counts as gone, which is a later miss at worst.
REMOVED_MAX = 1 << 16
IN_POOL = (SealStatus.SEALED, SealStatus.DUPLICATE)


@dataclass(slots=True)
class BlockNews:
    """What happened since somebody asked last. No block is in both `answered` and `removed`."""

    all_gone: bool = False  # all that was in the pool before has gone, as far as anybody knows
    answered: dict[BlockKey, bool] = field(default_factory=dict)  # blocks sent to be sealed: whether they are here
    removed: dict[BlockKey, None] = field(default_factory=dict)  # other blocks that have gone


class NewsInbox:
    def __init__(self, *, is_read: bool) -> None:
        """`is_read`: somebody takes the news. Else nothing is kept."""
        self._is_read = is_read
        self._lock = threading.Lock()
        self._news = BlockNews()

    async def hear(self, heartbeat: Awaitable[Removed]) -> None:
        """Take what the answer of a heartbeat says."""
        removed = await heartbeat
        if removed.lost:
            self.all_gone()
        with self._lock:
            self._gone(removed.keys)

    def sealed(self, items: Sequence[SealItem], statuses: Sequence[SealStatus]) -> None:
        """The pool has answered a Seal."""
        with self._lock:
            for item, status in zip(items, statuses, strict=True) if self._is_read else ():
                self._news.removed.pop(item.key, None)
                self._news.answered[item.key] = status in IN_POOL

    def not_sealed(self, items: Iterable[SealItem]) -> None:
        """Nobody knows what became of these blocks."""
        with self._lock:
            for item in items if self._is_read else ():
                self._news.answered[item.key] = False

    def all_gone(self) -> None:
        """The pool is gone, or removed blocks that it does not name."""
        with self._lock:
            self._news = BlockNews(True, dict.fromkeys(self._news.answered, False))

    def take(self) -> BlockNews:
        with self._lock:
            found, self._news = self._news, BlockNews()
            return found

    def _gone(self, keys: Iterable[BlockKey]) -> None:
        news = self._news
        for key in keys if self._is_read else ():
            if key in news.answered:
                news.answered[key] = False
            else:
                news.removed[key] = None
        if len(news.removed) > REMOVED_MAX:
            news.all_gone = True
            news.removed.clear()
