"""How a service moves: rates between two overviews of it, and their history. Pure.

NodeRates come from the counters of the shards. A node that restarted or was away has no rate until its second reading.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvservice.client.overview import NodeOverview, Overview

HISTORY_MAX = 240  # readings that sparklines show: four minutes of one a second


@dataclass(frozen=True, slots=True)
class NodeRates:
    """What happened between two readings, in one second."""

    asked_blocks: float = 0.0
    hit_local_blocks: float = 0.0
    hit_remote_blocks: float = 0.0
    hit_bytes: float = 0.0
    stored_bytes: float = 0.0
    fetched_bytes: float = 0.0
    served_bytes: float = 0.0
    acquires: float = 0.0
    evicted_blocks: float = 0.0
    hit_tier_blocks: float = 0.0

    @property
    def hit_rate(self) -> float | None:
        """Of the asked blocks, 0 to 1; None when none was asked."""
        if not self.asked_blocks:
            return None
        return (self.hit_local_blocks + self.hit_remote_blocks + self.hit_tier_blocks) / self.asked_blocks


NO_RATES = NodeRates()


@dataclass(frozen=True, slots=True)
class _Reading:
    at: float
    epoch: int
    counts: dict[str, int]


class Trends:
    """Add each overview as it is read. `rates` and `history` are then of the latest ones."""

    def __init__(self) -> None:
        self._last: dict[str, _Reading] = {}
        self._rates: dict[str, NodeRates] = {}
        self._history: deque[NodeRates] = deque(maxlen=HISTORY_MAX)
        self._of_node: dict[str, deque[NodeRates]] = {}

    def add(self, seen: Overview) -> None:
        readings = {node.node_id: _reading(seen.at, node) for node in seen.nodes if node.state != "silent"}
        had_any = bool(self._last)
        self._rates = {}
        for node_id, reading in readings.items():
            before = self._last.get(node_id)
            if before is not None and before.epoch == reading.epoch and reading.at > before.at:
                self._rates[node_id] = _between(before, reading)
        self._last = readings
        if had_any:
            self._history.append(self.total)
            known = {node.node_id for node in seen.nodes}
            self._of_node = {node: kept for node, kept in self._of_node.items() if node in known}
            for node_id in known:
                kept = self._of_node.setdefault(node_id, deque(maxlen=HISTORY_MAX))
                kept.append(self._rates.get(node_id, NO_RATES))

    @property
    def total(self) -> NodeRates:
        """Of all nodes together."""
        return add_rates(self._rates.values())

    def of(self, node_id: str) -> NodeRates:
        return self._rates.get(node_id, NO_RATES)

    def history(self, node_id: str | None = None) -> list[NodeRates]:
        """The oldest first; of one node, or of all together."""
        return list(self._history if node_id is None else self._of_node.get(node_id, ()))


def add_rates(rates: Iterable[NodeRates]) -> NodeRates:
    found = list(rates)
    return NodeRates(*(sum(getattr(one, field.name) for one in found) for field in fields(NodeRates)))


def _reading(at: float, node: NodeOverview) -> _Reading:
    counts = {field.name: node.counters.get(field.name, 0) for field in fields(NodeRates)}
    counts["evicted_blocks"] = node.counters.get("evicted_primary", 0) + node.counters.get("evicted_secondary", 0)
    return _Reading(at, node.epoch, counts)


def _between(before: _Reading, after: _Reading) -> NodeRates:
    seconds = after.at - before.at
    return NodeRates(
        *(max(after.counts[field.name] - before.counts[field.name], 0) / seconds for field in fields(NodeRates))
    )
