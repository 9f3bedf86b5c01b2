"""The second level of a replay: a disk of each node, or an object store that all nodes share.

Its books are the block store of the nodes, with eviction of its own. What it is asked takes no time, so its writer
keeps up with every eviction: what a real disk drops because it is busy is not dropped here. Nothing blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvservice.core.actions import Action
from kvservice.core.segment.geometry import SLAB_BYTES_MIN, Geometry
from kvservice.core.store.blocks import NO_KEY, BlockStore, Want
from kvservice.core.store.eviction import EvictionPolicy
from kvservice.core.store.slots import Block
from kvservice.units import BlockKey, BootEpoch, SpanRoute, div_ceil

PAYLOAD_BYTES = 4096  # Of a slot. Only the number of slots matters here, so it is the smallest that a slab takes.
WRITES = ("evicted", "stored", "reused")  # as in the settings `disk_write` and `objects_write`


def store_of(capacity: int, policy: EvictionPolicy, emit: Callable[[Action], None]) -> BlockStore:
    """A block store with exactly this many slots."""
    slots = Geometry(SLAB_BYTES_MIN, 1).slots_per_slab(PAYLOAD_BYTES)
    geometry = Geometry(SLAB_BYTES_MIN, div_ceil(capacity, slots))
    store = BlockStore(geometry, BootEpoch(1), policy, emit)
    spare = geometry.slab_count * slots - capacity
    # A slab has a fixed number of slots. Those beyond the capacity are reserved for good.
    assert len(store.reserve(spare, b"beyond the limit", Want(PAYLOAD_BYTES, 0.0)).slots) == spare
    return store


@dataclass(frozen=True, slots=True)
class ChainPlace:
    """A block's place in its prompt."""

    key: BlockKey
    parent: BlockKey | None
    position: int
    route: SpanRoute


class ReplayTier:
    """One tier. `written` and `read` count blocks."""

    def __init__(self, name: str, capacity: int, policy: EvictionPolicy, write: str) -> None:
        assert capacity > 0 and write in WRITES
        self.name = name
        self.write = write
        self.counters: Counter[str] = Counter()
        self.changed: list[BlockKey] = []  # that came or went since the owner looked
        self._store = store_of(capacity, policy, self._note)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._store

    def __len__(self) -> int:
        return len(self._store)

    def touch(self, chain: Sequence[BlockKey], now: float) -> None:
        self._store.policy.touch(chain, now)

    def put(self, place: ChainPlace, now: float) -> None:
        """Write the block down, unless it is here."""
        if place.key in self._store:
            return
        (slot,) = self._store.reserve(1, NO_KEY, Want(PAYLOAD_BYTES, now)).slots
        self._store.seal(slot, place.key, place.parent, place.position, place.route, 0, now, is_secondary=False)
        self.counters["written"] += 1

    def take(self, key: BlockKey) -> ChainPlace:
        """Read a block that is here."""
        block: Block | None = self._store.get(key)
        assert block is not None
        self.counters["read"] += 1
        return ChainPlace(key, self._store.parent_of(block), block.position, block.route)

    def check_invariants(self) -> None:
        self._store.check_invariants()

    def _note(self, action: Action) -> None:
        key = getattr(action, "key", None)
        if key is not None:
            self.changed.append(key)
