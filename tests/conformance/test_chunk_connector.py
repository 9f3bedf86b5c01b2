"""LMCache's connector for vLLM, which keeps chunks of 256 tokens. Slots here hold the engine's block, or a chunk.

Each test retells a passage of the public analyses of LMCacheConnector with its numbers. Where text and code of the
source disagree, the test names both and asserts what this project does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvservice.connector.layerwise.copies import BlockRun, HostLayers
from kvservice.connector.layerwise.worker import LayerwiseWorker
from kvservice.connector.options import Verify
from kvservice.connector.plan import CopyEntry, LoadPlan, PoolInfo, StepPlan
from kvservice.connector.scheduler.ports import Promise
from kvservice.connector.worker.block_copier import BlockCopier
from kvservice.connector.worker.copier import InlineCopier
from kvservice.copying.message import Direction
from kvservice.core.block.keys import chain_hashes
from kvservice.core.segment.digest import digest_payload
from kvservice.core.segment.geometry import plan_geometry, slot_index
from kvservice.core.segment.header import SlotHeader
from kvservice.core.segment.layout import HeadShare, SlotLayout
from kvservice.core.segment.refs import BlockRef
from kvservice.memory.segment import Segment
from kvservice.testing.eventually import eventually
from kvservice.tier.worker import TierWorker, Urgency
from kvservice.units import BlockKey, BootEpoch, Generation, MiB, SpanRoute
from tests.conformance.walk import BLOCK, HEADS, LAYOUT, WIDTH, Walk

CHUNK = 256  # tokens of one of LMCache's chunks


@pytest.fixture
def walk() -> Iterator[Walk]:
    """Its slots hold a block each."""
    made = Walk()
    yield made
    made.close()


@pytest.fixture
def chunks() -> Iterator[Walk]:
    """Its slots hold a chunk each."""
    made = Walk(parts=CHUNK // BLOCK)
    yield made
    made.close()


def stored(walk: Walk, tokens: list[int], table: list[int]) -> None:
    """The whole blocks of a prompt lie in the pool, computed in these blocks of the device."""
    slots = len(tokens) // walk.layout.block_tokens
    walk.arrive("writer", tokens)
    assert walk.matched("writer", len(tokens)) == Promise(0)
    walk.scheduler.allocated("writer", table, 0)

    def is_stored() -> bool:
        walk.step({"writer": (len(tokens), table)})  # the stock may hold fewer slots: then the rest comes later
        return walk.slots()["sealed"] == slots

    eventually(is_stored, "the prompt", detail=walk.slots)
    walk.finish("writer", len(tokens), table)


def test_three_hundred_tokens_have_eighteen_names() -> None:
    """300 tokens are 19 blocks of 16 tokens, and a chunk of 256 with 44 over. Whole blocks have names: 18 here, one for
    the chunk, and each name depends on all tokens before its own. The last 12 tokens have none."""
    tokens = list(range(300))
    assert -(-len(tokens) // BLOCK) == 19
    assert divmod(len(tokens), CHUNK) == (1, 44)
    names = chain_hashes(tokens, BLOCK)
    assert len(names) == 18
    assert len(tokens) - 18 * BLOCK == 12
    assert len(chain_hashes(tokens, CHUNK)) == 1
    assert names == chain_hashes(tokens[:288], BLOCK)
    other = chain_hashes([7, *tokens[1:]], BLOCK)
    assert all(one != two for one, two in zip(names, other, strict=True)), "the first token is in every name"


def test_three_hundred_tokens_are_one_chunk_and_a_rest(chunks: Walk) -> None:
    """With slots of 256 tokens the first 256 have one name and one slot. The 44 over are not stored, and a prompt that
    shares less than a chunk finds nothing."""
    tokens = list(range(300))
    stored(chunks, tokens, list(range(19)))
    assert chunks.slots()["sealed"] == 1
    chunks.arrive("same", tokens)
    assert chunks.matched("same", len(tokens)) == Promise(CHUNK)
    chunks.arrive("other", [*tokens[:255], 7, *tokens[256:]])
    assert chunks.matched("other", len(tokens)) == Promise(0)


@pytest.mark.parametrize("name", ["walk", "chunks"])
def test_mask_alignment(name: str, request: pytest.FixtureRequest) -> None:
    """The engine has 100 tokens of a prompt whose first 256 are stored.

    The source's text skips the chunk that the engine has in part, so 156 tokens are computed again. Its code rounds
    down, 100 // 256 * 256 = 0, and loads all 256, though the engine has 96 of them. Here the engine's own hit is 6
    blocks, and blocks 6 to 15 are loaded, 160 tokens, whether a slot is a block or a chunk. Of the 256 nothing is
    computed.
    """
    walk: Walk = request.getfixturevalue(name)
    tokens = list(range(CHUNK + 1))
    stored(walk, tokens, list(range(17)))
    assert walk.slots()["sealed"] == CHUNK // walk.layout.block_tokens
    assert 100 // CHUNK * CHUNK == 0
    own = 100 // BLOCK * BLOCK
    assert own == 96
    walk.arrive("reader", tokens)
    assert walk.matched("reader", len(tokens), own) == Promise(160)
    table = list(range(100, 117))
    before = [layer[100:106].clone() for layer in walk.tensors]
    walk.scheduler.allocated("reader", table, 160)
    (load,) = walk.step().loads
    assert [entry.block_id for entry in load.entries] == table[6:16]
    assert own + 160 == CHUNK, "only the token behind the chunk is computed"
    for layer, kept in zip(walk.tensors, before, strict=True):
        assert torch.equal(layer[106:116], layer[6:16])
        assert torch.equal(layer[100:106], kept), "the engine's own blocks are left alone"


def test_failed_blocks(walk: Walk) -> None:
    """Expected are the tokens 0 to 47, and 0 to 15 and 32 to 47 come: 16 to 31 are missing, which lie in device block
    200. The source reports that block, and the engine recomputes from it on.

    Here the block is known as well, but the load fails whole: a block that several requests share must not be computed
    again in place. The request computes everything itself, and what failed is not promised to it again.
    """
    tokens = list(range(49))
    table = [100, 200, 50, 60]
    stored(walk, tokens, [1, 2, 3, 4])
    expected, returned = set(range(48)), {*range(16), *range(32, 48)}
    assert {table[token // BLOCK] for token in expected - returned} == {200}
    walk.arrive("reader", tokens)
    assert walk.matched("reader", 49) == Promise(48)
    walk.scheduler.allocated("reader", table, 48)
    damaged = plan_of_load(walk)[1]
    assert walk.runtime is not None
    payload = walk.worker._segment.payload(damaged.ref.slot, LAYOUT.payload_bytes)  # type: ignore[union-attr]
    payload[4000] ^= 1
    plan = walk.step()
    (load,) = plan.loads
    missing = [entry.block_id for entry in load.entries if entry.ref == damaged.ref]
    assert missing == [200]
    assert walk.scheduler.counters["loads_failed"] == 1
    assert walk.scheduler.counters["load_corrupt"] == 1, "the one damaged block was noticed"
    assert walk.scheduler.matched("reader", 0, 49, 0.5) == Promise(0), "everything is computed, and not asked for again"
    stores = walk.step({"reader": (48, table)}).stores
    assert [entry.block_id for store in stores for entry in store.entries] == table[:3]


def plan_of_load(walk: Walk) -> list[CopyEntry]:
    """The entries of the one load that waits for the next step."""
    (load,) = walk.scheduler._loads._planned
    return list(load.entries)


class Layers:
    """A layer-wise worker of so many layers, one sealed block, and the order in which layers are copied."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        layout = SlotLayout(count, HEADS, BLOCK * WIDTH * 2, BLOCK)
        self.segment = Segment.nameless(Path("/dev/shm"), plan_geometry(4 * MiB), "n")
        self.segment.assign_slab(0, layout.payload_bytes)
        key, slot = BlockKey(b"0123456789abcdef"), slot_index(0, 0)
        payload = self.segment.payload(slot, layout.payload_bytes)
        payload[:] = torch.randn(layout.payload_bytes // 2).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
        epoch, generation = BootEpoch(self.segment.epoch), Generation(2)
        digest = digest_payload(payload, key)
        header = SlotHeader(epoch, generation, key, layout.payload_bytes, SpanRoute(0), digest, 0)
        self.segment.write_header(slot, header)
        self.tensors = [torch.zeros(2, HEADS, BLOCK, WIDTH, dtype=torch.bfloat16) for _ in range(count)]
        self.wanted = torch.frombuffer(bytearray(payload), dtype=torch.bfloat16).view(count, HEADS, BLOCK, WIDTH)
        self.copied: list[int] = []
        self.changed = threading.Condition()
        unpatched = HostLayers.copy

        def copy(layers: HostLayers, direction: Direction, layer: int, runs: list[BlockRun]) -> None:
            unpatched(layers, direction, layer, runs)
            with self.changed:
                self.copied.append(layer)
                self.changed.notify_all()

        monkeypatch.setattr(HostLayers, "copy", copy)
        copier = BlockCopier(self.tensors, range(HEADS))
        names = [f"layer.{index}" for index in range(count)]
        share = HeadShare(range(HEADS))
        self.worker = LayerwiseWorker(copier, Verify.FULL, InlineCopier(copier), share, names, save=False)
        pool = PoolInfo(str(self.segment.path), self.segment.geometry, epoch, layout, bytes(16))
        entry = CopyEntry(1, BlockRef(slot, generation), key)
        self.plan = StepPlan(pool=pool, loads=[LoadPlan("r", (entry,), layered=True)])

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.copied) >= count, 10.0)

    def close(self) -> None:
        self.worker.close()
        self.segment.close()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_prefetch_two(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Layers 0 and 1 are copied before the forward begins, and layer n + 2 when it asks for layer n: never more than
    two ahead of the one it computes. A model of one layer or of two has everything there at its first wait."""
    layers = Layers(count, monkeypatch)
    try:
        layers.worker.start_loads(layers.plan)
        for index in range(count):
            layers.wait_for(min(index + 2, count))
            time.sleep(0.02)  # for a copy too many
            assert layers.copied == list(range(min(index + 2, count))), "two ahead, in order, and no further"
            layers.worker.begin_layer(f"layer.{index}")
            assert torch.equal(layers.tensors[index][1], layers.wanted[index]), "the layer that is computed is there"
        assert layers.worker.end_layered() == {"r"}
        assert layers.copied == list(range(count)), "each layer once"
    finally:
        layers.close()


def test_prefetch_before_delete_before_put() -> None:
    """A disk's work waits in three classes. While the disk is busy, two puts, a delete and a prefetch are submitted in
    this order: the prefetch is done first, because a request waits for it, then the delete, which makes room, then the
    puts. A full queue refuses puts and nothing else."""
    began, gate, done = threading.Event(), threading.Event(), list[str]()
    worker = TierWorker("disk", threads=1, writes_max=2)

    def submit(urgency: Urgency, name: str) -> bool:
        return worker.submit(urgency, lambda: done.append(name), lambda: None)

    try:
        assert worker.submit(Urgency.WRITE, lambda: (began.set(), gate.wait()), lambda: None)  # type: ignore[arg-type, return-value]
        assert began.wait(10)
        assert submit(Urgency.WRITE, "put 1")
        assert submit(Urgency.WRITE, "put 2")
        assert submit(Urgency.ERASE, "delete")
        assert submit(Urgency.URGENT_READ, "prefetch")
        assert not submit(Urgency.WRITE, "put 3"), "the queue is full"
        assert submit(Urgency.ERASE, "delete 2") and submit(Urgency.READ, "warm up")
        gate.set()
        eventually(lambda: len(done) == 6, "everything that was accepted")
        assert done == ["prefetch", "warm up", "delete", "delete 2", "put 1", "put 2"]
    finally:
        gate.set()
        worker.close()
