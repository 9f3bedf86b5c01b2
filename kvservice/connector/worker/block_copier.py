"""Copies blocks between engine KV tensors and slots, for any strides that the engine chose.

The engine gives one view per layer, `[block, kv head, token, K‖V]`. If its kernels use smaller blocks than its manager,
the view is `[block, part, kv head, token of the part, K‖V]`. If the layers of a block lie at regular distances in one
storage (vLLM's standard layouts), all layers are one view and a block is one strided copy. Otherwise there is one copy
per layer.

Tensors on another device go through a buffer there that has the order of the slot, so that contiguous runs cross
between the devices. Only those are copied directly, and without blocking the calling thread.
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
    """Copies the blocks of one engine group. One worker owns it. The dtype is the engine's; bytes are copied
    unchanged."""

    def __init__(
        self,
        layers: Sequence[torch.Tensor],
        heads: range,
        *,
        staged: bool | None = None,
        first_layer: int = 0,
        layers_behind: int = 0,
        token_of: torch.Tensor | None = None,
    ) -> None:
        """Args:
            layers: KV tensors `[block, kv head, token, K‖V]` or `[block, part, kv head, token of the part, K‖V]`, all
            of one shape, dtype and device, in the order of the slot.
            heads: this rank's range of the model's kv heads.
            staged: whether to use the buffer; by default if the tensors are not in host memory.
            first_layer, layers_behind: layers of other engine groups before and after these in a slot.
            token_of: `(elements of a head's part of a block,)` int64, the token that each element is of, where the
            kernels do not keep a token's elements together; empty if nobody knows.

        Raises:
            UnsupportedLayout: the tensors are not alike.
        """
        layers = [layer.unsqueeze(1) if layer.dim() == 4 else layer for layer in layers]
        first = layers[0]
        if first.dim() != 5 or any(t.shape != first.shape or t.dtype != first.dtype for t in layers):
            shapes = sorted({f"{tuple(t.shape)} {t.dtype}" for t in layers})
            raise UnsupportedLayout(f"KV tensors must be 4-D or 5-D and alike over the layers, not {', '.join(shapes)}")
        # `[block, part, kv head, token of the part, K‖V]` each, in the order of the slot
        self.layers: Sequence[torch.Tensor] = list(layers)
        self.heads = heads
        self._slot_layers = slice(first_layer, first_layer + len(layers))
        self.layers_behind = layers_behind
        self._token_of = token_of
        self._staged = first.device.type != "cpu" if staged is None else staged
        self._together = one_view(layers)
        self.slots: torch.Tensor | None = None  # the bytes of the segment in use, `(segment bytes,)` uint8
        self._layout: SlotLayout | None = None

    @property
    def device(self) -> torch.device:
        return self.layers[0].device

    @property
    def fills_slots(self) -> bool:
        """Whether a slot holds the layers of this block copier and nothing else."""
        return self._slot_layers == slice(0, self.layout.layer_count)

    @property
    def layout(self) -> SlotLayout:
        """The layout of the slots that it is bound to."""
        assert self._layout is not None
        return self._layout

    @property
    def payload_bytes(self) -> int:
        """The payload size of the slots that it is bound to, in bytes."""
        return self.layout.payload_bytes

    def of(self, engine_group: int) -> BlockCopier:
        """The copier of the blocks of this engine group."""
        return self

    def bind(self, segment: memoryview, layout: SlotLayout) -> torch.Tensor:
        """Use this segment from now on. Returns its bytes, `(segment bytes,)` uint8. Raises UnsupportedLayout if a slot
        and the tensors do not fit."""
        _, parts, head_count, tokens, width = self.layers[0].shape
        cell_bytes = parts * tokens * width * self.layers[0].element_size()
        found = (self._slot_layers.stop + self.layers_behind, head_count, cell_bytes)
        wanted = (layout.layer_count, len(self.heads), layout.cell_bytes)
        if found != wanted:
            raise UnsupportedLayout(f"(layers, heads of this rank, cell bytes) are {found}, the slot has {wanted}")
        self.slots = torch.frombuffer(segment, dtype=torch.uint8)
        self._layout = layout
        return self.slots

    def unbind(self) -> None:
        """Release the segment, which can then be unmapped."""
        self.slots = None

    def store(self, block_id: int, payload_offset: int, part: int = 0) -> None:
        """Copy an engine block to a slot. The copy has ended when this returns, or it is ordered on the current stream
        of the engine's device."""
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
        """Copy a slot to an engine block, like `store`."""
        slot = self._slot_view(payload_offset, part)
        if self._staged:
            staging = self._staging_like(slot)
            for there, here in _runs(slot, staging):
                here.copy_(there, non_blocking=True)
            slot = staging
        for block, layers in zip(self._blocks(block_id), self._per_view(slot), strict=True):
            block.copy_(layers)

    def blank(self, payload_offset: int, tokens: int) -> bool:
        """Zero this rank's share of a slot behind its first `tokens`. No copy to the slot may be under way. Returns
        False and does nothing if it is not known which bytes belong to which token."""
        cells = self._slot_view(payload_offset, 0).flatten(2)
        if self._token_of is None:
            cells[:, :, tokens * self.layers[0].shape[4] :] = 0
            return True
        if self._token_of.numel() != cells.shape[2]:
            return False
        behind = torch.nn.functional.pad((self._token_of >= tokens).to(torch.int8), (1, 1))
        edges = behind.diff().nonzero().flatten().tolist()
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            cells[:, :, start:stop] = 0
        return True

    def _slot_view(self, payload_offset: int, part: int) -> torch.Tensor:
        """This rank's share of a slot as `[layer, head, kernel part, token, K‖V]`."""
        assert self.slots is not None
        _, parts, _, tokens, width = self.layers[0].shape
        layout = self.layout
        payload = self.slots[payload_offset : payload_offset + layout.payload_bytes]
        shape = (layout.layer_count, layout.parts, layout.kv_head_count, parts, tokens, width)
        whole = payload.view(self.layers[0].dtype).view(shape)
        return whole[self._slot_layers, part, self.heads.start : self.heads.stop]

    def _staging_like(self, slot: torch.Tensor) -> torch.Tensor:
        return torch.empty(slot.shape, dtype=slot.dtype, device=self.device)

    def _blocks(self, block_id: int) -> list[torch.Tensor]:
        """The engine's views of a block, with the dimensions of the slot: one view of all layers, or one per layer."""
        if self._together is not None:
            return [self._together[block_id].transpose(1, 2)]
        return [layer[block_id].transpose(0, 1) for layer in self.layers]

    def _per_view(self, slot: torch.Tensor) -> Sequence[torch.Tensor]:
        """A slot's share, cut in the way that `_blocks` cuts a block."""
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
        """Like BlockCopier.bind; each engine group has its own layout."""
        bound = [block_copier.bind(segment, own) for block_copier, own in self._block_copiers]
        return bound[0]

    def unbind(self) -> None:
        for block_copier, _ in self._block_copiers:
            block_copier.unbind()


def _runs(slot: torch.Tensor, staging: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Contiguous pieces of one rank's share: the whole share, or one piece per layer if other parts or other heads lie
    between."""
    if slot.is_contiguous():
        yield slot, staging
    else:
        yield from zip(slot.unbind(0), staging.unbind(0), strict=True)


def one_view(layers: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """`[block, layer, part, head, token, K‖V]` over the storage of all layers, or None if there is no such view."""
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
