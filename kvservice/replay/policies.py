"""Textbook eviction policies to compare with, behind the shard's interface. Production never runs them.

They know no secondary copies, sizes or tenants: one node, one model. Pure.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence

from kvservice.core.block.tenants import NOBODY
from kvservice.core.store.eviction import POLICIES as OURS
from kvservice.core.store.eviction import EvictionPolicy
from kvservice.units import BlockKey


class _Flat:
    """The bookkeeping that policies without links between blocks share. Subclasses order the blocks."""

    def __init__(self) -> None:
        self._pinned: set[BlockKey] = set()
        self._used_at: dict[BlockKey, float] = {}

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
        self._used_at[key] = now
        self._on_insert(key)

    def remove(self, key: BlockKey) -> None:
        del self._used_at[key]
        self._on_evict(key)

    def touch(self, chain: Sequence[BlockKey], now: float) -> None:
        for key in chain:
            if key in self._used_at:
                self._used_at[key] = now
                self._on_hit(key)

    def pin(self, keys: Collection[BlockKey]) -> None:
        self._pinned.update(keys)

    def unpin(self, keys: Collection[BlockKey]) -> None:
        self._pinned.difference_update(keys)

    def last_touch(self, key: BlockKey) -> int:
        return int(self._used_at[key] * 1000)

    def used_at(self, key: BlockKey) -> float:
        return self._used_at[key]

    def uses(self, key: BlockKey) -> int:
        return 0

    def coldest(self, count: int) -> list[BlockKey]:
        return [key for key in self._used_at if key not in self._pinned][:count]

    def make_primary(self, key: BlockKey) -> None:
        pass

    def parent_of(self, key: BlockKey) -> BlockKey | None:
        return None

    def by_heat(self) -> list[BlockKey]:
        return sorted(self._used_at, key=lambda key: -self._used_at[key])

    def _on_insert(self, key: BlockKey) -> None:
        raise NotImplementedError

    def _on_hit(self, key: BlockKey) -> None:
        raise NotImplementedError

    def _on_evict(self, key: BlockKey) -> None:
        raise NotImplementedError


class PlainLru(_Flat):
    """Evicts the least recently used block, even if other blocks depend on it."""

    def __init__(self) -> None:
        super().__init__()
        self._order: OrderedDict[BlockKey, None] = OrderedDict()

    def victim(self, size_class: int | None, may_go: Callable[[str], bool] | None = None) -> BlockKey | None:
        return next((key for key in self._order if key not in self._pinned), None)

    def _on_insert(self, key: BlockKey) -> None:
        self._order[key] = None

    def _on_hit(self, key: BlockKey) -> None:
        self._order.move_to_end(key)

    def _on_evict(self, key: BlockKey) -> None:
        del self._order[key]


# Share of the blocks in the small queue: the paper's 10 %.
SMALL_SHARE = 0.1
# Uses that are counted for a block: the paper's two bits. More uses do not keep it longer.
FREQUENCY_MAX = 3


class S3Fifo(_Flat):
    """Three FIFO queues (Yang et al., SOSP 2023). New blocks enter a small queue, and move to the main one if they are
    used there."""

    def __init__(self) -> None:
        super().__init__()
        self._small: deque[BlockKey] = deque()
        self._main: deque[BlockKey] = deque()
        self._queue_of: dict[BlockKey, deque[BlockKey]] = {}
        self._small_count = 0
        self._uses: dict[BlockKey, int] = {}
        self._evicted: OrderedDict[BlockKey, None] = OrderedDict()

    def victim(self, size_class: int | None, may_go: Callable[[str], bool] | None = None) -> BlockKey | None:
        # Each pass moves one block on. No block is passed by more often than its uses and its pins allow.
        for _ in range((FREQUENCY_MAX + 2) * len(self._queue_of) + len(self._small) + len(self._main)):
            from_small = bool(self._small) and (not self._main or self._small_count > SMALL_SHARE * len(self._queue_of))
            queue = self._small if from_small else self._main
            if not queue:
                return None
            key = queue[0]
            if self._queue_of.get(key) is not queue:
                queue.popleft()  # the block was removed
            elif key in self._pinned:
                queue.rotate(-1)
            elif self._uses[key]:
                queue.popleft()
                self._uses[key] = 0 if from_small else self._uses[key] - 1
                self._enter(key, self._main)
            else:
                return key
        return None

    def _enter(self, key: BlockKey, queue: deque[BlockKey]) -> None:
        self._small_count += (queue is self._small) - (self._queue_of.get(key) is self._small)
        self._queue_of[key] = queue
        queue.append(key)

    def _on_insert(self, key: BlockKey) -> None:
        self._uses[key] = 0
        known = key in self._evicted
        self._evicted.pop(key, None)
        self._enter(key, self._main if known else self._small)

    def _on_hit(self, key: BlockKey) -> None:
        self._uses[key] = min(self._uses[key] + 1, FREQUENCY_MAX)

    def _on_evict(self, key: BlockKey) -> None:
        queue = self._queue_of.pop(key)
        del self._uses[key]
        if queue and queue[0] == key:
            queue.popleft()
        else:
            queue.remove(key)
        if queue is self._small:
            self._small_count -= 1
            self._evicted[key] = None
            while len(self._evicted) > len(self._queue_of) + 1:
                self._evicted.popitem(last=False)


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {**OURS, "plain-lru": PlainLru, "s3-fifo": S3Fifo}
