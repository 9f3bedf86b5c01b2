"""Blocks that come back from tiers: without a directory, beside it, for other nodes, and from slow or wrong tiers."""

from __future__ import annotations

from typing import Any

import pytest

from kvservice.core import actions as act
from kvservice.core import events as ev
from kvservice.core.block.marks import MarkKind
from kvservice.core.events import PullResult
from kvservice.core.messages import AcquireRequest, AcquireResult, LocateResult, MissReason, WarmResult
from kvservice.core.segment.blockfile import disk_room
from kvservice.core.tier.rules import TierRules, WriteMoment
from kvservice.errors import InvalidRequest
from kvservice.testing.builders import SMALL, CoreHarness, make_chain, make_holder, make_located, run_of
from kvservice.units import AttachmentId, BlockKey, MiB, NodeId

DISK = TierRules("disk", budget_bytes=100 * MiB, write=WriteMoment.STORED)
OBJECTS = TierRules("objects", is_shared=True, write=WriteMoment.STORED)
CHAIN = make_chain(4)
OK, STALE, CORRUPT, FAILED = PullResult.OK, PullResult.STALE, PullResult.CORRUPT, PullResult.FAILED


def on_disk(*tiers: TierRules, chain: tuple[BlockKey, ...] = CHAIN, **options: Any) -> tuple[CoreHarness, AttachmentId]:
    """A node whose disk, and no memory, has this chain."""
    harness = CoreHarness(tiers=tiers or (DISK,), slab_count=4, **options)
    engine = harness.attach()
    harness.store(engine, chain)
    for tier in harness.tiers:
        harness.write_all(tier.name)
    forget_memory(harness, engine)
    assert not harness.keys_held() & set(chain)
    harness.tier_work.clear()
    return harness, engine


def forget_memory(harness: CoreHarness, engine: AttachmentId) -> None:
    """Let every slot be needed for something else, and be free again."""
    refs = harness.reserve(engine, 16)
    assert len(refs) == 16
    harness.send(ev.Abort(harness.next_op(), engine, tuple(refs)))


def test_what_the_disk_has_comes_back_without_a_directory() -> None:
    harness, engine = on_disk(has_directory=False)
    op = harness.acquire(engine, CHAIN)
    (read,) = harness.reads()
    assert [block.key for block, _ in read.items] == list(CHAIN) and read.urgent
    assert read.deadline == harness.now + 5.0
    harness.brought(read, OK)
    result = harness.result(op)
    assert (len(result.blocks), result.fetched_count, result.tier_count) == (4, 0, 4)
    assert (result.miss, result.farthest) == (MissReason.NONE, "disk")
    assert (harness.count("hit_tier_blocks"), harness.count("hit_local_blocks")) == (4, 0)
    assert harness.count("tier_disk_hit_blocks") == 4
    assert (harness.count("tier_disk_read_blocks"), harness.count("tier_disk_read_bytes")) == (4, 4 * SMALL)
    blocks = {block.key: block for block in harness.state.blocks()}
    assert [blocks[key].position for key in CHAIN] == [0, 1, 2, 3]
    assert not any(block.is_secondary for block in blocks.values())
    assert not harness.writes() and not harness.resolves


def test_a_directory_is_not_asked_for_what_the_disk_has() -> None:
    harness, engine = on_disk()
    op = harness.acquire(engine, CHAIN)
    assert not harness.resolves, "a dead directory would cost its timeout"
    harness.brought(harness.reads()[0], OK)
    assert len(harness.result(op).blocks) == 4
    assert all(harness.announced[key] == 1 for key in CHAIN), "they were announced all the time"


def test_two_requests_share_one_read() -> None:
    harness, engine = on_disk()
    first, second = harness.acquire(engine, CHAIN), harness.acquire(engine, CHAIN)
    (read,) = harness.reads()
    harness.brought(read, OK)
    assert harness.result(first).tier_count == harness.result(second).tier_count == 4


def test_a_block_that_nobody_has_ends_the_prefix() -> None:
    harness, engine = on_disk(has_directory=False)
    op = harness.acquire(engine, make_chain(6))
    harness.brought(harness.reads()[0], OK)
    assert (len(harness.result(op).blocks), harness.result(op).miss) == (4, MissReason.NEVER_STORED)


def test_what_the_disk_lacks_is_looked_up() -> None:
    harness, engine = on_disk()
    chain = make_chain(6)
    op = harness.acquire(engine, chain)
    assert harness.resolves[-1].start == 0
    harness.resolved(op, run_of(4, 2))
    harness.brought(harness.reads()[0], OK)
    harness.located(harness.locates[-1], make_located(harness.locates[-1].keys))
    harness.pulled(harness.pulls[-1], OK)
    result = harness.result(op)
    assert (len(result.blocks), result.fetched_count, result.tier_count, result.farthest) == (6, 2, 4, "disk")


@pytest.mark.parametrize("wrong", [STALE, CORRUPT])
def test_a_wrong_block_leaves_the_disk(wrong: PullResult) -> None:
    harness, engine = on_disk(has_directory=False)
    op = harness.acquire(engine, CHAIN)
    harness.brought(harness.reads()[0], OK, OK, wrong, OK)
    result = harness.result(op)
    assert (len(result.blocks), result.miss.value) == (2, wrong.value)
    assert harness.erased() == [CHAIN[2]] and harness.announced[CHAIN[2]] == 0
    assert harness.count(f"tier_disk_read_{wrong.value}") == 1
    assert harness.slots("quarantined") == 0


def test_a_failed_read_keeps_the_block_and_asks_the_next_holder() -> None:
    harness, engine = on_disk()
    chain = make_chain(5)
    op = harness.acquire(engine, chain)
    harness.resolved(op, run_of(0, 5))
    while harness.reads():
        harness.brought(harness.reads()[0], FAILED)
    while harness.open(op):
        locate = harness.locates.pop()
        harness.located(locate, make_located(locate.keys))
        harness.pulled(harness.pulls[-1], OK)
    assert harness.result(op).fetched_count == 5 and not harness.erased()


def test_a_digest_that_nobody_knows_is_no_block() -> None:
    """What others wrote is known by its name only: its digest comes with its bytes."""
    harness, engine = on_disk(OBJECTS, has_directory=False)
    op = harness.acquire(engine, CHAIN)
    assert isinstance(probe := harness.tier_work.pop(), act.Probe) and probe.chain == CHAIN
    harness.probed(op, 4)
    read = harness.reads("objects")[0]
    assert {block.digest for block, _ in read.items} == {0}
    harness.send(ev.BroughtBack(read.job, (ev.BroughtBlock(OK),) * 4))
    assert (harness.result(op).blocks, harness.result(op).miss) == ((), MissReason.PEER_FAILED)


def test_a_lossy_block_has_the_digest_of_its_bytes() -> None:
    harness, engine = on_disk(has_directory=False)
    op = harness.acquire(engine, CHAIN[:1])
    harness.send(ev.BroughtBack(harness.reads()[0].job, (ev.BroughtBlock(OK, 77),)))
    assert len(harness.result(op).blocks) == 1
    assert harness.state.blocks()[0].digest == 77


def test_a_tier_that_answers_too_little_has_failed_the_rest() -> None:
    harness, engine = on_disk(has_directory=False)
    op = harness.acquire(engine, CHAIN)
    harness.brought(harness.reads()[0], OK, OK)
    assert (len(harness.result(op).blocks), harness.result(op).miss) == (2, MissReason.PEER_FAILED)
    assert harness.slots("quarantined") == 0, "nothing writes a slot after a tier has answered"


# -- shared tiers ----


def test_a_shared_tier_is_asked_beside_the_directory() -> None:
    harness, engine = on_disk(OBJECTS)
    op = harness.acquire(engine, CHAIN)
    assert harness.resolves[-1].op == op and isinstance(harness.tier_work.pop(), act.Probe)
    harness.resolved(op)
    assert harness.open(op) and not harness.reads("objects")
    harness.probed(op, 3, is_end=True)
    read = harness.reads("objects")[0]
    assert [(block.key, block.position) for block, _ in read.items] == [(key, i) for i, key in enumerate(CHAIN[:3])]
    harness.brought(read, OK)
    result = harness.result(op)
    assert (result.tier_count, result.farthest, result.miss) == (3, "objects", MissReason.NEVER_STORED)


def test_nobody_waits_for_a_directory_when_the_store_has_all() -> None:
    harness, engine = on_disk(OBJECTS)
    op = harness.acquire(engine, CHAIN)
    harness.probed(op, 4)
    harness.brought(harness.reads("objects")[0], OK)
    assert harness.result(op).tier_count == 4
    harness.resolved(op, complete=False)


def test_nobody_waits_for_the_store_when_a_node_has_all() -> None:
    harness, engine = on_disk(OBJECTS)
    op = harness.acquire(engine, CHAIN)
    harness.fetch_all(op, CHAIN)
    assert harness.result(op).fetched_count == 4
    harness.probed(op, 4)


def test_a_store_that_has_nothing_costs_a_miss() -> None:
    harness, engine = on_disk(OBJECTS, has_directory=False)
    op = harness.acquire(engine, make_chain(3, "other"))
    harness.probed(op, 0, is_end=True)
    assert harness.result(op).miss is MissReason.NEVER_STORED
    harness.probed(999, 4)


def test_a_dead_directory_and_an_empty_store_are_a_failed_lookup() -> None:
    harness, engine = on_disk(OBJECTS)
    op = harness.acquire(engine, make_chain(3, "other"))
    harness.resolved(op, complete=False)
    harness.probed(op, 0)
    assert harness.result(op).miss is MissReason.LOOKUP_FAILED


def test_a_corrupt_object_is_erased_and_an_absent_one_is_not() -> None:
    harness, engine = on_disk(OBJECTS, has_directory=False)
    op = harness.acquire(engine, CHAIN)
    harness.probed(op, 4)
    harness.brought(harness.reads("objects")[0], OK, STALE, CORRUPT, OK)
    assert len(harness.result(op).blocks) == 1 and harness.erased("objects") == [CHAIN[2]]


def test_what_was_read_beside_a_clear_is_written_again() -> None:
    harness, engine = on_disk(OBJECTS, has_directory=False)
    op = harness.acquire(engine, CHAIN)
    harness.probed(op, 4)
    (read,) = harness.reads("objects")
    harness.clear(MarkKind.EVERYTHING)
    harness.brought(read, OK)
    assert not harness.result(op).blocks, "they are of before the clear"
    harness.advance(1.0)
    harness.store(engine, CHAIN)
    assert set(harness.write_all("objects")) == set(CHAIN)


def known_to_be_in_a_store(count: int) -> tuple[CoreHarness, AttachmentId, tuple[BlockKey, ...]]:
    """A node that has heard from a store that it has a chain of others, and could not read it."""
    harness, engine = on_disk(OBJECTS, has_directory=False)
    chain = make_chain(count, "of others")
    op = harness.acquire(engine, chain)
    harness.probed(op, count)
    harness.brought(harness.reads("objects")[0], FAILED)
    assert harness.result(op).miss is MissReason.PEER_FAILED
    return harness, engine, chain


def test_what_a_store_has_is_not_written_into_it_again() -> None:
    harness, engine, chain = known_to_be_in_a_store(3)
    harness.store(engine, chain)
    assert not harness.writes("objects")


def test_what_a_store_no_longer_has_is_written_into_it_again() -> None:
    """Its life-cycle rule has removed the end of a chain."""
    harness, engine, chain = known_to_be_in_a_store(2)
    op = harness.acquire(engine, chain)
    harness.probed(op, 1, is_end=True)
    harness.brought(harness.reads("objects")[0], OK)
    harness.store(engine, chain, 1)
    assert [block.key for write in harness.writes("objects") for block, _ in write.items] == [chain[1]]


@pytest.mark.parametrize(
    ("is_end", "miss"), [(True, MissReason.NEVER_STORED), (False, MissReason.TIER_NOT_ASKED)], ids=["lacks", "silent"]
)
def test_a_store_that_cannot_say_may_have_the_block(is_end: bool, miss: MissReason) -> None:
    harness, engine = on_disk(OBJECTS, has_directory=False)
    op = harness.next_op()
    harness.send(ev.Acquire(op, engine, AcquireRequest(tuple(CHAIN), 0, 5.0, request_id="r")))
    harness.probed(op, 0, is_end=is_end)
    assert harness.result(op).miss is miss
    (record,) = harness.state.explain("r", harness.now).records
    assert record.miss_node == ("" if is_end else "~objects")


def test_a_store_that_cannot_say_has_lost_nothing() -> None:
    harness, engine, chain = known_to_be_in_a_store(3)
    op = harness.acquire(engine, chain)
    harness.probed(op, 0)
    harness.store(engine, chain)
    assert not harness.writes("objects")


def test_a_slow_store_is_not_asked_for_what_is_computed_sooner() -> None:
    harness, engine = on_disk(OBJECTS, has_directory=False)
    op = harness.acquire(engine, CHAIN)
    harness.probed(op, 4)
    harness.now += 2.0
    harness.brought(harness.reads("objects")[0], OK)
    assert harness.result(op).tier_count == 4
    chain = make_chain(4, "other")
    harness.tier_work.clear()
    for _ in range(32):
        op = harness.acquire(engine, chain, recompute=0.01)
        assert harness.result(op).miss is MissReason.TIER_NOT_ASKED and not harness.tier_work
    op = harness.acquire(engine, chain, recompute=0.01)
    assert isinstance(harness.tier_work.pop(), act.Probe), "now and then it is tried again"
    harness.probed(op, 0)
    harness.acquire(engine, chain, recompute=0.01)
    assert not harness.tier_work, "and not at once again"


# -- what is warmed ----


def test_what_is_warmed_is_read_behind_what_engines_wait_for() -> None:
    harness, engine = on_disk(has_directory=False)
    op = harness.warm(CHAIN)
    (warming,) = harness.reads()
    assert not warming.urgent and [block.key for block, _ in warming.items] == list(CHAIN)
    asked = harness.acquire(engine, CHAIN)
    assert harness.reads() == [warming], "it waits for what is on its way"
    harness.brought(warming, OK)
    assert len(harness.result(asked).blocks) == len(CHAIN)
    assert harness.reply(op) == WarmResult(4, 0, (("~disk", 4),), 4, 30.0, MissReason.NONE)


# -- the cheapest source ----


def test_a_disk_slower_than_recomputing_is_not_used_and_said_so() -> None:
    harness, engine = on_disk(has_directory=False)
    op = harness.acquire(engine, CHAIN[:2])
    harness.now += 4.0
    harness.brought(harness.reads()[0], OK)
    assert harness.result(op).tier_count == 2
    op = harness.acquire(engine, CHAIN, recompute=0.01)
    result = harness.result(op)
    assert (len(result.blocks), result.miss) == (2, MissReason.SLOWER_THAN_RECOMPUTE)
    assert harness.count("fetch_not_worthwhile") == 2


def test_a_faster_node_is_asked_before_a_slow_disk() -> None:
    harness, engine = on_disk()
    op = harness.acquire(engine, CHAIN[:2])
    harness.now += 2.0
    harness.brought(harness.reads()[0], OK)
    assert harness.result(op).tier_count == 2
    other = make_chain(2, "other")
    op = harness.acquire(engine, other)
    harness.resolved(op, run_of(0, 2))
    locate = harness.locates[-1]
    harness.located(locate, make_located(locate.keys))
    harness.now += 0.01
    harness.pulled(harness.pulls[-1], OK)
    assert harness.result(op).fetched_count == 2
    op = harness.acquire(engine, CHAIN)
    assert harness.resolves[-1].op == op, "a node that has them would give them sooner"
    harness.resolved(op, run_of(2, 2))
    assert not harness.reads() and len(harness.locates[-1].keys) == 2
    harness.located(harness.locates[-1], None)
    (read,) = harness.reads()
    assert len(read.items) == 2, "the disk is the next holder"
    harness.brought(read, OK)
    assert harness.result(op).tier_count == 2
    assert [speed.node_id for speed in harness.state.peer_speeds()] == ["peer"], "a tier is none"


def test_a_directory_that_fails_is_not_waited_for_again() -> None:
    harness, engine = on_disk()
    op = harness.acquire(engine, make_chain(1, "other"))
    harness.resolved(op, complete=False)
    assert harness.result(op).miss is MissReason.LOOKUP_FAILED
    harness.acquire(engine, CHAIN)
    assert harness.reads()


# -- a tier that hangs, and little room ----


def test_a_tier_that_hangs_costs_one_request_its_time() -> None:
    harness, engine = on_disk(has_directory=False)
    op = harness.acquire(engine, CHAIN[:1], timeout=1.0)
    (read,) = harness.reads()
    harness.advance(1.1)
    assert harness.result(op).miss is MissReason.DEADLINE
    harness.acquire(engine, CHAIN, timeout=1.0)
    assert len(harness.reads()) == 1, "it owes an answer"
    harness.advance(6.0)
    op = harness.acquire(engine, CHAIN, timeout=1.0)
    assert harness.result(op).miss is MissReason.TIER_NOT_ASKED
    assert harness.slots("writing") == 1 and harness.state.tier_usage()[0].reading_bytes == SMALL
    harness.brought(read, OK)
    assert harness.slots("writing") == 0 and CHAIN[0] in harness.keys_held()
    op = harness.acquire(engine, CHAIN, timeout=60.0)
    harness.brought(harness.reads()[0], OK)
    assert harness.result(op).tier_count == 3


def test_a_shared_tier_that_is_not_open_is_not_asked() -> None:
    harness = CoreHarness(tiers=(OBJECTS,), has_directory=False)
    harness.restart()
    op = harness.acquire(harness.attach(), CHAIN)
    assert harness.result(op).miss is MissReason.TIER_NOT_OPEN and not harness.tier_work
    harness.send(ev.TierFound("objects", ()))
    op = harness.acquire(harness.attach(), CHAIN)
    harness.probed(op, 0, is_end=True)
    assert harness.result(op).miss is MissReason.NEVER_STORED


def test_without_room_in_memory_nothing_comes_back() -> None:
    harness, engine = on_disk(has_directory=False)
    refs = harness.reserve(engine, 14)
    op = harness.acquire(engine, CHAIN)
    (read,) = harness.reads()
    assert len(read.items) == 2
    harness.brought(read, OK)
    assert (len(harness.result(op).blocks), harness.result(op).miss) == (2, MissReason.NO_ROOM)
    harness.reserve(engine, 2)
    assert len(refs) == 14
    op = harness.acquire(engine, make_chain(5))
    assert harness.result(op).miss in (MissReason.NO_ROOM, MissReason.NEVER_STORED)


def test_a_block_stored_meanwhile_is_not_brought_back_twice() -> None:
    harness, engine = on_disk(has_directory=False)
    op = harness.acquire(engine, CHAIN[:1])
    (read,) = harness.reads()
    harness.store(engine, CHAIN[:1])
    harness.brought(read, OK)
    assert len(harness.result(op).blocks) == 1 and harness.slots("writing") == 0


def test_a_draining_node_brings_nothing_back() -> None:
    harness, engine = on_disk(has_directory=False)
    harness.send(ev.Drain())
    op = harness.acquire(engine, CHAIN)
    assert harness.result(op).miss is MissReason.DRAINING and not harness.reads()


def test_a_restarted_node_brings_back_what_its_disk_kept() -> None:
    harness, _ = on_disk(has_directory=False)
    kept = tuple(harness.state._tiers.blocks())
    harness.restart()
    harness.send(ev.TierFound("disk", kept))
    engine = harness.attach()
    op = harness.acquire(engine, CHAIN)
    harness.brought(harness.reads()[0], OK)
    assert harness.result(op).tier_count == 4


# -- other nodes ----


def located(harness: CoreHarness, keys: tuple[BlockKey, ...], wait: float) -> int:
    op = harness.next_op()
    harness.send(ev.PeerLocate(op, NodeId("reader"), harness.state.epoch, keys, wait))
    return op


def result_of(harness: CoreHarness, op: int) -> LocateResult:
    value = harness.reply(op)
    assert isinstance(value, LocateResult)
    return value


def test_a_reader_that_waits_gets_what_only_the_disk_has() -> None:
    harness, _ = on_disk()
    op = located(harness, CHAIN[1:], 0.5)
    (read,) = harness.reads()
    assert harness.open(op) and not harness.resolves
    harness.brought(read, OK)
    handles = result_of(harness, op).handles
    assert [handle is not None and handle.key for handle in handles] == list(CHAIN[1:])
    assert [handle.position for handle in handles if handle is not None] == [1, 2, 3]
    assert harness.slots("leased") == 3
    routes = {block.key: block.route for block in harness.state.blocks()}
    assert dict(harness.state.inventory())[CHAIN[1]] == routes[CHAIN[1]]


def test_a_clear_of_another_model_refuses_a_reader_nothing() -> None:
    harness, _ = on_disk()
    harness.advance(100.0)
    harness.clear(MarkKind.MODEL, "another")
    op = located(harness, CHAIN, 0.5)
    harness.brought(harness.reads()[0], OK)
    assert None not in result_of(harness, op).handles and harness.count("arrived_too_old") == 0


def test_what_a_reader_asked_for_goes_with_its_own_model() -> None:
    harness, _ = on_disk()
    located(harness, CHAIN, 0.5)
    harness.brought(harness.reads()[0], OK)
    harness.advance(100.0)
    assert harness.clear(MarkKind.MODEL, "another").blocks == 0
    assert harness.clear(MarkKind.MODEL, "model").blocks == 4


def test_a_reader_that_does_not_wait_gets_what_is_in_memory() -> None:
    harness, _ = on_disk()
    op = located(harness, CHAIN, 0.0)
    assert result_of(harness, op).handles == (None,) * 4 and not harness.reads()


def test_a_reader_gets_what_is_there_when_its_time_is_up() -> None:
    harness, _ = on_disk()
    op = located(harness, CHAIN, 0.5)
    harness.advance(0.6)
    assert result_of(harness, op).handles == (None,) * 4 and harness.slots("leased") == 0
    harness.brought(harness.reads()[0], OK)
    op = located(harness, CHAIN, 0.5)
    assert None not in result_of(harness, op).handles


def test_a_reader_that_is_gone_is_not_answered() -> None:
    harness, _ = on_disk()
    op = located(harness, CHAIN, 0.5)
    harness.send(ev.Cancel(op))
    harness.brought(harness.reads()[0], OK)
    assert harness.open(op) and harness.slots("leased") == 0 and len(harness.keys_held()) == 4


def test_a_wait_that_makes_no_sense_is_refused() -> None:
    harness, _ = on_disk()
    with pytest.raises(InvalidRequest):
        harness.reply(located(harness, CHAIN, -1.0))


def test_a_peer_is_given_time_to_bring_back() -> None:
    harness = CoreHarness()
    op = harness.acquire(harness.attach(), CHAIN, timeout=5.0)
    harness.resolved(op, run_of(0, 4, make_holder()))
    locate = harness.locates[-1]
    assert 0 < locate.wait_seconds < locate.timeout_seconds
    assert isinstance(harness.advance(5.1), list)
    assert isinstance(harness.result(op), AcquireResult)


def prefer_the_node(harness: CoreHarness, engine: AttachmentId, chain: tuple[BlockKey, ...]) -> None:
    """Bring the first block back slowly, and fetch another one fast."""
    harness.acquire(engine, chain[:1])
    harness.now += 0.5
    harness.brought(harness.reads()[0], OK)
    other = make_chain(1, "fast")
    harness.resolved(harness.acquire(engine, other), run_of(0, 1))
    harness.located(harness.locates[-1], make_located(other))
    harness.now += 0.01
    harness.pulled(harness.pulls[-1], OK)


def test_a_next_holder_that_hangs_is_not_waited_for() -> None:
    """The disk was free when another node was chosen, and owes an answer when that node has failed."""
    chain = make_chain(6)
    harness, engine = on_disk(chain=chain)
    prefer_the_node(harness, engine, chain)
    op = harness.acquire(engine, chain[:2])
    harness.resolved(op, run_of(1, 1))
    locate = harness.locates[-1]
    hangs = harness.acquire(engine, chain[:3], timeout=1.0)
    harness.resolved(hangs)
    assert len(harness.reads()) == 1 and harness.open(op)
    harness.advance(1.1)
    harness.located(locate, None)
    assert (harness.result(op).miss, len(harness.result(op).blocks)) == (MissReason.STALE, 1)
    assert len(harness.reads()) == 1


def test_a_next_holder_that_lost_the_block_meanwhile_says_so() -> None:
    harness, engine = on_disk(TierRules("disk", budget_bytes=4 * disk_room(SMALL), write=WriteMoment.STORED))
    prefer_the_node(harness, engine, CHAIN)
    op = harness.acquire(engine, CHAIN[:2])
    harness.resolved(op, run_of(1, 1))
    harness.store(engine, make_chain(4, "other"))
    harness.write_all()
    assert CHAIN[1] in harness.erased()
    harness.located(harness.locates[-1], None)
    assert (harness.result(op).miss, len(harness.result(op).blocks)) == (MissReason.STALE, 1)
    assert not harness.reads()


def test_explain_names_the_tier() -> None:
    harness, engine = on_disk(has_directory=False)
    op = harness.next_op()
    harness.send(ev.Acquire(op, engine, AcquireRequest(CHAIN, 0, 5.0, request_id="r")))
    harness.brought(harness.reads()[0], OK, OK, FAILED, FAILED)
    (record,) = harness.state.explain("r", harness.now).records
    assert [(run.start, run.count, run.source) for run in record.runs] == [(0, 2, "~disk")]
    assert record.miss_node == "~disk"
