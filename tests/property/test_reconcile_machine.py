"""The shard's machine with engines whose every message may be lost, late, doubled or overtaken: Reserve and its answer,
Abort, Seal, OpenHandoff, CloseHandoff, and the heartbeats, which are all that makes it good.

Nobody ever writes a slot that was taken from him (a rule of the machine below). Once a statement of an engine that
waits for no answer has arrived, the shard holds for it exactly what it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test

from kvservice.core import actions as act
from kvservice.core import events as ev
from kvservice.core.acquire.handoff import CLOSED_SECONDS
from kvservice.core.messages import HandoffState
from kvservice.core.reconcile import Ledger
from kvservice.core.segment.refs import BlockRef
from kvservice.core.store.slots import SlotState
from kvservice.units import AttachmentId, BootEpoch, HandoffId
from tests.property.shard_world import Asked, Engine, Write, any_index, engines, somebody_attached
from tests.property.test_shard_machine import ShardMachine
from tests.sim.mutation import Mutant, planted

MAIL_MAX = 6  # messages under way; older ones are lost
MakeEvent = Callable[[int], ev.Event]
reserve_endings = st.sampled_from(["goes well", "goes well", "on its way", "after a heartbeat", "given up"])
handoff_endings = st.sampled_from(["on its way", "opened", "overtaken", "with an old heartbeat"])


@dataclass
class Book:
    """What an engine remembers for its statements, and what is under way between it and its shard."""

    ledger: Ledger = field(default_factory=Ledger)
    attachment: AttachmentId | None = None
    epoch: BootEpoch | None = None
    mail: list[tuple[int, MakeEvent]] = field(default_factory=list)  # (number of a Reserve or 0, what will be said)
    answers: list[tuple[int, list[BlockRef]]] = field(default_factory=list)  # of Reserves
    waiting: set[int] = field(default_factory=set)  # Reserves whose answers it would still use
    sealing: list[BlockRef] = field(default_factory=list)  # sent to be sealed, not answered
    handoffs: dict[HandoffId, bool] = field(default_factory=dict)  # -> is open
    ended: dict[HandoffId, float] = field(default_factory=dict)  # -> when the shard heard so

    def post(self, make: MakeEvent, call: int = 0) -> None:
        self.mail = [*self.mail, (call, make)][-MAIL_MAX:]


class ReconcileMachine(ShardMachine):
    def __init__(self) -> None:
        super().__init__()
        self.books = [Book() for _ in self.engines]
        self.next_handoff = 1

    def _speaker(self, one: int) -> tuple[Engine, Book, AttachmentId]:
        engine = self._attached(one)
        assert engine.attachment is not None
        return engine, self._book(engine), engine.attachment

    def _book(self, engine: Engine) -> Book:
        """As it is once the engine has noticed the end of an attachment."""
        book = self.books[self.engines.index(engine)]
        if book.attachment != engine.attachment:
            book.ledger.forget()
            book.waiting.clear()
            book.sealing.clear()
            book.handoffs.clear()
            book.attachment = engine.attachment
        if book.epoch != self.harness.state.epoch:  # calls of an earlier epoch do not get past the wire
            book.mail.clear()
            book.ended.clear()
            book.epoch = self.harness.state.epoch
        return book

    # -- what engines say ----

    @somebody_attached
    @precondition(lambda self: sum(len(engine.writes) for engine in self.engines) < 5)
    @rule(one=engines, count=st.integers(1, 4), ending=reserve_endings)
    def reserve(self, one: int, count: int, ending: str) -> None:
        engine, book, attachment = self._speaker(one)
        one = self.engines.index(engine)
        call = book.ledger.begin_call()
        book.waiting.add(call)
        book.post(lambda op: ev.Reserve(op, attachment, count, 0, call), call)
        if ending == "on its way":
            return
        self.message_arrives(one, len(book.mail) - 1, again=False)
        if ending == "given up":
            book.waiting.remove(call)
            book.ledger.give_up(call)
        if ending != "goes well":
            self.heartbeat(one, at_once=True)
        self.answer_arrives(one, len(book.answers) - 1, again=False)

    @precondition(lambda self: any(book.waiting for book in self.books))
    @rule(one=engines, which=any_index)
    def give_up(self, one: int, which: int) -> None:
        book = self._book(self.engines[one])
        if book.waiting:
            call = sorted(book.waiting)[which % len(book.waiting)]
            book.waiting.remove(call)
            book.ledger.give_up(call)

    @precondition(lambda self: any(book.answers for book in self.books))
    @rule(one=engines, which=any_index, again=st.booleans())
    def answer_arrives(self, one: int, which: int, again: bool) -> None:
        engine = self.engines[one]
        book = self._book(engine)
        if not book.answers:
            return
        place = which % len(book.answers)
        call, refs = book.answers[place] if again else book.answers.pop(place)
        if book.ledger.take(call, refs):
            book.waiting.discard(call)
            chain = engine.chains[which % len(engine.chains)]
            for number, ref in enumerate(refs):
                key = chain[(which + number) % len(chain)]
                engine.writes.append(Write(ref.slot, engine.spec.layout.payload_bytes, key, ref.generation))

    @precondition(lambda self: any(book.mail for book in self.books))
    @rule(one=engines, which=any_index, again=st.booleans())
    def message_arrives(self, one: int, which: int, again: bool) -> None:
        """Any message under way, and perhaps not for the last time."""
        book = self._book(self.engines[one])
        if not book.mail:
            return
        place = which % len(book.mail)
        call, make = book.mail[place] if again else book.mail.pop(place)
        event = make(self.harness.next_op())
        op = self._ask(event, Asked(self.harness.now, ("engine", 0)))
        answer = self.harness.answers[op]
        if isinstance(event, ev.Renew) and isinstance(answer, act.Reply):
            self.heard[event.attachment] = len(self.harness.retracted)
        if call and isinstance(answer, act.Reply) and isinstance(answer.value, list):
            book.answers = [*book.answers, (call, answer.value)][-MAIL_MAX:]

    @somebody_attached
    @rule(one=engines, which=any_index)
    def abort(self, one: int, which: int) -> None:
        engine, book, attachment = self._speaker(one)
        if engine.writes:
            ref = engine.writes.pop(which % len(engine.writes)).ref
            book.ledger.give_back([ref])
            book.post(lambda op: ev.Abort(op, attachment, (ref,)))

    @somebody_attached
    @rule(
        one=engines,
        which=any_index,
        count=st.integers(1, 4),
        claim=st.integers(-1, 6),
        lost=st.integers(0, 3),
        given_up=st.booleans(),
    )
    def seal(self, one: int, which: int, count: int, claim: int, lost: int, given_up: bool) -> None:
        engine, book, _ = self._speaker(one)
        if not engine.writes:
            return
        before = list(engine.writes)
        if lost:
            super().seal(self.engines.index(engine), which, count, claim)
        else:
            del engine.writes[which % len(before) :]
        book.sealing += [write.ref for write in before if write not in engine.writes]
        if given_up:  # the engine waits no longer, and says so while the digests are computed
            self.seals_are_answered_or_given_up(self.engines.index(engine))
            self.heartbeat(self.engines.index(engine), at_once=True)

    @rule(one=engines)
    def seals_are_answered_or_given_up(self, one: int) -> None:
        book = self._book(self.engines[one])
        book.ledger.give_back(book.sealing)
        book.sealing.clear()

    @somebody_attached
    @rule(one=engines, ending=handoff_endings)
    def hand_off(self, one: int, ending: str) -> None:
        engine, book, attachment = self._speaker(one)
        one = self.engines.index(engine)
        if ending == "with an old heartbeat":
            self.heartbeat(one, at_once=False)
        handoff = HandoffId(self.next_handoff.to_bytes(16, "big"))
        self.next_handoff += 1
        call = book.ledger.open_handoff(handoff)
        book.handoffs[handoff] = True
        book.post(lambda op: ev.OpenHandoff(op, attachment, handoff, call))
        last = len(book.mail) - 1
        if ending == "opened":
            self.message_arrives(one, last, again=False)
        elif ending == "overtaken":
            self.end_hand_off(one, sorted(book.handoffs).index(handoff), lost=False)
            self.message_arrives(one, len(book.mail) - 1, again=False)
            self.message_arrives(one, len(book.mail) - 1, again=False)
        elif ending == "with an old heartbeat":
            self.heartbeat(one, at_once=True)
            self.message_arrives(one, len(book.mail) - 3, again=False)

    @somebody_attached
    @rule(one=engines, which=any_index, lost=st.booleans())
    def end_hand_off(self, one: int, which: int, lost: bool) -> None:
        engine, book, attachment = self._speaker(one)
        if book.handoffs:
            handoff = sorted(book.handoffs)[which % len(book.handoffs)]
            book.handoffs[handoff] = False
            book.ledger.close_handoff(handoff)

            def close(op: int) -> ev.Event:
                book.ended.setdefault(handoff, self.harness.now)
                return ev.CloseHandoff(op, attachment, handoff)

            if lost:
                self.everything_is_heard(self.engines.index(engine))
            else:
                book.post(close)

    @somebody_attached
    @rule(one=engines, at_once=st.booleans())
    def heartbeat(self, one: int, at_once: bool) -> None:
        engine, book, attachment = self._speaker(one)
        statement = book.ledger.state()
        book.post(lambda op: ev.Renew(op, attachment, (), (), statement))
        if at_once:
            self.message_arrives(self.engines.index(engine), len(book.mail) - 1, again=True)

    # -- what must hold ----

    @somebody_attached
    @rule(one=engines)
    def everything_is_heard(self, one: int) -> None:
        """The engine waits for nothing, and a heartbeat arrives: both hold the same."""
        engine, book, attachment = self._speaker(one)
        for call in book.waiting:
            book.ledger.give_up(call)
        book.waiting.clear()
        self.seals_are_answered_or_given_up(self.engines.index(engine))
        statement = book.ledger.state()
        op = self._ask(
            ev.Renew(self.harness.next_op(), attachment, (), (), statement), Asked(self.harness.now, ("engine", 0))
        )
        assert isinstance(self.harness.answers[op], act.Reply)
        self.heard[attachment] = len(self.harness.retracted)
        digested = {digest.slot for digest in self.harness.digests}
        writing = {slot.index for slot in self.harness.state._store.slots_of(engine.spec.engine_id, SlotState.WRITING)}
        assert writing - digested == {write.slot for write in engine.writes}
        for handoff, is_open in book.handoffs.items():
            state = self.harness.state._handoffs._state(handoff)
            assert is_open or state is not HandoffState.OPEN, "a hand-off stays open"
            assert state is HandoffState.OPEN or not is_open or self.harness.count("handoffs_silent")

    @invariant()
    def a_handoff_is_closed_by_its_writer_only(self) -> None:
        for engine in self.engines:
            for handoff, is_open in self._book(engine).handoffs.items():
                if is_open and not self.harness.count("handoffs_silent"):
                    assert self.harness.state._handoffs._state(handoff) is not HandoffState.CLOSED

    @invariant()
    def a_handoff_that_was_closed_is_not_open_again(self) -> None:
        for book in self.books:
            for handoff, ended_at in book.ended.items():
                if self.harness.now < ended_at + CLOSED_SECONDS:
                    assert self.harness.state._handoffs._state(handoff) is not HandoffState.OPEN


TestReconcile = ReconcileMachine.TestCase
TestReconcile.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

RECONCILE = "kvservice.core.reconcile"
HANDOFF = "kvservice.core.acquire.handoff"
WRITES = "kvservice.core.writes"
MUTANTS = (
    Mutant("a slot whose abort was lost comes back", RECONCILE, "                found.append(ref)\n", ""),
    Mutant(
        "a statement denies nothing that was granted later",
        RECONCILE,
        "return 0 < call <= statement.calls and",
        "return",
    ),
    Mutant(
        "a statement denies nothing whose answer may still be used",
        RECONCILE,
        " and call not in statement.open_calls\n",
        "\n",
    ),
    Mutant(
        "an answer is not used once its call was given up",
        RECONCILE,
        "            return False\n        self._open.remove(call)",
        "            self._open.add(call)\n        self._open.remove(call)",
    ),
    Mutant(
        "every slot that is held is stated",
        RECONCILE,
        "for ref in self._slots)\n        return",
        "for ref in list(self._slots)[1:])\n        return",
    ),
    Mutant(
        "a slot that is being digested ends with its digest",
        WRITES,
        "            if slot is not None and slot.index not in self._sealing:\n"
        "                self._store.abort(slot)\n                self._counters",
        "            if slot is not None:\n                self._store.abort(slot)\n                self._counters",
    ),
    Mutant(
        "a close that overtakes its open wins",
        HANDOFF,
        '            self._counters["handoff_close_ignored"] += 1\n            return\n',
        '            self._counters["handoff_close_ignored"] += 1\n            return\n'
        "        if not known.is_heard:\n            del self._handoffs[handoff]\n            return\n",
    ),
    Mutant(
        "a hand-off whose close was lost is closed",
        HANDOFF,
        "                self._close(handoff, known, now)\n\n    def _enter",
        "\n    def _enter",
    ),
    Mutant(
        "a hand-off that a statement opened is not closed by an older one",
        HANDOFF,
        "self._enter(handoff, attachment, statement.calls, now)",
        "self._enter(handoff, attachment, 1, now)",
    ),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "_"))
def test_planted_bug_is_found(mutant: Mutant) -> None:
    """The examples are the same in every run: random ones would miss a rare bug in one run of many."""
    thorough = settings(
        TestReconcile.settings, max_examples=2000, phases=[Phase.generate], database=None, derandomize=True
    )
    with planted(mutant), pytest.raises(AssertionError):
        run_state_machine_as_test(ReconcileMachine, settings=thorough)
