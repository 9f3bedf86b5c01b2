"""Two shards, two lookup partitions, real processes, real transports: blocks written on one node are read on the
other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from kvservice.client.shard import ShardClient
from kvservice.core.messages import AcquireResult, MissReason, SealStatus
from kvservice.errors import FingerprintMismatch, InvalidRequest, NotAttached
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually_async
from kvservice.transfer.nixl import nixl_available
from tests.integration.engine import LAYOUT, Engine, chain, spec

TRANSPORTS = [
    "shm",
    pytest.param("nixl", marks=[pytest.mark.nixl, pytest.mark.skipif(not nixl_available(), reason="NIXL absent")]),
]


@pytest.fixture(scope="module", params=TRANSPORTS)
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    with LocalCluster(nodes=2, transport=request.param, lease_seconds=2.0) as running:
        yield running


async def pair(cluster: LocalCluster) -> tuple[Engine, Engine]:
    a, b = [await Engine.attach(ShardClient(cluster.socket(node))) for node in ("n0", "n1")]
    return a, b


async def leave(*engines: Engine) -> None:
    for engine in engines:
        await engine.pool.close()
        engine.let_go()


async def test_blocks_of_one_node_are_promised_verified_on_another(cluster: LocalCluster) -> None:
    a, b = await pair(cluster)
    keys = chain(seed=1, count=100)
    assert await a.store(keys) == [SealStatus.SEALED] * 100
    cluster.wait_until_known(keys)
    before = cluster.stats("n1").counters

    async def fetched() -> AcquireResult | None:
        result = await b.read_all(keys, timeout=30.0)
        return None if result.miss is MissReason.PEER_FAILED else result

    # The shards meet now. On a busy machine the first try may end before both have made their agents.
    result = await eventually_async(fetched, "a fetch from the peer", 60.0)
    assert (len(result.blocks), result.fetched_count, result.miss) == (100, 100, MissReason.NONE)
    counters = cluster.stats("n1").counters
    assert counters["fetched_bytes"] - before.get("fetched_bytes", 0) == 100 * LAYOUT.payload_bytes
    again = await b.read_all(keys)
    assert (len(again.blocks), again.fetched_count) == (100, 0), "fetched blocks are local hits the second time"
    await leave(a, b)


async def test_gap_in_prefix_ends_the_hit(cluster: LocalCluster) -> None:
    a, b = await pair(cluster)
    keys = chain(seed=2, count=20)
    await a.store(keys[:8])
    cluster.wait_until_known(keys[:8])
    result = await b.read_all(keys)
    assert (len(result.blocks), result.miss) == (8, MissReason.NEVER_STORED)
    await leave(a, b)


async def test_engine_prefix_is_neither_leased_nor_fetched(cluster: LocalCluster) -> None:
    a, b = await pair(cluster)
    keys = chain(seed=3, count=16)
    await a.store(keys)
    cluster.wait_until_known(keys)
    result = await b.read_all(keys, skip=10)
    assert (len(result.blocks), result.fetched_count) == (6, 6)
    await leave(a, b)


async def test_one_fetch_serves_all_who_ask_at_once(cluster: LocalCluster) -> None:
    a, b = await pair(cluster)
    keys = chain(seed=4, count=32)
    await a.store(keys)
    cluster.wait_until_known(keys)
    before = cluster.stats("n1").counters.get("fetched_blocks", 0)
    results = await asyncio.gather(*(b.read_all(keys) for _ in range(10)))
    assert all(len(result.blocks) == 32 for result in results)
    assert cluster.stats("n1").counters["fetched_blocks"] - before == 32
    await leave(a, b)


async def test_other_fingerprint_of_one_model_is_refused_by_name(cluster: LocalCluster) -> None:
    a, b = await pair(cluster)
    other = ShardClient(cluster.socket("n0"))
    with pytest.raises(FingerprintMismatch, match=r"dtype: float8 here, bfloat16 there"):
        await other.attach(spec(dtype="float8"), lambda reason: None)
    await other.close()
    await leave(a, b)


async def test_bad_requests_are_typed_errors_and_the_shard_lives(cluster: LocalCluster) -> None:
    a, b = await pair(cluster)
    keys = chain(seed=5, count=2)
    with pytest.raises(InvalidRequest, match="twice"):
        await a.acquire((keys[0], keys[0]))
    with pytest.raises(InvalidRequest, match="reserve 1 to"):
        await a.pool.reserve(a.attachment.attachment_id, 0)
    await b.pool.detach(b.attachment.attachment_id)
    with pytest.raises(NotAttached):
        await b.pool.reserve(b.attachment.attachment_id, 1)
    assert cluster.accounting("n0").balanced
    await leave(a, b)


async def test_writes_of_a_lost_engine_are_quarantined(cluster: LocalCluster) -> None:
    """They stay so until its processes are gone."""
    engine = await Engine.attach(ShardClient(cluster.socket("n0")))
    await engine.pool.reserve(engine.attachment.attachment_id, 5)
    client = engine.pool
    assert isinstance(client, ShardClient)
    client._links.pop(engine.attachment.attachment_id).close()  # this process still holds its lock
    await eventually_async(lambda: cluster.accounting("n0").slots["quarantined"] == 5, "five slots in quarantine")
    await asyncio.sleep(0.8)
    assert cluster.accounting("n0").slots["quarantined"] == 5, "freed while a writer may be alive"
    engine.let_go()
    await eventually_async(lambda: cluster.accounting("n0").slots["quarantined"] == 0, "the slots to come back")
    assert cluster.accounting("n0").balanced


async def test_leases_of_a_silent_engine_end(cluster: LocalCluster) -> None:
    a, b = await pair(cluster)
    keys = chain(seed=6, count=4)
    await a.store(keys)
    result = await a.acquire(keys)
    assert len(result.blocks) == 4
    await eventually_async(lambda: cluster.accounting("n0").leases == 0, "the lease to expire", 12.0)
    await a.pool.release(a.attachment.attachment_id, [result.lease_id])  # late: a counted no-op
    assert cluster.stats("n0").counters["lease_release_ignored"] >= 1
    await leave(a, b)
