"""A table named by nodes, engines, tenants or requests that keeps only the entries used last.

New names appear for as long as a service runs: Ray gives a node a new id at every start, and pods get new addresses.
What is kept for a name is earlier experience and can be learnt again, so the entry used longest ago may be dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

# A node deals with at most so many others at a time. With more, what is dropped is measured again.
NODES_MAX = 1024


class BoundedTable(Generic[K, V]):
    """At most `limit` entries. A new one replaces the entry used longest ago, and `on_drop` gets that one's value."""

    def __init__(self, limit: int, on_drop: Callable[[V], None] | None = None) -> None:
        assert limit > 0
        self._limit = limit
        self._on_drop = on_drop
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[K]:
        """The names, the one used longest ago first. Does not count as a use."""
        return iter(self._entries)

    def items(self) -> list[tuple[K, V]]:
        """All entries. Does not count as a use."""
        return list(self._entries.items())

    def get(self, name: K) -> V | None:
        """Counts as a use."""
        if name not in self._entries:
            return None
        self._entries.move_to_end(name)
        return self._entries[name]

    def put(self, name: K, value: V) -> V:
        """Counts as a use. Returns the value."""
        self._entries[name] = value
        self._entries.move_to_end(name)
        if len(self._entries) > self._limit:
            _, dropped = self._entries.popitem(last=False)
            if self._on_drop is not None:
                self._on_drop(dropped)
        return value

    def clear(self) -> None:
        """Remove all entries. `on_drop` is not called."""
        self._entries.clear()

    def pop(self, name: K) -> V | None:
        """Remove and return the entry. `on_drop` is not called."""
        return self._entries.pop(name, None)
