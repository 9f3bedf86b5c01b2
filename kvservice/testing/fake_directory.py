"""A directory in this process, for tests: what one node announces, every node of the same `FakeLookup` finds at once.

No RPC, no heartbeat, no partition. `is_down` makes it answer like a lookup service that nobody can reach.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvservice.core.actions import Announce, Retract
from kvservice.core.messages import Holder, HolderRun
from kvservice.lookup.client import LookupAnswer, merge_runs
from kvservice.pool.remote import Heard
from kvservice.units import BlockKey, NodeId, SpanRoute


class FakeLookup:
    """Satisfies pool.remote.LookupPort. All nodes share one."""

    def __init__(self) -> None:
        self.is_down = False
        self._nodes: dict[NodeId, Holder] = {}
        self._blocks: dict[BlockKey, set[NodeId]] = {}
        self._listeners: list[Heard] = []

    async def resolve(
        self, chain: Sequence[BlockKey], start: int, timeout: float, exclude: NodeId | None = None
    ) -> LookupAnswer:
        if self.is_down:
            return LookupAnswer((), False)
        found = [(index, self._holders(chain[index])) for index in range(start, len(chain))]
        return LookupAnswer(merge_runs([HolderRun(index, 1, held) for index, held in found if held], exclude), True)

    async def find_node(self, node_id: NodeId, timeout: float) -> Holder | None:
        return None if self.is_down else self._nodes.get(node_id)

    async def members(self, timeout: float) -> list[Holder]:
        return [] if self.is_down else list(self._nodes.values())

    async def holders_of(
        self, blocks: Sequence[tuple[BlockKey, SpanRoute]], timeout: float
    ) -> dict[BlockKey, tuple[Holder, ...]]:
        return {} if self.is_down else {key: self._holders(key) for key, _ in blocks}

    def _holders(self, key: BlockKey) -> tuple[Holder, ...]:
        """Sorted by name, so that runs of the same holders are equal."""
        return tuple(self._nodes[node] for node in sorted(self._blocks.get(key, ())))

    def listen(self, heard: Heard) -> None:
        self._listeners.append(heard)
        for node in self._nodes.values():
            heard(node, True)

    def _tell(self, node: Holder, is_here: bool) -> None:
        for heard in self._listeners:
            heard(node, is_here)

    # -- called by its nodes ----

    def join(self, node: Holder) -> None:
        self._nodes[node.node_id] = node
        self._tell(node, True)

    def add(self, key: BlockKey, node: Holder) -> None:
        """Ignored for a node that left."""
        if node.node_id in self._nodes:
            self._blocks.setdefault(key, set()).add(node.node_id)

    def remove(self, key: BlockKey, node: Holder) -> None:
        self._blocks.get(key, set()).discard(node.node_id)

    def forget(self, node: Holder) -> None:
        if self._nodes.pop(node.node_id, None) is not None:
            self._tell(node, False)
        for nodes in self._blocks.values():
            nodes.discard(node.node_id)


class FakeDirectory:
    """Satisfies pool.remote.DirectoryPort for one node, which is a member until it leaves."""

    def __init__(self, lookup: FakeLookup, node: Holder) -> None:
        self.lookup = lookup
        self._node = node
        lookup.join(node)

    def tell(self, changes: Sequence[Announce | Retract]) -> None:
        for change in changes:
            (self.lookup.add if isinstance(change, Announce) else self.lookup.remove)(change.key, self._node)

    async def leave(self) -> None:
        self.lookup.forget(self._node)

    def self_holder(self) -> Holder | None:
        return self._node

    def listen(self, heard: Heard) -> None:
        self.lookup.listen(heard)
