"""The session: attaches, keeps slots in stock, renews and comes back after a loss, and never blocks its caller."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvservice.core.acquire.handoff import OPEN_SECONDS
from kvservice.core.acquire.suspects import NAMED_MAX
from kvservice.core.block.fingerprint import Fingerprint
from kvservice.core.block.window_groups import Window, WindowGroup
from kvservice.core.messages import AcquireRequest, Attachment, EngineSpec, RequestReport, SealItem
from kvservice.core.segment.geometry import plan_geometry
from kvservice.core.segment.refs import BlockRef
from kvservice.errors import FingerprintMismatch, Unavailable
from kvservice.pool.port import PoolPort
from kvservice.session import session as module
from kvservice.session import stock
from kvservice.session.session import HEARTBEAT_SECONDS_MAX, AcquireAnswer, Session
from kvservice.session.suspects import UnnamedSuspects
from kvservice.testing.eventually import eventually
from kvservice.testing.fake_pool import FakePool
from kvservice.testing.unique import unique_name
from kvservice.units import AttachmentId, BlockKey, Generation, HandoffId, LeaseId, MiB, SlotIndex, SpanRoute
from tests.settled import has_slots
from tests.unit.connector.line import LAYOUT

SPEC = EngineSpec(b"e" * 16, "m", Fingerprint.of({"model": "m"}), LAYOUT)
KEYS = tuple(BlockKey(bytes([i]) * 16) for i in range(4))


class Bench:
    """A session over a fake pool on the session's own loop."""

    def __init__(self, window_groups: tuple[WindowGroup, ...] = ()) -> None:
        self.path = Path(f"/dev/shm/kvservice-test{unique_name()}-n")
        self.pool = FakePool(self.path, plan_geometry(4 * MiB), lease_seconds=0.6)
        self.failures: list[Exception] = []  # of opening, one per attempt
        self.loop: asyncio.AbstractEventLoop | None = None
        self.may_reattach = True
        self.lost = 0  # calls
        self.session = Session(self.open, replace(SPEC, window_groups=window_groups), lambda: self.may_reattach)

    async def open(self) -> PoolPort:
        self.loop = asyncio.get_running_loop()
        if self.failures:
            raise self.failures.pop(0)
        return self.pool

    def start(self) -> Attachment:
        attachment = self.session.start(5.0)
        assert attachment is not None
        return attachment

    def lose(self, method: str) -> None:
        """From now on calls of this method fail; a Reserve is performed all the same, only its answer is lost."""
        unpatched = getattr(self.pool, method)

        async def failing(*arguments: object) -> None:
            if method == "reserve":
                await unpatched(*arguments)
            self.lost += 1
            raise Unavailable(f"{method} is lost")

        setattr(self.pool, method, failing)

    def held(self) -> set[SlotIndex]:
        return {ref.slot for ref in self.session._ledger.slots}

    def on_loop(self, call: Callable[[], None]) -> None:
        assert self.loop is not None
        self.loop.call_soon_threadsafe(call)

    def close(self) -> None:
        self.session.close()
        self.path.unlink(missing_ok=True)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def test_slots_are_in_stock_before_anybody_asks_for_one(bench: Bench) -> None:
    attachment = bench.start()
    eventually(lambda: bench.pool.reserved, "slots reserved ahead")
    bench.pool.latency = 1.0
    started = time.monotonic()
    refs = bench.session.take_slots(attachment.attachment_id, 4)
    assert len(refs) == 4
    assert time.monotonic() - started < 0.5, "no call to the pool between asking and getting"


def test_expected_stores_enlarge_the_stock(bench: Bench) -> None:
    """What is left of it is given back."""
    bench.start()
    eventually(lambda: bench.pool.reserved, "slots reserved ahead")
    idle = len(bench.pool.reserved)
    bench.session.expect(64)
    eventually(lambda: len(bench.pool.reserved) > 2 * idle, "slots for the prompt")
    bench.session.expect(-64)
    eventually(lambda: len(bench.pool.reserved) <= 2 * idle, "the surplus to be given back")


def test_an_idle_engine_gives_its_stock_back_and_gets_another(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "STOCK_IDLE_SECONDS", 0.3)
    monkeypatch.setattr(module, "TICK_SECONDS", 0.05)
    attachment = bench.start()
    eventually(lambda: bench.pool.reserved, "slots reserved ahead")
    eventually(lambda: not bench.pool.reserved, "all slots to be given back")
    assert bench.held() == set()
    bench.session.expect(1)
    eventually(lambda: bench.pool.reserved, "slots for the next request")
    assert bench.session.take_slots(attachment.attachment_id, 1)
    time.sleep(0.5)
    assert bench.pool.reserved, "a request is under way"
    bench.session.expect(-1)
    eventually(lambda: len(bench.pool.reserved) == 1, "all to be given back but what is being written")


def test_the_stock_leaves_most_of_a_tenants_quota_to_its_blocks(bench: Bench) -> None:
    attach = bench.pool.attach

    async def limited(spec: EngineSpec, on_lost: Callable[[str], None]) -> Attachment:
        return replace(await attach(spec, on_lost), quota_bytes=4 * LAYOUT.payload_bytes)

    bench.pool.attach = limited  # type: ignore[method-assign]
    bench.start()
    bench.session.expect(64)
    eventually(lambda: has_slots(bench.session), "a stock of slots")
    assert len(bench.pool.reserved) <= 2


def test_each_group_has_a_stock_of_its_own() -> None:
    bench = Bench(window_groups=(WindowGroup(LAYOUT, Window(sliding_tokens=64)),))
    asked: list[int] = []
    reserve = bench.pool.reserve

    async def recorded(attachment: AttachmentId, count: int, group: int = 0, call: int = 0) -> list[BlockRef]:
        asked.append(group)
        return await reserve(attachment, count, group, call)

    bench.pool.reserve = recorded  # type: ignore[method-assign]
    try:
        attachment = bench.start().attachment_id
        eventually(lambda: {0, 1} <= set(asked), "both groups to be asked for")
        mine = bench.session.take_slots(attachment, 2)
        theirs = bench.session.take_slots(attachment, 2, 1)
        assert len({*mine, *theirs}) == 4
    finally:
        bench.close()


def test_acquire_is_answered_through_the_mailbox(bench: Bench) -> None:
    attachment = bench.start()
    (ref,) = _take(bench, attachment.attachment_id, 1)
    bench.session.seal(attachment.attachment_id, [SealItem(ref, KEYS[0], None, 0, SpanRoute(0))])
    eventually(lambda: KEYS[0] in bench.pool.sealed, "the block sealed")
    assert bench.session.acquire("r", AcquireRequest(KEYS, 0, 1.0)) == attachment.attachment_id
    (answer,) = _answers(bench)
    assert answer.request_id == "r"
    assert answer.result is not None
    assert len(answer.result.blocks) == 1
    bench.session.release(attachment.attachment_id, answer.result.lease_id)
    eventually(lambda: not bench.pool.leases, "the lease released")


def test_caller_never_waits_for_a_slow_pool(bench: Bench) -> None:
    attachment = bench.start()
    bench.pool.latency = 1.0
    started = time.monotonic()
    bench.session.acquire("r", AcquireRequest(KEYS, 0, 1.0))
    bench.session.take_slots(attachment.attachment_id, 100)
    bench.session.expect(1)
    assert bench.session.answers() == []
    assert time.monotonic() - started < 0.5
    bench.pool.latency = 0.0
    assert _answers(bench)


def test_only_leases_that_the_engine_knows_of_are_renewed(bench: Bench) -> None:
    attachment = bench.start()
    eventually(lambda: bench.pool.counters["renew"] >= 1, "a renewal")
    assert bench.pool.renewed == []
    _store(bench, attachment, KEYS[:1])
    bench.session.acquire("r", AcquireRequest(KEYS, 0, 1.0))
    (answer,) = _answers(bench)
    assert answer.result is not None
    lease = answer.result.lease_id
    eventually(lambda: bench.pool.renewed == [lease], "the lease renewed")
    bench.session.release(attachment.attachment_id, lease)
    eventually(lambda: bench.pool.renewed == [], "nothing left to renew")


def test_reports_travel_with_a_renewal_and_are_sent_once(bench: Bench) -> None:
    bench.start()
    reports = [RequestReport(f"r{number}", 1, 0, 0, 1) for number in range(3)]
    for report in reports:
        bench.session.report(report)
    eventually(lambda: bench.pool.reported == reports, "the reports")
    before = bench.pool.counters["renew"]
    eventually(lambda: bench.pool.counters["renew"] > before, "another renewal")
    assert bench.pool.reported == reports


def test_reports_of_the_last_second_are_sent_before_the_end(bench: Bench) -> None:
    """A program ends right after its request; `kvservice explain` would say of it that it has not ended."""
    bench.start()
    report = RequestReport("last", 1, 0, 0, 1)
    bench.session.report(report)
    bench.session.close()
    assert bench.pool.reported == [report]


def test_suspects_travel_with_a_renewal_and_are_sent_once(bench: Bench) -> None:
    attachment = bench.start()
    _store(bench, attachment, KEYS[:1])
    damaged = bench.pool.sealed[KEYS[0]]
    bench.pool.segment.payload(damaged.slot, LAYOUT.payload_bytes)[0] ^= 1
    bench.lose("renew")
    bench.session.suspect([damaged])
    eventually(lambda: bench.lost > 1, "some renewals lost")
    del bench.pool.renew
    eventually(lambda: KEYS[0] not in bench.pool.sealed, "the suspect looked at")
    assert not bench.session._suspects


def test_suspects_are_named_within_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where leases need renewing less often."""
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS_MAX", 100.0)
    bench = Bench()
    bench.pool.lease_seconds = 900.0
    attachment = bench.start()
    _store(bench, attachment, KEYS[:1])
    damaged = bench.pool.sealed[KEYS[0]]
    bench.pool.segment.payload(damaged.slot, LAYOUT.payload_bytes)[0] ^= 1
    bench.session.suspect([damaged])
    eventually(lambda: KEYS[0] not in bench.pool.sealed, "the suspect looked at", seconds=20.0)
    bench.close()


def test_suspects_of_a_lost_pool_are_forgotten(bench: Bench) -> None:
    bench.start()
    bench.session.suspect([BlockRef(SlotIndex(1), Generation(2))])
    bench.session._forget()
    assert not bench.session._suspects


def test_of_many_suspects_the_first_are_named_once_each() -> None:
    suspects = UnnamedSuspects()
    refs = [BlockRef(SlotIndex(number), Generation(2)) for number in range(NAMED_MAX + 5)]
    suspects.add(refs[:1] * 3)
    suspects.add(refs)
    assert suspects.take() == refs[:NAMED_MAX] and not suspects


def test_request_that_ends_takes_its_question_back(bench: Bench) -> None:
    attachment = bench.start()
    _store(bench, attachment, KEYS[:1])
    bench.pool.latency = 30.0
    bench.session.acquire("r", AcquireRequest(KEYS, 0, 60.0))
    eventually(lambda: bench.pool.counters["acquire"] == 1, "the acquire")
    bench.session.abandon("r")
    eventually(lambda: bench.session.counters["acquire_cancelled"] == 1, "the cancelled acquire")
    bench.pool.latency = 0.0
    bench.session.acquire("r2", AcquireRequest(KEYS, 0, 1.0))
    (answer,) = _answers(bench)
    assert answer.request_id == "r2", "the engine heard of a request that is gone"


def test_request_id_used_again_at_once_is_answered(bench: Bench) -> None:
    """A client may send a request that it aborted again under its own id."""
    bench.start()
    bench.pool.latency = 0.2
    bench.session.acquire("r", AcquireRequest(KEYS, 0, 60.0))
    eventually(lambda: bench.pool.counters["acquire"] == 1, "the acquire")
    bench.session.abandon("r")
    again = AcquireRequest(KEYS[:1], 0, 60.0)
    bench.session.acquire("r", again)
    (answer,) = _answers(bench)
    assert answer.asked is again
    assert bench.session.counters["acquire_cancelled"] == 1


def test_nothing_is_kept_of_a_question_that_was_answered(bench: Bench) -> None:
    """An engine asks for months."""
    bench.start()
    for number in range(3):
        bench.session.acquire(f"r{number}", AcquireRequest(KEYS, 0, 1.0))
        _answers(bench)
    assert not bench.session._pending


def test_handoff_is_closed_after_everything_is_sealed(bench: Bench) -> None:
    attachment = bench.start()
    refs = _take(bench, attachment.attachment_id, 2)
    handoff = HandoffId(b"h" * 16)
    assert bench.session.open_handoff(handoff) == attachment.attachment_id
    eventually(lambda: bench.pool.handoffs == {handoff: True}, "the open hand-off")
    bench.pool.latency = 0.2
    for ref, key in zip(refs, KEYS, strict=False):
        bench.session.seal(attachment.attachment_id, [SealItem(ref, key, None, 0, SpanRoute(0))])
    bench.session.close_handoff(attachment.attachment_id, handoff)
    eventually(lambda: bench.pool.counters["close_handoff"], "the end of the hand-off to be told")
    assert set(KEYS[:2]) <= set(bench.pool.sealed)
    eventually(lambda: bench.pool.handoffs == {handoff: False}, "the closed hand-off")


@pytest.mark.parametrize("lost", ["abort", "reserve", "seal"])
def test_what_is_lost_of_slots_is_made_good_by_a_heartbeat(bench: Bench, lost: str) -> None:
    """The pool hears or answers no call of this kind any more: it holds for the engine what the engine holds."""
    attachment = bench.start()
    refs = _take(bench, attachment.attachment_id, 4)
    bench.lose(lost)
    if lost == "abort":
        bench.session.abort(attachment.attachment_id, refs)
    elif lost == "seal":
        items = [SealItem(ref, key, None, 0, SpanRoute(0)) for ref, key in zip(refs, KEYS, strict=True)]
        bench.session.seal(attachment.attachment_id, items)
    else:
        bench.session.expect(64)
    eventually(lambda: bench.lost, "the loss of the pool")
    eventually(lambda: bench.pool.counters["slots_reconciled"] >= 4, "the reconciled slots")
    bench.session.expect(-64)
    eventually(lambda: bench.held() == set(bench.pool.reserved), "session and pool to agree on the slots")


def test_slots_that_workers_write_are_stated(bench: Bench) -> None:
    attachment = bench.start()
    refs = _take(bench, attachment.attachment_id, 4)
    before = bench.pool.counters["renew"]
    eventually(lambda: bench.pool.counters["renew"] >= before + 3, "three more renewals")
    assert {ref.slot for ref in refs} <= set(bench.pool.reserved)
    assert not bench.pool.counters["slots_reconciled"]


def test_a_lost_open_or_close_is_made_good_by_a_heartbeat(bench: Bench) -> None:
    attachment = bench.start()
    bench.lose("open_handoff")
    bench.lose("close_handoff")
    handoff = HandoffId(b"h" * 16)
    bench.session.open_handoff(handoff)
    eventually(lambda: bench.pool.handoffs == {handoff: True}, "the open hand-off")
    bench.session.close_handoff(attachment.attachment_id, handoff)
    eventually(lambda: bench.pool.handoffs == {handoff: False}, "the closed hand-off")


def test_handoff_without_a_pool_is_not_begun(bench: Bench) -> None:
    bench.failures = [Unavailable("not yet")] * 3
    bench.session.start(5.0)
    assert bench.session.open_handoff(HandoffId(b"h" * 16)) is None


def test_loss_voids_the_stock_and_the_session_attaches_again(bench: Bench) -> None:
    first = bench.start()
    eventually(lambda: bench.pool.reserved, "slots reserved ahead")
    bench.on_loop(lambda: bench.pool.lose("killed"))
    eventually(lambda: bench.session.attachment not in (None, first), "the second attachment")
    assert bench.session.take_slots(first.attachment_id, 1) == []
    assert bench.session.counters["lost"] == 1


def test_a_late_end_of_an_attachment_leaves_the_next_one_alone(
    bench: Bench,
) -> None:
    before, told = bench.start(), bench.pool._on_lost
    assert told is not None
    bench.on_loop(lambda: bench.pool.lose("killed"))
    eventually(lambda: bench.session.attachment not in (None, before), "the next attachment")
    after, heard = bench.session.attachment, threading.Event()
    bench.on_loop(lambda: told("the stream broke"))
    bench.on_loop(heard.set)
    assert heard.wait(20.0)
    assert bench.session.attachment is after


def test_each_attempt_to_attach_has_a_higher_number(bench: Bench) -> None:
    """By which the shard knows one that was overtaken."""
    attach, attempts = bench.pool.attach, list[int]()

    async def recorded(spec: EngineSpec, on_lost: Callable[[str], None]) -> Attachment:
        attempts.append(spec.attempt)
        if len(attempts) == 1:
            raise Unavailable("its answer is lost")
        return await attach(spec, on_lost)

    bench.pool.attach = recorded  # type: ignore[method-assign]
    bench.session.start(5.0)
    eventually(lambda: bench.session.attachment is not None, "an attachment")
    bench.on_loop(lambda: bench.pool.lose("killed"))
    eventually(lambda: len(attempts) == 3, "three attempts")
    assert attempts == [1, 2, 3]


def test_heartbeats_come_as_often_as_handoffs_need_them(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do so however long leases are."""
    assert 3 * HEARTBEAT_SECONDS_MAX < OPEN_SECONDS, "a hand-off of a writer that works on would be closed"
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS_MAX", 0.1)
    bench.pool.lease_seconds = 600.0
    bench.start()
    eventually(lambda: bench.pool.counters["renew"] > 2, "three renewals")


def test_reattaching_waits_until_no_worker_can_write_old_slots(bench: Bench) -> None:
    bench.start()
    bench.may_reattach = False
    bench.on_loop(lambda: bench.pool.lose("killed"))
    eventually(lambda: bench.session.attachment is None, "the loss of the attachment")
    time.sleep(0.6)
    assert bench.session.attachment is None
    bench.may_reattach = True
    eventually(lambda: bench.session.attachment is not None, "an attachment")


def test_a_session_told_to_end_does_not_attach_once_more(bench: Bench) -> None:
    """That would free what they write."""
    bench.start()
    bench.may_reattach = False
    attached = bench.pool.counters["attach"]
    bench.on_loop(lambda: bench.pool.lose("killed"))
    eventually(lambda: bench.session.attachment is None, "the loss of the attachment")
    bench.session.close()
    assert bench.pool.counters["attach"] == attached


def test_what_belongs_to_a_lost_attachment_is_dropped(bench: Bench) -> None:
    first = bench.start()
    (ref,) = _take(bench, first.attachment_id, 1)
    bench.on_loop(lambda: bench.pool.lose("killed"))
    eventually(lambda: bench.session.attachment not in (None, first), "the second attachment")
    before = bench.pool.counters["seal"], bench.pool.counters["abort"]
    bench.session.seal(first.attachment_id, [SealItem(ref, KEYS[0], None, 0, SpanRoute(0))])
    bench.session.abort(first.attachment_id, [ref])
    eventually(lambda: bench.session.counters["seal_dropped"] == 1, "the dropped seal")
    assert (bench.pool.counters["seal"], bench.pool.counters["abort"]) == before


def test_slots_a_lost_pool_gave_too_late_are_not_used(bench: Bench) -> None:
    first, late, gate = bench.start(), list[BlockRef](), threading.Event()
    eventually(lambda: bench.pool.reserved, "slots reserved ahead")
    reserve = bench.pool.reserve

    async def slow(attachment: AttachmentId, count: int, group: int = 0, call: int = 0) -> list[BlockRef]:
        refs = await reserve(attachment, count, group, call)
        if attachment == first.attachment_id:
            late.extend(refs)
            while not gate.is_set():
                await asyncio.sleep(0.01)
        return refs

    bench.pool.reserve = slow  # type: ignore[method-assign]
    bench.session.expect(16)
    eventually(lambda: late, "the late slots")
    bench.on_loop(lambda: bench.pool.lose("killed"))
    eventually(lambda: bench.session.attachment is None, "the loss of the attachment")
    gate.set()
    eventually(lambda: bench.session.attachment is not None, "an attachment")
    second = bench.session.attachment
    assert second is not None
    taken = _take(bench, second.attachment_id, 4)
    assert not set(taken) & set(late)


def test_pool_that_is_not_up_yet_is_found_later(bench: Bench) -> None:
    bench.failures = [Unavailable("not started"), Unavailable("not started")]
    assert bench.session.start(5.0) is None, "start returns after the first attempt, attached or not"
    assert bench.session.acquire("r", AcquireRequest(KEYS, 0, 1.0)) is None
    eventually(lambda: bench.session.attachment is not None, "an attachment")


def test_failure_nobody_thought_of_is_tried_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvservice.session.session.RETRY_SECONDS_MAX", 0.1)
    bench.failures = [RuntimeError("a bug")]
    assert bench.session.start(5.0) is None
    eventually(lambda: bench.session.attachment is not None, "an attachment")


def test_the_log_says_attached_lost_and_attached_again(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvservice")
    bench.start()
    bench.on_loop(lambda: bench.pool.lose("it restarted"))
    eventually(lambda: bench.session.counters["attached"] == 2, "the second attachment")
    eventually(lambda: len(caplog.records) >= 3, "three log records")
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("attached to ") and "fingerprint" in lines[0] and "tokens" in lines[0]
    assert lines[1] == "the pool is gone (it restarted); serving without the cache until it is back"
    assert lines[2].startswith("attached again to ")


def test_refusal_is_said_once_and_names_the_reason(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.failures = [FingerprintMismatch("dtype: bfloat16 here, float16 there")]
    assert bench.session.start(5.0) is None
    assert [r.message for r in caplog.records if "float16 there" in r.message]


def test_call_that_the_pool_refuses_is_counted_and_answered(bench: Bench) -> None:
    bench.start()
    bench.pool.refuse = True
    bench.session.acquire("r", AcquireRequest(KEYS, 0, 1.0))
    (answer,) = _answers(bench)
    assert answer.result is None
    assert bench.session.counters["acquire_failed"] == 1


def test_answer_for_an_ended_request_is_given_back(bench: Bench) -> None:
    """It is given back even if the engine is idle."""
    attachment = bench.start()
    (ref,) = _take(bench, attachment.attachment_id, 1)
    bench.session.seal(attachment.attachment_id, [SealItem(ref, KEYS[0], None, 0, SpanRoute(0))])
    eventually(lambda: KEYS[0] in bench.pool.sealed, "the block sealed")
    bench.pool.latency = 0.1
    bench.session.acquire("r", AcquireRequest(KEYS, 0, 1.0))
    bench.session.abandon("r")
    # Cancelled where it was under way already, given back where it had not begun.
    counters = bench.session.counters
    eventually(lambda: counters["acquire_cancelled"] + counters["acquire_abandoned"] == 1, "the end of the acquire")
    assert bench.session.answers() == []
    eventually(lambda: not bench.pool.leases, "the lease released")


def test_waiting_for_an_answer_ends_with_the_answer(bench: Bench) -> None:
    bench.start()
    bench.pool.latency = 0.1
    bench.session.acquire("r", AcquireRequest(KEYS, 0, 1.0))
    started = time.monotonic()
    bench.session.wait_for_answer(5.0)
    assert time.monotonic() - started < 2.0
    assert len(bench.session.answers()) == 1
    bench.session.wait_for_answer(0.01)


def test_close_detaches_and_ends_the_thread(bench: Bench) -> None:
    bench.start()
    bench.session.close()
    assert bench.pool.counters["detach"] == 1
    assert bench.pool.closed
    assert bench.session.attachment is None
    bench.session.close()


def _take(bench: Bench, attachment: AttachmentId, count: int) -> list:  # type: ignore[type-arg]
    eventually(lambda: len(bench.pool.reserved) >= count, "slots enough")
    refs: list = []  # type: ignore[type-arg]
    eventually(
        lambda: refs.extend(bench.session.take_slots(attachment, count - len(refs))) or len(refs) == count,
        "slots taken",
    )
    return refs


def _answers(bench: Bench) -> list[AcquireAnswer]:
    found: list[AcquireAnswer] = []
    eventually(lambda: found.extend(bench.session.answers()) or found, "an answer")
    return found


def _store(bench: Bench, attachment: Attachment, keys: tuple[BlockKey, ...]) -> None:
    refs = _take(bench, attachment.attachment_id, len(keys))
    items = [SealItem(ref, key, None, 0, SpanRoute(0)) for ref, key in zip(refs, keys, strict=True)]
    bench.session.seal(attachment.attachment_id, items)
    eventually(lambda: set(keys) <= set(bench.pool.sealed), "the blocks sealed")


def test_what_a_step_ends_is_one_call_of_each_kind(bench: Bench) -> None:
    """However many copies and requests end between two looks of the loop."""
    attachment = bench.start()
    eventually(lambda: has_slots(bench.session), "slots reserved ahead")
    refs = bench.session.take_slots(attachment.attachment_id, 6)
    calls: list[tuple[str, int]] = []
    for method in ("seal", "abort", "release"):
        unpatched = getattr(bench.pool, method)

        async def counted(
            attachment: AttachmentId, values: object, *, of: str = method, call: object = unpatched
        ) -> object:
            calls.append((of, len(values)))  # type: ignore[arg-type]
            return await call(attachment, values)  # type: ignore[operator]

        setattr(bench.pool, method, counted)
    entered, leave = threading.Event(), threading.Event()
    bench.on_loop(lambda: (entered.set(), leave.wait(5.0)))  # type: ignore[func-returns-value]
    entered.wait(5.0)
    for ref, key in zip(refs, KEYS, strict=False):
        bench.session.seal(attachment.attachment_id, [SealItem(ref, key, None, 0, SpanRoute(0))])
    for ref in refs[4:]:
        bench.session.abort(attachment.attachment_id, [ref])
    for lease in (1, 2, 3):
        bench.session.release(attachment.attachment_id, LeaseId(lease))
    leave.set()
    eventually(lambda: len(calls) >= 3, "the calls", detail=lambda: calls)
    assert sorted(calls) == [("abort", 2), ("release", 3), ("seal", 4)]
