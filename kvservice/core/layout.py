"""Slot layout: what one block looks like in a slot, whoever wrote it.

A slot holds one block, all layers, contiguous, as `[layer][kv head][token][K‖V]`. The innermost `[token][K‖V]` cell is
copied as it is from the engine's cache page, so its inner order belongs to the attention backend and is part of the
fingerprint. A rank of a tensor-parallel engine owns a range of kv heads of every layer.
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
class SlotLayout:
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

    def head_range(self, rank: int, rank_count: int) -> range:
        """Heads that this tensor-parallel rank owns; ranks that replicate a head all own it.

        Raises UnsupportedLayout when the heads do not divide evenly.
        """
        if rank_count <= self.kv_head_count:
            if self.kv_head_count % rank_count:
                raise UnsupportedLayout(f"{self.kv_head_count} kv heads do not divide over {rank_count} ranks")
            width = self.kv_head_count // rank_count
            return range(rank * width, (rank + 1) * width)
        if rank_count % self.kv_head_count:
            raise UnsupportedLayout(f"{rank_count} ranks do not divide over {self.kv_head_count} kv heads")
        head = rank * self.kv_head_count // rank_count
        return range(head, head + 1)

    def runs(self, heads: range) -> Iterator[Run]:
        """The byte runs that hold these heads, layer by layer; one run in all when it is every head of the block."""
        if len(heads) == self.kv_head_count:
            yield Run(layer=0, slot_offset=0, length=self.payload_bytes)
            return
        for layer in range(self.layer_count):
            offset = layer * self.layer_bytes + heads.start * self.cell_bytes
            yield Run(layer=layer, slot_offset=offset, length=len(heads) * self.cell_bytes)
