"""Hand-offs: a reader gets blocks while they are being computed, and hears at once when no more will come."""

from __future__ import annotations

import pytest

from kvservice.core import events as ev
from kvservice.core.acquire import handoff as handoff_module
from kvservice.core.acquire.acquisitions import FOLLOW_WAIT_SECONDS
from kvservice.core.acquire.handoff import APPEAR_SECONDS, CLOSED_SECONDS, GATHER_SECONDS
from kvservice.core.events import PullResult
from kvservice.core.messages import FollowResult, Handoff, HandoffState, MissReason
from kvservice.errors import Exhausted, InvalidRequest, NotAttached, StaleEpoch
from kvservice.testing.builders import CoreHarness, make_chain, make_holder, make_located, make_spec, run_of
from kvservice.units import AttachmentId, BlockKey, BootEpoch, HandoffId, NodeId

ID = HandoffId(b"h" * 16)
CHAIN = make_chain(5)
FROM_PEER = Handoff(ID, NodeId("peer"))
FROM_HERE = Handoff(ID, NodeId("here"))


@pytest.fixture
def shard() -> CoreHarness:
    return CoreHarness(slab_count=4)


def open_handoff(shard: CoreHarness, attachment: AttachmentId, handoff: HandoffId = ID) -> None:
    op = shard.next_op()
    shard.send(ev.OpenHandoff(op, attachment, handoff))
    shard.reply(op)


def close_handoff(shard: CoreHarness, attachment: AttachmentId, handoff: HandoffId = ID) -> None:
    op = shard.next_op()
    shard.send(ev.CloseHandoff(op, attachment, handoff))
    shard.reply(op)


def follow(shard: CoreHarness, keys: tuple[BlockKey, ...] = CHAIN, wait: float = 1.0, epoch: int = 1) -> int:
    op = shard.next_op()
    shard.send(ev.PeerFollow(op, NodeId("reader"), BootEpoch(epoch), ID, keys, wait))
    return op


def answer(shard: CoreHarness, op: int) -> tuple[HandoffState, int]:
    value = shard.reply(op)
    assert isinstance(value, FollowResult)
    assert bool(value.located.lease_id) == bool(value.located.handles)
    return value.state, len(value.located.handles)


# -- the writer's node ----


def test_blocks_of_one_step_go_out_together(shard: CoreHarness) -> None:
    engine = shard.attach()
    open_handoff(shard, engine)
    op = follow(shard)
    shard.store(engine, CHAIN[:3])
    assert shard.open(op), "the first block of three was sent alone"
    shard.advance(GATHER_SECONDS)
    assert answer(shard, op) == (HandoffState.OPEN, 3)


def test_a_complete_prompt_is_answered_at_once(shard: CoreHarness) -> None:
    engine = shard.attach()
    open_handoff(shard, engine)
    op = follow(shard)
    shard.store(engine, CHAIN)
    assert answer(shard, op) == (HandoffState.OPEN, 5)


def test_what_is_sealed_already_is_not_waited_for(shard: CoreHarness) -> None:
    engine = shard.attach()
    shard.store(engine, CHAIN[:2])
    assert answer(shard, follow(shard)) == (HandoffState.UNKNOWN, 2)


def test_a_close_answers_those_who_wait(shard: CoreHarness) -> None:
    engine = shard.attach()
    open_handoff(shard, engine)
    op = follow(shard)
    close_handoff(shard, engine)
    assert answer(shard, op) == (HandoffState.CLOSED, 0)
    assert answer(shard, follow(shard)) == (HandoffState.CLOSED, 0)


def test_a_dead_writer_closes_its_handoffs(shard: CoreHarness) -> None:
    engine = shard.attach()
    open_handoff(shard, engine)
    op = follow(shard)
    shard.send(ev.AttachmentLost(engine))
    assert answer(shard, op) == (HandoffState.CLOSED, 0)
    assert shard.count("handoffs_broken") == 1


def test_an_unknown_handoff_is_answered_after_the_wait(shard: CoreHarness) -> None:
    op = follow(shard, wait=1.0)
    shard.advance(0.5)
    assert shard.open(op)
    shard.advance(0.5)
    assert answer(shard, op) == (HandoffState.UNKNOWN, 0)


def test_a_block_evicted_before_the_answer_ends_the_run(shard: CoreHarness) -> None:
    engine = shard.attach()
    open_handoff(shard, engine)
    shard.store(engine, CHAIN[:1])
    op = follow(shard, CHAIN[1:])
    shard.store(engine, CHAIN[:2])
    other = shard.attach(make_spec("other"))
    shard.acquire(other, CHAIN[:1])
    assert len(shard.reserve(other, 100)) == 15  # all but the pinned one: the followed block is evicted for it
    shard.advance(GATHER_SECONDS)
    assert answer(shard, op) == (HandoffState.OPEN, 0)


def test_what_was_sent_is_leased_to_the_reader(shard: CoreHarness) -> None:
    engine = shard.attach()
    shard.store(engine, CHAIN)
    op = follow(shard)
    value = shard.reply(op)
    assert isinstance(value, FollowResult)
    assert shard.slots("leased") == 5
    done = shard.next_op()
    shard.send(ev.PeerRelease(done, NodeId("reader"), BootEpoch(1), value.located.lease_id))
    assert shard.slots("leased") == 0


def test_a_closed_handoff_is_forgotten(shard: CoreHarness) -> None:
    engine = shard.attach()
    open_handoff(shard, engine)
    close_handoff(shard, engine)
    shard.advance(CLOSED_SECONDS)
    assert answer(shard, follow(shard, wait=0.0)) == (HandoffState.UNKNOWN, 0)


def test_an_id_is_used_once(shard: CoreHarness) -> None:
    engine = shard.attach()
    open_handoff(shard, engine)
    with pytest.raises(InvalidRequest, match="exists already"):
        open_handoff(shard, engine)


def test_nobody_closes_the_handoff_of_another_engine(shard: CoreHarness) -> None:
    engine, other = shard.attach(), shard.attach(make_spec("other"))
    open_handoff(shard, engine)
    close_handoff(shard, other)
    assert answer(shard, follow(shard, wait=0.0)) == (HandoffState.OPEN, 0)
    assert shard.count("handoff_close_ignored") == 1


@pytest.mark.parametrize("keys", [(), CHAIN + CHAIN[:1], (BlockKey(b"short"),)])
def test_a_follow_names_whole_keys_each_once(shard: CoreHarness, keys: tuple[BlockKey, ...]) -> None:
    with pytest.raises(InvalidRequest):
        shard.reply(follow(shard, keys))


def test_a_follow_of_an_earlier_boot_is_refused(shard: CoreHarness) -> None:
    with pytest.raises(StaleEpoch):
        shard.reply(follow(shard, epoch=2))


def test_a_handoff_needs_an_attachment_and_a_whole_id(shard: CoreHarness) -> None:
    with pytest.raises(NotAttached):
        open_handoff(shard, AttachmentId(9))
    engine = shard.attach()
    with pytest.raises(InvalidRequest):
        open_handoff(shard, engine, HandoffId(b"short"))


def test_a_cancelled_follow_is_never_answered(shard: CoreHarness) -> None:
    engine = shard.attach()
    open_handoff(shard, engine)
    op = follow(shard)
    shard.send(ev.Cancel(op))
    shard.store(engine, CHAIN)
    shard.advance(2.0)
    assert shard.open(op) and shard.slots("leased") == 0


def test_an_answer_without_a_writer_comes_too_late(shard: CoreHarness) -> None:
    shard.send(ev.Followed(shard.next_op(), 7, None, None, 0.0))
    assert shard.count("follows_failed") == 0, "nobody waits for it"


def test_an_open_handoff_is_counted(shard: CoreHarness) -> None:
    open_handoff(shard, shard.attach())
    assert shard.state.open_handoff_count == 1


# -- the reader's node ----


def begin(shard: CoreHarness, handoff: Handoff = FROM_PEER, timeout: float = 60.0) -> tuple[AttachmentId, int]:
    engine = shard.attach(make_spec("reader"))
    return engine, shard.acquire(engine, CHAIN, timeout=timeout, handoff=handoff)


def test_blocks_are_fetched_while_the_rest_is_computed(shard: CoreHarness) -> None:
    _, op = begin(shard)
    assert shard.follows[-1].keys == CHAIN and not shard.resolves
    shard.followed(shard.follows[-1], 2)
    assert [handle.key for handle, _ in shard.pulls[0].items] == list(CHAIN[:2])
    assert shard.follows[-1].keys == CHAIN[2:], "the rest is asked for before the first blocks are here"
    shard.followed(shard.follows[-1], 3, state=HandoffState.CLOSED)
    shard.pulled(shard.pulls[1], PullResult.OK)
    assert shard.open(op)
    shard.pulled(shard.pulls[0], PullResult.OK)
    result = shard.result(op)
    assert (len(result.blocks), result.fetched_count, result.miss) == (5, 5, MissReason.NONE)
    assert len(shard.remote_releases) == 2


def test_what_is_here_is_not_asked_for(shard: CoreHarness) -> None:
    shard.store(shard.attach(), CHAIN[:2])
    _, op = begin(shard)
    assert shard.follows[-1].keys == CHAIN[2:]
    shard.followed(shard.follows[-1], 3, state=HandoffState.CLOSED)
    shard.pulled(shard.pulls[0], PullResult.OK)
    assert (len(shard.result(op).blocks), shard.result(op).fetched_count) == (5, 3)


def test_a_short_handoff_is_completed_from_the_directory(shard: CoreHarness) -> None:
    _, op = begin(shard)
    shard.followed(shard.follows[-1], 2)
    shard.pulled(shard.pulls[0], PullResult.OK)
    shard.followed(shard.follows[-1], 0, state=HandoffState.CLOSED)
    assert shard.resolves[-1].start == 2
    shard.resolved(op, run_of(2, 2, make_holder("third")))
    locate = shard.locates[-1]
    assert locate.keys == CHAIN[2:4]
    shard.located(locate, make_located(locate.keys))
    shard.pulled(shard.pulls[-1], PullResult.OK)
    result = shard.result(op)
    assert (len(result.blocks), result.miss) == (4, MissReason.NEVER_STORED)


def test_a_writer_that_fails_is_given_up_at_once(shard: CoreHarness) -> None:
    _, op = begin(shard)
    wanted = shard.follows[-1]
    shard.send(ev.Followed(wanted.follow, wanted.op, None, None, shard.now))
    shard.resolved(op)
    assert shard.result(op).miss is MissReason.NEVER_STORED
    assert shard.count("follows_failed") == 1


def test_an_answer_counts_once(shard: CoreHarness) -> None:
    _, op = begin(shard)
    first = shard.follows[-1]
    shard.followed(first, 2)
    shard.followed(first, 5)
    assert len(shard.pulls) == 1 and len(shard.remote_releases) == 1
    last = shard.follows[-1]
    shard.followed(last, 0, state=HandoffState.CLOSED)
    shard.followed(last, 3)
    assert len(shard.pulls) == 1 and len(shard.remote_releases) == 2
    shard.resolved(op)
    shard.pulled(shard.pulls[0], PullResult.OK)
    assert len(shard.result(op).blocks) == 2


def test_a_handoff_that_never_appears_is_given_up(shard: CoreHarness) -> None:
    _, op = begin(shard)
    shard.now += FOLLOW_WAIT_SECONDS
    shard.followed(shard.follows[-1], 0, state=HandoffState.UNKNOWN)
    assert len(shard.follows) == 2, "it may still be on its way"
    shard.now += APPEAR_SECONDS
    shard.followed(shard.follows[-1], 0, state=HandoffState.UNKNOWN)
    shard.resolved(op)
    assert shard.result(op).miss is MissReason.NEVER_STORED


def test_an_open_handoff_is_followed_until_the_deadline(shard: CoreHarness) -> None:
    _, op = begin(shard, timeout=20.0)
    for _ in range(19):
        shard.now += FOLLOW_WAIT_SECONDS
        shard.followed(shard.follows[-1], 0)
    shard.advance(1.0)
    assert shard.result(op).miss is MissReason.DEADLINE
    shard.followed(shard.follows[-1], 2)
    assert len(shard.remote_releases) == 1, "a late answer's lease is given back"


def test_a_corrupt_block_ends_the_prefix(shard: CoreHarness) -> None:
    _, op = begin(shard)
    shard.followed(shard.follows[-1], 3)
    shard.pulled(shard.pulls[0], PullResult.OK, PullResult.CORRUPT, PullResult.OK)
    result = shard.result(op)
    assert (len(result.blocks), result.miss) == (1, MissReason.CORRUPT)


def test_two_readers_fetch_a_common_prefix_once(shard: CoreHarness) -> None:
    _, first = begin(shard)
    second = shard.acquire(shard.attach(make_spec("second")), CHAIN, timeout=60.0, handoff=FROM_PEER)
    asked = shard.follows[-2:]
    shard.followed(asked[0], 5)
    shard.followed(asked[1], 5)
    assert len(shard.pulls) == 1
    shard.pulled(shard.pulls[0], PullResult.OK)
    assert len(shard.result(first).blocks) == len(shard.result(second).blocks) == 5


def test_the_wait_for_a_writer_says_nothing_about_the_link(shard: CoreHarness) -> None:
    _, op = begin(shard)
    wanted, sent_at = shard.follows[-1], shard.now
    shard.now += 30.0
    result = FollowResult(HandoffState.CLOSED, make_located(wanted.keys))
    shard.send(ev.Followed(wanted.follow, wanted.op, make_holder(), result, sent_at + 29.9))
    shard.pulled(shard.pulls[-1], PullResult.OK)
    assert len(shard.result(op).blocks) == 5
    later = make_chain(5, "later")
    again = shard.acquire(shard.attach(make_spec("again")), later, recompute=0.5, timeout=60.0)
    shard.resolved(again, run_of(0, 5))
    assert shard.count("fetch_not_worthwhile") == 0


def test_a_cancelled_reader_leaves_nothing(shard: CoreHarness) -> None:
    shard.store(shard.attach(), CHAIN[:1])
    _, op = begin(shard)
    shard.followed(shard.follows[-1], 2)
    shard.send(ev.Cancel(op))
    assert shard.slots("leased") == 0
    shard.followed(shard.follows[-1], 2)
    shard.pulled(shard.pulls[0], PullResult.OK)
    shard.advance(100.0)
    counts = shard.state.slot_counts()
    assert (counts["sealed"], counts["leased"], counts["writing"]) == (3, 0, 0)
    assert shard.state._acquisitions.is_idle and len(shard.remote_releases) == 2


def test_a_draining_node_follows_nobody(shard: CoreHarness) -> None:
    attachment = shard.attach(make_spec("reader"))
    shard.send(ev.Drain())
    op = shard.acquire(attachment, CHAIN, timeout=60.0, handoff=FROM_PEER)
    assert shard.result(op).miss is MissReason.DRAINING and not shard.follows


# -- writer and reader on one node ----


def test_blocks_of_the_same_node_are_shared_as_they_are_sealed(shard: CoreHarness) -> None:
    writer = shard.attach()
    open_handoff(shard, writer)
    _, op = begin(shard, FROM_HERE)
    shard.store(writer, CHAIN[:3])
    assert shard.open(op) and not shard.follows
    shard.store(writer, CHAIN)
    result = shard.result(op)
    assert (len(result.blocks), result.fetched_count, result.miss) == (5, 0, MissReason.NONE)


def test_a_writer_on_the_same_node_that_stops_is_noticed(shard: CoreHarness) -> None:
    writer = shard.attach()
    open_handoff(shard, writer)
    _, op = begin(shard, FROM_HERE)
    shard.store(writer, CHAIN[:2])
    shard.send(ev.AttachmentLost(writer))
    shard.resolved(op)
    assert (len(shard.result(op).blocks), shard.result(op).miss) == (2, MissReason.NEVER_STORED)


def test_a_writer_on_the_same_node_that_never_comes_is_given_up(shard: CoreHarness) -> None:
    _, op = begin(shard, FROM_HERE)
    shard.advance(APPEAR_SECONDS)
    shard.resolved(op)
    assert shard.result(op).miss is MissReason.NEVER_STORED


def test_a_handoff_closed_before_the_reader_came_is_no_wait(shard: CoreHarness) -> None:
    writer = shard.attach()
    open_handoff(shard, writer)
    shard.store(writer, CHAIN[:4])
    close_handoff(shard, writer)
    _, op = begin(shard, FROM_HERE)
    shard.resolved(op)
    assert len(shard.result(op).blocks) == 4


# -- rare endings ----


def test_a_writer_whose_blocks_find_no_room_ends_the_wait(shard: CoreHarness) -> None:
    """The request is answered with what is here, and computes the rest."""
    other = shard.attach(make_spec("other"))
    assert len(shard.reserve(other, 100)) == 16
    _, op = begin(shard)
    shard.followed(shard.follows[-1], 5)
    assert (len(shard.result(op).blocks), shard.result(op).miss) == (0, MissReason.NO_ROOM)
    assert len(shard.follows) == 1 and len(shard.remote_releases) == 1


def test_a_writer_is_not_asked_for_what_is_on_its_way(shard: CoreHarness) -> None:
    first = shard.acquire(shard.attach(make_spec("first")), CHAIN)
    shard.resolved(first, run_of(0, 5))
    shard.located(shard.locates[-1], make_located(CHAIN))
    _, second = begin(shard)
    assert not shard.follows
    shard.pulled(shard.pulls[-1], PullResult.OK)
    assert len(shard.result(first).blocks) == len(shard.result(second).blocks) == 5


def test_a_writer_that_fails_after_the_deadline_ends_the_wait(shard: CoreHarness) -> None:
    """The directory is not asked any more."""
    _, op = begin(shard, timeout=2.0)
    wanted = shard.follows[-1]
    shard.now += 2.5
    shard.send(ev.Followed(wanted.follow, wanted.op, None, None, shard.now))
    assert shard.result(op).miss is MissReason.NEVER_STORED and not shard.resolves


def test_readers_of_handoffs_are_limited(shard: CoreHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff_module, "FOLLOWS_MAX", 2)
    waiting = [follow(shard) for _ in range(2)]
    with pytest.raises(Exhausted, match="2 readers"):
        shard.reply(follow(shard))
    assert all(shard.open(op) for op in waiting)
