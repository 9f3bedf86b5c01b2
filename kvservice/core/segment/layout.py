"""Slot layout: what one block looks like in a slot, whichever engine wrote it.

A block of the pool is one or several of the engine's blocks, its parts: `[layer][part][kv head][token][K‖V]`. Engines
keep the blocks of a layer side by side, so parts that follow each other there are one run of bytes. The innermost
`[token][K‖V]` cell is copied unchanged from the engine's cache page, so its inner order belongs to the attention
backend and is part of the fingerprint. A rank of a tensor-parallel engine holds a range of kv heads of every layer.
When there are more ranks than ranges, several ranks hold the same range and take turns in writing it. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvservice.errors import UnsupportedLayout


@dataclass(frozen=True, slots=True)
class HeadShare:
    """One rank's part of every block: a range of heads, of which `replica_count` ranks hold the same bytes."""

    heads: range
    replica: int = 0  # this rank's number among them
    replica_count: int = 1

    def writes(self, slot: int) -> bool:
        """Whether this rank writes its heads into this slot. Of the ranks with the same heads exactly one does.

        Taking turns by slot needs no word between the ranks, and each has the same work.
        """
        return slot % self.replica_count == self.replica


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The shape of a slot's payload. Raises UnsupportedLayout for sizes that are not positive."""

    layer_count: int
    kv_head_count: int  # of the whole model, over all tensor-parallel ranks
    cell_bytes: int  # bytes of one kv head of one layer of one part: its tokens × (K + V) × head size × item size
    block_tokens: int  # of all parts
    parts: int = 1  # blocks of the engine

    def __post_init__(self) -> None:
        for name in ("layer_count", "kv_head_count", "cell_bytes", "block_tokens", "parts"):
            if getattr(self, name) <= 0:
                raise UnsupportedLayout(f"{name} must be positive, not {getattr(self, name)}")
        if self.block_tokens % self.parts:
            raise UnsupportedLayout(f"{self.block_tokens} tokens do not divide into {self.parts} parts")

    @property
    def part_bytes(self) -> int:
        """Of one part in one layer."""
        return self.kv_head_count * self.cell_bytes

    @property
    def layer_bytes(self) -> int:
        return self.parts * self.part_bytes

    @property
    def payload_bytes(self) -> int:
        return self.layer_count * self.layer_bytes

    @property
    def part_tokens(self) -> int:
        return self.block_tokens // self.parts

    def share(self, rank: int, rank_count: int, shard_count: int | None = None) -> HeadShare:
        """The heads of this tensor-parallel rank, when consecutive ranks hold the same heads, as vLLM places them.

        `shard_count` is the number of different ranges that the ranks hold; by default the smaller of heads and ranks.
        Raises UnsupportedLayout when heads or ranks do not divide evenly.
        """
        if shard_count is None:
            shard_count = min(rank_count, self.kv_head_count)
        if self.kv_head_count % shard_count:
            raise UnsupportedLayout(f"{self.kv_head_count} kv heads do not divide over {shard_count} ranks")
        if rank_count % shard_count:
            raise UnsupportedLayout(f"{rank_count} ranks do not divide over {shard_count} parts of the kv heads")
        width = self.kv_head_count // shard_count
        replica_count = rank_count // shard_count
        shard, replica = divmod(rank, replica_count)
        return HeadShare(range(shard * width, (shard + 1) * width), replica, replica_count)
