"""Rules of store.blocks: which slab goes over to another size, and what it costs to look for it."""

from __future__ import annotations

from itertools import count

from kvservice.core.segment.geometry import Geometry
from kvservice.core.store.blocks import BlockStore, Want
from kvservice.core.store.eviction import LeafFirstLru
from kvservice.testing.builders import LARGE, SMALL
from kvservice.units import BlockKey, BootEpoch, MiB, SpanRoute

ENGINE = bytes(16)
SLABS = 64
PROMPT = 16  # small blocks: four slabs


class Counting(LeafFirstLru):
    def __init__(self) -> None:
        super().__init__()
        self.looks = 0

    def last_touch(self, key: BlockKey) -> int:
        self.looks += 1
        return super().last_touch(key)


def test_a_search_for_a_slab_leaves_each_at_a_young_block() -> None:
    """Each reservation in a full pool of two sizes looks for one, and the whole node waits for it."""
    policy, numbers = Counting(), count(1)
    store = BlockStore(Geometry(MiB, SLABS), BootEpoch(1), policy, lambda action: None)

    def fill(size: int, blocks: int) -> None:
        parent = None
        for position, slot in enumerate(store.reserve(blocks, ENGINE, Want(size, 0.0)).slots):
            key = BlockKey(next(numbers).to_bytes(16, "big"))
            store.seal(slot, key, parent, position, SpanRoute(0), 0, 0.0, is_secondary=False)
            parent = key

    fill(LARGE, 2 * (SLABS // 2))
    for _ in range(SLABS // 2 * 4 // PROMPT):
        fill(SMALL, PROMPT)
    assert store.table.free_slab_count == 0
    policy.looks = 0
    fill(LARGE, 1)
    assert store.counters["slabs_moved"] == 0
    assert policy.looks <= SLABS
