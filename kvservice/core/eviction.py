"""Which block goes first: leaves before the prefix they hang on, fetched copies before originals, then least recent.

Only a block without resident children can be a victim, so a prefix is never torn out from under its suffix. Among
those, copies go first because their original lives on another node; then the oldest touch; then the deepest position,
which keeps the order right for blocks whose parent is not known (adopted after a restart). Blocks of layers with a
window are no chain: they have neither parent nor children, and only those that hits end with are touched.

Lazy heaps, one for each size and tenant: entries are pushed when a block becomes or stays evictable under a new rank,
and checked when popped.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvservice.core.tenants import NOBODY
from kvservice.core.windows import SIDE_POSITION
from kvservice.units import BlockKey


class EvictionPolicy(Protocol):
    """What core.blocks asks of a policy. All methods change only the policy's own state and never block."""

    now: float  # set before each event, seconds

    def add(
        self, key: BlockKey, parent: BlockKey | None, position: int, *, is_copy: bool, size_class: int,
        account: str = NOBODY,
    ) -> None: ...  # fmt: skip

    def remove(self, key: BlockKey) -> None: ...

    def touch(self, chain: Sequence[BlockKey]) -> None:
        """These consecutive blocks of one chain were used. Unknown ones are skipped; links are learnt."""
        ...

    def pin(self, key: BlockKey) -> None: ...

    def unpin(self, key: BlockKey) -> None: ...

    def victim(self, size_class: int | None, may_go: Callable[[str], bool] | None = None) -> BlockKey | None:
        """The block to evict next, of this size (None: of any); it stays until `remove`. `may_go` says of an account
        whether its blocks count. None when every block is pinned or has children."""
        ...

    def last_touch(self, key: BlockKey) -> int: ...

    def used_at(self, key: BlockKey) -> float:
        """Like last_touch, on the clock of `now`."""
        ...

    def promote(self, key: BlockKey) -> None:
        """A copy whose original goes: from now on it is the original."""
        ...

    def parent_of(self, key: BlockKey) -> BlockKey | None: ...

    def by_heat(self) -> list[BlockKey]:
        """All blocks, the last used first, prefixes before what hangs on them. Sorts."""
        ...


_Rank = tuple[bool, int, int]


@dataclass(slots=True)
class _Entry:
    parent: BlockKey | None  # None: first of a chain, or not known
    position: int
    is_copy: bool
    size_class: int
    account: str
    tick: int  # logical time of the last touch
    used_at: float  # the same in seconds
    children: int = 0  # resident blocks that name this one as parent
    pinned: bool = False

    @property
    def rank(self) -> _Rank:
        # Of a window's blocks the earlier are wanted by shorter hits only; with them gone the chain is still of use.
        order = self.position - 2 * SIDE_POSITION if self.position >= SIDE_POSITION else -self.position
        return (not self.is_copy, self.tick, order)


class LeafFirstLru:
    """The default policy."""

    def __init__(self) -> None:
        self._entries: dict[BlockKey, _Entry] = {}
        self._heaps: dict[int, dict[str, list[tuple[_Rank, BlockKey]]]] = {}  # by size, then by account
        self._sizes: Counter[tuple[int, str]] = Counter()  # blocks that each heap is for
        # Children of a block that is not resident, by its key and position: linked if it comes, but only at that
        # position, or two blocks could become each other's parent and never be evicted.
        self._orphans: dict[tuple[BlockKey, int], int] = {}
        self._tick = 0
        self.now = 0.0

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._entries

    def add(
        self, key: BlockKey, parent: BlockKey | None, position: int, *, is_copy: bool, size_class: int,
        account: str = NOBODY,
    ) -> None:  # fmt: skip
        assert key not in self._entries
        self._tick += 1
        entry = _Entry(None, position, is_copy, size_class, account, self._tick, self.now)
        self._sizes[size_class, account] += 1
        entry.children = self._orphans.pop((key, position), 0)
        self._entries[key] = entry
        self._link(entry, parent)
        self._touch_ancestors(entry)
        self._offer(key, entry)

    def remove(self, key: BlockKey) -> None:
        entry = self._entries.pop(key)
        assert not entry.pinned
        self._unlink(entry)
        place = (entry.size_class, entry.account)
        self._sizes[place] -= 1
        if not self._sizes[place]:  # tenants of long ago are not looked at again
            del self._sizes[place]
            self._heaps.get(entry.size_class, {}).pop(entry.account, None)
        if entry.children:
            self._orphans[key, entry.position] = entry.children

    def touch(self, chain: Sequence[BlockKey]) -> None:
        self._tick += 1
        previous: BlockKey | None = None
        for key in chain:
            entry = self._entries.get(key)
            if entry is not None:
                entry.tick, entry.used_at = self._tick, self.now
                if entry.parent is None and previous is not None:
                    self._link(entry, previous)
                self._offer(key, entry)
            previous = key

    def pin(self, key: BlockKey) -> None:
        self._entries[key].pinned = True

    def unpin(self, key: BlockKey) -> None:
        entry = self._entries[key]
        entry.pinned = False
        self._offer(key, entry)

    def victim(self, size_class: int | None, may_go: Callable[[str], bool] | None = None) -> BlockKey | None:
        best: tuple[_Rank, BlockKey] | None = None
        for size in list(self._heaps) if size_class is None else [size_class]:
            for account, heap in self._heaps.get(size, {}).items():
                if may_go is not None and not may_go(account):
                    continue
                while heap and not self._is_true(*heap[0]):
                    heapq.heappop(heap)
                if heap and (best is None or heap[0] < best):
                    best = heap[0]
        return None if best is None else best[1]

    def _is_true(self, rank: _Rank, key: BlockKey) -> bool:
        """Whether a heap's entry is not out of date. A block that was gone and is back has a later tick."""
        entry = self._entries.get(key)
        return entry is not None and entry.rank == rank and self._is_evictable(entry)

    def last_touch(self, key: BlockKey) -> int:
        return self._entries[key].tick

    def used_at(self, key: BlockKey) -> float:
        return self._entries[key].used_at

    def promote(self, key: BlockKey) -> None:
        entry = self._entries[key]
        entry.is_copy = False
        self._offer(key, entry)

    def parent_of(self, key: BlockKey) -> BlockKey | None:
        return self._entries[key].parent

    def by_heat(self) -> list[BlockKey]:
        entries = self._entries
        return sorted(entries, key=lambda key: (-entries[key].tick, entries[key].position))

    def _is_evictable(self, entry: _Entry) -> bool:
        return not entry.pinned and entry.children == 0

    def _offer(self, key: BlockKey, entry: _Entry) -> None:
        if not self._is_evictable(entry):
            return
        heap = self._heaps.setdefault(entry.size_class, {}).setdefault(entry.account, [])
        heapq.heappush(heap, (entry.rank, key))
        if len(heap) > 64 + 4 * self._sizes[entry.size_class, entry.account]:
            # Touches leave dead entries behind; keep memory in proportion.
            fresh = list(dict.fromkeys(one for one in heap if self._is_true(*one)))
            heapq.heapify(fresh)
            self._heaps[entry.size_class][entry.account] = fresh

    def _link(self, entry: _Entry, parent: BlockKey | None) -> None:
        above = self._entries.get(parent) if parent is not None else None
        if parent is None or entry.position >= SIDE_POSITION:
            return
        if above is not None and above.position != entry.position - 1:
            return  # not a chain: linking it could close a circle that nothing ever evicts
        entry.parent = parent
        if above is not None:
            above.children += 1
        else:
            place = (parent, entry.position - 1)
            self._orphans[place] = self._orphans.get(place, 0) + 1

    def _unlink(self, entry: _Entry) -> None:
        if entry.parent is None:
            return
        above = self._entries.get(entry.parent)
        if above is not None and above.position == entry.position - 1:
            above.children -= 1
            self._offer(entry.parent, above)
            return
        place = (entry.parent, entry.position - 1)
        left = self._orphans[place] - 1
        if left:
            self._orphans[place] = left
        else:
            del self._orphans[place]

    def _touch_ancestors(self, entry: _Entry) -> None:
        # A new leaf makes its whole prefix as recent as itself: an engine that had the prefix in its own cache never
        # asks us for it, yet it is what makes the leaf reachable. Stops at the first ancestor touched already.
        parent = entry.parent
        while parent is not None:
            above = self._entries.get(parent)
            if above is None or above.tick == self._tick or above.position != entry.position - 1:
                return
            above.tick, above.used_at = self._tick, self.now
            self._offer(parent, above)
            entry, parent = above, above.parent

    def check_invariants(self) -> None:
        children: dict[tuple[BlockKey, int], int] = {}
        for entry in self._entries.values():
            if entry.parent is not None:
                place = (entry.parent, entry.position - 1)
                children[place] = children.get(place, 0) + 1
        for key, entry in self._entries.items():
            assert entry.children == children.pop((key, entry.position), 0), f"child count of {key.hex()} is off"
        assert children == self._orphans, "children of absent parents are miscounted"
        assert self._sizes == Counter((entry.size_class, entry.account) for entry in self._entries.values())
        for size_class, account in self._sizes:
            listed = {(rank, key) for rank, key in self._heaps.get(size_class, {}).get(account, [])}
            for key, entry in self._entries.items():
                if (entry.size_class, entry.account) == (size_class, account) and self._is_evictable(entry):
                    assert (entry.rank, key) in listed, f"{key.hex()} is evictable but would never be found"
