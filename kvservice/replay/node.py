"""One simulated node: the real block store (slots, admission, eviction) without bytes, driven as a shard drives it.

The shard adds leases, deadlines, single flight and digests. They change nothing here, where everything takes no time:
`tests/unit/replay` plays one trace through both and compares. Nothing blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvservice.core.acquire.acquisition import longest_run
from kvservice.core.actions import Action, Announce, Retract
from kvservice.core.block.keys import span_route
from kvservice.core.directory.directory import Directory
from kvservice.core.messages import Holder
from kvservice.core.segment.geometry import SLAB_BYTES_MIN, Geometry
from kvservice.core.store.blocks import NO_KEY, BlockStore, Want
from kvservice.core.store.eviction import EvictionPolicy
from kvservice.units import BlockKey, BootEpoch, NodeId, div_ceil

PAYLOAD_BYTES = 4096  # Of a slot. Only the number of slots matters here, so it is the smallest that a slab takes.
WRITER = b"engine".ljust(16, b".")
STORE_BATCH = 64  # Blocks that are reserved and sealed together. An engine also does it in steps.
FAR = 1e18  # Seconds, later than any trace ends: simulated nodes need no heartbeat.


class ReplayNode:
    """One node. `directory` is shared with the other nodes; None means that this node is alone."""

    def __init__(
        self, name: str, capacity: int, policy: EvictionPolicy, directory: ReplayDirectory | None = None
    ) -> None:
        assert capacity > 0
        self.holder = Holder(NodeId(name), f"{name}:1", BootEpoch(1))
        self.counters: Counter[str] = Counter()
        self._directory = directory
        self._actions: list[Action] = []
        geometry = Geometry(
            SLAB_BYTES_MIN, div_ceil(capacity, Geometry(SLAB_BYTES_MIN, 1).slots_per_slab(PAYLOAD_BYTES))
        )
        self._store = BlockStore(geometry, BootEpoch(1), policy, self._actions.append)
        spare = geometry.slab_count * geometry.slots_per_slab(PAYLOAD_BYTES) - capacity
        # A slab has a fixed number of slots. Those beyond the capacity are reserved for good.
        assert len(self._store.reserve(spare, b"beyond the limit", Want(PAYLOAD_BYTES, 0.0)).slots) == spare
        self._actions.clear()
        if directory is not None:
            directory.join(self)

    def __len__(self) -> int:
        return len(self._store)

    def serve(self, keys: tuple[BlockKey, ...], now: float) -> tuple[int, int]:
        """Serve one prompt: acquire the part of its prefix that exists, store the rest. Returns the number of blocks
        that were here, and the number that came from other nodes."""
        self._store.policy.touch(keys, now)
        held: dict[int, BlockKey] = {}
        for index, key in enumerate(keys):
            self._pin(index, key, held)
        local = next((index for index in range(len(keys)) if index not in held), len(keys))
        if self._directory is not None and local < len(keys):
            self._fetch(self._directory, keys, held, now)
        end = next((index for index in range(local, len(keys)) if index not in held), len(keys))
        fetched = self.counters["fetched_now"]
        self.counters["fetched_now"] = 0
        for key in held.values():
            block = self._store.get(key)
            assert block is not None
            self._store.unpin(block.slot)
        self._keep(keys, end, now)
        self._announce(now)
        hits = end - fetched
        self.counters.update(asked=len(keys), local_hits=hits, remote_hits=fetched)
        return hits, fetched

    def lend(self, keys: Sequence[BlockKey], now: float) -> int:
        """Pin blocks for another node that reads them. Returns how many of them, from the first on, are here. They stay
        until `take_back`."""
        self._store.policy.touch(tuple(keys), now)
        for index, key in enumerate(keys):
            block = self._store.get(key)
            if block is None:
                return index
            self._store.pin(block)
        return len(keys)

    def take_back(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            block = self._store.get(key)
            assert block is not None
            self._store.unpin(block.slot)

    def _pin(self, index: int, key: BlockKey, held: dict[int, BlockKey]) -> bool:
        block = self._store.get(key)
        if block is not None:
            self._store.pin(block)
            held[index] = key
        return block is not None

    def _fetch(
        self, directory: ReplayDirectory, keys: tuple[BlockKey, ...], held: dict[int, BlockKey], now: float
    ) -> None:
        """Fetch every missing block up to the first one that no node has, as core.acquire.acquisitions does on a fast
        link."""
        holders = directory.holders(keys, self.holder, now)
        wanted: list[int] = []
        for index in range(len(keys)):
            if index not in held:
                if index not in holders:
                    break
                wanted.append(index)
        start = 0
        while start < len(wanted):
            source, end = longest_run(wanted, start, len(wanted), holders)
            indices = wanted[start:end]
            names = [keys[index] for index in indices]
            lender = directory.node(source)
            lent = lender.lend(names, now)
            slots = self._store.reserve(lent, NO_KEY, Want(PAYLOAD_BYTES, now)).slots
            for index, slot in zip(indices, slots, strict=False):
                parent = keys[index - 1] if index else None
                self._store.seal(slot, keys[index], parent, index, span_route(keys, index), 0, now, is_secondary=True)
                self._pin(index, keys[index], held)
                self.counters["fetched_now"] += 1
            lender.take_back(names[:lent])
            if len(slots) < len(indices):
                return
            start = end

    def _keep(self, keys: tuple[BlockKey, ...], start: int, now: float) -> None:
        """Store the blocks that the engine computed."""
        for first in range(start, len(keys), STORE_BATCH):
            indices = range(first, min(first + STORE_BATCH, len(keys)))
            slots = self._store.reserve(len(indices), WRITER, Want(PAYLOAD_BYTES, now)).slots
            self.counters["not_reserved"] += len(indices) - len(slots)
            for index, slot in zip(indices, slots, strict=False):
                if keys[index] in self._store:  # the block lies behind a gap in the prefix
                    self._store.abort(slot)
                else:
                    parent = keys[index - 1] if index else None
                    self._store.seal(
                        slot, keys[index], parent, index, span_route(keys, index), 0, now, is_secondary=False
                    )
            if len(slots) < len(indices):
                return

    def _announce(self, now: float) -> None:
        if self._directory is not None:
            words: dict[BlockKey, bool] = {}
            for action in self._actions:
                if isinstance(action, Announce | Retract):
                    words[action.key] = isinstance(action, Announce)
            self._directory.tell(self.holder, words, now)
        self._actions.clear()

    def counted(self) -> dict[str, int]:
        return dict(self.counters + self._store.counters)

    def check_invariants(self) -> None:
        self._store.check_invariants()


class ReplayDirectory:
    """All lookup partitions as one directory that learns of every change at once."""

    def __init__(self) -> None:
        self.directory = Directory(hide_seconds=FAR, forget_seconds=2 * FAR)
        self._nodes: dict[NodeId, ReplayNode] = {}
        self._sequences: Counter[NodeId] = Counter()

    def join(self, node: ReplayNode) -> None:
        self._nodes[node.holder.node_id] = node
        self._sequences[node.holder.node_id] = 1
        self.directory.apply(node.holder, 1, full_begin=True, full_end=True, now=0.0)

    def node(self, holder: Holder) -> ReplayNode:
        return self._nodes[holder.node_id]

    def tell(self, holder: Holder, words: dict[BlockKey, bool], now: float) -> None:
        """The last change of each key: True if it was added, False if it was removed."""
        if words:
            self._sequences[holder.node_id] += 1
            added = [key for key, here in words.items() if here]
            removed = [key for key, here in words.items() if not here]
            self.directory.apply(holder, self._sequences[holder.node_id], added, removed, now=now)

    def holders(self, keys: Sequence[BlockKey], asker: Holder, now: float) -> dict[int, tuple[Holder, ...]]:
        """The nodes that hold each block, by its index in the chain, without the asker."""
        found: dict[int, tuple[Holder, ...]] = {}
        for run in self.directory.resolve(keys, now):
            others = tuple(holder for holder in run.holders if holder != asker)
            if others:
                found.update(dict.fromkeys(range(run.start, run.start + run.count), others))
        return found
