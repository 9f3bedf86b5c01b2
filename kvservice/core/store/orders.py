"""In which order the leaves of a cache go: the longest unused first, or those with the least worth first.

An order holds entries of stretches that were leaves when they were put in, and checks them when they come to the top.
So whoever makes a stretch a leaf, or moves it to another group, puts it in again; nobody takes one out. Both orders are
total, so the same history always chooses the same victim. Pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from kvservice.core.store.kinds import KINDS
from kvservice.core.store.stretches import GARBAGE_MIN, IsLeaf, Rank, Stretch
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


class ByWorth:
    """The leaf with the least worth goes first. Leaves of one kind and age lie in one cell, so when the worths change
    only the cells are sorted again. What the running prompt uses goes last."""

    def __init__(self, is_leaf: IsLeaf, table: Sequence[Sequence[float]]) -> None:
        self._is_leaf = is_leaf
        self._table = table
        self._cells: dict[int, list[_Entry]] = {}  # by age and kind; of cells with equal worth, the oldest goes first
        self._tops: list[tuple[float, int]] = []  # (worth, cell) of each cell with entries
        self._count = 0  # entries
        self._sweep_at = GARBAGE_MIN

    def put(self, stretch: Stretch) -> None:
        group = stretch.group
        if not stretch.is_tip:  # so that it is put in again when the group is older
            stretch.is_tip = True
            group.tips.append(stretch)
        cell = (AGES - group.age) * KINDS + group.kind
        heap = self._cells.get(cell)
        if heap is None:
            heap = self._cells[cell] = []
            heapq.heappush(self._tops, (self._worth(cell), cell))
        heapq.heappush(heap, _entry_of(stretch))
        self._count += 1
        if self._count > self._sweep_at:
            self.sweep()

    def first(self) -> Stretch | None:
        tops = self._tops
        while tops:
            cell = tops[0][1]
            heap = self._cells[cell]
            while heap:
                if self._is_true(heap[0], cell):
                    return heap[0][3]
                heapq.heappop(heap)
                self._count -= 1
            heapq.heappop(tops)
            del self._cells[cell]
        return None

    def drop_first(self) -> None:
        heapq.heappop(self._cells[self._tops[0][1]])
        self._count -= 1

    def rank(self, stretch: Stretch) -> Rank:
        cell = (AGES - stretch.group.age) * KINDS + stretch.group.kind
        return (self._worth(cell), cell, *_entry_of(stretch)[:3])

    def in_order(self) -> Iterator[Stretch]:
        for _, cell in sorted(self._tops):
            for entry in _drained(self._cells[cell]):
                if self._is_true(entry, cell):
                    yield entry[3]

    def sort_cells(self) -> None:
        """The table of worths has changed."""
        self._tops = [(self._worth(cell), cell) for cell in self._cells]
        heapq.heapify(self._tops)

    def sweep(self) -> None:
        """Take out what is outdated, so that memory stays in proportion to the leaves."""
        cells = self._cells
        for cell, heap in cells.items():
            heap[:] = sorted({entry for entry in heap if self._is_true(entry, cell)})
        self._cells = {cell: heap for cell, heap in cells.items() if heap}
        self._count = sum(map(len, self._cells.values()))
        self._sweep_at = max(2 * self._count, GARBAGE_MIN)
        self.sort_cells()

    def _worth(self, cell: int) -> float:
        age, kind = AGES - cell // KINDS, cell % KINDS
        return self._table[kind][age] if age else float("inf")

    def _is_true(self, entry: _Entry, cell: int) -> bool:
        tick, precedence, _, stretch = entry
        group = stretch.group
        is_here = (AGES - group.age) * KINDS + group.kind == cell
        return is_here and tick == group.tick and precedence == stretch.precedence and self._is_leaf(stretch)
