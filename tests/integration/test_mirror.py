"""A node's mirror of the directory, in real processes: lookups without a call, and what is done when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvservice.client.shard import ShardClient
from kvservice.core.actions import Announce
from kvservice.core.directory import mirror as core_mirror
from kvservice.core.directory.announce import Announcer
from kvservice.core.directory.key_table import ROWS_MIN
from kvservice.core.directory.mirror import STALE_SECONDS, mirror_bytes
from kvservice.core.messages import Holder
from kvservice.discovery import MIRROR_NAME
from kvservice.lookup import mirror_writer
from kvservice.lookup.announce_pump import AnnouncePump
from kvservice.lookup.client import LookupAnswer, LookupClient
from kvservice.lookup.mirror_reader import find_mirror
from kvservice.lookup.mirror_writer import DirectoryMirror
from kvservice.lookup.server import LookupServer
from kvservice.serve.holdings import Holdings
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually_async
from kvservice.units import BlockKey, BootEpoch, NodeId, SpanRoute
from tests.integration.engine import Engine, chain
from tests.settled import is_synced, mirrored_answer

CALL_SECONDS = 2.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=2, lookup_partitions=2, transport="shm", lease_seconds=2.0) as running:
        yield running


def reader_of(cluster: LocalCluster, node: str) -> LookupClient:
    """This process is not the shard's."""
    addresses = cluster.record(node).lookup_addresses
    mirror = find_mirror(addresses, cluster.service, cluster.root)
    assert mirror is not None
    return LookupClient(addresses, mirror=mirror)


def holders(answer: LookupAnswer) -> set[NodeId]:
    return {holder.node_id for run in answer.runs for holder in run.holders}


def found(answer: LookupAnswer) -> int:
    return sum(run.count for run in answer.runs)


def announcing(announcer: Announcer, addresses: list[str]) -> tuple[AnnouncePump, asyncio.Task[None]]:
    """Node x tells the lookup partitions what it has, in this task."""
    pump = AnnouncePump(announcer, addresses, lambda: Holder(NodeId("x"), "x:1", BootEpoch(1)), 1.0, lambda: None)
    return pump, asyncio.create_task(pump.run())


async def knows(reader: LookupClient, keys: Sequence[BlockKey]) -> bool:
    answer = await mirrored_answer(reader, keys)
    return answer is not None and found(answer) == len(keys)


async def test_remote_hit_is_found_without_a_call(cluster: LocalCluster) -> None:
    """Other processes of the node see the same."""
    a, b = [await Engine.attach(ShardClient(cluster.socket(node))) for node in ("n0", "n1")]
    reader = reader_of(cluster, "n0")
    keys = chain(seed=1, count=300)
    await eventually_async(lambda: mirrored_answer(reader, keys), "a live mirror")
    await a.store(keys)
    await eventually_async(lambda: knows(reader, keys), "the keys in the mirror")
    await eventually_async(lambda: cluster.stats("n1").counters["mirror_keys"] >= 300, "the keys in n1's mirror")
    before = cluster.stats("n1").counters
    result = await b.read_all(keys)
    assert (len(result.blocks), result.fetched_count) == (300, 300)
    counters = cluster.stats("n1").counters
    assert counters["mirror_answers"] > before.get("mirror_answers", 0)
    assert counters.get("lookup_rpcs", 0) == before.get("lookup_rpcs", 0)
    assert counters["mirror_live_partitions"] == 2 and counters["mirror_age_ms"] < STALE_SECONDS * 1e3
    assert holders(await reader.resolve(keys, 0, CALL_SECONDS, NodeId("n0"))) <= {"n1"}
    for engine in (a, b):
        await engine.pool.close()
        engine.let_go()
    await reader.close()


async def test_lookup_partition_that_dies_is_missed_and_comes_back(cluster: LocalCluster) -> None:
    a = await Engine.attach(ShardClient(cluster.socket("n0")))
    reader = reader_of(cluster, "n0")
    keys = chain(seed=2, count=640)
    await a.store(keys)
    await eventually_async(lambda: knows(reader, keys), "the keys in the mirror")
    cluster.kill("lookup0")

    async def is_stale() -> bool:
        return await mirrored_answer(reader, keys) is None

    await eventually_async(is_stale, "a stale mirror", STALE_SECONDS + 3)
    answer = await reader.resolve(keys, 0, CALL_SECONDS)
    assert holders(answer) <= {"n0"} and 0 < sum(run.count for run in answer.runs) < 640, "the other one's part"
    assert not answer.complete and reader.counters["mirror_fallback_stale"] > 0
    cluster.start_lookup(0)
    await eventually_async(lambda: knows(reader, keys), "the keys in the mirror again")
    await a.pool.close()
    a.let_go()
    await reader.close()


async def test_mirror_of_a_killed_shard_is_not_believed(cluster: LocalCluster) -> None:
    """The next one is found."""
    a = await Engine.attach(ShardClient(cluster.socket("n1")))
    reader = reader_of(cluster, "n0")
    keys = chain(seed=3, count=100)
    await a.store(keys)
    await eventually_async(lambda: knows(reader, keys), "the keys in the mirror")
    cluster.kill("n0")
    await eventually_async(lambda: reader.mirrored.live(2)[1] == [False, False], "a stale mirror", STALE_SECONDS + 3)
    answer = await reader.resolve(keys, 0, CALL_SECONDS)
    assert answer.complete and found(answer) == 100 and holders(answer) == {"n1"}
    assert reader.counters["lookup_rpcs"] > 0
    cluster.start_shard("n0")
    await eventually_async(lambda: knows(reader, keys), "the keys in the mirror again")
    await a.pool.close()
    a.let_go()
    await reader.close()


async def test_router_of_the_node_reads_the_mirror(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSERVICE_RUNTIME_DIR", str(cluster.root))
    a = await Engine.attach(ShardClient(cluster.socket("n0")))
    keys = chain(seed=4, count=50)
    await a.store(keys)
    cluster.wait_until_known(keys)
    holdings = Holdings(lambda: cluster.record("n0").lookup_addresses, refresh_seconds=60, answer_seconds=0)
    await holdings.refresh()
    answer = await holdings.resolve(keys, CALL_SECONDS)
    assert answer.complete and found(answer) == 50
    assert holdings._lookup is not None and holdings._lookup.counters.get("lookup_rpcs", 0) == 0
    assert holdings._lookup.counters["mirror_answers"] == 1
    await holdings.close()
    await a.pool.close()
    a.let_go()


async def test_mirror_ends_at_once_while_events_arrive(tmp_path: Path) -> None:
    """Over and over, because the two must come together: a cancellation that got lost held the end of a shard up."""
    server = LookupServer("127.0.0.1:0", allow_plaintext=True)
    addresses = [await server.start()]
    for attempt in range(30):
        mirror = DirectoryMirror.open(tmp_path / "memory", tmp_path / MIRROR_NAME, addresses, 64 << 20, epoch=1)
        assert mirror is not None
        mirror.start()
        announcer, node = Announcer(1, list), Holder(NodeId("x"), "x:1", BootEpoch(attempt + 1))
        pump = AnnouncePump(announcer, addresses, lambda node=node: node, 0.02, lambda: None)
        running = asyncio.create_task(pump.run())
        await asyncio.sleep(0.03)
        for key in chain(seed=attempt, count=200):
            announcer.change([Announce(key, SpanRoute(0))])
        pump.kick()
        await asyncio.sleep(0.002 * (attempt % 5))
        await asyncio.wait_for(mirror.stop(), 2.0)
        assert not list(tmp_path.iterdir())
        await pump.stop(leaving=True)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    await server.stop()


async def test_a_stream_that_is_refused_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The line has the address and the reason; the counter has every attempt."""
    monkeypatch.setattr(mirror_writer, "PROTOCOL_VERSION", 99)
    server = LookupServer("127.0.0.1:0", allow_plaintext=True)
    addresses = [await server.start()]
    mirror = DirectoryMirror.open(tmp_path / "memory", tmp_path / MIRROR_NAME, addresses, 64 << 20, epoch=1)
    assert mirror is not None
    mirror.start()
    await eventually_async(lambda: mirror.counters.get("mirror_stream_version", 0) >= 2, "a second refusal")
    await mirror.stop()
    await server.stop()
    (line,) = [record for record in caplog.records if record.getMessage() == "mirror_stream_failed"]
    assert vars(line)["address"] == addresses[0] and "version 99" in vars(line)["reason"]


async def test_mirror_follows_a_lookup_partition_that_moves(tmp_path: Path) -> None:
    first, second = (LookupServer("127.0.0.1:0", allow_plaintext=True) for _ in range(2))
    addresses = [await server.start() for server in (first, second)]
    mirror = DirectoryMirror.open(tmp_path / "memory", tmp_path / MIRROR_NAME, addresses[:1], 64 << 20, epoch=1)
    assert mirror is not None
    mirror.start()
    await eventually_async(lambda: mirror.counters["mirror_live_partitions"] == 1, "a live mirror")
    mirror.set_addresses(addresses[1:])
    await eventually_async(lambda: mirror.counters["mirror_streams"] >= 2, "a stream to the new lookup service")
    await first.stop()
    await asyncio.sleep(STALE_SECONDS)
    assert mirror.counters["mirror_live_partitions"] == 1 and mirror.counters["mirror_streams"] == 2
    await mirror.stop()
    await second.stop()


async def test_a_partition_that_did_not_fit_and_goes_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While nobody answers it is tried as any other, and does not count as one that is too large again and again."""
    monkeypatch.setattr(mirror_writer, "FULL_SECONDS", 0.1)
    server = LookupServer("127.0.0.1:0", allow_plaintext=True)
    addresses = [await server.start()]
    announcer = Announcer(1, lambda: [(key, SpanRoute(0)) for key in chain(seed=1, count=2000)])
    pump, running = announcing(announcer, addresses)
    await eventually_async(lambda: is_synced(announcer, 0), "an announced node")
    size = mirror_bytes(ROWS_MIN)
    mirror = DirectoryMirror.open(tmp_path / "memory", tmp_path / MIRROR_NAME, addresses, size, epoch=1)
    assert mirror is not None
    mirror.start()
    await eventually_async(lambda: mirror.counters.get("mirror_filled_up", 0) >= 1, "a mirror that is too small")
    await pump.stop(leaving=False)
    running.cancel()
    await server.stop()

    def tries() -> int:
        return mirror.counters.get("mirror_stream_unavailable", 0)

    await eventually_async(lambda: tries() >= 4, "several attempts to reach it")
    counted = sum(record.getMessage() == "mirror_full" for record in caplog.records)
    assert counted == mirror.counters["mirror_filled_up"]
    await mirror.stop()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_part_that_does_not_fit_takes_no_other_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had is removed later, and what comes meanwhile waits for the room."""
    monkeypatch.setattr(core_mirror, "SWEEP_KEYS", 64)
    servers = [LookupServer("127.0.0.1:0", index, 2, allow_plaintext=True) for index in range(2)]
    addresses = [await server.start() for server in servers]
    held = {key: SpanRoute(part) for part in range(2) for key in chain(seed=part, count=3000)}
    announcer = Announcer(2, lambda: held.items())
    pump, running = announcing(announcer, addresses)
    await eventually_async(lambda: is_synced(announcer, 0) and is_synced(announcer, 1), "an announced node")
    size = mirror_bytes(1024)  # for 5,160 keys
    mirror = DirectoryMirror.open(tmp_path / "memory", tmp_path / MIRROR_NAME, addresses, size, epoch=1)
    assert mirror is not None
    mirror.start()
    await eventually_async(lambda: mirror.counters.get("mirror_filled_up", 0) >= 1, "a part that does not fit")
    await eventually_async(lambda: mirror.counters["mirror_live_partitions"] == 1, "the part that fits")
    taken = mirror.counters["mirror_keys_taken"]
    announcer.change([Announce(key, SpanRoute(part)) for part in range(2) for key in chain(seed=8 + part, count=300)])
    pump.kick()
    await eventually_async(lambda: mirror.counters["mirror_keys_taken"] == taken + 300, "what was stored since", 20)
    assert mirror.counters["mirror_filled_up"] == mirror.counters["mirror_live_partitions"] == 1
    await mirror.stop()
    await pump.stop(leaving=False)
    await asyncio.gather(running, return_exceptions=True)
    for server in servers:
        await server.stop()


async def test_a_node_that_announces_anew_needs_no_second_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its part waits until the number that it had is free again."""
    monkeypatch.setattr(core_mirror, "NODES_MAX", 1)
    server = LookupServer("127.0.0.1:0", allow_plaintext=True)
    addresses = [await server.start()]
    announcer = Announcer(1, lambda: [(key, SpanRoute(0)) for key in chain(seed=1, count=100)])
    pump, running = announcing(announcer, addresses)
    mirror = DirectoryMirror.open(tmp_path / "memory", tmp_path / MIRROR_NAME, addresses, 64 << 20, epoch=1)
    assert mirror is not None
    mirror.start()
    await eventually_async(lambda: mirror.counters.get("mirror_keys_taken") == 100, "the keys in the mirror", 20)
    announcer.begin_again(0)
    pump.kick()
    await eventually_async(lambda: mirror.counters["mirror_keys_taken"] == 200, "the keys in the mirror again", 20)
    assert mirror.counters["mirror_live_partitions"] == 1 and "mirror_filled_up" not in mirror.counters
    await mirror.stop()
    await pump.stop(leaving=False)
    await asyncio.gather(running, return_exceptions=True)
    await server.stop()
