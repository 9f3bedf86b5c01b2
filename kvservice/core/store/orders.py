"""In which order the leaves of a cache go: the longest unused first, those that S3-FIFO would not hold, or those with
the least worth.

An order holds entries of stretches that were leaves when they were put in, and checks them when they come to the top.
So whoever makes a stretch a leaf, or moves it to another group, puts it in again; nobody takes one out. All orders are
total, so the same history always chooses the same victim. Pure.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

from kvservice.core.store.kinds import KINDS
from kvservice.core.store.stretches import GARBAGE_MIN, Group, IsLeaf, Rank, Stretch
from kvservice.core.store.worths import AGES

_Entry = tuple[int, int, int, Stretch]  # (tick, precedence, number, stretch)


def _entry_of(stretch: Stretch) -> _Entry:
    return (stretch.group.tick, stretch.precedence, stretch.number, stretch)


def _drained(heap: Sequence[_Entry]) -> Iterator[_Entry]:
    """The different entries of a heap in their order. Whoever wants few of them pays for few."""
    left, last = list(heap), None
    while left:
        entry = heapq.heappop(left)
        if entry != last:
            last = entry
            yield entry


class ByAge:
    """The least recently used leaf goes first."""

    def __init__(self, is_leaf: IsLeaf) -> None:
        self._is_leaf = is_leaf
        self._heap: list[_Entry] = []
        self._sweep_at = GARBAGE_MIN

    def put(self, stretch: Stretch) -> None:
        heapq.heappush(self._heap, _entry_of(stretch))
        if len(self._heap) > self._sweep_at:
            self._heap = sorted({entry for entry in self._heap if self._is_true(entry)})
            self._sweep_at = max(2 * len(self._heap), GARBAGE_MIN)

    def put_older(self, stretch: Stretch) -> None:
        """Its group has reached its next age, which changes nothing here."""

    def first(self) -> Stretch | None:
        heap = self._heap
        while heap:
            if self._is_true(heap[0]):
                return heap[0][3]
            heapq.heappop(heap)
        return None

    def drop_first(self) -> None:
        heapq.heappop(self._heap)

    def rank(self, stretch: Stretch) -> Rank:
        return (0.0, 0, *_entry_of(stretch)[:3])

    def in_order(self) -> Iterator[Stretch]:
        return (entry[3] for entry in _drained(self._heap) if self._is_true(entry))

    def _is_true(self, entry: _Entry) -> bool:
        tick, precedence, _, stretch = entry
        return tick == stretch.group.tick and precedence == stretch.precedence and self._is_leaf(stretch)


class ByFifo:
    """Leaves that the shadow of S3-FIFO does not hold, or not whole, go before the others. Within both parts the least
    recently used leaf goes first. The shadow is as large as the pool and is asked for the same blocks. Put a leaf in
    again when the shadow evicts some of it."""

    def __init__(self, is_leaf: IsLeaf) -> None:
        self._gone = ByAge(lambda stretch: not _is_kept(stretch) and is_leaf(stretch))
        self._kept = ByAge(lambda stretch: _is_kept(stretch) and is_leaf(stretch))

    def put(self, stretch: Stretch) -> None:
        self._part_of(stretch).put(stretch)

    def put_older(self, stretch: Stretch) -> None:
        """Its group has reached its next age, which changes nothing here."""

    def first(self) -> Stretch | None:
        return self._gone.first() or self._kept.first()

    def drop_first(self) -> None:
        (self._gone if self._gone.first() else self._kept).drop_first()

    def rank(self, stretch: Stretch) -> Rank:
        return (0.0, int(_is_kept(stretch)), *_entry_of(stretch)[:3])

    def in_order(self) -> Iterator[Stretch]:
        return itertools.chain(self._gone.in_order(), self._kept.in_order())

    def _part_of(self, stretch: Stretch) -> ByAge:
        return self._kept if _is_kept(stretch) else self._gone


def _is_kept(stretch: Stretch) -> bool:
    return stretch.shadow_fifo == len(stretch.keys)


class ByWorth:
    """The leaf with the least worth goes first. Leaves of one kind and age lie in one cell, so when the worths of a
    kind change only its cells are sorted again. What the running prompt uses goes last."""

    def __init__(self, is_leaf: IsLeaf, table: Sequence[Sequence[float]]) -> None:
        self._is_leaf = is_leaf
        self._table = table
        self._cells: dict[int, dict[int, list[_Entry]]] = {}  # by kind, then by age
        # (worth, number) of each cell; of cells with equal worth, the oldest goes first. An entry whose worth is
        # outdated is dropped when it comes to the top.
        self._tops: list[tuple[float, int]] = []
        self._count = 0  # entries of cells
        self._sweep_at = self._sort_at = GARBAGE_MIN

    def put(self, stretch: Stretch) -> None:
        group = stretch.group
        if not stretch.is_tip:  # so that it is put in again when the group is older
            stretch.is_tip = True
            group.tips.append(stretch)
        self._push(group, _entry_of(stretch))

    def put_older(self, stretch: Stretch) -> None:
        """Its group has just reached its next age. So have all that were used before it: the cell that it lay in has
        no more of them."""
        group = stretch.group
        tick = group.tick
        of_kind = self._cells.get(group.kind)
        left = None if of_kind is None else of_kind.get(group.age - 1)
        while left and left[0][0] <= tick:
            heapq.heappop(left)
            self._count -= 1
        self._push(group, (tick, stretch.precedence, stretch.number, stretch))

    def _push(self, group: Group, entry: _Entry) -> None:
        kind, age = group.kind, group.age
        of_kind = self._cells.get(kind)
        if of_kind is None:
            of_kind = self._cells[kind] = {}
        heap = of_kind.get(age)
        if heap is None:
            heap = of_kind[age] = []
            heapq.heappush(self._tops, (self._worth(kind, age), _number(kind, age)))
        heapq.heappush(heap, entry)
        self._count += 1
        if self._count > self._sweep_at:
            self.sweep()

    def first(self) -> Stretch | None:
        tops = self._tops
        while tops:
            worth, number = tops[0]
            kind, age = number % KINDS, AGES - number // KINDS
            heap = self._cells[kind].get(age) if kind in self._cells else None
            if heap is not None and worth == self._worth(kind, age):
                while heap:
                    if self._is_true(heap[0], kind, age):
                        return heap[0][3]
                    heapq.heappop(heap)
                    self._count -= 1
                self._drop(kind, age)
            heapq.heappop(tops)
        return None

    def drop_first(self) -> None:
        number = self._tops[0][1]
        heapq.heappop(self._cells[number % KINDS][AGES - number // KINDS])
        self._count -= 1

    def rank(self, stretch: Stretch) -> Rank:
        kind, age = stretch.group.kind, stretch.group.age
        return (self._worth(kind, age), _number(kind, age), *_entry_of(stretch)[:3])

    def in_order(self) -> Iterator[Stretch]:
        for _, number in sorted(self._true_tops()):
            kind, age = number % KINDS, AGES - number // KINDS
            for entry in _drained(self._cells[kind][age]):
                if self._is_true(entry, kind, age):
                    yield entry[3]

    def sort_kind(self, kind: int) -> None:
        """The worths of a kind have changed."""
        for age in self._cells.get(kind, ()):
            heapq.heappush(self._tops, (self._worth(kind, age), _number(kind, age)))
        if len(self._tops) > self._sort_at:
            self._sort()

    def sweep(self) -> None:
        """Take out what is outdated, so that memory stays in proportion to the leaves."""
        self._count = 0
        for kind, of_kind in list(self._cells.items()):
            for age, heap in list(of_kind.items()):
                heap[:] = sorted({entry for entry in heap if self._is_true(entry, kind, age)})
                self._count += len(heap)
                if not heap:
                    self._drop(kind, age)
        self._sweep_at = max(2 * self._count, GARBAGE_MIN)
        self._sort()

    def _drop(self, kind: int, age: int) -> None:
        of_kind = self._cells[kind]
        del of_kind[age]
        if not of_kind:
            del self._cells[kind]

    def _sort(self) -> None:
        self._tops = self._true_tops()
        heapq.heapify(self._tops)
        self._sort_at = max(2 * len(self._tops), GARBAGE_MIN)

    def _true_tops(self) -> list[tuple[float, int]]:
        cells = self._cells.items()
        return [(self._worth(kind, age), _number(kind, age)) for kind, of_kind in cells for age in of_kind]

    def _worth(self, kind: int, age: int) -> float:
        return self._table[kind][age] if age else float("inf")

    def _is_true(self, entry: _Entry, kind: int, age: int) -> bool:
        tick, precedence, _, stretch = entry
        group = stretch.group
        is_here = group.kind == kind and group.age == age
        return is_here and tick == group.tick and precedence == stretch.precedence and self._is_leaf(stretch)


def _number(kind: int, age: int) -> int:
    """Of a cell: smaller for older ones."""
    return (AGES - age) * KINDS + kind
