"""Paged K and V on torch: the blocks of all layers, and the cache layer through which a transformers model uses them.

A block's bytes lie together as `[layer][kv head][token][K‖V]`, which is also their order in a slot of the pool: a copy
between the two is one run. Attention itself is the library's. Each layer writes the K and V of the new tokens to their
slots, then gathers what attention reads by the block table, as PagedAttention does inside its kernel ("Efficient Memory
Management for Large Language Model Serving with PagedAttention", Kwon et al., SOSP 2023; vLLM).

Block ids come from outside: this module allocates none and counts no references. Everything runs on the calling thread
and on the current stream of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache, DynamicLayer


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one block holds. All layers are alike."""

    layer_count: int
    head_count: int  # of K and V in the cache: 1 for latent attention (MLA)
    key_width: int  # elements of one token's K in one head; with MLA the latent
    value_width: int  # with MLA the rotated part of the keys
    block_tokens: int
    dtype: torch.dtype

    @property
    def cell_bytes(self) -> int:
        """One kv head of one layer of one block."""
        item_bytes: int = self.dtype.itemsize
        return self.block_tokens * (self.key_width + self.value_width) * item_bytes

    @property
    def block_bytes(self) -> int:
        return self.layer_count * self.head_count * self.cell_bytes


class PagedKV:
    """K and V of all blocks on one device. All memory is allocated at once."""

    def __init__(
        self,
        shape: KVShape,
        block_count: int,
        device: torch.device | str = "cpu",
        *,
        memory: torch.Tensor | None = None,
        pinned: bool = False,
    ) -> None:
        """Args:
            memory: `(block_count * shape.block_bytes,)` uint8 on any device, to be used as it is instead of new memory.
            pinned: page-locked host memory, from and to which CUDA copies without blocking the calling thread.

        Raises:
            ValueError: there is no block, or the memory has another size.
        """
        if block_count < 1:
            raise ValueError(f"a pool has at least one block, not {block_count}")
        self.shape = shape
        self.block_count = block_count
        width = shape.key_width + shape.value_width
        size = (block_count, shape.layer_count, shape.head_count, shape.block_tokens, width)
        if memory is None:
            memory = torch.zeros(block_count * shape.block_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        if memory.dtype != torch.uint8 or memory.shape != (block_count * shape.block_bytes,):
            raise ValueError(f"{block_count} blocks take {block_count * shape.block_bytes} bytes, not {memory.shape}")
        # (block, layer, kv head, token of the block, K‖V)
        self.storage = memory.view(shape.dtype).view(size)
        # (block, kv head, token of the block, K‖V) each: what a BlockCopier takes
        self.layers = list(self.storage.unbind(1))

    @property
    def device(self) -> torch.device:
        return self.storage.device

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put K and V `(row, kv head, token, width)` into these slots `(row, token)`. A slot is a block's id times
        `block_tokens`, plus the place in the block. No slot may be named twice."""
        blocks, places = slots // self.shape.block_tokens, slots % self.shape.block_tokens
        self.layers[layer][blocks, :, places] = torch.cat((keys, values), dim=-1).transpose(1, 2)

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of K and V of these slots `(row, token)`, as `(row, kv head, token, width)` each."""
        blocks, places = slots // self.shape.block_tokens, slots % self.shape.block_tokens
        found = self.layers[layer][blocks, :, places].transpose(1, 2)
        return found[..., : self.shape.key_width], found[..., self.shape.key_width :]

    def copy_blocks(self, pairs: torch.Tensor) -> None:
        """Copy blocks inside the pool, all layers: copy-on-write. Every block is read before one is written.

        Args:
            pairs: `(n, 2)` int64 in host memory, (from, to).

        Raises:
            ValueError: the pairs have another form, name a block that is not there, or write one twice.
        """
        source, target = _checked(pairs, self.block_count, self.block_count).to(self.device).unbind(1)
        self.storage[target] = self.storage[source]


def swap_blocks(source: PagedKV, target: PagedKV, pairs: torch.Tensor) -> None:
    """Copy blocks between two devices, all layers, one contiguous copy a block.

    The copies are ordered on the current stream. With pinned host memory they do not block, and the host may read a
    block only after that stream is synchronised. The operation and its refusals follow vLLM's `swap_blocks`.

    Args:
        pairs: `(n, 2)` int64 in host memory, (block of `source`, block of `target`).

    Raises:
        ValueError: neither pool is on a GPU, the pools differ in shape, or the pairs are no such pairs.
    """
    if "cuda" not in (source.device.type, target.device.type):
        raise ValueError(
            f"Invalid device combination: {source.device} to {target.device}. One of the two must be a GPU; between "
            "host blocks and the pool a copier of kvservice copies"
        )
    if source.shape != target.shape:
        raise ValueError(f"blocks of {source.shape} do not fit into blocks of {target.shape}")
    for block, place in _checked(pairs, source.block_count, target.block_count).tolist():
        target.storage[place].copy_(source.storage[block], non_blocking=True)


def _checked(pairs: torch.Tensor, source_count: int, target_count: int) -> torch.Tensor:
    if pairs.dim() != 2 or pairs.shape[1] != 2 or pairs.dtype != torch.int64 or pairs.device.type != "cpu":
        raise ValueError(
            f"pairs of blocks are an (n, 2) int64 tensor in host memory, not {tuple(pairs.shape)} {pairs.dtype} on "
            f"{pairs.device}"
        )
    for blocks, count in zip(pairs.unbind(1), (source_count, target_count), strict=True):
        if blocks.numel() and not 0 <= int(blocks.min()) <= int(blocks.max()) < count:
            raise ValueError(f"blocks {blocks.tolist()} are not all among 0 to {count - 1}")
    if pairs[:, 1].unique().numel() != len(pairs):
        raise ValueError(f"a block is written twice: {pairs[:, 1].tolist()}")
    return pairs


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """What to compute of one sequence in a step: some of its prompt, or its newest token."""

    tokens: Sequence[int]  # to compute, at positions `begin` and after
    begin: int  # the tokens before it have their K and V in the blocks
    table: Sequence[int]  # ids of the sequence's blocks, for at least `end` tokens
    first: int = 0  # the first token that attention reads. The table's entries for those before it are not used

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens)

    @property
    def read_count(self) -> int:
        return self.end - self.first

    def slots(self, block_tokens: int) -> torch.Tensor:
        """Of the tokens that attention reads, `(read_count,)` int64 in host memory."""
        blocks = torch.tensor(self.table, dtype=torch.int64)
        slots = (blocks[:, None] * block_tokens + torch.arange(block_tokens)).flatten()
        assert len(slots) >= self.end, "the table has a block for every token"
        return slots[self.first : self.end]


@dataclass(frozen=True, slots=True)
class Batch:
    """Spans of equally many tokens, as one forward takes them.

    Shorter rows are padded on their left, as `generate` does it: the distance between a query and a key is then the
    same as in the sequence, and one causal mask, with or without a sliding window, is right for all rows.
    """

    past: int  # tokens before the new ones, in the longest row
    positions: torch.Tensor  # (row, new token) int64, in the sequence
    write: torch.Tensor  # (row, new token) int64, slots
    # (row, past + new) int64, slots. Padding repeats the row's newest slot, which holds finite numbers when it is read:
    # its weight is 0, and 0 times NaN would not be 0.
    read: torch.Tensor
    mask: torch.Tensor  # (row, past + new) int64, 0 for padding

    @classmethod
    def of(cls, spans: Sequence[TokenSpan], block_tokens: int, device: torch.device) -> Batch:
        new = len(spans[0].tokens)
        assert new > 0, "a span has at least one token to compute"
        assert all(len(span.tokens) == new for span in spans)
        longest = max(span.read_count for span in spans)
        rows, mask = [], torch.zeros((len(spans), longest), dtype=torch.int64)
        for row, span in enumerate(spans):
            slots, padding = span.slots(block_tokens), longest - span.read_count
            mask[row, padding:] = 1
            rows.append(torch.cat((slots[-1:].expand(padding), slots)))
        read = torch.stack(rows).to(device)
        positions = torch.tensor([range(span.begin, span.end) for span in spans], device=device)
        return cls(longest - new, positions, read[:, -new:], read, mask.to(device))


class LayerHook(Protocol):
    """What happens between the layers of a step, for loads and stores that go layer by layer. Called in the order of
    the layers, once a layer and step, however many forwards the step has."""

    def before(self, layer: int) -> None:
        """Before the first forward of the step uses this layer of any block. May block until the layer is loaded."""
        ...

    def written(self, layer: int) -> None:
        """The last forward of the step has written its K and V of this layer, as have those before it. It has not
        computed with them."""
        ...


class PagedLayer(DynamicLayer):
    """One layer of the cache that a transformers model is given.

    It overrides `update` and `get_seq_length` only. The other methods of cache layers have changed between versions of
    transformers; DynamicLayer's are right in each, because they go by these two.
    """

    def __init__(
        self,
        kv: PagedKV,
        layer: int,
        batch: Batch,
        before: Callable[[int], None] | None,
        written: Callable[[int], None] | None,
    ) -> None:
        super().__init__()
        self._kv = kv
        self._layer = layer
        self._batch = batch
        self._before = before
        self._written = written

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write K and V `(row, kv head, new token, width)` of the new tokens. Returns those of all tokens that
        attention may read, `(row, kv head, past + new, width)`.

        A layer with a sliding window gets all of them too, and its mask hides what lies before the window: every layer
        of a block is kept for as long as the block is."""
        if self._before is not None:
            self._before(self._layer)
        self._kv.write(self._layer, self._batch.write, key_states, value_states)
        if self._written is not None:
            self._written(self._layer)
        return self._kv.read(self._layer, self._batch.read)

    def get_seq_length(self) -> int:
        """The tokens before the new ones, padding included; also during and after `update`."""
        return self._batch.past


def paged_cache(kv: PagedKV, batch: Batch, hook: LayerHook | None, *, first: bool, last: bool) -> Cache:
    """The cache for one forward over this batch, which is the first or last of its step."""
    before = hook.before if hook is not None and first else None
    written = hook.written if hook is not None and last else None
    return Cache(layers=[PagedLayer(kv, layer, batch, before, written) for layer in range(kv.shape.layer_count)])
