"""Copies in an engine's own process on a GPU: the bytes of a plain copy in every layout, by batches of large runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kvservice.connector.plan import CopyEntry, PoolInfo
from kvservice.connector.worker.block_copier import BlockCopier
from kvservice.connector.worker.copier import CudaCopier, in_process_copier
from kvservice.copying.message import Direction
from kvservice.core.segment.geometry import slot_index
from kvservice.core.segment.refs import BlockRef
from kvservice.memory.segment import Segment
from kvservice.testing.eventually import eventually
from kvservice.units import Generation
from tests.gpu.device import block_bytes, kv_cache
from tests.gpu.slots import BLOCKS, HEADS, KEY, ORDERS, SLOT, payload, segment

pytestmark = pytest.mark.gpu

PLACES = {5: 9, 0: 4, 31: 5, 17: 0}  # block → slot
LARGE_RUNS = {"lbhn", "blhn"}  # a layer of a block is contiguous, or all of them


@contextmanager
def copying(cache: torch.Tensor, *, pinned: bool) -> Iterator[tuple[CudaCopier, Segment]]:
    with segment() as made:
        blocks = BlockCopier(list(cache.unbind(0)), range(HEADS))
        copier = in_process_copier(blocks)
        assert isinstance(copier, CudaCopier)
        memory = blocks.bind(made.buffer, SLOT)
        copier.adopt(memory, PoolInfo(str(made.path), made.geometry, made.epoch, SLOT, bytes(16)))
        pinning = copier._pinning
        assert pinning is not None
        if pinned:
            pinning.used()
            eventually(lambda: pinning.covers(made.geometry.segment_bytes), "the pool pinned")
        else:
            pinning._patience = float("inf")
        yield copier, made
        copier.release()
        copier.close()
        del memory
        blocks.unbind()


def copy(copier: CudaCopier, direction: Direction, places: dict[int, int]) -> None:
    entries = [CopyEntry(block, BlockRef(slot_index(0, slot), Generation(1)), KEY) for block, slot in places.items()]
    ticket = copier.run(direction, entries)
    eventually(ticket.query, "the end of the copies")


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("order", ORDERS)
def test_blocks_go_to_slots_and_come_back_elsewhere(order: str, pinned: bool) -> None:
    cache = kv_cache(order)
    with copying(cache, pinned=pinned) as (copier, made):
        copy(copier, Direction.STORE, PLACES)
        for block, slot in PLACES.items():
            assert payload(made, slot_index(0, slot)) == block_bytes(cache, block)
        wanted = cache.clone()
        cache.zero_()
        copy(copier, Direction.LOAD, {(block + 1) % BLOCKS: slot for block, slot in PLACES.items()})
        for block in range(BLOCKS):
            source = (block - 1) % BLOCKS
            expected = wanted[:, source] if source in PLACES else torch.zeros_like(wanted[:, source])
            assert torch.equal(cache[:, block], expected), f"block {block}"
        batched = copier.take_counters().get("copy_batched_blocks", 0)
        assert batched == (2 * len(PLACES) if pinned and order in LARGE_RUNS and copier._driver is not None else 0)


def test_store_waits_for_the_kernels_that_write_the_block() -> None:
    cache = kv_cache("blhn")
    with copying(cache, pinned=True) as (copier, made):
        for attempt in range(20):
            torch.cuda._sleep(50_000_000)  # tens of milliseconds of a kernel
            cache[:, 3] = attempt
            copy(copier, Direction.STORE, {3: 0})
            cache[:, 3] = -1  # the engine's again
            torch.cuda.synchronize()
            assert payload(made, slot_index(0, 0)) == block_bytes(torch.full_like(cache, attempt), 3)
