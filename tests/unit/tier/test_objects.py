"""The tier of objects over a store that is a folder: names, verification, what is skipped, and a store that fails."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvservice.core.block.marks import Mark, MarkKind
from kvservice.core.events import BroughtBlock, PullResult
from kvservice.core.segment.blockfile import FILE_HEADER_BYTES, BlockFileHeader, pack_file_header
from kvservice.errors import TierError
from kvservice.testing.eventually import eventually
from kvservice.testing.tier_calls import PATIENT_SECONDS, BlocksOfTier
from kvservice.tier import block_objects, objects
from kvservice.tier.base import TierRead, TierWrite, WriteResult
from kvservice.tier.objects import ObjectTier
from tests.unit.tier.damages import Damage, each_damage

SIZE = 64 << 10


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[ObjectTier]:
    made = ObjectTier(f"file://{tmp_path}/store", "team/a")
    assert made.start() == []
    yield made
    made.close()


@pytest.fixture
def blocks(tier: ObjectTier) -> BlocksOfTier:
    return BlocksOfTier(tier)


def path_of(tmp_path: Path, number: int) -> Path:
    text = number.to_bytes(16, "big").hex()
    return tmp_path / "store" / "team" / "a" / "v1" / text[:2] / f"{text}.safetensors"


def test_an_object_is_the_file_of_its_block(tmp_path: Path, blocks: BlocksOfTier) -> None:
    assert blocks.write(1) == (WriteResult.OK,)
    header = pack_file_header(BlockFileHeader(blocks.block(1), SIZE))
    assert path_of(tmp_path, 1).read_bytes() == header + blocks.payload(1)


def test_a_read_brings_bytes_and_their_digest(blocks: BlocksOfTier) -> None:
    blocks.write(1, 2)
    unknown = blocks.block(2, digest=0)  # as a probe finds it
    results, digests, slots = blocks.read(blocks.block(1), unknown, blocks.block(3))
    assert results == (PullResult.OK, PullResult.OK, PullResult.STALE)
    assert digests == (blocks.block(1).digest, blocks.block(2).digest, 0)
    assert bytes(slots[0]) == blocks.payload(1) and bytes(slots[1]) == blocks.payload(2)


@each_damage
def test_damaged_objects_are_never_a_hit(
    tmp_path: Path, blocks: BlocksOfTier, damage: Damage, wanted: PullResult
) -> None:
    blocks.write(1)
    path = path_of(tmp_path, 1)
    path.write_bytes(damage(path.read_bytes()))
    results, digests, _ = blocks.read(blocks.block(1))
    assert results == (wanted,) and digests == (0,)


def test_another_block_under_the_name_is_stale(tmp_path: Path, blocks: BlocksOfTier) -> None:
    blocks.write(1, 2)
    path_of(tmp_path, 1).write_bytes(path_of(tmp_path, 2).read_bytes())
    assert blocks.read(blocks.block(1))[0] == (PullResult.STALE,)
    assert blocks.read(blocks.block(2, fingerprint=bytes(16)))[0] == (PullResult.OK,)
    shorter = blocks.block(2, payload_bytes=SIZE - 4096)
    assert blocks.read(shorter)[0] == (PullResult.STALE,)


def test_known_objects_are_not_written_again(tmp_path: Path, tier: ObjectTier, blocks: BlocksOfTier) -> None:
    blocks.write(1)
    path_of(tmp_path, 1).unlink()
    assert blocks.write(1) == (WriteResult.OK,)
    assert not path_of(tmp_path, 1).exists() and tier.counters()["writes_skipped"] == 1
    assert blocks.read(blocks.block(1))[0] == (PullResult.STALE,)
    assert blocks.write(1) == (WriteResult.OK,) and path_of(tmp_path, 1).exists()


def test_objects_of_before_a_clear_are_written_again(tmp_path: Path, tier: ObjectTier, blocks: BlocksOfTier) -> None:
    blocks.write(1)
    for number in (1, 2):
        tier.keep_marks([Mark(MarkKind.TENANT, time.time(), f"tenant{number}")])
        path_of(tmp_path, 1).unlink()
        assert blocks.write(1) == (WriteResult.OK,) and path_of(tmp_path, 1).exists()
    assert len(tier.load_marks()) == 2
    blocks.write(1)
    assert tier.counters()["writes_skipped"] == 1, "marks that are known change nothing"


def test_an_object_that_outlived_the_marks_is_absent(tmp_path: Path, blocks: BlocksOfTier) -> None:
    """Nobody knows any more what was cleared when it was written. The next write replaces it."""
    blocks.write(1)
    long_ago = time.time() - block_objects.OBJECT_SECONDS
    os.utime(path_of(tmp_path, 1), (long_ago, long_ago + 60.0))
    assert blocks.read(blocks.block(1))[0] == (PullResult.OK,)
    os.utime(path_of(tmp_path, 1), (long_ago, long_ago))
    other = ObjectTier(f"file://{tmp_path}/store", "team/a")
    other.start()
    try:
        assert BlocksOfTier(other).probe(1) == 0
    finally:
        other.close()
    assert blocks.read(blocks.block(1))[0] == (PullResult.STALE,)
    assert blocks.write(1) == (WriteResult.OK,)
    assert blocks.read(blocks.block(1))[0] == (PullResult.OK,)


def test_a_block_is_no_younger_than_its_object(tmp_path: Path, tier: ObjectTier, blocks: BlocksOfTier) -> None:
    """A node whose clock is ahead wrote it. Once the time is there that it says, it would have outlived a clear."""
    now, done = time.time(), threading.Event()
    ahead, answers = blocks.block(1, stored_at=now + 3600), list[BroughtBlock]()
    blocks.tier.write(TierWrite(1, ((ahead, memoryview(blocks.payload(1))),)), lambda *_: done.set())
    assert done.wait(PATIENT_SECONDS)

    def take(_: int, found: tuple[BroughtBlock, ...]) -> None:
        answers.extend(found)

    for oldest in (now - 60, now + 60):  # the second: after a clear of a moment ago, with what clocks may differ by
        wanted, target = blocks.block(1, stored_at=oldest), memoryview(bytearray(SIZE))
        tier.read(TierRead(2, ((wanted, target),), time.monotonic() + PATIENT_SECONDS), take)
    eventually(lambda: len(answers) == 2, "both reads")
    assert sorted(found.result.value for found in answers) == ["ok", "stale"]
    assert 0 < max(found.stored_at for found in answers) <= path_of(tmp_path, 1).stat().st_mtime + 1


def test_a_damaged_object_is_replaced_by_the_next_write(tmp_path: Path, blocks: BlocksOfTier) -> None:
    blocks.write(1)
    path_of(tmp_path, 1).write_bytes(b"x" * (FILE_HEADER_BYTES + SIZE))
    assert blocks.read(blocks.block(1))[0] == (PullResult.CORRUPT,)
    assert blocks.probe(1) == 0
    blocks.write(1)
    assert blocks.read(blocks.block(1))[0] == (PullResult.OK,)


def test_a_probe_counts_the_beginning_of_a_chain(tmp_path: Path, blocks: BlocksOfTier) -> None:
    other = ObjectTier(f"file://{tmp_path}/store", "team/a")
    other.start()
    blocks.write(*range(40))
    try:
        assert BlocksOfTier(other).probe(*range(100)) == 40
        assert other.counters()["looks"] < 30
        assert BlocksOfTier(other).probe(*range(40)) == 40
        assert BlocksOfTier(other).probe(*range(200, 240)) == 0 and BlocksOfTier(other).probe() == 0
    finally:
        other.close()


def test_what_a_probe_saw_is_remembered(tier: ObjectTier, blocks: BlocksOfTier) -> None:
    blocks.write(*range(8))
    blocks.probe(*range(16))
    looks = tier.counters()["looks"]
    assert blocks.probe(*range(16)) == 8 and tier.counters()["looks"] == looks


def test_absent_objects_are_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, blocks: BlocksOfTier
) -> None:
    monkeypatch.setattr(block_objects, "ABSENT_SECONDS", 0.0)
    assert blocks.probe(1) == 0
    BlocksOfTier(blocks.tier).write(2)
    path_of(tmp_path, 1).parent.mkdir(parents=True, exist_ok=True)
    path_of(tmp_path, 1).write_bytes(path_of(tmp_path, 2).read_bytes())  # another node was there
    assert blocks.probe(1) == 1


def test_erased_objects_are_gone_and_written_again(tmp_path: Path, tier: ObjectTier, blocks: BlocksOfTier) -> None:
    blocks.write(1, 2)
    tier.erase([blocks.block(number).key for number in (9, 1, 8, 2)])  # some never were there
    eventually(lambda: tier.counters().get("erased", 0) == 4, "both are erased")
    assert not path_of(tmp_path, 1).exists() and not path_of(tmp_path, 2).exists()
    assert blocks.write(1) == (WriteResult.OK,) and path_of(tmp_path, 1).exists()


def test_namespaces_do_not_see_each_other(tmp_path: Path, blocks: BlocksOfTier) -> None:
    other = ObjectTier(f"file://{tmp_path}/store", "team/b")
    other.start()
    blocks.write(1)
    try:
        assert BlocksOfTier(other).probe(1) == 0
    finally:
        other.close()


@pytest.mark.parametrize("namespace", ["", "/a", "a/", "a//b", "..", "a/../b", "a b", "ä", "a" * 64])
def test_a_namespace_that_makes_no_name_is_refused(namespace: str) -> None:
    with pytest.raises(TierError, match="objects_namespace"):
        ObjectTier("memory:///", namespace)


def test_a_full_queue_drops_writes_only(
    monkeypatch: pytest.MonkeyPatch, tier: ObjectTier, blocks: BlocksOfTier
) -> None:
    blocks.write(1)
    eventually(lambda: tier._writes.count == 0, "the first write left its lane")
    monkeypatch.setattr(objects, "WRITES_WAITING_MAX", 2)
    monkeypatch.setattr(tier._writes, "count_max", 0)
    monkeypatch.setattr(tier._writes, "count", 1)
    answers: list[tuple[WriteResult, ...]] = []
    items = tuple((blocks.block(number), memoryview(blocks.payload(number))) for number in (2, 3, 4, 5))
    tier.write(TierWrite(1, items), lambda _, results, *sizes: answers.append(results))
    assert blocks.read(blocks.block(1))[0] == (PullResult.OK,)
    eventually(lambda: tier.counters().get("writes_dropped", 0) == 2, "two writes are dropped")
    assert answers == []
    tier.close()
    assert answers == [(WriteResult.FAILED,) * 4]


def test_a_read_that_begins_too_late_fails(tier: ObjectTier, blocks: BlocksOfTier) -> None:
    blocks.write(1)
    assert blocks.read(blocks.block(1), seconds=-1.0)[0] == (PullResult.FAILED,)
    tier._urgent.count, tier._urgent.count_max = 1, 0
    assert blocks.read(blocks.block(1), seconds=0.05)[0] == (PullResult.FAILED,)
    assert tier.counters()["reads_late"] == 2
    tier._urgent.count, tier._urgent.count_max = 0, 64


def test_a_closed_tier_answers_at_once(tier: ObjectTier, blocks: BlocksOfTier) -> None:
    blocks.write(1)
    tier.close()
    tier.close()
    assert blocks.write(2) == (WriteResult.FAILED,) and blocks.probe(1) == 0
    assert blocks.read(blocks.block(1))[0] == (PullResult.FAILED,)
    tier.erase([blocks.block(1).key])
    assert not [thread for thread in threading.enumerate() if thread.name == "kvservice-objects"]


def test_a_tier_that_ends_answers_every_read(tmp_path: Path) -> None:
    """Also those that begin at that moment."""
    answered: list[int] = []
    for number in range(20):
        tier = ObjectTier(f"file://{tmp_path}/store")
        tier.start()
        blocks = BlocksOfTier(tier)
        for _ in range(200):
            items = ((blocks.block(1), memoryview(bytearray(SIZE))),)
            tier.read(TierRead(1, items, time.monotonic() + 5, urgent=True), lambda job, found: answered.append(job))
        time.sleep(0.001 * number)
        tier.close()
        assert len(answered) == 200 * (number + 1)


def test_a_store_that_fails_is_left_alone_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tier: ObjectTier, blocks: BlocksOfTier
) -> None:
    """Files where its folders should be make every request of a store that is a folder fail."""
    blocks.write(1)
    good, bad = tmp_path / "store" / "team", tmp_path / "store" / "aside"
    good.rename(bad)
    good.write_bytes(b"")
    for number in (1, 2, 3):
        assert blocks.read(blocks.block(number))[0] != (PullResult.OK,)
    assert blocks.write(4) == blocks.write(5) == blocks.write(6) == (WriteResult.FAILED,)
    assert tier.counters()["store_left_alone"] == 1 and f"{tmp_path}/store" in tier.trouble()
    before = tier.counters()["store_failed"]
    assert blocks.read(blocks.block(1))[0] == (PullResult.FAILED,)
    assert blocks.write(7) == (WriteResult.FAILED,) and blocks.probe(1) == 0
    assert tier.counters()["store_failed"] == before, "nothing was asked of it"
    good.unlink()
    bad.rename(good)
    tier._objects._reading.breaker.open_until = 0.0
    assert blocks.read(blocks.block(1))[0] == (PullResult.OK,) and not tier.trouble()
    assert blocks.write(7) == (WriteResult.OK,)


def test_a_store_that_takes_no_more_is_still_read(tier: ObjectTier, blocks: BlocksOfTier) -> None:
    """Its failing writes had it left alone, and its hits were lost while engines stored."""
    blocks.write(1)
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, allowed[1]))
        assert set(blocks.write(*range(2, 10))) == {WriteResult.FAILED}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
    assert tier.counters()["store_left_alone"] == 1 and tier.write_trouble() and not tier.trouble()
    assert blocks.read(blocks.block(1))[0] == (PullResult.OK,) and blocks.probe(1) == 1
    assert blocks.write(10) == (WriteResult.FAILED,), "it is not asked to take anything yet"


def test_a_store_that_came_back_is_known_without_a_read(tmp_path: Path, tier: ObjectTier, blocks: BlocksOfTier) -> None:
    good, bad = tmp_path / "store" / "team", tmp_path / "store" / "aside"
    blocks.write(1)
    good.rename(bad)
    good.write_bytes(b"")
    blocks.write(4, 5, 6)
    assert tier.write_trouble()
    good.unlink()
    bad.rename(good)
    tier.load_marks()
    assert not tier.write_trouble()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("bucket/prefix", "s3://BUCKET/PREFIX"),
        ("http://host/bucket", "s3://BUCKET/PREFIX"),
        ("s3://", "cannot be opened"),
        ("az://container/prefix", "Account must be specified"),
        ("file://relative/folder", "cannot be opened"),
        ("file:///nowhere/a#b", "behind # or [?]"),
        ("s3://bucket/prefix?version=1", "behind # or [?]"),
    ],
)
def test_a_wrong_url_says_what_to_write(monkeypatch: pytest.MonkeyPatch, url: str, said: str) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    tier = ObjectTier(url)
    with pytest.raises(TierError, match=said):
        tier.start()
    tier.close()


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "obstore.store", None)
    tier = ObjectTier("s3://bucket/prefix")
    with pytest.raises(TierError, match="the extra 'objects'"):
        tier.start()
    tier.close()


def test_a_store_that_nobody_answers_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvservice.testing.cluster import free_port

    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ALLOW_HTTP", raising=False)
    tier = ObjectTier("s3://bucket/prefix")
    with pytest.raises(TierError, match="AWS_ALLOW_HTTP") as refused:
        tier.start()
    assert refused.value.attributes["transient"] is False
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    tier = ObjectTier("s3://bucket/prefix")
    with pytest.raises(TierError, match="does not answer") as refused:
        tier.start()
    assert refused.value.attributes["transient"] is True
