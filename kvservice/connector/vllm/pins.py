"""Our own references on blocks of vLLM's pool, beside those of requests, and a look into its prefix cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import BlockHash as VllmHash
from vllm.v1.core.kv_cache_utils import get_block_hash, make_block_hash_with_group_id

from kvservice.units import BlockHash

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


class PoolPins:
    """BlockPins over vLLM's block pool: takes a reference of our own on each block."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def pin(self, block_ids: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])

    def unpin(self, block_ids: Sequence[int]) -> None:
        # The last block of a chain goes first, so that it is also evicted first.
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in reversed(block_ids)])

    def free_share(self) -> float:
        return float(self._pool.get_num_free_blocks() / self._pool.num_gpu_blocks)

    def are_blocks_in_use(self) -> bool:
        """Whether requests, copies or loans use blocks. vLLM asks the same before it empties its cache."""
        return int(self._pool.num_gpu_blocks - self._pool.get_num_free_blocks()) > 1  # one is the null block

    def forget(self, block_ids: Sequence[int]) -> None:
        self._pool.evict_blocks(set(block_ids))


class PoolCache:
    """EngineCache over vLLM's block pool, for a model with one KV cache group."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def find(self, block_hash: BlockHash) -> int | None:
        key = make_block_hash_with_group_id(VllmHash(block_hash), 0)
        # Read from the pool each time: a reset gives it another map.
        block = self._pool.cached_block_hash_to_block.get_one_block(key)
        return None if block is None else int(block.block_id)

    def free_blocks(self) -> int:
        return int(self._pool.get_num_free_blocks())

    def next_to_go(self) -> Iterator[tuple[int, BlockHash | None]]:
        for block in self._pool.free_block_queue.iter_blocks_after(None):
            named = block.block_hash
            yield block.block_id, None if named is None else BlockHash(get_block_hash(named))

    def give_back(self, block_ids: Sequence[int]) -> None:
        released = []
        for block_id in block_ids:
            block = self._pool.blocks[block_id]
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                released.append(block)
        # To the front of the queue, where they were: `free_blocks` would make them the last to go, and then every block
        # of the engine would be stored in turn.
        self._pool.free_block_queue.prepend_n(released)
