"""Rules of acquire.acquisitions: one fetch per block, a prefix without gaps, an answer in time whatever peers do."""

from __future__ import annotations

import pytest

from kvservice.core import events as ev
from kvservice.core.acquire.acquisition import TIMEOUT_SECONDS_MAX
from kvservice.core.acquire.acquisitions import LOOKUP_SECONDS_MAX
from kvservice.core.acquire.estimate import REFUSALS_MAX
from kvservice.core.acquire.fetches import PULL_GRACE_SECONDS
from kvservice.core.acquire.pulls import LOCATE_GIVE_UP_SECONDS, PULL_BLOCKS_MAX, PULL_SECONDS_MAX, SUSPECT_SECONDS
from kvservice.core.block.keys import KEYS_PER_REQUEST_MAX
from kvservice.core.events import PullResult
from kvservice.core.messages import AcquireRequest, MissReason, SealStatus
from kvservice.errors import InvalidRequest
from kvservice.testing.builders import LARGE, CoreHarness, make_chain, make_holder, make_located, make_spec, run_of
from kvservice.units import AttachmentId, BlockKey, KiB, LeaseId

CHAIN = make_chain(4)
A, B, C = make_holder("a"), make_holder("b"), make_holder("c")
OK, STALE, CORRUPT, FAILED, STUCK = (
    PullResult.OK,
    PullResult.STALE,
    PullResult.CORRUPT,
    PullResult.FAILED,
    PullResult.STUCK,
)


def make(slab_count: int = 2) -> tuple[CoreHarness, AttachmentId]:
    harness = CoreHarness(slab_count=slab_count)
    return harness, harness.attach()


def pulling(harness: CoreHarness, engine: AttachmentId, *runs: object, timeout: float = 5.0) -> int:
    """Everything of CHAIN is on its way from A (or from these holders): the call is open, one Pull is asked for."""
    op = harness.acquire(engine, CHAIN, timeout=timeout)
    harness.resolved(op, run_of(0, 4, *(runs or (A,))))  # type: ignore[arg-type]
    harness.located(harness.locates[-1], make_located(CHAIN))
    assert harness.open(op) and len(harness.pulls) == 1
    return op


def nothing_left(harness: CoreHarness) -> None:
    """No fetch, no waiter and no key on its way is remembered."""
    assert harness.state._acquisitions.is_idle and not harness.state._pulls._open
    counts = harness.state.slot_counts()
    assert counts["free"] + counts["sealed"] + counts["leased"] == harness.state.capacity


# -- what is here ----


def test_a_whole_prefix_that_is_here_is_promised_at_once() -> None:
    harness, engine = make()
    harness.store(engine, CHAIN)
    answer = harness.result(harness.acquire(engine, CHAIN))
    assert (len(answer.blocks), answer.fetched_count, answer.miss) == (4, 0, MissReason.NONE)
    assert [harness.headers[ref.slot].key for ref in answer.blocks] == list(CHAIN)
    assert harness.slots("leased") == 4 and not harness.resolves


def test_gap_in_prefix_ends_the_hit() -> None:
    harness, engine = make()
    harness.store(engine, CHAIN)
    refs = harness.reserve(engine, 4)
    harness.send(ev.Abort(harness.next_op(), engine, tuple(refs)))
    other = (CHAIN[0], make_chain(1, "not here")[0], *CHAIN[1:])
    answer = harness.hit(engine, other)
    assert (len(answer.blocks), answer.miss) == (1, MissReason.NEVER_STORED)
    assert harness.slots("leased") == 1, "what lies behind the gap is not kept"


def test_what_the_engine_has_is_neither_leased_nor_fetched() -> None:
    harness, engine = make()
    harness.store(engine, CHAIN[:3])
    answer = harness.hit(engine, CHAIN[:3], skip=2)
    assert [harness.headers[ref.slot].key for ref in answer.blocks] == [CHAIN[2]]
    nothing = harness.hit(engine, CHAIN, skip=4)
    assert (nothing.blocks, nothing.lease_id, nothing.miss) == ((), 0, MissReason.NONE)
    op = harness.acquire(engine, CHAIN, skip=3)
    assert harness.resolves[-1].start == 3
    harness.fetch_all(op, CHAIN, 3)
    assert harness.pulls[-1].items[0][0].key == CHAIN[3] and len(harness.pulls[-1].items) == 1


def test_a_miss_holds_no_lease() -> None:
    harness, engine = make()
    answer = harness.hit(engine, CHAIN)
    assert (answer.blocks, answer.lease_id, answer.miss) == ((), 0, MissReason.NEVER_STORED)
    assert harness.state.lease_count == 0


def test_a_silent_directory_is_not_taken_for_an_empty_one() -> None:
    harness, engine = make()
    op = harness.acquire(engine, CHAIN)
    harness.resolved(op, complete=False)
    assert harness.result(op).miss is MissReason.LOOKUP_FAILED


def test_without_a_directory_nobody_is_asked() -> None:
    harness = CoreHarness(has_directory=False)
    answer = harness.result(harness.acquire(harness.attach(), CHAIN))
    assert (answer.miss, harness.resolves) == (MissReason.NEVER_STORED, [])


def test_the_directory_may_not_use_up_the_engines_time() -> None:
    harness, engine = make()
    harness.acquire(engine, CHAIN, timeout=100.0)
    harness.acquire(engine, CHAIN, timeout=0.1)
    assert [one.timeout_seconds for one in harness.resolves] == [LOOKUP_SECONDS_MAX, 0.1]


def test_a_block_of_another_size_under_the_same_key_is_no_hit() -> None:
    harness = CoreHarness()
    harness.store(harness.attach(make_spec("small", "s")), CHAIN[:1])
    large = harness.attach(make_spec("large", "l", payload_bytes=LARGE))
    assert harness.hit(large, CHAIN[:1]).blocks == ()


def bad_requests() -> list[AcquireRequest]:
    many = tuple(BlockKey(number.to_bytes(16, "big")) for number in range(KEYS_PER_REQUEST_MAX + 1))
    return [
        AcquireRequest((), 0, 1.0),
        AcquireRequest(CHAIN, -1, 1.0),
        AcquireRequest(CHAIN, 5, 1.0),
        AcquireRequest((CHAIN[0], CHAIN[0]), 0, 1.0),
        AcquireRequest((CHAIN[0], BlockKey(b"short")), 0, 1.0),
        AcquireRequest((BlockKey(b""),), 0, 1.0),
        AcquireRequest(CHAIN, 0, -1.0),
        AcquireRequest(CHAIN, 0, TIMEOUT_SECONDS_MAX + 1),
        AcquireRequest(CHAIN, 0, float("nan")),
        AcquireRequest(many, 0, 1.0),
    ]


@pytest.mark.parametrize(
    "request_", bad_requests(), ids=lambda one: f"{len(one.keys)}-{one.skip}-{one.timeout_seconds}"
)
def test_malformed_requests_are_refused_without_side_effect(request_: AcquireRequest) -> None:
    harness, engine = make()
    harness.store(engine, CHAIN)
    op = harness.next_op()
    harness.send(ev.Acquire(op, engine, request_))
    with pytest.raises(InvalidRequest):
        harness.result(op)
    assert harness.slots("leased") == 0
    nothing_left(harness)


# -- fetching ----


def test_a_fetched_prefix_is_promised_and_announced() -> None:
    """Its lease is given back."""
    harness, engine = make()
    harness.store(engine, CHAIN[:1])
    op = harness.acquire(engine, CHAIN)
    harness.fetch_all(op, CHAIN, 1)
    answer = harness.result(op)
    assert (len(answer.blocks), answer.fetched_count, answer.miss) == (4, 3, MissReason.NONE)
    assert harness.announced == dict.fromkeys(CHAIN, 1)
    assert {block.key: block.is_secondary for block in harness.state.blocks()} == {
        CHAIN[0]: False,
        **dict.fromkeys(CHAIN[1:], True),
    }
    assert [(one.lease_id, one.holder.node_id) for one in harness.remote_releases] == [(7, "peer")]
    nothing_left(harness)


def test_many_acquisitions_of_one_cold_prefix_make_one_fetch() -> None:
    harness, engine = make()
    ops = [harness.acquire(engine, CHAIN) for _ in range(10)]
    for op in ops:
        harness.resolved(op, run_of(0, 4, A))
    ops += [harness.acquire(engine, CHAIN) for _ in range(5)]
    assert len(harness.locates) == 1
    harness.located(harness.locates[0], make_located(CHAIN))
    harness.pulled(harness.pulls[0], OK)
    assert [len(harness.result(op).blocks) for op in ops] == [4] * 15
    assert len(harness.pulls) == 1 and harness.count("fetches_started") == 1
    nothing_left(harness)


def test_acquisitions_that_overlap_wait_for_each_others_blocks() -> None:
    harness, engine = make()
    short, long = harness.acquire(engine, CHAIN[:2]), harness.acquire(engine, CHAIN)
    harness.resolved(short, run_of(0, 2, A))
    harness.resolved(long, run_of(0, 4, B))
    assert [one.keys for one in harness.locates] == [CHAIN[:2], CHAIN[2:]]
    for locate in harness.locates:
        harness.located(locate, make_located(locate.keys))
    harness.pulled(harness.pulls[1], OK)
    assert harness.open(long)
    harness.pulled(harness.pulls[0], OK)
    assert [len(harness.result(op).blocks) for op in (short, long)] == [2, 4]


def test_the_holder_of_the_longest_run_is_asked() -> None:
    harness, engine = make()
    op = harness.acquire(engine, CHAIN)
    harness.resolved(op, run_of(0, 1, A, B), run_of(1, 3, B))
    assert [(one.holder, one.keys) for one in harness.locates] == [(B, CHAIN)]


def test_a_chain_spread_over_peers_is_fetched_from_each() -> None:
    harness, engine = make()
    op = harness.acquire(engine, CHAIN)
    harness.resolved(op, run_of(0, 2, A), run_of(2, 2, B))
    assert [(one.holder, one.keys) for one in harness.locates] == [(A, CHAIN[:2]), (B, CHAIN[2:])]


def test_this_node_is_never_asked_for_its_own_blocks() -> None:
    harness, engine = make()
    op = harness.acquire(engine, CHAIN)
    harness.resolved(op, run_of(0, 4, make_holder("here")))
    assert harness.result(op).miss is MissReason.NEVER_STORED
    assert not harness.locates


def test_a_run_is_cut_at_the_most_one_pull_may_hold() -> None:
    harness, engine = make()
    chain = tuple(BlockKey(number.to_bytes(16, "big")) for number in range(1, PULL_BLOCKS_MAX + 11))
    op = harness.acquire(engine, chain)
    harness.resolved(op, run_of(0, 1 << 40, A))
    assert [len(one.keys) for one in harness.locates] == [PULL_BLOCKS_MAX, 10]


def test_a_second_answer_of_the_directory_is_ignored() -> None:
    harness, engine = make()
    op = pulling(harness, engine)
    assert harness.resolved(op, run_of(0, 4, B)) == []
    assert harness.resolved(99, run_of(0, 4, B)) == []


def test_what_an_engine_stored_meanwhile_is_not_fetched() -> None:
    harness, engine = make()
    op = harness.acquire(engine, CHAIN)
    harness.store(engine, CHAIN[:3])
    harness.resolved(op, run_of(0, 4, A))
    assert [one.keys for one in harness.locates] == [CHAIN[3:]]


def test_a_fetch_that_is_slower_than_recomputing_is_not_made() -> None:
    harness, engine = make()
    op = harness.acquire(engine, CHAIN[:1])
    harness.resolved(op, run_of(0, 1, A))
    harness.located(harness.locates[0], make_located(CHAIN[:1]))
    harness.now += 1.0
    harness.pulled(harness.pulls[0], OK)  # 250 KiB in a second
    for number in range(REFUSALS_MAX):
        op = harness.acquire(engine, make_chain(2, f"{number}"), recompute=0.5)
        harness.resolved(op, run_of(0, 2, A))
        assert harness.result(op).miss is MissReason.SLOWER_THAN_RECOMPUTE
    assert len(harness.locates) == 1
    op = harness.acquire(engine, make_chain(2, "once more"), recompute=0.5)
    harness.resolved(op, run_of(0, 2, A))
    assert len(harness.locates) == 2, "a peer is not given up for ever"
    op = harness.acquire(engine, make_chain(8, "in part"), recompute=2.0, timeout=3.5)
    harness.resolved(op, run_of(0, 8, A))
    assert len(harness.locates[-1].keys) == 3, "as many as fit the time"


def test_no_fetch_starts_while_draining() -> None:
    harness, engine = make()
    op = harness.acquire(engine, CHAIN)
    harness.send(ev.Drain())
    harness.resolved(op, run_of(0, 4, A))
    assert (harness.result(op).miss, harness.locates) == (MissReason.DRAINING, [])


# -- deadlines ----


def test_the_deadline_answers_with_the_verified_prefix() -> None:
    """The fetch still lands."""
    harness, engine = make()
    harness.store(engine, CHAIN[:1])
    op = harness.acquire(engine, CHAIN, timeout=2.0)
    harness.resolved(op, run_of(1, 3, A))
    harness.located(harness.locates[0], make_located(CHAIN[1:]))
    assert harness.state.next_deadline() == harness.now + 2.0
    harness.advance(2.0)
    answer = harness.result(op)
    assert (len(answer.blocks), answer.miss) == (1, MissReason.DEADLINE)
    harness.pulled(harness.pulls[0], OK)
    assert harness.keys_held() == set(CHAIN)
    assert len(harness.result(harness.acquire(engine, CHAIN)).blocks) == 4
    nothing_left(harness)


@pytest.mark.parametrize("timeout", [0.0, 1.0])
def test_a_directory_that_never_answers_costs_the_deadline_only(timeout: float) -> None:
    harness, engine = make()
    harness.store(engine, CHAIN[:2])
    op = harness.acquire(engine, CHAIN, timeout=timeout)
    assert harness.state.next_deadline() == harness.now + timeout
    harness.advance(timeout)
    assert (len(harness.result(op).blocks), harness.result(op).miss) == (2, MissReason.DEADLINE)
    assert harness.resolved(op, run_of(2, 2, A)) == []
    nothing_left(harness)


def test_a_peer_that_falls_silent_does_not_hold_its_blocks() -> None:
    harness, engine = make()
    op = harness.acquire(engine, CHAIN, timeout=100.0)
    harness.resolved(op, run_of(0, 4, A, B))
    assert harness.state.next_deadline() == harness.now + LOCATE_GIVE_UP_SECONDS
    harness.advance(LOCATE_GIVE_UP_SECONDS)
    assert harness.locates[-1].holder == B
    harness.advance(LOCATE_GIVE_UP_SECONDS)
    assert harness.result(op).miss is MissReason.PEER_FAILED
    assert harness.count("fetches_overdue") == 2
    assert harness.located(harness.locates[0], make_located(CHAIN)) == []
    nothing_left(harness)


@pytest.mark.parametrize("lease_seconds", [0.0, 10.0, 1e12])
def test_an_unreported_pull_keeps_its_slots_and_nothing_else(lease_seconds: float) -> None:
    harness, engine = make()
    op = harness.acquire(engine, CHAIN, timeout=500.0)
    harness.resolved(op, run_of(0, 4, A))
    harness.located(harness.locates[-1], make_located(CHAIN, lease_seconds=lease_seconds))
    harness.advance(PULL_SECONDS_MAX + PULL_GRACE_SECONDS)
    assert harness.result(op).miss is MissReason.DEADLINE
    assert harness.slots("writing") == 4, "the transfer may still write them"
    again = harness.acquire(engine, CHAIN)
    harness.fetch_all(again, CHAIN)
    assert len(harness.result(again).blocks) == 4, "the blocks can be fetched anew"
    harness.pulled(harness.pulls[0], OK)
    assert (harness.slots("writing"), harness.slots("leased")) == (0, 4)
    assert harness.state.next_deadline() is not None
    nothing_left(harness)


def test_a_reused_op_number_gets_no_blocks_of_the_first_call() -> None:
    harness, engine = make()
    op = pulling(harness, engine, timeout=1.0)
    harness.advance(1.0)
    harness.result(op)
    del harness.answers[op]
    other = make_chain(4, "other")
    harness.send(ev.Acquire(op, engine, AcquireRequest(other, 0, 5.0)))
    harness.resolved(op, run_of(0, 4, B))
    harness.pulled(harness.pulls[0], OK)
    assert harness.open(op)
    harness.located(harness.locates[-1], make_located(other))
    harness.pulled(harness.pulls[-1], OK)
    assert [harness.headers[ref.slot].key for ref in harness.result(op).blocks] == list(other)


# -- peers that answer badly ----


@pytest.mark.parametrize("how", ["silent", "nothing", "wrong key", "wrong length", "too few"])
def test_a_holder_that_fails_is_followed_by_the_next(how: str) -> None:
    harness, engine = make()
    op = harness.acquire(engine, CHAIN)
    harness.resolved(op, run_of(0, 4, A, B))
    answers = {
        "silent": None,
        "nothing": make_located([None] * 4),
        "wrong key": make_located(make_chain(4, "other")),
        "wrong length": make_located(CHAIN, length=1 * KiB),
        "too few": make_located([]),
    }
    harness.located(harness.locates[0], answers[how])
    assert [one.holder for one in harness.locates] == [A, B]
    assert harness.open(op) and harness.slots("writing") == 0
    assert harness.located(harness.locates[0], make_located(CHAIN)) == [], "the first holder has had its chance"
    harness.located(harness.locates[1], make_located(CHAIN))
    harness.pulled(harness.pulls[0], OK)
    assert len(harness.result(op).blocks) == 4
    nothing_left(harness)


def test_each_holder_is_tried_once() -> None:
    harness, engine = make()
    op = harness.acquire(engine, CHAIN)
    harness.resolved(op, run_of(0, 4, A, B, A, B, C))
    for number in range(3):
        harness.located(harness.locates[number], None)
    assert [one.holder for one in harness.locates] == [A, B, C]
    assert harness.result(op).miss is MissReason.PEER_FAILED
    nothing_left(harness)


def test_a_peer_that_lost_the_rest_gives_the_beginning() -> None:
    harness, engine = make()
    op = harness.acquire(engine, CHAIN)
    harness.resolved(op, run_of(0, 4, A))
    harness.located(harness.locates[0], make_located([CHAIN[0], CHAIN[1], None, CHAIN[3]]))
    assert [handle.key for handle, _ in harness.pulls[0].items] == list(CHAIN[:2])
    harness.pulled(harness.pulls[0], OK)
    answer = harness.result(op)
    assert (len(answer.blocks), answer.miss) == (2, MissReason.STALE)
    nothing_left(harness)


def test_without_room_only_what_fits_is_pulled() -> None:
    harness, engine = make(slab_count=1)
    harness.reserve(engine, 3)
    op = harness.acquire(engine, CHAIN)
    harness.resolved(op, run_of(0, 4, A))
    harness.located(harness.locates[0], make_located(CHAIN))
    assert len(harness.pulls[0].items) == 1
    harness.pulled(harness.pulls[0], OK)
    assert (len(harness.result(op).blocks), harness.result(op).miss) == (1, MissReason.NO_ROOM)


def test_without_any_room_the_peers_lease_is_given_back() -> None:
    harness, engine = make(slab_count=1)
    harness.reserve(engine, 4)
    op = harness.acquire(engine, CHAIN)
    harness.resolved(op, run_of(0, 4, A))
    harness.located(harness.locates[0], make_located(CHAIN))
    assert harness.result(op).miss is MissReason.NO_ROOM
    assert len(harness.remote_releases) == 1 and not harness.pulls


# -- what a pull may say ----


@pytest.mark.parametrize(
    ("result", "reason", "state"),
    [
        (STALE, MissReason.STALE, "free"),
        (FAILED, MissReason.PEER_FAILED, "free"),
        (CORRUPT, MissReason.CORRUPT, "quarantined"),
        (STUCK, MissReason.DEADLINE, "quarantined"),
    ],
)
def test_pull_result_ends_the_prefix_and_decides_about_the_slot(
    result: PullResult, reason: MissReason, state: str
) -> None:
    harness, engine = make()
    op = pulling(harness, engine)
    harness.pulled(harness.pulls[0], OK, OK, result, OK)
    answer = harness.result(op)
    assert (len(answer.blocks), answer.fetched_count, answer.miss) == (2, 2, reason)
    assert harness.keys_held() == set(CHAIN) - {CHAIN[2]}, "good blocks behind the gap are kept for the next one"
    assert harness.slots("writing") == 0
    assert harness.slots("quarantined") == (state == "quarantined")


def test_a_slot_with_wrong_bytes_rests_and_is_used_again() -> None:
    harness, engine = make()
    pulling(harness, engine)
    harness.pulled(harness.pulls[0], CORRUPT)
    harness.advance(SUSPECT_SECONDS - 0.1)
    assert harness.slots("quarantined") == 4
    assert harness.state.next_deadline() is not None
    harness.advance(0.1)
    assert harness.slots("free") == harness.state.capacity
    assert harness.state.next_deadline() is None


def test_a_stuck_slot_waits_for_its_transfer_however_long() -> None:
    harness, engine = make()
    pulling(harness, engine)
    harness.pulled(harness.pulls[0], OK, STUCK, STUCK, OK)
    assert not harness.remote_releases, "the peer must keep what may still be read"
    harness.advance(1e6)
    assert harness.slots("quarantined") == 2
    for _ in range(2):
        harness.send(ev.WritesEnded(harness.pulls[0].job))
        assert harness.slots("quarantined") == 0
    nothing_left(harness)


def test_a_pull_that_says_too_little_is_stuck_there() -> None:
    harness, engine = make()
    pulling(harness, engine)
    harness.pulled(harness.pulls[0], OK, OK)
    assert harness.slots("quarantined") == 2


def test_a_pull_is_heard_once() -> None:
    harness, engine = make()
    pulling(harness, engine)
    harness.pulled(harness.pulls[0], FAILED)
    assert harness.send(ev.Pulled(harness.pulls[0].job, (OK,) * 4)) == []
    assert harness.send(ev.Pulled(99, (OK,))) == []
    assert harness.keys_held() == set()


def test_after_a_failed_pull_the_next_holder_is_asked() -> None:
    harness, engine = make()
    op = pulling(harness, engine, A, B)
    harness.pulled(harness.pulls[0], OK, FAILED, OK, STUCK)
    assert harness.open(op)
    assert (harness.locates[1].holder, harness.locates[1].keys) == (B, (CHAIN[1], CHAIN[3]))
    harness.located(harness.locates[1], make_located(harness.locates[1].keys, lease=8))
    harness.send(ev.WritesEnded(harness.pulls[0].job))
    assert harness.slots("writing") == 2, "the end of the old transfer must not touch the new one's slots"
    harness.pulled(harness.pulls[1], OK)
    assert (len(harness.result(op).blocks), harness.result(op).fetched_count) == (4, 4)
    assert harness.remote_releases[-1].lease_id == LeaseId(8)
    nothing_left(harness)


def test_waiters_are_not_lost_when_another_holder_is_tried() -> None:
    harness, engine = make()
    op = pulling(harness, engine, A, B)
    late = harness.acquire(engine, CHAIN)
    harness.pulled(harness.pulls[0], FAILED)
    later = harness.acquire(engine, CHAIN)
    harness.located(harness.locates[1], make_located(CHAIN))
    harness.pulled(harness.pulls[1], OK)
    assert [len(harness.result(one).blocks) for one in (op, late, later)] == [4] * 3


# -- fetching and storing the same block ----


@pytest.mark.parametrize("first", ["seal", "fetch"])
def test_a_block_stored_here_while_it_is_fetched_is_held_once(first: str) -> None:
    harness, engine = make()
    op = pulling(harness, engine)
    refs = harness.reserve(engine, 1)
    harness.write(refs[0], CHAIN[0])
    sealing = harness.begin_seal(engine, harness.items(refs, CHAIN))
    if first == "seal":
        harness.digest_all()
        harness.pulled(harness.pulls[0], OK)
    else:
        harness.pulled(harness.pulls[0], OK)
        harness.digest_all()
    expected = SealStatus.SEALED if first == "seal" else SealStatus.DUPLICATE
    assert harness.statuses(sealing) == [expected]
    assert len(harness.result(op).blocks) == 4
    assert harness.announced == dict.fromkeys(CHAIN, 1)
    nothing_left(harness)


def test_a_block_stored_here_answers_who_waits_for_its_fetch() -> None:
    harness, engine = make()
    op = harness.acquire(engine, CHAIN[:1])
    harness.resolved(op, run_of(0, 1, A))
    harness.store(engine, CHAIN[:1])
    assert (len(harness.result(op).blocks), harness.result(op).fetched_count) == (1, 0)
    harness.located(harness.locates[0], None)
    nothing_left(harness)


def test_a_failed_fetch_does_not_forget_a_seal_on_its_way() -> None:
    harness, engine = make()
    op = pulling(harness, engine)
    refs = harness.reserve(engine, 1)
    harness.write(refs[0], CHAIN[0])
    harness.begin_seal(engine, harness.items(refs, CHAIN))
    harness.pulled(harness.pulls[0], FAILED)
    assert harness.result(op).miss is MissReason.PEER_FAILED
    harness.digest_all()
    assert harness.keys_held() == {CHAIN[0]}
    nothing_left(harness)


def test_fetched_copies_go_before_primary_ones() -> None:
    harness, engine = make(slab_count=1)
    op = harness.acquire(engine, CHAIN[:2])
    harness.store(engine, make_chain(2, "mine"))
    harness.fetch_all(op, CHAIN[:2])
    harness.release(engine, harness.result(op).lease_id)
    harness.reserve(engine, 2)
    assert harness.keys_held() == set(make_chain(2, "mine"))


def test_every_question_and_every_pull_has_a_number_of_its_own() -> None:
    harness, engine = make()
    ops = [harness.acquire(engine, CHAIN[:2]), harness.acquire(engine, make_chain(2, "other"))]
    for op in ops:
        harness.resolved(op, run_of(0, 2, A, B))
        harness.located(harness.locates[-1], None)
    assert len({locate.fetch for locate in harness.locates}) == len(harness.locates) == 4
    harness.located(harness.locates[1], make_located(harness.locates[1].keys))
    harness.located(harness.locates[3], make_located(harness.locates[3].keys))
    for pull in harness.pulls:
        harness.pulled(pull, OK)
    assert [len(harness.result(op).blocks) for op in ops] == [2, 2]
    nothing_left(harness)
