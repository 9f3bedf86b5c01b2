"""Block copies between engine KV tensors and slots, for whatever strides the engine chose.

The engine gives one view per layer, `[block, kv head, token, K‖V]`; where its kernels use smaller blocks than its
manager, `[block, part, kv head, token of the part, K‖V]`. When the layers of a block lie at regular
distances in one storage (vLLM's standard layouts), all of them are one view and a block is one strided copy;
otherwise it is one copy a layer.

Tensors on another device go through a buffer there in the order of the slot, so that what crosses between the devices
are contiguous runs: only those are copied without a detour, and without the calling thread waiting for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from kvservice.core.segment.layout import SlotLayout
from kvservice.errors import UnsupportedLayout


class BlockCopiers(Protocol):
    """The block copiers of an engine, by engine group."""

    @property
    def device(self) -> torch.device: ...

    def of(self, engine_group: int) -> BlockCopier: ...

    def bind(self, segment: memoryview, layout: SlotLayout) -> torch.Tensor: ...

    def unbind(self) -> None: ...


class BlockCopier:
    """Owned by one worker. `heads` is this rank's range of the model's kv heads. `staged`: use the buffer; by default
    where the tensors are not in host memory. `first_layer`, `layers_behind` and `slot_parts`: where a slot holds
    more than one block, of other engine groups and of this one."""

    def __init__(
        self,
        layers: Sequence[torch.Tensor],
        heads: range,
        *,
        staged: bool | None = None,
        first_layer: int = 0,
        layers_behind: int = 0,
        slot_parts: int = 1,
    ) -> None:
        """Raises UnsupportedLayout when the tensors are not alike."""
        layers = [layer.unsqueeze(1) if layer.dim() == 4 else layer for layer in layers]
        first = layers[0]
        if first.dim() != 5 or any(t.shape != first.shape or t.dtype != first.dtype for t in layers):
            shapes = sorted({f"{tuple(t.shape)} {t.dtype}" for t in layers})
            raise UnsupportedLayout(f"KV tensors must be 4-D or 5-D and alike over the layers, not {', '.join(shapes)}")
        self._layers = list(layers)
        self._heads = heads
        self._slot_layers = slice(first_layer, first_layer + len(layers))
        self._layers_behind = layers_behind
        self._slot_parts = slot_parts
        self._staged = first.device.type != "cpu" if staged is None else staged
        self._together = _one_view(layers)
        self._slots: torch.Tensor | None = None  # the segment's bytes
        self._layout: SlotLayout | None = None

    @property
    def layers(self) -> Sequence[torch.Tensor]:
        """`[block, part, kv head, token of the part, K‖V]` each, in the order of the slot."""
        return self._layers

    @property
    def heads(self) -> range:
        return self._heads

    @property
    def slots(self) -> torch.Tensor | None:
        """The bytes of the segment in use."""
        return self._slots

    @property
    def device(self) -> torch.device:
        return self._layers[0].device

    @property
    def fills_slots(self) -> bool:
        """A slot holds one block, all layers of this block copier and nothing else."""
        assert self._layout is not None
        return self._slot_parts == 1 and self._slot_layers == slice(0, self._layout.layer_count)

    @property
    def layout(self) -> SlotLayout:
        """Of the slots it is bound to."""
        assert self._layout is not None
        return self._layout

    @property
    def payload_bytes(self) -> int:
        """Of the slots it is bound to."""
        assert self._layout is not None
        return self._layout.payload_bytes

    def of(self, engine_group: int) -> BlockCopier:
        """The one that copies the blocks of this KV cache group of the engine."""
        return self

    def bind(self, segment: memoryview, layout: SlotLayout) -> torch.Tensor:
        """Use this segment from now on. Returns its bytes. Raises UnsupportedLayout when a slot and the tensors do not
        fit."""
        _, parts, head_count, tokens, width = self._layers[0].shape
        cell_bytes = self._slot_parts * parts * tokens * width * self._layers[0].element_size()
        found = (self._slot_layers.stop + self._layers_behind, head_count, cell_bytes)
        wanted = (layout.layer_count, len(self._heads), layout.cell_bytes)
        if found != wanted:
            raise UnsupportedLayout(f"(layers, heads of this rank, cell bytes) are {found}, the slot has {wanted}")
        self._slots = torch.frombuffer(segment, dtype=torch.uint8)
        self._layout = layout
        return self._slots

    def unbind(self) -> None:
        """Let go of the segment, which can be unmapped then."""
        self._slots = None

    def store(self, block_id: int, payload_offset: int, part: int = 0) -> None:
        """Engine block -> slot: done when this returns, or ordered on the current stream of the engine's device."""
        slot = self._slot_view(payload_offset, part)
        if self._staged:
            staging = self._staging_like(slot)
            for layers, block in zip(self._per_view(staging), self._blocks(block_id), strict=True):
                layers.copy_(block)
            for there, here in _runs(slot, staging):
                there.copy_(here, non_blocking=True)
            return
        for layers, block in zip(self._per_view(slot), self._blocks(block_id), strict=True):
            layers.copy_(block)

    def load(self, payload_offset: int, block_id: int, part: int = 0) -> None:
        """Slot -> engine block, like `store`."""
        slot = self._slot_view(payload_offset, part)
        if self._staged:
            staging = self._staging_like(slot)
            for there, here in _runs(slot, staging):
                here.copy_(there, non_blocking=True)
            slot = staging
        for block, layers in zip(self._blocks(block_id), self._per_view(slot), strict=True):
            block.copy_(layers)

    def _slot_view(self, payload_offset: int, part: int) -> torch.Tensor:
        """This rank's share of a slot as `[layer, head, kernel part, token, K‖V]`."""
        assert self._slots is not None and self._layout is not None
        _, parts, _, tokens, width = self._layers[0].shape
        payload = self._slots[payload_offset : payload_offset + self._layout.payload_bytes]
        shape = (self._layout.layer_count, self._layout.kv_head_count, self._slot_parts, parts, tokens, width)
        whole = payload.view(self._layers[0].dtype).view(shape)
        return whole[self._slot_layers, self._heads.start : self._heads.stop, part]

    def _staging_like(self, slot: torch.Tensor) -> torch.Tensor:
        return torch.empty(slot.shape, dtype=slot.dtype, device=self.device)

    def _blocks(self, block_id: int) -> list[torch.Tensor]:
        """The engine's views of a block, dimensions as in the slot: one for all layers, or one a layer."""
        if self._together is not None:
            return [self._together[block_id].transpose(1, 2)]
        return [layer[block_id].transpose(0, 1) for layer in self._layers]

    def _per_view(self, slot: torch.Tensor) -> Sequence[torch.Tensor]:
        """A slot's share cut as `_blocks` cuts a block."""
        return [slot] if self._together is not None else slot.unbind(0)


class GroupedBlockCopiers:
    """A block copier for each KV cache group of the engine, by its index, with the layout of its slots."""

    def __init__(self, block_copiers: Sequence[tuple[BlockCopier, SlotLayout]]) -> None:
        self._block_copiers = list(block_copiers)

    @property
    def device(self) -> torch.device:
        return self._block_copiers[0][0].device

    def of(self, engine_group: int) -> BlockCopier:
        return self._block_copiers[engine_group][0]

    def bind(self, segment: memoryview, layout: SlotLayout) -> torch.Tensor:
        """Like BlockCopier's; each engine group has a layout of its own."""
        bound = [block_copier.bind(segment, own) for block_copier, own in self._block_copiers]
        return bound[0]

    def unbind(self) -> None:
        for block_copier, _ in self._block_copiers:
            block_copier.unbind()


def _runs(slot: torch.Tensor, staging: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Contiguous pieces of one rank's share: all of it, or one a layer when other ranks' heads lie between them."""
    if slot.is_contiguous():
        yield slot, staging
    else:
        yield from zip(slot.unbind(0), staging.unbind(0), strict=True)


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
