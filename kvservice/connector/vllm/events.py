"""What the engine's event stream says of the pool, in vLLM's own events, for routers that index several engines.

A stored block is described whole, with its tokens: an indexer that never heard of the block, or has forgotten it since
the engine evicted its own copy, can still find it. The medium `CPU` tells it apart from the engine's own cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

from kvservice.core.bounded_table import BoundedTable

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from kvservice.connector.cache_groups import Grouping
    from kvservice.connector.scheduler.half import SchedulerHalf
    from kvservice.connector.scheduler.ports import StoredBlock
    from kvservice.core.segment.layout import SlotLayout

# Blocks whose tokens are known, with their requests: a million tokens. A block is stored some steps after it was
# computed, or when its request ends; one that is stored after it was dropped here is told without its tokens.
DESCRIBED_MAX = 1 << 16


class StoredEvents:
    """Describes stored blocks. Used on the scheduler's thread."""

    def __init__(self, block_tokens: int, hash_tokens: int) -> None:
        """Tokens of a block that is named, and of one of vLLM's hashes: the last hash of a block names it."""
        self._block_tokens = block_tokens
        self._hash_tokens = hash_tokens
        self._places: BoundedTable[bytes, tuple[Request, int]] = BoundedTable(DESCRIBED_MAX)  # by hash
        self._noted: dict[str, int] = {}  # hashes of each request that are in `_places`

    def note(self, request: Request) -> None:
        """The request may have more blocks than before."""
        hashes = request.block_hashes
        noted = self._noted.get(request.request_id, 0)
        if noted < len(hashes):
            for number in range(noted, len(hashes)):
                self._places.put(hashes[number], (request, number))
            self._noted[request.request_id] = len(hashes)

    def end(self, request: Request) -> None:
        """The request has all the blocks that it will have."""
        self.note(request)
        self._noted.pop(request.request_id, None)

    def take(self, half: SchedulerHalf) -> list[KVCacheEvent]:
        """The events since the last call. The last one of a block says whether it is there."""
        gone, stored = half.take_told()
        return [*map(block_removed, gone), *map(self.stored, stored)]

    def stored(self, block: StoredBlock) -> KVCacheEvent:
        """The event that this block has a copy in host memory."""
        parent = None if block.parent is None else maybe_convert_block_hash(BlockHash(block.parent))
        found: dict[str, Any] = {"token_ids": [], "lora_id": None, "lora_name": None}
        if (place := self._places.get(block.block_hash)) is not None:
            found = self._content(*place)
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(BlockHash(block.block_hash))],
            parent_block_hash=parent,
            block_size=self._block_tokens,
            medium=MEDIUM_CPU,
            **found,
        )

    def _content(self, request: Request, number: int) -> dict[str, Any]:
        end = (number + 1) * self._hash_tokens
        start = end - self._block_tokens
        extra, _ = generate_block_hash_extra_keys(request, start, end, 0)
        lora = request.lora_request
        return {
            "token_ids": list(request.all_token_ids[start:end]),
            "extra_keys": None if extra is None else to_event_extra_keys([extra]),
            "lora_id": None if lora is None else lora.adapter_id,
            "lora_name": None if lora is None else lora.name,
        }


def stored_events(layout: SlotLayout, cache_config: KVCacheConfig, grouping: Grouping) -> StoredEvents:
    """For an engine whose slots are of this layout."""
    is_one = len(cache_config.kv_cache_groups) == 1
    named = layout.part_tokens if is_one else layout.block_tokens  # as Grouping.named names blocks
    return StoredEvents(named, layout.block_tokens // grouping.stride)


def block_removed(block_hash: bytes) -> KVCacheEvent:
    """The event that one block has no copy in host memory any more."""
    return BlockRemoved(block_hashes=[maybe_convert_block_hash(BlockHash(block_hash))], medium=MEDIUM_CPU)


def publishes_events(vllm_config: Any) -> bool:
    events = vllm_config.kv_events_config
    return events is not None and bool(events.enable_kv_cache_events)
