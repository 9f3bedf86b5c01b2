"""Caches of keys alone, as large as the pool: what would have been found if LRU, or worth, had chosen every victim.

They see every prompt, hold whatever was asked for, and evict leaf by leaf as the pool does. As a stretch's blocks come
and go together, they count in stretches and cost little. Their counts are kept in the stretches. What the pool has
forgotten they have, too. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

from kvservice.core.store.orders import ByWorth
from kvservice.core.store.stretches import Stretch, UseLine


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
