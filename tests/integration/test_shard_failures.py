"""Kill -9 and SIGSTOP of shards and lookup partitions under an engine: misses, never wrong bytes, never a hang."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator

import pytest

from kvservice.client.shard import ShardClient
from kvservice.core.block.fingerprint import Fingerprint
from kvservice.core.directory.mirror import STALE_SECONDS
from kvservice.core.messages import EngineSpec, MissReason
from kvservice.errors import KVServiceError
from kvservice.session.options import PoolOptions
from kvservice.session.pool_choice import choose_pool
from kvservice.session.session import Session
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually, eventually_async
from tests.integration.engine import LAYOUT, Engine, chain
from tests.integration.test_two_nodes import leave, pair


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=2, lease_seconds=2.0) as running:
        yield running


async def test_killed_shard_readopts_every_sealed_block(cluster: LocalCluster) -> None:
    a = await Engine.attach(ShardClient(cluster.socket("n0")))
    keys = chain(seed=11, count=64)
    await a.store(keys)
    epoch = a.attachment.epoch
    cluster.kill("n0")
    await eventually_async(lambda: a.lost != [], "the engine to hear of the end")
    await leave(a)
    cluster.start_shard("n0")
    again, b = await pair(cluster)
    assert again.attachment.epoch > epoch
    assert cluster.stats("n0").counters["blocks_adopted"] == 64
    assert len((await again.read_all(keys)).blocks) == 64, "adopted blocks hit locally"
    cluster.wait_until_known(keys)
    result = await b.read_all(keys)
    assert (len(result.blocks), result.fetched_count) == (64, 64), "and remotely, under the new epoch"
    await leave(again, b)


def test_an_engine_finds_its_shard_when_that_came_back_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node can have another id after a restart of Ray, and then its shard has another socket."""
    with LocalCluster(nodes=1) as cluster:
        monkeypatch.setenv("KVSERVICE_RUNTIME_DIR", str(cluster.root))
        spec = EngineSpec(b"e" * 16, "m", Fingerprint.of({"model": "m"}), LAYOUT)
        choice = choose_pool(PoolOptions(service=cluster.service), spec)
        session = Session(choice.open, choice.spec, lambda: True)
        first = session.start(10.0)
        assert first is not None and first.node_id == "n0"
        cluster.kill("n0", signal.SIGTERM)
        cluster.nodes.append("m1")
        cluster.start_shard("m1")
        eventually(lambda: session.attachment is not None and session.attachment.node_id == "m1", "the engine to move")
        session.close()


async def test_half_written_blocks_are_not_reused_after_a_restart(cluster: LocalCluster) -> None:
    """Their engine is alive and may still write."""
    a = await Engine.attach(ShardClient(cluster.socket("n0")))
    await a.pool.reserve(a.attachment.attachment_id, 3)
    cluster.kill("n0")
    cluster.start_shard("n0")
    assert cluster.accounting("n0").slots["quarantined"] == 3
    await leave(a)
    await eventually_async(lambda: cluster.accounting("n0").slots["quarantined"] == 0, "the end of the quarantine")


async def test_killed_holder_is_a_miss_with_a_reason(cluster: LocalCluster) -> None:
    a, b = await pair(cluster)
    keys = chain(seed=12, count=16)
    await a.store(keys)
    cluster.wait_until_known(keys)
    cluster.kill("n0")
    started = time.monotonic()
    result = await b.acquire(keys, timeout=3.0)
    assert time.monotonic() - started < 4.5
    assert result.blocks == ()
    assert result.miss in (MissReason.PEER_FAILED, MissReason.NEVER_STORED)
    await eventually_async(lambda: cluster.known(keys) == 0, "the directory to forget the keys", seconds=12.0)
    await leave(b)
    a.let_go()


async def test_stopped_holder_costs_no_more_than_the_deadline(cluster: LocalCluster) -> None:
    a, b = await pair(cluster)
    keys = chain(seed=13, count=16)
    await a.store(keys)
    cluster.wait_until_known(keys)
    cluster.kill("n0", signal.SIGSTOP)
    started = time.monotonic()
    result = await b.acquire(keys, timeout=0.5)
    assert time.monotonic() - started < 2.0
    assert result.blocks == ()
    cluster.kill("n0", signal.SIGCONT)
    await leave(a, b)


async def test_killed_lookup_service_costs_only_remote_hits(cluster: LocalCluster) -> None:
    """Its directory is rebuilt."""
    a, b = await pair(cluster)
    keys = chain(seed=14, count=150)
    await a.store(keys)
    cluster.wait_until_known(keys)
    cluster.kill("lookup0")
    cluster.kill("lookup1")
    assert (await b.read_all(keys[:60])).fetched_count == 60, "the mirror is believed for a moment"
    await asyncio.sleep(STALE_SECONDS)
    started = time.monotonic()
    result = await b.acquire(keys, timeout=2.0)
    assert time.monotonic() - started < 1.8
    assert (len(result.blocks), result.miss) == (60, MissReason.LOOKUP_FAILED)
    await b.pool.release(b.attachment.attachment_id, [result.lease_id])
    assert len((await a.read_all(keys)).blocks) == 150, "local hits need no lookup"
    cluster.start_lookup(0)
    cluster.start_lookup(1)
    cluster.wait_until_known(keys)
    await eventually_hits(b, keys)
    await leave(a, b)


async def eventually_hits(engine: Engine, keys: tuple[bytes, ...]) -> None:
    """The client's breaker may take some seconds to try a restarted lookup partition again."""

    async def hits() -> bool:
        return len((await engine.read_all(keys)).blocks) == len(keys)  # type: ignore[arg-type]

    await eventually_async(hits, "hits through the rebuilt directory")


async def test_engine_of_a_dead_shard_gets_typed_errors_at_once(cluster: LocalCluster) -> None:
    a = await Engine.attach(ShardClient(cluster.socket("n0")))
    cluster.kill("n0")
    started = time.monotonic()
    with pytest.raises(KVServiceError):
        await a.acquire(chain(seed=15, count=4), timeout=1.0)
    assert time.monotonic() - started < 2.0
    await leave(a)


async def test_no_byte_is_wrong_while_shards_die_and_return(cluster: LocalCluster) -> None:
    keys = [chain(seed=20 + i, count=24) for i in range(4)]
    hits = 0
    for round_index in range(4):
        a, b = await pair(cluster)
        for one in keys:
            await a.store(one)
            cluster.wait_until_known(one)
        reads = [asyncio.ensure_future(b.read_all(one, timeout=2.0)) for one in keys]
        await asyncio.sleep(0.04 * round_index)
        cluster.kill("n0")
        for read in reads:
            hits += len((await read).blocks)  # read_all asserts every byte
        a.let_go()
        await leave(b)
        cluster.start_shard("n0")
    assert hits > 0
    assert cluster.accounting("n0").balanced
    assert cluster.accounting("n1").balanced
