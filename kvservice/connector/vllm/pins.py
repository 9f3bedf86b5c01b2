"""Our own references on blocks of vLLM's pool, beside those of requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

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
