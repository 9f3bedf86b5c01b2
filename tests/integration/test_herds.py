"""Many at once, more than there is room for, and an address that answers nothing at all."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvservice.client.peer import PeerClient
from kvservice.client.shard import ShardClient
from kvservice.core.actions import Locate
from kvservice.core.messages import Holder, MissReason
from kvservice.errors import KVServiceError
from kvservice.lookup.client import LookupAnswer, LookupClient
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually_async
from kvservice.units import BootEpoch, MiB, NodeId
from tests.integration.certificates import write
from tests.integration.engine import Engine, chain
from tests.integration.test_two_nodes import leave, pair

CLIENTS = 1000
FLOOD_SECONDS = 4.0
READ_SECONDS = 1.0
SHORT_SECONDS = 0.3
LATE_SECONDS = 2.0  # the client's slack, and a machine that does something else


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=2, lease_seconds=2.0) as running:
        yield running


async def test_a_thousand_who_ask_for_one_cold_prefix_make_one_fetch(cluster: LocalCluster) -> None:
    a, b = await pair(cluster)
    more = [await Engine.attach(ShardClient(cluster.socket("n1"))) for _ in range(9)]
    keys = chain(seed=1, count=32)
    await a.store(keys)
    cluster.wait_until_known(keys)
    before = cluster.stats("n1").counters
    readers = [b, *more]
    asked = [readers[i % len(readers)].acquire(keys, timeout=20.0) for i in range(CLIENTS)]
    results = await asyncio.gather(*asked)
    assert [len(result.blocks) for result in results] == [32] * CLIENTS
    assert all(b.read(ref, key) for ref, key in zip(results[0].blocks, keys, strict=True))
    for i, reader in enumerate(readers):
        await reader.pool.release(reader.id, [result.lease_id for result in results[i :: len(readers)]])
    after = cluster.stats("n1").counters
    assert after["fetched_blocks"] - before.get("fetched_blocks", 0) == 32
    await leave(a, *readers)
    await eventually_async(lambda: cluster.accounting("n1").leases == 0, "the leases to be released")


async def flood(engine: Engine, seed: int, until: float) -> tuple[int, int]:
    """(answers with blocks, answers without). Each answer comes in time, or the call ends with a typed error."""
    hits = misses = 0
    keys = chain(seed, 64)
    while (started := time.monotonic()) < until:
        try:
            result = await engine.acquire(keys, timeout=READ_SECONDS)
        except KVServiceError:
            misses += 1
            continue
        finally:
            assert time.monotonic() - started < READ_SECONDS + LATE_SECONDS
        hits, misses = hits + bool(result.blocks), misses + (not result.blocks)
        if result.lease_id:
            with contextlib.suppress(KVServiceError):  # then it ends with its time
                await engine.pool.release(engine.id, [result.lease_id])
    return hits, misses


async def test_too_much_work_ends_in_time_and_leaves_nothing(cluster: LocalCluster) -> None:
    a, b = await pair(cluster)
    hot = chain(seed=2, count=64)
    await a.store(hot)
    cluster.wait_until_known(hot)
    await b.read_all(hot)
    shard = psutil.Process(cluster.record("n1").pid)
    until = time.monotonic() + FLOOD_SECONDS
    floods = [asyncio.ensure_future(flood(b, 2 if i % 2 else 1000 + i, until)) for i in range(300)]
    await asyncio.sleep(FLOOD_SECONDS / 2)
    resident = shard.memory_info().rss
    counted = await asyncio.gather(*floods)
    hits, misses = (sum(column) for column in zip(*counted, strict=True))
    print(f"{hits} answers with blocks, {misses} without, {shard.memory_info().rss - resident} bytes more")
    assert hits > 0, "what is here is served meanwhile"
    assert shard.memory_info().rss - resident < 32 * MiB
    assert len((await b.read_all(hot)).blocks) == 64
    await leave(a, b)
    await eventually_async(lambda: cluster.accounting("n1").leases == 0, "the leases to be released")
    assert cluster.accounting("n1").balanced


def swallow(address: str) -> list[socket.socket]:
    """Listens there and accepts nothing: the kernel drops every attempt once these have filled the queue."""
    host, _, port = address.rpartition(":")
    listener = socket.create_server((host, int(port)), backlog=0)
    filling = []
    for _ in range(4):
        client = socket.socket()
        client.setblocking(False)
        client.connect_ex((host, int(port)))
        filling.append(client)
    return [listener, *filling]


async def test_a_silent_address_costs_the_lookup_its_time_once(
    tmp_path: Path,
) -> None:
    """It swallows every attempt to connect."""
    certificates = str(write(tmp_path / "tls"))  # with them it has a port
    with LocalCluster(nodes=1, lookup_partitions=1, mirror_bytes=0, tls_dir=certificates) as cluster:
        engine = await Engine.attach(ShardClient(cluster.socket("n0")))
        cluster.kill("lookup0")
        swallowing = swallow(cluster.lookup_addresses[0])
        try:
            seconds = []
            for seed in range(8):
                started = time.monotonic()
                result = await engine.acquire(chain(seed, 8), timeout=READ_SECONDS)
                seconds.append(time.monotonic() - started)
                assert (result.blocks, result.miss) == ((), MissReason.LOOKUP_FAILED)
        finally:
            for one in swallowing:
                one.close()
        assert max(seconds) < READ_SECONDS + LATE_SECONDS
        assert sum(one < 0.1 for one in seconds) >= 4, f"the breaker did not open: {seconds}"
        await leave(engine)


@pytest.mark.parametrize("hangs", ["lookup0", "n0"])
async def test_long_prompts_wait_no_longer_for_a_part_that_hangs(hangs: str) -> None:
    """What they send fills the socket, and there gRPC's own deadline does not hold."""
    keys, answers = tuple(chain(seed=3, count=4_000)), []
    with LocalCluster(nodes=1, lookup_partitions=1) as cluster:
        directory, peers = LookupClient(cluster.lookup_addresses), PeerClient("shm", NodeId("n1"))
        record = cluster.record("n0")
        holder = Holder(NodeId("n0"), record.peer_address, BootEpoch(record.epoch))

        async def ask() -> object:
            if hangs == "n0":
                return await peers.locate(Locate(1, holder, keys, SHORT_SECONDS, 0.0))
            return await directory.resolve(keys, 0, SHORT_SECONDS)

        await ask()  # connects
        cluster.kill(hangs, signal.SIGSTOP)
        try:
            started = time.monotonic()
            answers = await asyncio.gather(*[ask() for _ in range(40)], return_exceptions=True)
            assert time.monotonic() - started < SHORT_SECONDS + LATE_SECONDS
        finally:
            cluster.kill(hangs, signal.SIGCONT)
            await directory.close()
            await peers.close()
    assert all(isinstance(answer, KVServiceError) or answer == LookupAnswer((), False) for answer in answers)
