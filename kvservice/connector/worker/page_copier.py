"""Copies pages that engines of several kinds share, between an engine's KV tensors and slots.

A slot holds one page, `[layer][K|V][token][kv head][element]` (core.block.pages). An engine's block holds one or
several pages, in an order that its attention kernels chose: the conversion is here and nowhere else. What an engine
gives are views of its own memory, so a copy is all that is done, and a tensor-parallel rank copies its own heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvservice.connector.worker.block_copier import BlockCopier, one_view
from kvservice.core.block.pages import PAGE_TOKENS
from kvservice.core.segment.layout import SlotLayout
from kvservice.errors import UnsupportedLayout


@dataclass(frozen=True, slots=True)
class PageViews:
    """K and V of an engine's blocks, `(block, token, kv head of this rank, element)` for each layer."""

    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]


def row_views(layers: Sequence[torch.Tensor]) -> PageViews:
    """Of tensors `(block, kv head, token, K‖V)` in any strides: a row is one token's K and then its V."""
    size = _head_size(layers)
    return PageViews(
        [layer[..., :size].transpose(1, 2) for layer in layers], [layer[..., size:].transpose(1, 2) for layer in layers]
    )


def column_views(layers: Sequence[torch.Tensor]) -> PageViews:
    """Of tensors that say `(block, kv head, token, K‖V)` and hold, for each block and head, K as `(element, token)` and
    behind it V as `(token, element)`. vLLM's vector kernels for CPUs pack it so, which their shape does not show."""
    size, keys, values = _head_size(layers), [], []
    for layer in layers:
        blocks, heads, tokens, _ = layer.shape
        if layer.stride()[2:] != (2 * size, 1):
            raise UnsupportedLayout(f"a head's part of a block is not one run of bytes: strides {layer.stride()}")
        halves = layer.view(blocks, heads, 2, tokens * size)
        keys.append(halves[:, :, 0].view(blocks, heads, size, tokens).permute(0, 3, 1, 2))
        values.append(halves[:, :, 1].view(blocks, heads, tokens, size).transpose(1, 2))
    return PageViews(keys, values)


def _head_size(layers: Sequence[torch.Tensor]) -> int:
    shapes = {tuple(layer.shape) for layer in layers}
    first = layers[0].shape
    if len(shapes) > 1 or len(first) != 4 or first[3] % 2:
        raise UnsupportedLayout(f"pages are shared of KV tensors (block, kv head, token, K‖V), not of {sorted(shapes)}")
    return int(first[3]) // 2


class PageCopier(BlockCopier):
    """A block copier whose slots are shared pages. A part is here a page of the engine's block."""

    def __init__(
        self, layers: Sequence[torch.Tensor], views: PageViews, heads: range, *, staged: bool | None = None
    ) -> None:
        """`layers` are the engine's tensors and `views` show their K and V. The rest as in BlockCopier. Raises
        UnsupportedLayout if a block does not hold whole pages."""
        super().__init__(layers, heads, staged=staged)
        _, tokens, self._head_count, self._head_size = map(int, views.keys[0].shape)
        if tokens % PAGE_TOKENS:
            raise UnsupportedLayout(
                f"a block of {tokens} tokens does not hold whole pages of {PAGE_TOKENS}: choose a block size that is a "
                f"multiple of {PAGE_TOKENS}"
            )
        self.pages_of_block = tokens // PAGE_TOKENS
        self._pairs = (views.keys, views.values)
        # (block, layer, token, kv head, element) of K and of V, if the layers lie at regular distances
        self._whole = (one_view(views.keys), one_view(views.values))

    @property
    def fills_slots(self) -> bool:
        """Never as runs of bytes: the engine's order is another one."""
        return False

    def bind(self, segment: memoryview, layout: SlotLayout) -> torch.Tensor:
        found = (len(self.layers), self._head_count, PAGE_TOKENS * 2 * self._head_size * self.layers[0].element_size())
        wanted = (layout.layer_count, len(self.heads), layout.cell_bytes)
        if found != wanted or layout.block_tokens != PAGE_TOKENS or layout.parts != 1:
            raise UnsupportedLayout(f"(layers, heads of this rank, bytes of a head) are {found}, the slot has {wanted}")
        self.slots = torch.frombuffer(segment, dtype=torch.uint8)
        self._layout = layout
        return self.slots

    def store(self, block_id: int, payload_offset: int, part: int = 0) -> None:
        slot = self._slot_view(payload_offset)
        target = torch.empty(slot.shape, dtype=slot.dtype, device=self.device) if self._staged else slot
        for which in (0, 1):
            for there, here in self._copies(target[:, which], which, block_id, part):
                there.copy_(here)
        if self._staged:
            slot.copy_(target, non_blocking=slot.is_contiguous())

    def load(self, payload_offset: int, block_id: int, part: int = 0) -> None:
        slot = self._slot_view(payload_offset)
        if self._staged:
            staging = torch.empty(slot.shape, dtype=slot.dtype, device=self.device)
            slot = staging.copy_(slot, non_blocking=slot.is_contiguous())
        for which in (0, 1):
            for there, here in self._copies(slot[:, which], which, block_id, part):
                here.copy_(there)

    def pages(self, places: Sequence[tuple[int, int]], layer_count: int) -> torch.Tensor:
        """A copy of the first layers of these pages (block id, part), one behind the other, in host memory: `(layer,
        K|V, token, kv head of this rank, element)`. Blocks until what the device has been given so far is done."""
        tokens = [(block_id, slice(part * PAGE_TOKENS, (part + 1) * PAGE_TOKENS)) for block_id, part in places]
        layers = zip(*(views[:layer_count] for views in self._pairs), strict=True)
        halves = [torch.stack([torch.cat([one[place] for place in tokens]) for one in pair]) for pair in layers]
        return torch.stack(halves).cpu()

    def _slot_view(self, payload_offset: int, part: int = 0) -> torch.Tensor:
        """This rank's heads of a slot, `(layer, K|V, token, kv head, element)`."""
        assert self.slots is not None
        layout = self.layout
        payload = self.slots[payload_offset : payload_offset + layout.payload_bytes]
        shape = (layout.layer_count, 2, PAGE_TOKENS, layout.kv_head_count, self._head_size)
        return payload.view(self.layers[0].dtype).view(shape)[:, :, :, self.heads.start : self.heads.stop]

    def _copies(
        self, half: torch.Tensor, which: int, block_id: int, part: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(of a page's K or V, of the engine) of everything that one page takes: all layers at once, or one by one."""
        tokens, whole = slice(part * PAGE_TOKENS, (part + 1) * PAGE_TOKENS), self._whole[which]
        if whole is not None:
            return [(half, whole[block_id, :, tokens])]
        return [(half[layer], view[block_id, tokens]) for layer, view in enumerate(self._pairs[which])]
