"""Reconciliation: what an engine states is kept, what it denies is let go, in whatever order messages come."""

from __future__ import annotations

import pytest

from kvservice.core import events as ev
from kvservice.core.acquire.handoff import (
    CLOSED_SECONDS,
    OPEN_MAX,
    OPEN_OF_ONE_MAX,
    OPEN_SECONDS,
)
from kvservice.core.messages import FollowResult, HandoffState, SealStatus, Statement
from kvservice.core.reconcile import STATED_SLOTS_MAX, Ledger
from kvservice.core.segment.refs import BlockRef
from kvservice.errors import Exhausted, InvalidRequest
from kvservice.testing.builders import CoreHarness, make_chain, make_spec
from kvservice.units import AttachmentId, BootEpoch, Generation, HandoffId, NodeId, SlotIndex

ID = HandoffId(b"h" * 16)
CHAIN = make_chain(8)


class Line:
    """An engine and its shard, where every message can be held back."""

    def __init__(self) -> None:
        self.shard = CoreHarness(slab_count=2)
        self.attachment = self.shard.attach()
        self.ledger = Ledger()

    def reserve(self, count: int = 1) -> list[BlockRef]:
        """All goes well."""
        call = self.ledger.begin_call()
        refs = self.shard.reserve(self.attachment, count, call=call)
        assert self.ledger.take(call, refs)
        return refs

    def state(self) -> Statement:
        statement = self.ledger.state()
        assert statement is not None
        return statement

    def arrives(self, statement: Statement) -> None:
        op = self.shard.next_op()
        self.shard.send(ev.Renew(op, self.attachment, (), (), statement))
        self.shard.reply(op)

    def beat(self) -> None:
        self.arrives(self.state())

    @property
    def writing(self) -> int:
        return self.shard.slots("writing")

    def open(self, handoff: HandoffId = ID, call: int | None = None) -> None:
        op = self.shard.next_op()
        call = self.ledger.open_handoff(handoff) if call is None else call
        self.shard.send(ev.OpenHandoff(op, self.attachment, handoff, call))
        self.shard.reply(op)

    def close(self, handoff: HandoffId = ID) -> None:
        op = self.shard.next_op()
        self.ledger.close_handoff(handoff)
        self.shard.send(ev.CloseHandoff(op, self.attachment, handoff))
        self.shard.reply(op)

    def follow(self, handoff: HandoffId = ID, wait: float = 0.0) -> int:
        op = self.shard.next_op()
        self.shard.send(ev.PeerFollow(op, NodeId("reader"), BootEpoch(1), handoff, CHAIN, wait))
        return op

    def handoff(self, handoff: HandoffId = ID) -> HandoffState:
        value = self.shard.reply(self.follow(handoff))
        assert isinstance(value, FollowResult)
        return value.state


@pytest.fixture
def line() -> Line:
    return Line()


# -- slots ----


def test_a_slot_whose_abort_was_lost_is_free_after_a_heartbeat(line: Line) -> None:
    kept, given = line.reserve(), line.reserve(3)
    line.ledger.give_back(given)
    line.beat()
    assert line.writing == 1 and line.shard.count("slots_reconciled") == 3
    line.shard.write(kept[0], CHAIN[0])
    op = line.shard.begin_seal(line.attachment, line.shard.items(kept, CHAIN))
    line.shard.digest_all()
    assert line.shard.statuses(op) == [SealStatus.SEALED]


def test_slots_of_a_lost_answer_are_free_once_it_is_given_up(line: Line) -> None:
    call = line.ledger.begin_call()
    line.shard.reserve(line.attachment, 4, call=call)
    line.beat()
    assert line.writing == 4, "its answer may still be on the way"
    line.ledger.give_up(call)
    line.beat()
    assert line.writing == 0


def test_an_answer_to_a_call_that_was_given_up_is_not_used(line: Line) -> None:
    call = line.ledger.begin_call()
    refs = line.shard.reserve(line.attachment, 4, call=call)
    line.ledger.give_up(call)
    line.beat()
    assert not line.ledger.take(call, refs) and not line.ledger.slots


def test_an_answer_is_used_once(line: Line) -> None:
    call = line.ledger.begin_call()
    first, again = (line.shard.reserve(line.attachment, 2, call=call) for _ in range(2))
    assert line.ledger.take(call, first) and not line.ledger.take(call, again)
    line.beat()
    assert line.writing == 2 and line.ledger.slots == set(first)


def test_a_statement_says_nothing_about_what_was_granted_later(line: Line) -> None:
    before = line.state()
    line.reserve(2)
    for _ in range(2):
        line.arrives(before)
    assert line.writing == 2


def test_an_old_statement_does_not_deny_a_slot_granted_again(line: Line) -> None:
    (first,) = line.reserve()
    line.ledger.give_back([first])
    old = line.state()
    line.arrives(old)
    slots = line.reserve(100)
    assert first.slot in {ref.slot for ref in slots}
    line.arrives(old)
    assert line.writing == len(slots)


def test_a_slot_is_stated_while_its_seal_is_under_way(line: Line) -> None:
    """Even when it is granted again: the seal is a DUPLICATE, the slot went back and came again before that answer."""
    (ref,) = line.reserve()
    again = BlockRef(ref.slot, Generation(ref.generation + 2))
    call = line.ledger.begin_call()
    line.ledger.take(call, [again])
    line.ledger.give_back([ref])
    assert line.state().slots == (ref.slot,)


def test_a_slot_that_is_being_digested_ends_with_its_digest(line: Line) -> None:
    (ref,) = line.reserve()
    line.shard.write(ref, CHAIN[0])
    op = line.shard.begin_seal(line.attachment, line.shard.items([ref], CHAIN))
    line.ledger.give_back([ref])  # the engine waits no longer for the answer
    line.beat()
    assert line.writing == 1
    line.shard.digest_all()
    assert line.shard.statuses(op) == [SealStatus.SEALED]


def test_silence_frees_no_slot(line: Line) -> None:
    """A paused engine states nothing, and goes on to write."""
    line.reserve(2)
    line.shard.advance(3600.0)
    assert line.writing == 2


def test_an_engine_that_makes_no_statements_keeps_what_it_has(line: Line) -> None:
    line.shard.reserve(line.attachment, 2)
    line.arrives(Statement(9, (), (), ()))
    assert line.writing == 2


def test_a_statement_speaks_of_its_own_engine_only(line: Line) -> None:
    other = line.shard.attach(make_spec("other"))
    line.shard.reserve(other, 2, call=1)
    line.ledger.begin_call()
    line.ledger.give_up(1)
    line.beat()
    assert line.writing == 2


def test_what_would_not_fit_into_a_message_is_not_stated_in_part() -> None:
    ledger = Ledger()
    refs = [BlockRef(SlotIndex(number), Generation(1)) for number in range(STATED_SLOTS_MAX + 1)]
    assert ledger.take(ledger.begin_call(), refs)
    assert ledger.state() is None
    ledger.give_back(refs[:1])
    assert ledger.state() is not None


def test_an_attachment_of_an_earlier_boot_is_none_of_a_later_one(line: Line) -> None:
    before = line.shard.attach(make_spec("other"))
    line.shard.restart()
    assert before not in {line.shard.attach(), line.shard.attach(make_spec("other"))}


# -- hand-offs ----


def test_a_reader_hears_of_a_lost_close_with_a_heartbeat(line: Line) -> None:
    line.open()
    op = line.follow(wait=10.0)
    line.ledger.close_handoff(ID)
    line.beat()
    value = line.shard.reply(op)
    assert isinstance(value, FollowResult) and value.state is HandoffState.CLOSED


def test_an_open_that_was_lost_is_made_good_by_a_heartbeat(line: Line) -> None:
    call = line.ledger.open_handoff(ID)
    line.beat()
    assert line.handoff() is HandoffState.OPEN
    line.open(call=call)
    line.open(call=call)
    assert line.handoff() is HandoffState.OPEN and line.shard.count("handoffs_opened") == 1


def test_a_close_that_overtakes_its_open_wins(line: Line) -> None:
    call = line.ledger.open_handoff(ID)
    line.close()
    line.open(call=call)
    assert line.handoff() is HandoffState.CLOSED


def test_an_open_after_its_close_ends_with_a_heartbeat(line: Line) -> None:
    call = line.ledger.open_handoff(ID)
    line.close()
    line.shard.advance(CLOSED_SECONDS)
    line.open(call=call)
    line.beat()
    assert line.handoff() is HandoffState.CLOSED


def test_a_statement_closes_nothing_that_was_opened_later(line: Line) -> None:
    before = line.state()
    call = line.ledger.open_handoff(ID)
    line.beat()  # opens it, as its Open is late
    line.arrives(before)
    line.open(call=call)
    line.arrives(before)
    assert line.handoff() is HandoffState.OPEN


def test_a_statement_from_before_the_close_opens_nothing_again(line: Line) -> None:
    line.open()
    before = line.state()
    line.close()
    line.arrives(before)
    assert line.handoff() is HandoffState.CLOSED


def test_an_id_is_not_opened_by_two_calls_or_two_engines(line: Line) -> None:
    line.open()
    with pytest.raises(InvalidRequest, match="exists already"):
        line.open(call=line.ledger.open_handoff(ID))
    other = line.shard.attach(make_spec("other"))
    op = line.shard.next_op()
    line.shard.send(ev.Renew(op, other, (), (), Statement(1, (), (), (ID,))))
    line.close()
    assert line.handoff() is HandoffState.CLOSED


def test_a_handoff_lasts_as_long_as_its_writer_states_it(line: Line) -> None:
    line.open()
    for _ in range(10):
        line.shard.advance(OPEN_SECONDS / 2)
        line.beat()
    assert line.handoff() is HandoffState.OPEN
    line.shard.advance(OPEN_SECONDS)
    assert line.handoff() is HandoffState.CLOSED and line.shard.count("handoffs_silent") == 1


def test_a_handoff_that_nobody_closes_ends_some_time(line: Line) -> None:
    line.open()
    for _ in range(48):
        line.shard.advance(1800.0)
    assert line.handoff() is HandoffState.UNKNOWN


def test_handoffs_that_nobody_closes_keep_no_new_ones_out(line: Line) -> None:
    others = [line.attachment, *(line.shard.attach(make_spec(f"other{i}")) for i in range(3))]
    for number in range(OPEN_MAX):
        _open(line.shard, others[number % 4], number)
    with pytest.raises(Exhausted):
        _open(line.shard, others[0], OPEN_MAX)
    with pytest.raises(Exhausted):
        _open(line.shard, line.shard.attach(make_spec("fifth")), OPEN_MAX)
    line.shard.advance(OPEN_SECONDS)
    for number in range(OPEN_MAX, OPEN_MAX + OPEN_OF_ONE_MAX):  # closed ones make room
        _open(line.shard, others[0], number)


def test_one_engine_keeps_no_other_from_handing_off(line: Line) -> None:
    for number in range(OPEN_OF_ONE_MAX):
        _open(line.shard, line.attachment, number)
    with pytest.raises(Exhausted):
        _open(line.shard, line.attachment, OPEN_MAX)
    _open(line.shard, line.shard.attach(make_spec("other")), OPEN_MAX)


def test_one_tenant_keeps_no_other_from_handing_off(line: Line) -> None:
    many = [line.shard.attach(make_spec(f"many{i}"), "many") for i in range(4)]
    for number in range(OPEN_MAX // 2):
        _open(line.shard, many[number % 4], number)
    with pytest.raises(Exhausted):
        _open(line.shard, many[0], OPEN_MAX)
    few = line.shard.attach(make_spec("few"), "few")
    for number in range(OPEN_MAX, OPEN_MAX + OPEN_OF_ONE_MAX):
        _open(line.shard, few, number)


def _open(shard: CoreHarness, attachment: AttachmentId, number: int) -> None:
    op = shard.next_op()
    shard.send(ev.OpenHandoff(op, attachment, HandoffId(number.to_bytes(16, "big")), number + 1))
    shard.reply(op)
