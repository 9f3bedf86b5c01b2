"""What the shard asks of an eviction policy, and the policy `lru`: leaves first, then the longest unused.

Only a block without resident children can be a victim, so a prefix is never evicted before its suffix. Among the
candidates, secondary copies go first, because another node has the primary copy. Next is the block that has waited
longest since its last use. Last, the deepest position goes first, which keeps the order right for blocks whose parent
is not known (adopted after a restart). Blocks of window groups have neither parent nor children, and only those at the
end of a hit are touched.

Time is counted in prompts, not in seconds, so an idle night ages nothing.

Each size and tenant has a lazy heap. An entry is pushed when a block becomes evictable or its rank changes, and checked
when it is popped. Choosing a victim looks at the top of each heap. The default policy is core.store.worth. Pure.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvservice.core.block.tenants import NOBODY
from kvservice.core.block.window_groups import WINDOW_BIT
from kvservice.core.store.kinds import Expected
from kvservice.core.store.worth import GuardedWorth, RuleState
from kvservice.units import BlockKey


class EvictionPolicy(Protocol):
    """What core.store.blocks asks of a policy. All methods change only the policy's own state and never block.

    `now` is seconds on the shard's clock, which never goes back.
    """

    def add(
        self,
        key: BlockKey,
        parent: BlockKey | None,
        position: int,
        now: float,
        *,
        is_secondary: bool,
        size_class: int,
        account: str = NOBODY,
    ) -> None: ...

    def remove(self, key: BlockKey) -> None: ...

    def touch(self, chain: Sequence[BlockKey], now: float) -> None:
        """These consecutive blocks of one chain were used. Unknown ones are skipped; parents are learnt."""
        ...

    def pin(self, keys: Collection[BlockKey]) -> None:
        """These blocks are read from now on, and no victims. None of them was pinned."""
        ...

    def unpin(self, keys: Collection[BlockKey]) -> None:
        """The last reader of each of these blocks, which were pinned, has ended."""
        ...

    def victim(self, size_class: int | None, may_go: Callable[[str], bool] | None = None) -> BlockKey | None:
        """The block to evict next, of this size (None: any size). It stays until `remove`.

        `may_go` says of an account whether its blocks may be evicted. Returns None when no block may be, for example
        because each is pinned or has children.
        """
        ...

    def coldest(self, count: int) -> list[BlockKey]:
        """Up to `count` blocks, each as `victim(None)` would name it if those before it were gone. Changes nothing.

        A cleaner asks it several times a second what to write down ahead of need, so it must be cheap.
        """
        ...

    def last_touch(self, key: BlockKey) -> int: ...

    def used_at(self, key: BlockKey) -> float:
        """When the block was used last, in seconds on the clock of `now`."""
        ...

    def uses(self, key: BlockKey) -> int:
        """How often the block was used again, for people. A policy that does not count says 0."""
        ...

    def make_primary(self, key: BlockKey) -> None:
        """The primary copy goes away: this secondary copy is the primary one from now on."""
        ...

    def parent_of(self, key: BlockKey) -> BlockKey | None: ...

    def by_heat(self) -> list[BlockKey]:
        """All blocks, the most recently used first, and each prefix before the blocks that extend it. Sorts."""
        ...


@runtime_checkable
class SelfExplaining(Protocol):
    """What a policy may have as well, for people."""

    def reason(self, key: BlockKey) -> int:
        """Why this block, which `victim` named, goes first; core.store.reasons has the words."""
        ...

    def rule(self) -> RuleState:
        """Which of its rules chooses victims, and what each of them would find."""
        ...


@runtime_checkable
class Hintable(Protocol):
    """What a policy may have as well, to use hints of clients."""

    def expect(self, expected: Expected) -> None:
        """The client of the next prompt, with which `touch` is called now, expects this of it."""
        ...


_Rank = tuple[bool, int, int]


@dataclass(slots=True)
class _KnownBlock:
    parent: BlockKey | None  # None: the first of a chain, or not known
    position: int
    is_secondary: bool
    size_class: int
    account: str
    tick: int  # logical time of the last touch
    used_at: float  # the same in seconds
    children: int = 0  # resident blocks that name this one as parent

    @property
    def rank(self) -> _Rank:
        # Of a window group's blocks, the earlier ones serve only shorter hits, so they are evicted first.
        order = self.position - 2 * WINDOW_BIT if self.position >= WINDOW_BIT else -self.position
        return (not self.is_secondary, self.tick, order)


_Heap = list[tuple[_Rank, BlockKey]]


class LeafFirstLru:
    """The least recently used leaf goes first, however often it was used."""

    def __init__(self) -> None:
        self._entries: dict[BlockKey, _KnownBlock] = {}
        self._heaps: dict[int, dict[str, _Heap]] = {}  # by size, then by account
        self._sizes: Counter[tuple[int, str]] = Counter()  # blocks of each size and account
        # Children of blocks that are not resident, by the parent's key and position. They are linked when the parent
        # comes, but only at that position: otherwise two blocks could be each other's parent and never be evicted.
        self._orphans: dict[tuple[BlockKey, int], int] = {}
        self._pinned: set[BlockKey] = set()
        self._parked: set[BlockKey] = set()  # pinned blocks without children whose heap entry was dropped
        self._tick = 0

    def add(
        self,
        key: BlockKey,
        parent: BlockKey | None,
        position: int,
        now: float,
        *,
        is_secondary: bool,
        size_class: int,
        account: str = NOBODY,
    ) -> None:
        assert key not in self._entries
        above = self._entries.get(parent) if parent is not None else None
        if above is None or above.tick != self._tick:  # all blocks of one prompt get the same tick
            self._tick += 1
        entry = _KnownBlock(None, position, is_secondary, size_class, account, self._tick, now)
        self._sizes[size_class, account] += 1
        entry.children = self._orphans.pop((key, position), 0)
        self._entries[key] = entry
        self._link(entry, parent)
        self._touch_ancestors(entry)
        self._offer(key, entry)

    def remove(self, key: BlockKey) -> None:
        assert key not in self._pinned
        entry = self._entries.pop(key)
        self._unlink(entry)
        place = (entry.size_class, entry.account)
        self._sizes[place] -= 1
        if not self._sizes[place]:  # so that tenants without blocks cost nothing
            del self._sizes[place]
            self._heaps.get(entry.size_class, {}).pop(entry.account, None)
        if entry.children:
            self._orphans[key, entry.position] = entry.children

    def touch(self, chain: Sequence[BlockKey], now: float) -> None:
        self._tick += 1
        tick, entries = self._tick, self._entries  # once: a chain has thousands of blocks, and each hit touches one
        previous: BlockKey | None = None
        for key in chain:
            entry = entries.get(key)
            if entry is not None:
                entry.tick, entry.used_at = tick, now
                if entry.parent is None and previous is not None:
                    self._link(entry, previous)
                if not entry.children:
                    self._offer(key, entry)
            previous = key

    def pin(self, keys: Collection[BlockKey]) -> None:
        self._pinned.update(keys)

    def unpin(self, keys: Collection[BlockKey]) -> None:
        self._pinned.difference_update(keys)
        for key in [key for key in keys if key in self._parked] if self._parked else ():
            self._parked.discard(key)
            self._offer(key, self._entries[key])

    def victim(self, size_class: int | None, may_go: Callable[[str], bool] | None = None) -> BlockKey | None:
        best: tuple[_Rank, BlockKey] | None = None
        for heap in self._heaps_of(size_class, may_go):
            if self._clean_top(heap):
                best = heap[0] if best is None or heap[0] < best else best
        return None if best is None else best[1]

    def coldest(self, count: int) -> list[BlockKey]:
        sources = list(self._heaps_of(None, None))
        found: dict[BlockKey, None] = {}
        left: dict[BlockKey, int] = {}  # for parents of blocks in `found`: children that are not in it
        popped: list[tuple[_Heap, tuple[_Rank, BlockKey]]] = []
        queue: list[tuple[_Rank, BlockKey, int]] = []  # (rank, key, source; -1 = its last child was found)

        def put_top_of(source: int) -> None:
            heap = sources[source]
            if self._clean_top(heap):
                popped.append((heap, heapq.heappop(heap)))
                heapq.heappush(queue, (*popped[-1][1], source))

        for source in range(len(sources)):
            put_top_of(source)
        while queue and len(found) < count:
            _, key, source = heapq.heappop(queue)
            if source >= 0:
                put_top_of(source)
            if key in found:
                continue
            found[key] = None
            entry = self._entries[key]
            above = None if entry.parent is None else self._entries.get(entry.parent)
            if entry.parent is not None and above is not None and above.position == entry.position - 1:
                left[entry.parent] = left.get(entry.parent, above.children) - 1
                if not left[entry.parent] and entry.parent not in self._pinned:
                    heapq.heappush(queue, (above.rank, entry.parent, -1))
        for heap, item in popped:
            heapq.heappush(heap, item)
        return list(found)

    def _heaps_of(self, size_class: int | None, may_go: Callable[[str], bool] | None) -> Iterator[_Heap]:
        """Each heap of this size, or of any, whose account may lose blocks."""
        for size in list(self._heaps) if size_class is None else [size_class]:
            for account, heap in self._heaps.get(size, {}).items():
                if may_go is None or may_go(account):
                    yield heap

    def _clean_top(self, heap: _Heap) -> bool:
        """Drop what is outdated or pinned from the top of a heap. Pinned blocks come back when they are unpinned, so a
        chain that is read costs the heaps nothing. Returns whether anything is left."""
        while heap:
            rank, key = heap[0]
            if self._is_true(rank, key):
                if key not in self._pinned:
                    return True
                self._parked.add(key)
            heapq.heappop(heap)
        return False

    def _is_true(self, rank: _Rank, key: BlockKey) -> bool:
        """Whether a heap's entry is up to date. A block that was evicted and is back has a later tick."""
        entry = self._entries.get(key)
        return entry is not None and entry.rank == rank and not entry.children

    def last_touch(self, key: BlockKey) -> int:
        return self._entries[key].tick

    def used_at(self, key: BlockKey) -> float:
        return self._entries[key].used_at

    def uses(self, key: BlockKey) -> int:
        return 0

    def make_primary(self, key: BlockKey) -> None:
        entry = self._entries[key]
        entry.is_secondary = False
        self._offer(key, entry)

    def parent_of(self, key: BlockKey) -> BlockKey | None:
        return self._entries[key].parent

    def by_heat(self) -> list[BlockKey]:
        entries = self._entries
        return sorted(entries, key=lambda key: (-entries[key].tick, entries[key].position))

    def _offer(self, key: BlockKey, entry: _KnownBlock) -> None:
        if entry.children:
            return
        heap = self._heaps.setdefault(entry.size_class, {}).setdefault(entry.account, [])
        heapq.heappush(heap, (entry.rank, key))
        if len(heap) > 64 + 4 * self._sizes[entry.size_class, entry.account]:
            # Touches leave outdated entries behind; this keeps memory in proportion to the blocks.
            heap[:] = dict.fromkeys(item for item in heap if self._is_true(*item))
            heapq.heapify(heap)

    def _link(self, entry: _KnownBlock, parent: BlockKey | None) -> None:
        above = self._entries.get(parent) if parent is not None else None
        if parent is None or entry.position >= WINDOW_BIT:
            return
        if above is not None and above.position != entry.position - 1:
            return  # not a chain: a link could close a circle, which would never be evicted
        entry.parent = parent
        if above is not None:
            above.children += 1
        else:
            place = (parent, entry.position - 1)
            self._orphans[place] = self._orphans.get(place, 0) + 1

    def _unlink(self, entry: _KnownBlock) -> None:
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

    def _touch_ancestors(self, entry: _KnownBlock) -> None:
        # A new leaf makes its whole prefix as recent as itself. An engine that has the prefix in its own cache never
        # asks us for it, but without it the leaf cannot be used. Stops at the first ancestor touched already.
        parent, used_at = entry.parent, entry.used_at
        while parent is not None:
            above = self._entries.get(parent)
            if above is None or above.tick == self._tick or above.position != entry.position - 1:
                return
            above.tick, above.used_at = self._tick, used_at
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
        assert self._parked <= self._pinned <= self._entries.keys(), "a block is held back that is not pinned, or gone"
        for size_class, account in self._sizes:
            listed = set(self._heaps.get(size_class, {}).get(account, []))
            for key, entry in self._entries.items():
                if (entry.size_class, entry.account) == (size_class, account) and not entry.children:
                    assert key in self._parked or (entry.rank, key) in listed, (
                        f"{key.hex()} is evictable but would never be found"
                    )


# By the setting `eviction`.
POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"default": GuardedWorth, "lru": LeafFirstLru}
