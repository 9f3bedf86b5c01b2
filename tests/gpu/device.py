"""KV tensors on a GPU in every layout, and what a block must look like in a slot."""

from __future__ import annotations

import torch

from kvservice.connector.worker.shared_kv import region_layout
from kvservice.core.segment.copy_runs import RegionLayout
from tests.gpu.slots import HEADS, SIZES, WIDTH


def kv_cache(order: str, seed: int = 0) -> torch.Tensor:
    """`[layer, block, head, token, width]` over one allocation in this physical order, random bytes."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = [SIZES[name] for name in order] + [WIDTH]
    backing = torch.randint(0, 255, shape, device="cuda", generator=generator).to(torch.bfloat16)
    return backing.permute([*(order.index(name) for name in "lbhn"), 4])


def layout_of(cache: torch.Tensor) -> RegionLayout:
    storage = cache.untyped_storage()
    return region_layout(list(cache.unbind(0)), range(HEADS), storage.data_ptr(), storage.nbytes())


def block_bytes(cache: torch.Tensor, block: int) -> bytes:
    """As it must be in a slot."""
    data: bytes = cache[:, block].contiguous().cpu().view(torch.uint8).numpy().tobytes()
    return data
