"""A shard without engines takes what another one is about to evict, and gives it to everybody."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from kvservice.client.operator import OperatorClient
from kvservice.core.block.marks import Mark, MarkKind
from kvservice.core.messages import SealItem
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually, eventually_async
from kvservice.units import MiB, SpanRoute
from tests.integration.engine import LAYOUT, attached, chain, spec

pytestmark = pytest.mark.processes
PROMPTS = [chain(50_000 + number, 20) for number in range(12)]  # 15 MiB, twice the memory of a node


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=3, transport="shm", pool_bytes=8 * MiB, memory_nodes=1) as running:
        yield running


async def store_all(cluster: LocalCluster) -> None:
    engine = await attached(cluster.socket("n0"))
    try:
        for prompt in PROMPTS:
            await engine.store(prompt)
            await asyncio.sleep(0.3)  # an engine computes at least so long for so many blocks
    finally:
        await engine.pool.close()
        engine.let_go()


async def read_oldest(cluster: LocalCluster) -> int:
    engine = await attached(cluster.socket("n1"))
    try:
        return sum([len((await engine.read_all(prompt)).blocks) for prompt in PROMPTS[:4]])
    finally:
        await engine.pool.close()
        engine.let_go()


def test_what_one_node_evicts_is_read_from_the_memory_node(cluster: LocalCluster) -> None:
    assert [cluster.stats(node).accepts_spill for node in cluster.nodes] == [False, False, True]
    asyncio.run(store_all(cluster))
    n0 = cluster.stats("n0").counters
    assert n0["spill_blocks_taken"] > 40 and n0["evicted_primary"] > 40, dict(n0)
    eventually(lambda: cluster.stats("n2").counters.get("takeover_blocks_taken", 0) > 40, "the memory node has them")
    cluster.wait_until_announced("n2")
    assert asyncio.run(read_oldest(cluster)) > 40
    pulled = {row.node_id: row.pulled_bytes for row in cluster.stats("n1").pulls}
    assert pulled.get("n2", 0) > 0, pulled
    assert not cluster.stats("n2").counters.get("spill_blocks_offered", 0), "it passes nothing on"


async def test_a_memory_node_knows_whose_blocks_it_has_after_a_restart(tmp_path: Path) -> None:
    """No engine ever attached to it, and a clear of another model leaves what is on its disk."""
    disk = {"PATH": str(tmp_path), "BYTES": str(64 * MiB), "WRITE": "stored"}
    disk = {f"KVSERVICE_DISK_{name}": value for name, value in disk.items()}
    with LocalCluster(nodes=2, transport="shm", pool_bytes=8 * MiB, memory_nodes=1, environment=disk) as cluster:

        def on_disk() -> int:
            return sum(tier.blocks for tier in cluster.stats("n1").tiers)

        await store_all(cluster)
        await eventually_async(lambda: on_disk() > 40, "what the memory node took is on its disk")
        await asyncio.to_thread(cluster.kill, "n1", signal.SIGTERM)  # its memory goes: nobody would know whose that is
        await asyncio.to_thread(cluster.start_shard, "n1")
        await eventually_async(lambda: on_disk() > 40, "the blocks are found again")
        held, operator = on_disk(), OperatorClient()
        mark = Mark(MarkKind.MODEL, time.time(), "another model")
        await operator.clear(cluster.record("n1").peer_address, [mark])
        await operator.close()
        assert on_disk() >= held


async def test_a_memory_node_full_of_one_model_takes_blocks_of_another() -> None:
    """Whose blocks have another size. Nobody else would ever free the first model's memory there."""
    large = replace(spec("large"), layout=replace(LAYOUT, cell_bytes=5 * LAYOUT.cell_bytes))
    with LocalCluster(nodes=2, transport="shm", pool_bytes=4 * MiB, memory_nodes=1) as cluster:

        def taken() -> int:
            return cluster.stats("n1").counters.get("takeover_blocks_taken", 0)

        engine, numbers = await attached(cluster.socket("n0")), count(60_000)

        async def is_full() -> bool:
            await engine.store(chain(next(numbers), 20))
            return cluster.stats("n1").slab_free_count == 0

        await eventually_async(is_full, "the memory node is full", 60.0)
        engine.let_go()
        await engine.pool.close()
        other, before = await attached(cluster.socket("n0"), large), taken()
        keys = iter(chain(70_000, 1000, "large"))

        async def is_taken() -> bool:
            for ref, key in zip(await other.pool.reserve(other.id, 1), keys, strict=False):
                other.segment.payload(ref.slot, large.layout.payload_bytes)[:] = bytes(large.layout.payload_bytes)
                await other.pool.seal(other.id, [SealItem(ref, key, None, 0, SpanRoute(0))])
            return cluster.stats("n1").counters.get("slabs_moved", 0) > 1

        await eventually_async(is_taken, "the memory node takes blocks of the other size", 30.0)
        assert taken() > before
        other.let_go()
        await other.pool.close()
