"""A table named by nodes, engines, tenants or requests, of which only the latest are kept.

Names come and go for as long as a service runs: Ray gives every start of a node a new id, pods get new addresses.
What is kept for each of them is a memory of earlier experience, never the truth, so the name that was used longest ago
may go.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

NODES_MAX = 1024  # remembered by one node: as many as it deals with at a time, not as many as there ever were


class Recent(Generic[K, V]):
    """At most `limit` entries; the one used longest ago makes room, and `on_drop` gets its value."""

    def __init__(self, limit: int, on_drop: Callable[[V], None] | None = None) -> None:
        assert limit > 0
        self._limit = limit
        self._on_drop = on_drop
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[K]:
        """The names, that used longest ago first. Not a use."""
        return iter(self._entries)

    def items(self) -> list[tuple[K, V]]:
        """All entries. Not a use."""
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

    def pop(self, name: K) -> V | None:
        """Takes the entry out; it is the caller's then."""
        return self._entries.pop(name, None)
