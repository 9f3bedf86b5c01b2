"""Caches of keys alone, as large as the pool: what would have been found if one rule had chosen every victim.

There is one for LRU, one for S3-FIFO and one for worth. They see every prompt, hold whatever was asked for, and evict a
prefix after what extends it, as the pool does. As a stretch's blocks come and go together, they count in stretches and
cost little. Their counts are kept in the stretches. What the pool forgets, they forget with it. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter

from kvservice.core.store.orders import ByWorth
from kvservice.core.store.stretches import GARBAGE_MIN, Stretch, UseLine

FIFO_SMALL_SHARE = 0.1  # of the blocks, which S3-FIFO's small queue may hold: the paper's 10 %
FIFO_USES_MAX = 3  # that S3-FIFO counts: the paper's two bits


class ShadowLru:
    """The least recently used goes first. A chain's blocks lie with the deepest first, so no leaf is looked for."""

    def __init__(self) -> None:
        self.count = 0  # blocks that it holds
        self._line = UseLine()

    def use(self, found: Sequence[Stretch]) -> int:
        """Serve a prompt. Returns how many of its blocks were hits."""
        hits = _hits(found, attrgetter("shadow_lru"))
        for stretch in found:
            held, length = stretch.shadow_lru, len(stretch.keys)
            if held != length:
                stretch.shadow_lru = length
                self.count += length - held
        for stretch in reversed(found):
            self._line.used(stretch)
        return hits

    def shrink(self, limit: int) -> int:
        """Evict until no more than `limit` blocks are held. Returns how many went."""
        before = self.count
        while self.count > limit:
            stretch = self._line.first()
            assert stretch is not None, "what is held is in the line"
            going = min(stretch.shadow_lru, self.count - limit)
            stretch.shadow_lru -= going
            self.count -= going
            if not stretch.shadow_lru:
                self._line.drop_first()
        return before - self.count

    def after_cut(self, upper: Stretch) -> None:
        """A stretch was cut; this is the new one."""
        self._line.put_first(upper)

    def extend(self, stretch: Stretch) -> None:
        """One more block is added to a stretch."""
        if stretch.shadow_lru == len(stretch.keys):
            stretch.shadow_lru += 1
            self.count += 1

    def forget(self, stretch: Stretch) -> None:
        """Only the resident blocks of a stretch are remembered any longer."""
        going = max(stretch.shadow_lru - stretch.held, 0)
        stretch.shadow_lru -= going
        self.count -= going


class ShadowFifo:
    """S3-FIFO by stretches (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023). What is new
    enters a small queue. At its end, what was used there moves on to the main queue, and the rest goes. What comes back
    soon after that enters the main queue, where each use is worth one more round. Of a prompt's stretches the deepest
    enters first, so that a prefix outlives what extends it."""

    def __init__(self) -> None:
        self._small = _FifoQueue()
        self._main = _FifoQueue()
        self._limit = 0  # blocks; 0: nothing was ever evicted
        self._gone = 0  # blocks that went from the small queue

    @property
    def count(self) -> int:
        return self._small.count + self._main.count

    def use(self, found: Sequence[Stretch]) -> int:
        hits = _hits(found, attrgetter("shadow_fifo"))
        for stretch in reversed(found):
            if stretch.shadow_fifo:
                stretch.fifo_uses = min(stretch.fifo_uses + 1, FIFO_USES_MAX)
            else:
                gone_at = stretch.fifo_gone_at
                stretch.is_new = gone_at < 0 or self._gone - gone_at > self._limit
                stretch.fifo_uses = 0
                self._queue_of(stretch).enter(stretch)
            self._hold(stretch, len(stretch.keys))
        return hits

    def shrink(self, limit: int) -> list[Stretch]:
        """Evict until no more than `limit` blocks are held. Returns the stretches that lost some."""
        self._limit = limit
        losers: list[Stretch] = []
        while self.count > limit:
            is_small_full = self._small.count > FIFO_SMALL_SHARE * self.count
            queue = self._small if is_small_full or not self._main.count else self._main
            stretch = queue.first()
            if stretch.fifo_uses:
                self._move_on(stretch)
                continue
            going = min(stretch.shadow_fifo, self.count - limit)
            self._hold(stretch, stretch.shadow_fifo - going)
            self._gone += going * stretch.is_new
            stretch.fifo_gone_at = self._gone if stretch.is_new else -1
            losers.append(stretch)
        return losers

    def after_cut(self, upper: Stretch) -> None:
        """A stretch was cut; this is the new one. It was used now in most cases, so it is soon moved on."""
        if upper.shadow_fifo:
            self._queue_of(upper).enter_first(upper)

    def extend(self, stretch: Stretch) -> None:
        if stretch.shadow_fifo == len(stretch.keys):
            self._hold(stretch, stretch.shadow_fifo + 1)

    def forget(self, stretch: Stretch) -> None:
        self._hold(stretch, min(stretch.shadow_fifo, stretch.held))

    def _move_on(self, stretch: Stretch) -> None:
        """It was used, and is at the end of its queue."""
        held = stretch.shadow_fifo
        self._hold(stretch, 0)
        stretch.fifo_uses = 0 if stretch.is_new else stretch.fifo_uses - 1
        stretch.is_new = False
        self._main.enter(stretch)
        self._hold(stretch, held)

    def _hold(self, stretch: Stretch, count: int) -> None:
        self._queue_of(stretch).count += count - stretch.shadow_fifo
        stretch.shadow_fifo = count

    def _queue_of(self, stretch: Stretch) -> _FifoQueue:
        return self._small if stretch.is_new else self._main


class _FifoQueue:
    """Stretches in the order in which they entered. An entry is outdated when its stretch entered again, or when
    nothing of it is held."""

    __slots__ = ("_entries", "_sweep_at", "count")

    def __init__(self) -> None:
        self.count = 0  # blocks
        self._entries: deque[tuple[int, Stretch]] = deque()  # (how often it had entered, stretch)
        self._sweep_at = GARBAGE_MIN

    def __len__(self) -> int:
        return len(self._entries)

    def enter(self, stretch: Stretch) -> None:
        """As the last one. Its blocks are counted when they are held."""
        if len(self._entries) >= self._sweep_at:
            self._entries = deque(entry for entry in self._entries if _is_entered(entry))
            self._sweep_at = max(2 * len(self._entries), GARBAGE_MIN)
        stretch.fifo_entered += 1
        self._entries.append((stretch.fifo_entered, stretch))

    def enter_first(self, stretch: Stretch) -> None:
        stretch.fifo_entered += 1
        self._entries.appendleft((stretch.fifo_entered, stretch))

    def first(self) -> Stretch:
        while not _is_entered(self._entries[0]):
            self._entries.popleft()
        return self._entries[0][1]


def _is_entered(entry: tuple[int, Stretch]) -> bool:
    entered, stretch = entry
    return entered == stretch.fifo_entered and stretch.shadow_fifo > 0


class ShadowWorth:
    """The leaf with the least worth goes first."""

    def __init__(self, order: ByWorth) -> None:
        self.count = 0
        self.order = order

    def use(self, found: Sequence[Stretch]) -> int:
        hits = _hits(found, attrgetter("shadow_worth"))
        for stretch in found:
            held, length = stretch.shadow_worth, len(stretch.keys)
            if held != length:
                stretch.shadow_worth = length
                self.count += length - held
                if not held and stretch.above is not None:
                    stretch.above.shadow_worth_below += 1
        return hits

    def shrink(self, limit: int) -> None:
        while self.count > limit:
            stretch = self.order.first()
            assert stretch is not None, "some stretch is a leaf"
            self._take(stretch, min(stretch.shadow_worth, self.count - limit))

    def extend(self, stretch: Stretch) -> None:
        if stretch.shadow_worth == len(stretch.keys):
            stretch.shadow_worth += 1
            self.count += 1

    def forget(self, stretch: Stretch) -> None:
        self._take(stretch, max(stretch.shadow_worth - stretch.held, 0))

    def _take(self, stretch: Stretch, count: int) -> None:
        stretch.shadow_worth -= count
        self.count -= count
        above = stretch.above
        if count and not stretch.shadow_worth and above is not None:
            above.shadow_worth_below -= 1
            if above.is_shadow_leaf:
                self.order.put(above)


def _hits(found: Sequence[Stretch], held: Callable[[Stretch], int]) -> int:
    """How many blocks of a prompt a shadow has, from its beginning to the first that it lacks."""
    hits = 0
    for stretch in found:
        hits += held(stretch)
        if held(stretch) != len(stretch.keys):
            break
    return hits
