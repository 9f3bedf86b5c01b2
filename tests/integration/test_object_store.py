"""The tier of objects against a real S3 API, and with faults between them: late, refused, cut, changed, hanging."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from kvservice.core.block.marks import Mark, MarkKind
from kvservice.core.events import PullResult
from kvservice.core.messages import AcquireResult, MissReason, SealStatus
from kvservice.errors import TierError
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually, eventually_async
from kvservice.testing.s3_faults import FaultyStore, StoreFaults
from kvservice.testing.s3_server import S3Server
from kvservice.testing.tier_calls import BlocksOfTier
from kvservice.tier import block_objects
from kvservice.tier.base import WriteResult
from kvservice.tier.object_store import open_store
from kvservice.tier.objects import READS_MAX, ObjectTier
from tests.contract.test_tiers import ObjectPlace, ObjectsContract
from tests.integration.engine import Engine, attached, chain

pytestmark = pytest.mark.processes
T = TypeVar("T")


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def front(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStore]:
    with FaultyStore(s3.address, seed=7) as made:
        for name, value in s3.environment(made.address).items():
            monkeypatch.setenv(name, value)
        yield made


@pytest.fixture
def tier(s3: S3Server, front: FaultyStore, request: pytest.FixtureRequest) -> Iterator[ObjectTier]:
    """Each test has a namespace of its own."""
    made = ObjectTier(s3.url, request.node.name[:60].rstrip("]").replace("[", "-"))
    made.start()
    yield made
    front.faults = StoreFaults()
    made.close()


@pytest.fixture
def blocks(tier: ObjectTier) -> BlocksOfTier:
    return BlocksOfTier(tier)


def test_marks_of_clears_are_kept_beside_the_blocks(tier: ObjectTier, s3: S3Server, front: FaultyStore) -> None:
    marks = [Mark(MarkKind.TENANT, time.time() - number, f"t{number}") for number in range(40)]
    for mark in marks:
        tier.keep_marks([mark])
    other = ObjectTier(s3.url, "test_marks_of_clears_are_kept_beside_the_blocks")
    other.start()
    assert set(other.load_marks()) == set(marks)
    front.faults = StoreFaults(error=1.0)
    with pytest.raises(TierError, match="does not answer as it should"):
        other.load_marks()
    front.faults = StoreFaults()
    other.close()


def test_another_cluster_finds_and_reads_what_one_wrote(
    s3: S3Server, front: FaultyStore, tier: ObjectTier, blocks: BlocksOfTier
) -> None:
    assert blocks.write(*range(20)) == (WriteResult.OK,) * 20
    other = ObjectTier(s3.url, "test_another_cluster_finds_and_reads_what_one_wrote")
    other.start()
    try:
        theirs = BlocksOfTier(other)
        assert theirs.probe(*range(30)) == 20
        results, digests, slots = theirs.read(*map(theirs.block, range(20)))
        assert results == (PullResult.OK,) * 20 and digests[3] == theirs.block(3).digest
        assert [bytes(slot) for slot in slots] == [theirs.payload(number) for number in range(20)]
        puts = front.counts["PUT"]
        assert theirs.write(*range(20)) == (WriteResult.OK,) * 20
        assert front.counts["PUT"] == puts, "what is known to be there is not written again"
        other.erase([theirs.block(number).key for number in range(5, 25)])
        eventually(lambda: other.counters().get("erased") == 20, "they are erased")
        assert theirs.read(theirs.block(4), theirs.block(5))[0] == (PullResult.OK, PullResult.STALE)
    finally:
        other.close()


def test_a_missing_bucket_says_to_make_it(front: FaultyStore) -> None:
    tier = ObjectTier("s3://no-such-bucket/prefix")
    with pytest.raises(TierError, match="no such bucket: make the bucket") as refused:
        tier.start()
    assert refused.value.attributes["transient"] is True


def test_refused_credentials_say_which_to_check(s3: S3Server, front: FaultyStore) -> None:
    s3.check_credentials(True)
    try:
        tier = ObjectTier(s3.url)
        with pytest.raises(TierError, match="refuses these credentials: check AWS_ACCESS_KEY_ID") as refused:
            tier.start()
        assert refused.value.attributes["transient"] is True
    finally:
        s3.check_credentials(False)


def test_a_store_that_gives_access_later_is_used_then(s3: S3Server) -> None:
    """A role or a bucket may be made after the node has started, and its message says to do so."""
    environment = {**s3.environment(), "KVSERVICE_OBJECTS_URL": s3.url}
    s3.check_credentials(True)
    try:
        with LocalCluster(1, 1, transport="shm", mirror_bytes=0, environment=environment) as cluster:
            eventually(lambda: cluster.stats("n0").tiers[0].state == "failed", "it is refused")
            s3.check_credentials(False)
            eventually(lambda: cluster.stats("n0").tiers[0].state == "open", "it is used")
    finally:
        s3.check_credentials(False)


def test_a_proof_that_is_not_read_back_leaves_no_object(s3: S3Server, front: FaultyStore) -> None:
    """A store that fails so is opened again and again."""
    front.faults = StoreFaults(error=1.0, methods=("GET",))
    with pytest.raises(TierError, match="does not answer as it should"):
        ObjectTier(s3.url, "proven").start()
    front.faults = StoreFaults()
    assert [row["path"] for rows in open_store(s3.url).list("proven/") for row in rows] == []


def test_throttled_and_failed_requests_are_tried_again(front: FaultyStore, blocks: BlocksOfTier) -> None:
    front.faults = StoreFaults(throttle=0.15, error=0.1)
    written = blocks.write(*range(24))
    results, _, slots = blocks.read(*map(blocks.block, range(24)))
    front.faults = StoreFaults()
    assert front.counts["throttle"] + front.counts["error"] > 5
    assert written.count(WriteResult.OK) >= 20, "two of three tries in a row rarely fail"
    for number, result in enumerate(results):
        assert result is not PullResult.OK or bytes(slots[number]) == blocks.payload(number)
    assert results.count(PullResult.OK) >= 16


def test_no_fault_on_the_way_is_ever_a_hit(front: FaultyStore, tier: ObjectTier, blocks: BlocksOfTier) -> None:
    blocks.write(*range(24))
    front.faults = StoreFaults(cut=0.25, flip=0.25, reset=0.2)
    for _ in range(3):
        results, _, slots = blocks.read(*map(blocks.block, range(24)))
        for number, result in enumerate(results):
            assert result is not PullResult.OK or bytes(slots[number]) == blocks.payload(number)
    assert min(front.counts[fault] for fault in ("cut", "flip", "reset")) > 0
    assert tier.counters()["reads_corrupt"] > 0


def test_a_bit_changed_on_its_way_costs_nothing(front: FaultyStore, tier: ObjectTier, blocks: BlocksOfTier) -> None:
    """What is corrupt is erased for all nodes, and a damaged object of marks counts as a clear of everything."""
    blocks.write(1)
    mark = Mark(MarkKind.TENANT, time.time(), "acme")
    tier.keep_marks([mark])

    def flipped(last: int, work: Callable[[], T]) -> T:
        """The bit changes in the answer to request `last` of those that `work` makes."""
        gets = front.counts["GET"]
        front.faults = StoreFaults(late_seconds=0.5, flip=float(last == 1))
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(work)
            for passed in range(1, last):
                eventually(lambda count=gets + passed: front.counts["GET"] >= count, "it is asked")  # type: ignore[misc]
                front.faults = StoreFaults(late_seconds=0.5, flip=float(passed == last - 1))
            eventually(lambda: front.counts["GET"] >= gets + last, "it is asked")
            front.faults = StoreFaults()
            return asked.result()

    results, _, slots = flipped(1, lambda: blocks.read(blocks.block(1)))
    assert results == (PullResult.OK,) and bytes(slots[0]) == blocks.payload(1)
    assert flipped(2, tier.load_marks) == (mark,), "after the listing"
    assert front.counts["flip"] == 2


def test_an_object_read_beside_a_clear_is_replaced(front: FaultyStore, tier: ObjectTier, blocks: BlocksOfTier) -> None:
    """It is of before the clear, whenever its read ends: it was believed to be what is stored since."""
    blocks.write(1)
    front.faults = StoreFaults(late_seconds=1.0, methods=("GET",))
    gets = front.counts["GET"]
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(blocks.read, blocks.block(1))
        eventually(lambda: front.counts["GET"] > gets, "it is read")
        tier.keep_marks([Mark(MarkKind.TENANT, time.time(), "acme")])
        assert reading.result()[0] == (PullResult.OK,)
    puts = front.counts["PUT"]
    assert blocks.write(1) == (WriteResult.OK,)
    assert front.counts["PUT"] == puts + 1


def test_reads_at_50_ms_overlap(front: FaultyStore, tier: ObjectTier, blocks: BlocksOfTier) -> None:
    blocks.write(*range(READS_MAX))
    front.faults = StoreFaults(late_seconds=0.05)
    front.most_at_once = 0
    results, _, _ = blocks.read(*map(blocks.block, range(READS_MAX)))
    assert results == (PullResult.OK,) * READS_MAX
    assert front.most_at_once >= 32


def test_a_store_that_hangs_costs_one_wait(
    monkeypatch: pytest.MonkeyPatch, front: FaultyStore, tier: ObjectTier, blocks: BlocksOfTier
) -> None:
    blocks.write(1, 2, 3)
    monkeypatch.setattr(block_objects, "FIRST_BYTE_SECONDS", 0.5)
    monkeypatch.setattr(block_objects, "LOOK_SECONDS", 0.5)
    front.faults = StoreFaults(hang=1.0)
    assert blocks.probe(7, seconds=0.05) == 0  # answered at its deadline, whatever the store does
    assert blocks.read(*map(blocks.block, (1, 2, 3)))[0] == (PullResult.FAILED,) * 3
    eventually(lambda: tier.counters()["store_left_alone"] == 1, "it is left alone")
    began, asked = time.monotonic(), sum(front.counts[method] for method in ("GET", "HEAD", "PUT"))
    assert blocks.read(*map(blocks.block, (1, 2, 3)))[0] == (PullResult.FAILED,) * 3
    assert blocks.write(8, 9) == (WriteResult.FAILED,) * 2 and blocks.probe(1, 2) == 0
    waited = time.monotonic() - began
    assert sum(front.counts[method] for method in ("GET", "HEAD", "PUT")) - asked <= 1, "at most a trial"
    assert waited < 0.5 or tier.counters()["store_failed"] > 3
    front.faults = StoreFaults()
    eventually(lambda: blocks.read(blocks.block(1))[0] == (PullResult.OK,), "it is asked again", 30.0)
    assert blocks.write(8) == (WriteResult.OK,)


def test_a_tier_ends_while_its_store_hangs(front: FaultyStore, tier: ObjectTier, blocks: BlocksOfTier) -> None:
    blocks.write(1)
    front.faults = StoreFaults(hang=1.0, methods=("GET",))
    answers = blocks.begin_read(blocks.block(1))
    eventually(lambda: front.counts["hang"] > 0, "the read is under way")
    began = time.monotonic()
    tier.close()
    assert answers == [(PullResult.FAILED,)] and time.monotonic() - began < 5.0


def wait_until_open(cluster: LocalCluster) -> None:
    eventually(lambda: [tier.state for tier in cluster.stats("n0").tiers] == ["open"], "the object store is open")


async def at(cluster: LocalCluster, work: Callable[[Engine], Awaitable[T]]) -> T:
    """An engine of the cluster's only node does something and leaves."""
    engine = await attached(cluster.socket("n0"))
    try:
        return await work(engine)
    finally:
        await engine.pool.close()
        engine.let_go()


def test_another_cluster_hits_what_one_stored(s3: S3Server, front: FaultyStore) -> None:
    """Two services with nothing in common but the store: real shards, from the setting to the engine's bytes."""
    settings = {"KVSERVICE_OBJECTS_URL": s3.url, "KVSERVICE_OBJECTS_WRITE": "stored"}
    prompt, other = chain(60_000, 20), chain(60_001, 20)

    async def store(engine: Engine) -> None:
        await engine.store(prompt)
        await eventually_async(
            lambda: first.stats("n0").counters.get("tier_objects_written_blocks") == len(prompt), "they are written"
        )

    async def read(engine: Engine) -> AcquireResult:
        return await engine.read_all(prompt)

    async def use_while_it_hangs(engine: Engine) -> list[SealStatus]:
        missed = await engine.acquire(other, timeout=1.0)
        assert not missed.blocks and missed.miss is MissReason.TIER_NOT_ASKED
        return await engine.store(other)

    with LocalCluster(nodes=1, transport="shm", environment={**s3.environment(), **settings}) as first:
        wait_until_open(first)
        asyncio.run(at(first, store))
    with LocalCluster(nodes=1, transport="shm", environment={**s3.environment(front.address), **settings}) as second:
        wait_until_open(second)
        result = asyncio.run(at(second, read))
        assert (len(result.blocks), result.miss, result.farthest) == (20, MissReason.NONE, "objects")
        front.faults = StoreFaults(hang=1.0)
        began = time.monotonic()
        assert asyncio.run(at(second, use_while_it_hangs)) == [SealStatus.SEALED] * len(other)
        assert time.monotonic() - began < 10.0, "the engine does not wait for the store"
        front.faults = StoreFaults()


class TestObjectsOverS3(ObjectsContract):
    @pytest.fixture
    def place(self, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> ObjectPlace:
        s3.empty()
        for name, value in s3.environment().items():
            monkeypatch.setenv(name, value)
        return ObjectPlace(s3.url, open_store(s3.url))
