"""An eviction policy of another package: the prompt that was stored first goes first, however often it was used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass

from kvservice.units import BlockKey


@dataclass
class _Stored:
    parent: BlockKey | None
    number: int  # the order in which blocks were stored
    is_secondary: bool
    size_class: int
    account: str
    used_at: float
    touch: int  # the order in which blocks were used
    is_pinned: bool = False


class FirstIn:
    """Looks at every block for each victim. A policy for large pools keeps them in order."""

    interface_version = 1

    def __init__(self) -> None:
        self._blocks: dict[BlockKey, _Stored] = {}
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
        account: str = "",
    ) -> None:
        self._tick += 1
        self._blocks[key] = _Stored(parent, self._tick, is_secondary, size_class, account, now, self._tick)

    def remove(self, key: BlockKey) -> None:
        del self._blocks[key]

    def touch(self, chain: Sequence[BlockKey], now: float) -> None:
        self._tick += 1
        for key in chain:
            if key in self._blocks:
                self._blocks[key].used_at, self._blocks[key].touch = now, self._tick

    def pin(self, keys: Collection[BlockKey]) -> None:
        for key in keys:
            self._blocks[key].is_pinned = True

    def unpin(self, keys: Collection[BlockKey]) -> None:
        for key in keys:
            self._blocks[key].is_pinned = False

    def victim(self, size_class: int | None, may_go: Callable[[str], bool] | None = None) -> BlockKey | None:
        return self._next(set(), size_class, may_go)

    def coldest(self, count: int) -> list[BlockKey]:
        found: dict[BlockKey, None] = {}
        while len(found) < count and (key := self._next(found.keys(), None, None)) is not None:
            found[key] = None
        return list(found)

    def _next(
        self, gone: Set[BlockKey], size_class: int | None, may_go: Callable[[str], bool] | None
    ) -> BlockKey | None:
        """The victim, if the blocks in `gone` were evicted already."""
        parents = {block.parent for key, block in self._blocks.items() if key not in gone}

        def can_go(key: BlockKey, block: _Stored) -> bool:
            fits = key not in gone and (size_class is None or block.size_class == size_class)
            return fits and not block.is_pinned and key not in parents and (may_go is None or may_go(block.account))

        candidates = [key for key, block in self._blocks.items() if can_go(key, block)]
        return min(candidates, key=self._turn, default=None)

    def last_touch(self, key: BlockKey) -> int:
        return self._blocks[key].touch

    def uses(self, key: BlockKey) -> int:
        return 0

    def used_at(self, key: BlockKey) -> float:
        return self._blocks[key].used_at

    def make_primary(self, key: BlockKey) -> None:
        self._blocks[key].is_secondary = False

    def parent_of(self, key: BlockKey) -> BlockKey | None:
        return self._blocks[key].parent

    def by_heat(self) -> list[BlockKey]:
        return sorted(self._blocks, key=lambda key: (-self._blocks[key].touch, self._blocks[key].number))

    def _turn(self, key: BlockKey) -> tuple[bool, int]:
        return (not self._blocks[key].is_secondary, self._blocks[key].number)


class OfTomorrow(FirstIn):
    """Written for an interface that this kvservice does not have."""

    interface_version = 2


class Half:
    """Lacks every method."""

    interface_version = 1
