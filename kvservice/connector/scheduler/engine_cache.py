"""The engine's own prefix cache, as far as the scheduler half looks into it. Pure; without I/O."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Protocol

from kvservice.connector.cache_groups import NOWHERE, Table
from kvservice.units import BlockHash, BlockKey


class EngineCache(Protocol):
    """The engine's own prefix cache, for an engine with one KV cache group. Nothing changes what it holds, and nothing
    blocks."""

    def find(self, block_hash: BlockHash) -> int | None:
        """The id of a block that holds what this hash names; None if there is none."""
        ...

    def free_blocks(self) -> int: ...

    def next_to_go(self) -> Iterable[tuple[int, BlockHash | None]]:
        """(block id, hash of what is cached there) of the free blocks, the one that the engine takes next first."""
        ...

    def give_back(self, block_ids: Sequence[int]) -> None:
        """Unpin these blocks. They are taken next again, unless a request uses them by now."""
        ...


def held_by_engine(cache: EngineCache | None, hashes: Sequence[BlockHash], count: int, stride: int) -> int:
    """How many of a request's first `count` positions the engine has whole itself, from the first on."""
    held = 0
    while cache is not None and held < count * stride and cache.find(hashes[held]) is not None:
        held += 1
    return held // stride


def table_from_cache(
    cache: EngineCache,
    hashes: Sequence[BlockHash],
    keys: Sequence[BlockKey],
    known: Container[BlockKey],
    wanted: range,
    stride: int,
) -> Table:
    """The blocks of a request that lost its own: where the engine still has the `wanted` positions, up to the first
    block that neither the engine has nor the pool is `known` to have. A block that only the pool has is NOWHERE: who
    copies decides anew what the pool has, and may know less by then. So is everything before the wanted positions."""
    table = [NOWHERE] * (wanted.start * stride)
    for index in range(wanted.start * stride, wanted.stop * stride):
        found = cache.find(hashes[index])
        if found is None and keys[index // stride] not in known:
            break
        table.append(NOWHERE if found is None else found)
    return table
