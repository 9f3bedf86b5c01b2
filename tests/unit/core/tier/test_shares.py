"""Shares of the memory: a tier that never answers keeps a quarter for its reads and a sixteenth for its writes. What
does not fit into one read comes after it."""

from __future__ import annotations

from kvservice.core import events as ev
from kvservice.core.events import PullResult
from kvservice.core.messages import LocateResult, MissReason
from kvservice.testing.builders import SMALL, CoreHarness, make_chain
from kvservice.units import AttachmentId, KiB, NodeId
from tests.unit.core.tier.test_bring_back import DISK, OBJECTS, on_disk

OK, STALE = PullResult.OK, PullResult.STALE
CHAIN = make_chain(12)  # of the 16 blocks that the memory has room for
SHARE = 4  # blocks: a quarter


def reading(harness: CoreHarness, tier: str = "disk") -> list[int]:
    """How many blocks each read has."""
    return [len(read.items) for read in harness.reads(tier)]


def on_a_disk() -> tuple[CoreHarness, AttachmentId]:
    return on_disk(chain=CHAIN, has_directory=False)


def test_a_read_takes_its_share_of_the_memory_only() -> None:
    harness, engine = on_a_disk()
    op = harness.acquire(engine, CHAIN)
    for _ in range(3):
        assert harness.open(op) and reading(harness) == [SHARE]
        assert harness.state.tier_usage()[0].reading_bytes == SHARE * SMALL
        harness.brought(harness.reads()[0], OK)
    result = harness.result(op)
    assert (len(result.blocks), result.tier_count, result.miss) == (12, 12, MissReason.NONE)
    assert not harness.reads() and harness.count("fetches_failed") == 0


def test_a_tier_that_never_answers_leaves_most_of_the_memory() -> None:
    harness, engine = on_a_disk()
    op = harness.acquire(engine, CHAIN, timeout=1.0)
    for seconds in (1.1, 6.0, 600.0):
        harness.advance(seconds)
    assert harness.result(op).miss is MissReason.DEADLINE
    assert harness.slots("writing") == SHARE and len(harness.reserve(engine, 16)) == 16 - SHARE
    harness.brought(harness.reads()[0], OK)
    assert not harness.reads(), "nobody waits for the rest any more"


def test_nothing_is_read_on_for_a_request_that_is_over() -> None:
    harness, engine = on_a_disk()
    op = harness.acquire(engine, CHAIN, timeout=1.0)
    harness.advance(1.1)
    assert harness.result(op).miss is MissReason.DEADLINE
    harness.brought(harness.reads()[0], OK)
    assert not harness.reads() and len(harness.keys_held()) == SHARE


def test_a_leaving_node_reads_nothing_on() -> None:
    harness, engine = on_a_disk()
    op = harness.acquire(engine, CHAIN)
    harness.send(ev.Drain())
    harness.brought(harness.reads()[0], OK)
    assert not harness.reads()
    assert (len(harness.result(op).blocks), harness.result(op).miss) == (SHARE, MissReason.DRAINING)


def test_a_block_that_does_not_come_ends_what_comes_after_it() -> None:
    harness, engine = on_a_disk()
    op = harness.acquire(engine, CHAIN)
    harness.brought(harness.reads()[0], OK)
    harness.brought(harness.reads()[0], OK, STALE, OK, OK)
    assert not harness.reads()
    assert (len(harness.result(op).blocks), harness.result(op).miss) == (SHARE + 1, MissReason.STALE)


def test_reads_of_two_requests_share_the_share() -> None:
    harness, engine = on_a_disk()
    first = harness.acquire(engine, CHAIN[:3])
    second = harness.acquire(engine, CHAIN[:6])
    assert reading(harness) == [3, 1]
    last = harness.acquire(engine, CHAIN)
    assert reading(harness) == [3, 1] and harness.count("tier_disk_busy") > 0
    for _ in range(3):
        harness.brought(harness.reads()[0], OK)
    assert [harness.result(op).tier_count for op in (first, second, last)] == [3, 6, 6]
    assert harness.result(last).miss is MissReason.TIER_NOT_ASKED, "no room for it when it asked"


def test_the_next_holder_is_asked_for_the_rest_at_once() -> None:
    harness, engine = on_disk(DISK, OBJECTS, chain=CHAIN)
    harness.acquire(engine, CHAIN[:1])
    harness.now += 0.1
    harness.brought(harness.reads()[0], OK)
    op = harness.acquire(engine, (*CHAIN, *make_chain(13)[12:]))
    harness.probed(op, 11)
    harness.resolved(op)
    assert reading(harness, "objects") == [SHARE] and reading(harness) == [SHARE]
    while harness.reads("objects") or harness.reads():
        harness.brought((harness.reads("objects") + harness.reads())[0], OK)
    assert harness.result(op).tier_count == 11


def test_a_shared_tier_reads_its_share_as_well() -> None:
    harness, engine = on_disk(OBJECTS, chain=CHAIN, has_directory=False)
    op = harness.acquire(engine, CHAIN)
    harness.probed(op, 12)
    for _ in range(3):
        assert reading(harness, "objects") == [SHARE]
        harness.brought(harness.reads("objects")[0], OK)
    assert harness.result(op).tier_count == 12


def test_a_reader_gets_all_that_is_read_in_its_time() -> None:
    harness, _ = on_a_disk()
    op = harness.next_op()
    harness.send(ev.PeerLocate(op, NodeId("reader"), harness.state.epoch, CHAIN, 0.5))
    for _ in range(3):
        harness.brought(harness.reads()[0], OK)
    located = harness.reply(op)
    assert isinstance(located, LocateResult) and None not in located.handles


def test_a_block_above_the_share_goes_alone() -> None:
    """Each of the two slots is half of the memory."""
    harness = CoreHarness(slab_count=1, slab_bytes=512 * KiB, tiers=(DISK,), has_directory=False)
    engine, chain = harness.attach(), make_chain(2)
    harness.store(engine, chain)
    assert [len(job.items) for job in harness.writes()] == [1]
    assert harness.write_all() == list(chain)
    harness.send(ev.Abort(harness.next_op(), engine, tuple(harness.reserve(engine, 2))))
    op = harness.acquire(engine, chain)
    for _ in chain:
        assert reading(harness) == [1]
        harness.brought(harness.reads()[0], OK)
    assert harness.result(op).tier_count == 2
