"""vLLM's SimpleCPUOffloadConnector, walked through with two requests, as the public walk-throughs of it tell the story.

It keeps blocks that the device computed in the host's memory, by their hash, and copies them back for the next prompt
that begins alike. Each test retells one passage with its numbers. Where the passage is wrong, the test says so and
holds this project to what is right.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvservice.connector.scheduler.ports import Promise
from kvservice.core.segment.geometry import plan_geometry
from kvservice.core.segment.layout import SlotLayout
from kvservice.testing.eventually import eventually
from kvservice.units import GiB, KiB, MiB
from tests.conformance.walk import BLOCK, LAYOUT, Walk

PROMPT = list(range(1000, 1016))  # A: one block of sixteen tokens
LONGER = [*PROMPT, *range(2000, 2016)]  # B: the same block and one more


@pytest.fixture
def walk() -> Iterator[Walk]:
    made = Walk()
    yield made
    made.close()


@pytest.fixture
def tailed() -> Iterator[Walk]:
    made = Walk(tails=True)
    yield made
    made.close()


def test_simple_cpu_offload_walk_through(walk: Walk) -> None:
    """A is computed into device block 101 and stored: 1 of 50 host blocks. B begins like A: A's block is copied from
    the host into device block 102, only the rest is computed, into 103, and stored: 2 of 50, 48 free.

    The source has A and B of 3 and 7 tokens in blocks of 16 and finds A's block by its hash; a block that is not full
    has no hash, so here the prompts are one and two whole blocks. It stores device block 102 once more under a second
    hash: what was just loaded is known here, and stored once. It has 100 device blocks and uses numbers 101 to 103: a
    hundred blocks end at number 99, so this engine has more. Its events -1 ("no transfer") are empty lists here.
    """
    walk.arrive("A", PROMPT)
    assert walk.matched("A", BLOCK + 1) == Promise(0), "the host holds nothing yet"
    walk.scheduler.allocated("A", [101], 0)
    first = walk.step({"A": (BLOCK, [101])})
    assert not first.loads
    assert [entry.block_id for store in first.stores for entry in store.entries] == [101]
    eventually(lambda: walk.slots()["sealed"] == 1, "1/50 in use", detail=walk.slots)
    walk.finish("A", BLOCK, [101])

    walk.arrive("B", LONGER)
    assert walk.matched("B", 2 * BLOCK + 1) == Promise(BLOCK, layered=False)
    walk.scheduler.allocated("B", [102, 103], BLOCK)
    loading = walk.step()
    (load,) = loading.loads
    assert [(entry.ref.slot, entry.block_id) for entry in load.entries] == [(first.stores[0].entries[0].ref.slot, 102)]
    assert all(torch.equal(layer[102], layer[101]) for layer in walk.tensors), "the bytes that A computed"
    second = walk.step({"B": (2 * BLOCK, [102, 103])})
    assert not second.loads
    assert [entry.block_id for store in second.stores for entry in store.entries] == [103]
    eventually(lambda: walk.slots()["sealed"] == 2, "2/50 in use", detail=walk.slots)

    walk.finish("B", 2 * BLOCK, [102, 103])
    assert not walk.scheduler.has_pending_work(0.3), "a request that ends holds up nothing"
    assert sum(count for state, count in walk.slots().items() if state != "sealed") == 48
    assert sum(walk.slots().values()) == walk.geometry.slots_per_slab(LAYOUT.payload_bytes) == 50
    assert not walk.pins.pinned, "device blocks 101, 102 and 103 are free"
    assert not walk.session._leases, "and nothing protects the host's blocks from eviction"
    assert walk.scheduler.counters["load_blocks"] == 1
    assert walk.scheduler.counters["store_blocks_planned"] == 2


def test_sizes_of_the_example() -> None:
    """A block of 16 tokens of Llama 3 8B has 2 MiB: 32 layers of 64 KiB, for K and V of 8 kv heads in bfloat16. 3 GiB
    of host memory hold 1,457 of them.

    The source computes with 32 kv heads, the model's query heads, and counts K alone in one place ("128 KB a layer,
    4 MB") and 64 MB in another, of which 3 GiB would hold "50": they hold 47 beside the slabs' headers.
    """
    llama = SlotLayout(layer_count=32, kv_head_count=8, cell_bytes=16 * 2 * 128 * 2, block_tokens=16)
    assert llama.layer_bytes == 64 * KiB
    assert llama.payload_bytes == 2 * MiB
    all_heads = SlotLayout(layer_count=32, kv_head_count=32, cell_bytes=16 * 2 * 128 * 2, block_tokens=16)
    assert all_heads.payload_bytes == 8 * MiB
    assert all_heads.layer_bytes // 2 == 128 * KiB, "the source's 128 KB a layer are K alone"
    budget = plan_geometry(3 * GiB)
    assert budget.slab_count == 47
    assert budget.slab_count * budget.slots_per_slab(llama.payload_bytes) == 1457
    assert budget.slab_count * budget.slots_per_slab(all_heads.payload_bytes) == 329
    assert budget.slots_per_slab(64 * MiB) == 0, "headers need room beside a payload as large as a slab"
    wide = plan_geometry(3 * GiB, slab_bytes=64 * MiB + 8 * KiB)
    assert wide.slab_count * wide.slots_per_slab(64 * MiB) == 47


def test_three_and_seven_tokens(tailed: Walk) -> None:
    """The source's own prompts, 3 and 7 tokens in blocks of 16. A's 3 tokens lie in device block 101 and are stored. B
    hits 3 tokens, which are copied into block 102, computes its other 4 into the slots 3 to 6 of that block, and stores
    the block a second time, because it has another name with more tokens."""
    walk = tailed
    one, two = [11, 12, 13], [11, 12, 13, 14, 15, 16, 17]
    walk.arrive("A", one)
    assert walk.matched("A", 3) == Promise(0)
    walk.scheduler.allocated("A", [101], 0)
    first = walk.step({"A": (3, [101])})
    walk.finish("A", 3, [101])
    stores = first.stores + walk.step().stores
    assert [entry.block_id for store in stores for entry in store.entries] == [101]
    eventually(lambda: walk.slots()["sealed"] == 1, "A", detail=walk.slots)
    walk.arrive("B", two)
    promise = walk.matched("B", 7)
    assert promise == Promise(3)
    assert list(range(promise.tokens, len(two))) == [3, 4, 5, 6], "slots of block 102 that are computed"
    walk.scheduler.allocated("B", [102], 3)
    (load,) = walk.step().loads
    assert [entry.block_id for entry in load.entries] == [102]
    assert all(torch.equal(layer[102, :, :3], layer[101, :, :3]) for layer in walk.tensors), "what A computed"
    assert not any(layer[102, :, 3:].any() for layer in walk.tensors), "and nothing of what else was in its block"
    walk.step({"B": (7, [102])})
    walk.finish("B", 7, [102])
    (store,) = walk.step().stores
    assert [entry.block_id for entry in store.entries] == [102]
    eventually(lambda: walk.slots()["sealed"] == 2, "A, and B of other tokens", detail=walk.slots)
    assert not walk.session._leases and not walk.pins.pinned


def test_three_and_seven_tokens_as_whole_blocks(walk: Walk) -> None:
    """The same story with one block for each token of the source: A of 48 tokens, B of 112. B hits 48 tokens and
    computes 64; 3 blocks are stored for A and 4 for B."""
    one = list(range(48))
    two = [*one, *range(500, 564)]
    walk.arrive("A", one)
    assert walk.matched("A", 49) == Promise(0)
    walk.scheduler.allocated("A", [1, 2, 3], 0)
    first = walk.step({"A": (48, [1, 2, 3])})
    assert sum(len(store.entries) for store in first.stores) == 3
    eventually(lambda: walk.slots()["sealed"] == 3, "A's blocks", detail=walk.slots)
    walk.arrive("B", two)
    promise = walk.matched("B", 113)
    assert (promise.tokens, len(two) - promise.tokens) == (48, 64)
    table = [11, 12, 13, 14, 15, 16, 17]
    walk.scheduler.allocated("B", table, promise.tokens)
    walk.step()
    second = walk.step({"B": (112, table)})
    assert [entry.block_id for store in second.stores for entry in store.entries] == [14, 15, 16, 17]
    eventually(lambda: walk.slots()["sealed"] == 7, "and B's own", detail=walk.slots)


def test_the_engine_takes_the_leading_part_of_a_promise(walk: Walk) -> None:
    """Three blocks are promised, and the engine has room for two and takes 32 tokens: the first two are loaded, nothing
    is written behind them, and the third is computed and known to be stored."""
    tokens = list(range(48))
    walk.arrive("A", tokens)
    assert walk.matched("A", 49) == Promise(0)
    walk.scheduler.allocated("A", [1, 2, 3], 0)
    walk.step({"A": (48, [1, 2, 3])})
    eventually(lambda: walk.slots()["sealed"] == 3, "A's blocks", detail=walk.slots)
    walk.arrive("B", tokens)
    assert walk.matched("B", 49) == Promise(48)
    untouched = [layer[13].clone() for layer in walk.tensors]
    walk.scheduler.allocated("B", [11, 12], 32)
    (load,) = walk.step().loads
    assert [entry.block_id for entry in load.entries] == [11, 12]
    for layer, kept in zip(walk.tensors, untouched, strict=True):
        assert torch.equal(layer[11:13], layer[1:3])
        assert torch.equal(layer[13], kept)
    assert not walk.step({"B": (48, [11, 12, 13])}).stores
    assert not walk.session._leases
