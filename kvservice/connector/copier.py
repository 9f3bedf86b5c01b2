"""Block copies between engine KV tensors and slots, for whatever strides the engine chose.

The engine gives one view per layer, `[block, kv head, token, K‖V]`; where its kernels use smaller blocks than its
manager, `[block, part, kv head, token of the part, K‖V]`. When the layers of a block lie at regular
distances in one storage (vLLM's standard layouts), all of them are one view and a block is one strided copy;
otherwise it is one copy a layer. Works on CPU and CUDA tensors; on CUDA each copy is ordered on the current stream and
waits for it, which is right but slow (a GPU mover with its own stream is planned; this path has not run on a GPU yet).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvservice.core.layout import SlotLayout
from kvservice.errors import UnsupportedLayout


class BlockCopier:
    """Owned by one worker. `heads` is this rank's range of the model's kv heads."""

    def __init__(self, layers: Sequence[torch.Tensor], heads: range) -> None:
        """Raises UnsupportedLayout when the tensors are not alike."""
        layers = [layer.unsqueeze(1) if layer.dim() == 4 else layer for layer in layers]
        first = layers[0]
        if first.dim() != 5 or any(t.shape != first.shape or t.dtype != first.dtype for t in layers):
            shapes = sorted({f"{tuple(t.shape)} {t.dtype}" for t in layers})
            raise UnsupportedLayout(f"KV tensors must be 4-D or 5-D and alike over the layers, not {', '.join(shapes)}")
        self._layers = list(layers)
        self._heads = heads
        self._together = _one_view(layers)
        self._slots: torch.Tensor | None = None  # the segment's bytes
        self._layout: SlotLayout | None = None

    def bind(self, segment: memoryview, layout: SlotLayout) -> None:
        """Use this segment from now on. Raises UnsupportedLayout when a slot and the tensors do not fit."""
        _, parts, head_count, tokens, width = self._layers[0].shape
        cell_bytes = parts * tokens * width * self._layers[0].element_size()
        found = (len(self._layers), head_count, cell_bytes)
        wanted = (layout.layer_count, len(self._heads), layout.cell_bytes)
        if found != wanted:
            raise UnsupportedLayout(f"(layers, heads of this rank, cell bytes) are {found}, the slot has {wanted}")
        self._slots = torch.frombuffer(segment, dtype=torch.uint8)
        self._layout = layout

    def store(self, block_id: int, payload_offset: int) -> None:
        """Engine block -> slot. Blocks until the bytes are in the slot."""
        slot = self._slot_view(payload_offset)
        if self._together is not None:
            slot.copy_(self._together[block_id])
            return
        for index, layer in enumerate(self._layers):
            slot[index].copy_(layer[block_id])

    def load(self, payload_offset: int, block_id: int) -> None:
        """Slot -> engine block, ordered on the current stream."""
        slot = self._slot_view(payload_offset)
        if self._together is not None:
            self._together[block_id].copy_(slot)
            return
        for index, layer in enumerate(self._layers):
            layer[block_id].copy_(slot[index])

    def _slot_view(self, payload_offset: int) -> torch.Tensor:
        """This rank's share of a slot as `[layer, part, head, token, K‖V]`."""
        assert self._slots is not None and self._layout is not None
        _, parts, _, tokens, width = self._layers[0].shape
        payload = self._slots[payload_offset : payload_offset + self._layout.payload_bytes]
        shape = (self._layout.layer_count, self._layout.kv_head_count, parts, tokens, width)
        mine = payload.view(self._layers[0].dtype).view(shape)[:, self._heads.start : self._heads.stop]
        return mine.transpose(1, 2)


def _one_view(layers: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """`[block, layer, part, head, token, K‖V]` over the storage of all layers, or None when there is no such view."""
    first = layers[0]
    if any(
        t.stride() != first.stride() or t.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        for t in layers
    ):
        return None
    offsets = [t.storage_offset() for t in layers]
    step = offsets[1] - offsets[0] if len(layers) > 1 else 0
    if step < 0 or any(offset != offsets[0] + i * step for i, offset in enumerate(offsets)):
        return None
    size = (first.shape[0], len(layers), *first.shape[1:])
    stride = (first.stride(0), step, *first.stride()[1:])
    return torch.as_strided(first, size, stride, storage_offset=offsets[0])
