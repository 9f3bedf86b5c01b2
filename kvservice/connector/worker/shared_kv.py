"""Places a CPU engine's KV cache in memory that a copy worker can map too, without the engine's knowledge.

vLLM allocates the whole KV cache of a CPU worker with one `torch.zeros(bytes, dtype=torch.int8)` inside the connector's
`get_mem_pool_context`. That one allocation gets its memory from a memfd; all others are left alone. Where the KV
tensors lie shows afterwards whether it worked.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvservice.copying.memory import SharedMemory
from kvservice.core.segment.copy_runs import RegionLayout
from kvservice.errors import SegmentError, UnsupportedLayout
from kvservice.units import MiB

log = logging.getLogger("kvservice.connector")

BYTES_MIN = 1 * MiB  # A smaller allocation is no KV cache and is left alone.


class SharedKV(TorchFunctionMode):
    """Entered around the engine's allocation, on its main thread. `memory` is what the engine got; None if it asked for
    nothing that looks like a KV cache."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: SharedMemory | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.memory is None and _is_kv_cache(func, args, kwargs):
            try:
                self.memory = SharedMemory.make(args[0])
            except SegmentError as error:
                log.error("the KV cache is in private memory, so no copy worker can use it: %s", error.message)
            else:
                return torch.frombuffer(self.memory.buffer, dtype=torch.int8)
        return func(*args, **kwargs)


def _is_kv_cache(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return (
        func is torch.zeros
        and len(args) == 1
        and isinstance(args[0], int)
        and args[0] >= BYTES_MIN
        and set(kwargs) <= {"dtype", "device"}
        and kwargs.get("dtype") is torch.int8
        and torch.device(kwargs.get("device") or "cpu").type == "cpu"
    )


def region_layout(layers: Sequence[torch.Tensor], heads: range, address: int, byte_count: int) -> RegionLayout:
    """How these layers, shaped as BlockCopier takes them, lie in the memory at `address`. Raises UnsupportedLayout if
    they are not in it, or are not alike."""
    layers = [layer.unsqueeze(1) if layer.dim() == 4 else layer for layer in layers]
    first = layers[0]
    if first.dim() != 5 or any(t.shape != first.shape or t.stride() != first.stride() for t in layers):
        raise UnsupportedLayout("the layers' KV tensors are not alike")
    offsets = tuple(layer.data_ptr() - address for layer in layers)
    if min(offsets) < 0 or max(offsets) >= byte_count:
        raise UnsupportedLayout("the KV cache is not in the memory that was shared")
    if first.stride(4) != 1:
        raise UnsupportedLayout("K and V of one token are not contiguous")
    size = first.element_size()
    blocks, parts, head_count, tokens, width = first.shape
    block, part, head, token, _ = (stride * size for stride in first.stride())
    return RegionLayout(
        region_bytes=byte_count,
        block_count=blocks,
        layer_offsets=offsets,
        parts=parts,
        heads=head_count,
        tokens=tokens,
        cell_bytes=width * size,
        block_stride=block,
        part_stride=part,
        head_stride=head,
        token_stride=token,
        first_head=heads.start,
    )
