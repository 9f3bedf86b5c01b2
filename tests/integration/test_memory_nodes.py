"""A shard without engines takes what another one is about to evict, and gives it to everybody."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
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
