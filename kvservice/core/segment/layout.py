"""Slot layout: what one block looks like in a slot, whichever engine wrote it.

A slot holds one block, all layers, contiguous, as `[layer][kv head][token][K‖V]`. The innermost `[token][K‖V]` cell is
copied unchanged from the engine's cache page, so its inner order belongs to the attention backend and is part of the
fingerprint. A rank of a tensor-parallel engine holds a range of kv heads of every layer. When there are more ranks than
ranges, several ranks hold the same range and take turns in writing it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvservice.errors import UnsupportedLayout


@dataclass(frozen=True, slots=True)
class Run:
    """`length` contiguous bytes at `slot_offset` in the slot's payload, of one layer and a range of its heads."""

    layer: int
    slot_offset: int
    length: int


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
    cell_bytes: int  # bytes of one kv head of one layer of one block: tokens × (K + V) × head size × item size
    block_tokens: int

    def __post_init__(self) -> None:
        for name in ("layer_count", "kv_head_count", "cell_bytes", "block_tokens"):
            if getattr(self, name) <= 0:
                raise UnsupportedLayout(f"{name} must be positive, not {getattr(self, name)}")

    @property
    def layer_bytes(self) -> int:
        return self.kv_head_count * self.cell_bytes

    @property
    def payload_bytes(self) -> int:
        return self.layer_count * self.layer_bytes

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

    def runs(self, heads: range) -> Iterator[Run]:
        """The byte runs of these heads, layer by layer; a single run when they are all the heads of the block."""
        if len(heads) == self.kv_head_count:
            yield Run(layer=0, slot_offset=0, length=self.payload_bytes)
            return
        for layer in range(self.layer_count):
            offset = layer * self.layer_bytes + heads.start * self.cell_bytes
            yield Run(layer=layer, slot_offset=offset, length=len(heads) * self.cell_bytes)
