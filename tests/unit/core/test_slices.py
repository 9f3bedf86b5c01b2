"""Rules of core.slices: a long call lets others have their turns, and what happens in between is not lost on it."""

from __future__ import annotations

import pytest

from kvservice.core import actions as act
from kvservice.core import events as ev
from kvservice.core.messages import AcquireRequest, Handoff, MissReason, SealStatus, Statement
from kvservice.core.slices import DEFAULT_SLICES, Slices, SliceSizes, Work
from kvservice.errors import NotAttached
from kvservice.testing.builders import CoreHarness, make_chain
from kvservice.units import HandoffId, NodeId

CHAIN = make_chain(5)
HANDOFF = HandoffId(b"h" * 16)


def sliced(*, stored: int = 5, waits: bool = True) -> tuple[CoreHarness, int]:
    """A shard that does two blocks at a time, and an engine that has stored the first blocks of the chain."""
    harness = CoreHarness(slab_count=4, slices=SliceSizes(blocks=2, slots=2))
    attachment = harness.attach()
    if stored:
        harness.store(attachment, CHAIN[:stored])
    harness.waits = waits
    return harness, attachment


def acquire(harness: CoreHarness, attachment: int, **wishes: object) -> int:
    op = harness.next_op()
    harness.send(ev.Acquire(op, attachment, AcquireRequest(CHAIN, 0, **{"timeout_seconds": 5.0, **wishes})))
    return op


# -- acquire ----


def test_a_long_acquire_pins_a_slice_at_a_time() -> None:
    harness, attachment = sliced()
    op = acquire(harness, attachment)
    seen = []
    while harness.turns:
        seen.append(harness.slots("leased"))
        assert harness.open(op)
        harness.go_on()
    assert seen == [2, 4, 5, 5], "two blocks a slice, then the policy is told, and then the answer"
    assert len(harness.result(op).blocks) == 5


def test_others_are_answered_between_two_slices() -> None:
    harness, attachment = sliced()
    op = acquire(harness, attachment)
    assert len(harness.reserve(attachment, 1)) == 1
    assert harness.open(op)


def test_a_short_acquire_is_answered_at_once() -> None:
    harness, attachment = sliced()
    assert len(harness.hit(attachment, CHAIN[:2]).blocks) == 2
    assert not harness.turns


def test_a_cancelled_acquire_gives_back_what_it_has_pinned() -> None:
    harness, attachment = sliced()
    op = acquire(harness, attachment)
    harness.send(ev.Cancel(op))
    assert harness.slots("leased") == 0
    assert harness.go_on() == [] and harness.slots("leased") == 0, "its last turn does nothing"


def test_an_acquire_of_an_engine_that_left_promises_nothing() -> None:
    harness, attachment = sliced()
    op = acquire(harness, attachment)
    harness.send(ev.AttachmentLost(attachment))
    assert (harness.result(op).blocks, harness.result(op).miss) == ((), MissReason.DETACHED)
    assert harness.go_on() == [] and harness.slots("leased") == 0


def test_a_deadline_does_not_end_the_look_at_what_is_here() -> None:
    harness, attachment = sliced()
    op = acquire(harness, attachment, timeout_seconds=0.0)
    harness.advance(1.0)
    assert harness.open(op) and harness.state.next_deadline() != harness.now
    while harness.turns:
        harness.go_on()
    assert len(harness.result(op).blocks) == 5


def test_a_block_that_is_sealed_between_two_slices_counts() -> None:
    harness, attachment = sliced(stored=4)
    refs = harness.reserve(attachment, 1)
    harness.write(refs[0], CHAIN[4])
    op = acquire(harness, attachment)
    for _ in range(2):
        harness.go_on()  # the last block was looked for, and is not here
    harness.begin_seal(attachment, harness.items(refs, CHAIN, 4))
    harness.digest_all()
    while harness.open(op):
        harness.go_on()
    assert len(harness.result(op).blocks) == 5


def holding(*chosen: int) -> tuple[CoreHarness, int]:
    """A shard that has these blocks of the chain."""
    harness, attachment = sliced(stored=0, waits=False)
    refs = harness.reserve(attachment, len(chosen))
    for ref, index in zip(refs, chosen, strict=True):
        harness.write(ref, CHAIN[index])
    items = tuple(harness.items([ref], CHAIN, index)[0] for ref, index in zip(refs, chosen, strict=True))
    harness.begin_seal(attachment, items)
    harness.digest_all()
    return harness, attachment


def test_only_missing_blocks_of_a_handoff_are_awaited() -> None:
    harness, attachment = holding(0, 3)
    harness.send(ev.OpenHandoff(harness.next_op(), attachment, HANDOFF))
    op = acquire(harness, attachment, handoff=Handoff(HANDOFF, NodeId("here")))
    harness.store(attachment, CHAIN[:3], 1)
    assert harness.open(op)
    harness.store(attachment, CHAIN, 4)
    assert len(harness.result(op).blocks) == 5


def test_a_gap_ends_the_run_although_later_blocks_are_here() -> None:
    harness, attachment = holding(0, 3)
    op = acquire(harness, attachment)
    harness.resolved(op)
    assert (len(harness.result(op).blocks), harness.result(op).miss) == (1, MissReason.NEVER_STORED)
    assert harness.slots("leased") == 1, "the block behind the gap is let go"


def test_a_handoff_on_this_node_is_watched_after_the_last_slice() -> None:
    harness, attachment = sliced(stored=4)
    harness.send(ev.OpenHandoff(harness.next_op(), attachment, HANDOFF))
    op = acquire(harness, attachment, handoff=Handoff(HANDOFF, NodeId("here")))
    harness.waits = False
    harness.go_on()
    assert harness.open(op), "it waits for the writer"
    harness.send(ev.CloseHandoff(harness.next_op(), attachment, HANDOFF))
    harness.resolved(op)
    assert len(harness.result(op).blocks) == 4


# -- reserve ----


def test_a_long_reserve_is_answered_with_all_its_slots() -> None:
    harness, attachment = sliced(stored=0)
    op = harness.next_op()
    harness.send(ev.Reserve(op, attachment, 5))
    while harness.open(op):
        assert 0 < harness.slots("writing") < 5
        harness.go_on()
    assert len(harness.reply(op)) == harness.slots("writing") == 5


def test_slots_of_a_cancelled_reserve_go_back() -> None:
    harness, attachment = sliced(stored=0)
    op = harness.next_op()
    harness.send(ev.Reserve(op, attachment, 5))
    harness.send(ev.Cancel(op))
    assert harness.slots("writing") == 0 and harness.go_on() == []


@pytest.mark.parametrize("how", ["detach", "lost", "attach again"])
def test_a_reserve_ends_with_its_attachment(how: str) -> None:
    """Else it would promise slots that were given back, and that somebody else writes."""
    harness, attachment = sliced(stored=0)
    op = harness.next_op()
    harness.send(ev.Reserve(op, attachment, 5))
    if how == "attach again":
        harness.attach()
    else:
        harness.send(ev.Detach(attachment) if how == "detach" else ev.AttachmentLost(attachment))
    refused = harness.answers[op]
    assert isinstance(refused, act.Refuse) and isinstance(refused.error, NotAttached)
    assert harness.slots("writing") == harness.slots("quarantined") == 0, "nobody knows of them"
    assert harness.go_on() == []


def test_a_drain_ends_a_reserve_with_what_it_has() -> None:
    harness, attachment = sliced(stored=0)
    op = harness.next_op()
    harness.send(ev.Reserve(op, attachment, 5))
    harness.send(ev.Drain())
    harness.go_on()
    assert len(harness.reply(op)) == 2


def test_a_statement_denies_no_slot_of_an_open_reserve() -> None:
    harness, attachment = sliced(stored=0)
    op = harness.next_op()
    harness.send(ev.Reserve(op, attachment, 5, call=1))
    harness.send(ev.Renew(harness.next_op(), attachment, (), (), Statement(1, (1,), (), ())))
    while harness.turns:
        harness.go_on()
    assert len(harness.reply(op)) == harness.slots("writing") == 5


# -- seal, abort, release ----


def long_seal() -> tuple[CoreHarness, int, int]:
    """A seal of the whole chain, of which the first slice was looked at: (harness, attachment, operation)."""
    harness, attachment = sliced(stored=0)
    harness.waits = False
    refs = harness.reserve(attachment, 5)
    for ref, key in zip(refs, CHAIN, strict=True):
        harness.write(ref, key)
    harness.waits = True
    op = harness.begin_seal(attachment, harness.items(refs, CHAIN))
    return harness, attachment, op


def test_a_long_seal_is_answered_when_its_last_slice_is() -> None:
    harness, _, op = long_seal()
    for _ in range(2):
        harness.digest_all()
        assert harness.open(op), "the rest was not even looked at"
        harness.go_on()
    harness.digest_all()
    assert harness.statuses(op) == [SealStatus.SEALED] * 5


def test_what_was_sealed_before_a_detach_is_sealed() -> None:
    harness, attachment, op = long_seal()
    harness.send(ev.Detach(attachment))
    harness.digest_all()
    assert harness.statuses(op) == [SealStatus.SEALED] * 5
    assert harness.go_on() == []


def test_a_seal_that_nobody_waits_for_is_done_all_the_same() -> None:
    harness, _, op = long_seal()
    harness.send(ev.Cancel(op))
    harness.waits = False
    harness.digest_all()
    harness.digest_all()
    assert harness.keys_held() == set(CHAIN)


def test_many_slots_are_given_back_in_slices() -> None:
    harness, attachment = sliced(stored=0)
    harness.waits = False
    refs = harness.reserve(attachment, 5)
    harness.waits = True
    op = harness.next_op()
    harness.send(ev.Abort(op, attachment, tuple(refs)))
    assert harness.open(op) and harness.slots("writing") == 3
    harness.waits = False
    harness.go_on()
    assert not harness.open(op) and harness.slots("writing") == 0


def test_many_leases_end_in_slices() -> None:
    harness, attachment = sliced(waits=False)
    leases = tuple(harness.hit(attachment, CHAIN[:count]).lease_id for count in (2, 1, 3))
    harness.waits = True
    op = harness.next_op()
    harness.send(ev.Release(op, attachment, leases))
    assert harness.open(op) and harness.state.lease_count == 2
    harness.go_on()
    assert not harness.open(op) and harness.state.lease_count == 0 and harness.slots("leased") == 0


# -- the mechanism ----


def counted(done: list[float], count: int) -> Work:
    for _ in range(count):
        done.append((yield))


def test_each_slice_gets_its_time_and_the_last_asks_for_no_turn() -> None:
    emitted: list[act.Action] = []
    done: list[float] = []
    slices = Slices(DEFAULT_SLICES, emitted.append)
    slices.begin(7, counted(done, 2))
    assert emitted == [act.NextTurn(7)] and 7 in slices
    slices.go_on(7, 1.5)
    assert done == [1.5] and emitted == [act.NextTurn(7)] * 2
    slices.go_on(7, 2.5)
    assert done == [1.5, 2.5] and len(emitted) == 2 and 7 not in slices
    slices.go_on(7, 3.5)
    assert done == [1.5, 2.5] and len(emitted) == 2, "a late turn does nothing"


def test_work_dropped_by_its_own_slice_asks_for_no_turn() -> None:
    emitted: list[act.Action] = []
    slices = Slices(DEFAULT_SLICES, emitted.append)

    def work() -> Work:
        yield
        slices.drop(7)
        slices.begin(7, counted([], 1))
        yield

    slices.begin(7, work())
    slices.go_on(7, 1.0)
    assert emitted == [act.NextTurn(7)] * 2, "one of each work"
    assert 7 in slices


def test_a_slice_is_far_smaller_than_the_largest_call() -> None:
    """What one event does bounds how long everybody else waits."""
    assert DEFAULT_SLICES.slots <= DEFAULT_SLICES.blocks <= 128
