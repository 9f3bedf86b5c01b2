"""Stores what the engine is about to evict, and nothing else. Engine-neutral; no I/O except through the session.

The engine's free blocks stand in a queue, and it takes the first ones next. In each step the beginning of the queue is
looked through, and what is cached there but not in the pool is copied. So a block that is never evicted is never
copied. The idea is that of vLLM's SimpleCPUOffloadConnector in its lazy mode.

The queue knows a block by the engine's hash only. What else a store needs is noted while its request is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvservice.connector.cache_groups import entries_of
from kvservice.connector.plan import StepPlan
from kvservice.connector.scheduler.engine_cache import EngineCache
from kvservice.connector.scheduler.known_keys import KNOWN_KEYS_MAX, KnownKeys
from kvservice.connector.scheduler.ports import StoredBlock
from kvservice.connector.scheduler.request import EngineRequest, Naming
from kvservice.connector.scheduler.store_plan import PlannedStore
from kvservice.connector.scheduler.stores import Stores
from kvservice.core.block.keys import span_route
from kvservice.core.messages import Attachment, SealItem
from kvservice.units import BlockHash, BlockKey, SpanRoute

# Beyond it the oldest names are forgotten; their blocks are not stored. It is the memory of 2 million tokens in blocks
# of 16, more than an engine holds.
NAMES_MAX = KNOWN_KEYS_MAX


class _Name(NamedTuple):
    """What a block of the engine is called in the pool."""

    key: BlockKey
    parent: BlockKey | None
    position: int
    route: SpanRoute
    parent_hash: BlockHash | None
    naming: Naming


class NearEviction:
    def __init__(self, stores: Stores, known: KnownKeys, window: int) -> None:
        """`window` is how many of the blocks that the engine takes next may be lost without harm, after each step."""
        self.window = window
        self._stores = stores
        self._known = known
        self._names: dict[BlockHash, _Name] = {}  # the one noted last is at the end

    def note(self, request: EngineRequest, hashes: Sequence[BlockHash], full: int) -> None:
        """Keep the names of the request's first `full` blocks, as far as they have one and may be stored."""
        begin, request.named = max(request.named, request.kept_out), min(full, len(request.keys))
        for position in range(begin, min(request.storable(full), len(request.keys))):
            key, parent, parent_hash = request.keys[position], None, None
            if position:
                parent, parent_hash = request.keys[position - 1], hashes[position - 1]
            name = _Name(key, parent, position, span_route(request.keys, position), parent_hash, request.naming)
            self._names.pop(hashes[position], None)
            self._names[hashes[position]] = name
        while len(self._names) > NAMES_MAX:
            del self._names[next(iter(self._names))]

    def plan(self, plan: StepPlan, attachment: Attachment, naming: Naming, cache: EngineCache) -> None:
        """Add the store of what is near eviction to the step. Blocks that find no slot are tried again in the next
        step."""
        wanted: dict[BlockKey, tuple[int, BlockHash, _Name]] = {}  # the engine may hold one key in several blocks
        harmless = 0
        for block_id, block_hash in cache.next_to_go():
            name = None if block_hash is None else self._names.get(block_hash)
            if name is None or name.key in self._known or name.key in wanted or name.naming != naming:
                harmless += 1
            else:
                assert block_hash is not None
                wanted[name.key] = (block_id, block_hash, name)
            # A block under copy leaves the queue, so the ones behind it go sooner. It comes back to the front.
            if harmless == self.window or len(wanted) == self.window:
                break
        if not wanted:
            return
        planned = PlannedStore()
        blocks: list[StoredBlock] = []
        slots = self._stores.take_slots(attachment.attachment_id, len(wanted))
        for ref, (block_id, block_hash, name) in zip(slots, wanted.values(), strict=False):
            planned.items.append(SealItem(ref, name.key, name.parent, name.position, name.route))
            planned.entries += entries_of([(0, 0, block_id)], ref, name.key)
            blocks.append(StoredBlock(block_hash, name.parent_hash))
        planned.put_off = len(wanted) - len(slots)
        store = self._stores.open(attachment.attachment_id, planned, blocks, give_back=cache.give_back)
        if store is not None:
            plan.stores.append(store)

    def clear(self) -> None:
        self._names.clear()
