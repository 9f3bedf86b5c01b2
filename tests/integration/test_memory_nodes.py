"""A shard without engines takes what another one is about to evict, and gives it to everybody."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvservice.client.operator import OperatorClient
from kvservice.core.block.marks import Mark, MarkKind
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually, eventually_async
from kvservice.units import MiB
from tests.integration.engine import attached, chain

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
