"""KV tensors on a GPU in every layout, a segment beside them, and what a block must look like in a slot."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from kvservice.connector.shared_kv import region_layout
from kvservice.core.descriptors import RegionLayout
from kvservice.core.digest import digest_payload
from kvservice.core.geometry import plan_geometry
from kvservice.core.header import SlotHeader
from kvservice.core.layout import SlotLayout
from kvservice.memory.segment import Segment
from kvservice.units import BlockKey, BootEpoch, Generation, MiB, SlotIndex, SpanRoute

LAYERS, HEADS, TOKENS, WIDTH, BLOCKS = 4, 8, 16, 128, 32
SLOT = SlotLayout(LAYERS, HEADS, TOKENS * WIDTH * 2, TOKENS)
KEY = BlockKey(b"a key of 16 byte")
# Physical order of the dimensions, outermost first.
ORDERS = ("lbhn", "lbnh", "blhn", "blnh", "lhbn")
SIZES = {"l": LAYERS, "b": BLOCKS, "h": HEADS, "n": TOKENS}


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


@contextmanager
def segment() -> Iterator[Segment]:
    path = Path(f"/dev/shm/kvservice-test{uuid.uuid4().hex[:8]}-n")
    made = Segment.create(path, plan_geometry(64 * MiB), "n")
    made.assign_slab(0, SLOT.payload_bytes)
    try:
        yield made
    finally:
        made.close()
        made.unlink()


def write_header(made: Segment, slot: SlotIndex, generation: int) -> None:
    digest = digest_payload(made.payload(slot, SLOT.payload_bytes), KEY)
    epoch = BootEpoch(made.epoch)
    made.write_header(slot, SlotHeader(epoch, Generation(generation), KEY, SLOT.payload_bytes, SpanRoute(0), digest, 0))
