"""Hand-offs between real shards: blocks are read while the rest is written, and every way to stop leaves nothing."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from typing import ClassVar

import pytest

from kvservice.client.shard import ShardClient
from kvservice.core.messages import AcquireResult, Handoff, MissReason
from kvservice.errors import InvalidRequest
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually_async
from kvservice.transfer.nixl import nixl_available
from kvservice.units import BlockKey, HandoffId, MiB, NodeId
from tests.integration.engine import Engine, chain

LEASE_SECONDS = 2.0
WAIT_SECONDS = LEASE_SECONDS + 5  # for what the shards do by themselves
MEETING_SECONDS = 30.0  # for the first transfer between fresh shards: each starts NIXL's agent, on a busy machine
POOL_BYTES = 8 * MiB  # about 100 blocks
TRANSPORTS = [
    "shm",
    pytest.param("nixl", marks=[pytest.mark.nixl, pytest.mark.skipif(not nixl_available(), reason="NIXL absent")]),
]
seeds = iter(range(7_000, 8_000))


@pytest.fixture(scope="module", params=TRANSPORTS)
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    with LocalCluster(nodes=2, transport=request.param, lease_seconds=LEASE_SECONDS, pool_bytes=POOL_BYTES) as running:
        yield running


@pytest.fixture(autouse=True)
async def nothing_stays(cluster: LocalCluster) -> AsyncIterator[None]:
    yield
    for two in list(Two.present):  # of a test that failed: the next one would find its attachments
        await two.leave()
    await eventually_async(cluster.nothing_is_held, "no lease, attachment or slot being written", WAIT_SECONDS)


def counter(cluster: LocalCluster, name: str) -> int:
    """Of the reader's node."""
    return cluster.stats("n1").counters.get(name, 0)


class Two:
    """A writer on n0 and a reader on n1 (or on n0 as well), with one fresh hand-off."""

    present: ClassVar[set[Two]] = set()

    def __init__(self, writer: Engine, reader: Engine) -> None:
        self.writer = writer
        self.reader = reader
        self.handoff = Handoff(HandoffId(os.urandom(16)), NodeId("n0"))
        self.started = time.monotonic()
        self.present.add(self)

    @classmethod
    async def begin(cls, cluster: LocalCluster, reader_node: str = "n1") -> Two:
        return cls(*[await Engine.attach(ShardClient(cluster.socket(node))) for node in ("n0", reader_node)])

    async def open(self) -> None:
        await self.writer.pool.open_handoff(self.writer.attachment.attachment_id, self.handoff.handoff_id)

    async def close(self) -> None:
        await self.writer.pool.close_handoff(self.writer.attachment.attachment_id, self.handoff.handoff_id)

    def read(self, keys: tuple[BlockKey, ...], timeout: float = 20.0) -> asyncio.Task[AcquireResult]:
        self.started = time.monotonic()
        return asyncio.create_task(self.reader.read_all(keys, timeout=timeout, handoff=self.handoff))

    async def leave(self) -> None:
        self.present.discard(self)
        for engine in (self.writer, self.reader):
            await engine.pool.close()
            engine.let_go()


@pytest.mark.parametrize("node", ["n1", "n0"])
async def test_blocks_are_promised_when_the_last_one_is_sealed(cluster: LocalCluster, node: str) -> None:
    two, keys = await Two.begin(cluster, node), chain(next(seeds), 40)
    await two.open()
    reading = two.read(keys, timeout=2 * MEETING_SECONDS)
    before = counter(cluster, "fetched_blocks")
    for end in (8, 16, 24, 32):
        await two.writer.store(keys[:end], end - 8)
    if node == "n1":
        await eventually_async(
            lambda: counter(cluster, "fetched_blocks") >= before + 24, "blocks that cross early", MEETING_SECONDS
        )
    assert not reading.done()
    await two.writer.store(keys, 32)
    result = await reading
    assert (len(result.blocks), result.miss) == (40, MissReason.NONE)
    assert result.fetched_count == (40 if node == "n1" else 0)
    await two.close()
    await two.leave()


async def test_reader_that_comes_first_waits_for_the_writer(cluster: LocalCluster) -> None:
    two, keys = await Two.begin(cluster), chain(next(seeds), 10)
    reading = two.read(keys)
    await asyncio.sleep(0.5)
    await two.open()
    await two.writer.store(keys)
    assert len((await reading).blocks) == 10
    await two.close()
    await two.leave()


@pytest.mark.parametrize("node", ["n1", "n0"])
@pytest.mark.parametrize("how", ["closes", "leaves"])
async def test_writer_that_stops_ends_the_wait_at_once(cluster: LocalCluster, how: str, node: str) -> None:
    two, keys = await Two.begin(cluster, node), chain(next(seeds), 20)
    await two.open()
    reading = two.read(keys)
    await two.writer.store(keys[:10])
    await asyncio.sleep(0.2)
    stopped = time.monotonic()
    await (two.close() if how == "closes" else two.writer.pool.close())
    result = await reading
    assert (len(result.blocks), result.miss) == (10, MissReason.NEVER_STORED)
    assert time.monotonic() - stopped < 2.0
    await two.leave()


@pytest.mark.parametrize("node", ["n0", "nowhere"])
async def test_writer_that_never_comes_is_given_up(cluster: LocalCluster, node: str) -> None:
    two, keys = await Two.begin(cluster), chain(next(seeds), 10)
    two.handoff = Handoff(two.handoff.handoff_id, NodeId(node))
    result = await two.read(keys)
    assert (result.blocks, result.miss) == ((), MissReason.NEVER_STORED)
    assert time.monotonic() - two.started < 8.0
    await two.leave()


async def test_writer_that_evicts_costs_the_reader_only_what_is_gone(cluster: LocalCluster) -> None:
    """The pool of the writer's node holds about a hundred blocks; the prompt and others together are far more."""
    two, keys = await Two.begin(cluster), chain(next(seeds), 80)
    other = await Engine.attach(ShardClient(cluster.socket("n0")))
    await two.open()
    await two.writer.store(keys[:40])
    for _ in range(3):
        await other.store(chain(next(seeds), 90))
    reading = two.read(keys)
    await two.writer.store(keys, 40)
    for _ in range(3):
        await other.store(chain(next(seeds), 90))
    await two.close()
    result = await reading  # read_all has compared every byte
    assert len(result.blocks) < 80 and result.miss is not MissReason.NONE
    assert time.monotonic() - two.started < 10.0
    await other.pool.close()
    other.let_go()
    await two.leave()


async def test_reader_that_gives_up_holds_nothing(cluster: LocalCluster) -> None:
    two, keys = await Two.begin(cluster), chain(next(seeds), 20)
    await two.open()
    reading = two.read(keys, timeout=60.0)
    await two.writer.store(keys[:10])
    await asyncio.sleep(0.3)
    before = counter(cluster, "acquires_cancelled")
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await eventually_async(
        lambda: counter(cluster, "acquires_cancelled") == before + 1, "the shard to hear of it", WAIT_SECONDS
    )
    assert cluster.accounting("n1").slots["leased"] == 0
    await two.leave()


async def test_deadline_ends_the_wait_for_a_slow_writer(cluster: LocalCluster) -> None:
    two, keys = await Two.begin(cluster), chain(next(seeds), 20)
    await two.open()
    await two.writer.store(keys[:5])
    result = await two.read(keys, timeout=1.0)
    assert (len(result.blocks), result.miss) == (5, MissReason.DEADLINE)
    await two.leave()


async def test_dead_shard_of_the_writer_is_noticed(cluster: LocalCluster) -> None:
    two, keys = await Two.begin(cluster), chain(next(seeds), 20)
    await two.open()
    reading = two.read(keys)
    await two.writer.store(keys[:10])
    await asyncio.sleep(0.5)
    killed = time.monotonic()
    cluster.kill("n0")
    result = await reading
    assert len(result.blocks) <= 10 and time.monotonic() - killed < 6.0
    cluster.start_shard("n0")
    await two.leave()


async def test_writer_whose_shard_restarted_is_followed_again(cluster: LocalCluster) -> None:
    """The reader's shard knows the writer's from before; both shards live on one more time."""
    first, keys = await Two.begin(cluster), chain(next(seeds), 10)
    await first.open()
    reading = first.read(keys)
    await first.writer.store(keys)
    assert len((await reading).blocks) == 10
    await first.leave()
    cluster.kill("n0")
    cluster.start_shard("n0")
    two, keys = await Two.begin(cluster), chain(next(seeds), 10)
    await two.writer.store(keys)
    cluster.wait_until_known(keys)  # the directory has heard of the new epoch
    more = chain(next(seeds), 10)
    await two.open()
    asked = time.monotonic()
    reading = two.read(more)
    await two.writer.store(more)
    result = await reading
    assert (len(result.blocks), result.fetched_count) == (10, 10)
    assert time.monotonic() - asked < 2.5, "not by giving up on the writer and asking the directory"
    await two.close()
    await two.leave()


async def test_an_id_of_the_wrong_size_is_refused_with_a_reason(cluster: LocalCluster) -> None:
    two = await Two.begin(cluster)
    with pytest.raises(InvalidRequest, match="16 bytes"):
        await two.writer.pool.open_handoff(two.writer.attachment.attachment_id, HandoffId(b"short"))
    await two.open()
    with pytest.raises(InvalidRequest, match="exists already"):
        await two.open()
    await two.leave()
