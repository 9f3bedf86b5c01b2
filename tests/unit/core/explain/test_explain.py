"""What a shard remembers of requests and of blocks that went: complete, bounded, and never in a request's way."""

from __future__ import annotations

import pytest

from kvservice.core import events as ev
from kvservice.core.block.marks import MarkKind
from kvservice.core.explain.records import (
    ANSWERED_MAX,
    KEEP_SECONDS,
    KEYS_MAX,
    RECORDS_MAX,
    REQUEST_ID_CHARS_MAX,
    RequestRecords,
    SourceRun,
    check_request_id,
)
from kvservice.core.messages import AcquireRequest, Handoff, MissReason, RequestReport
from kvservice.errors import FingerprintMismatch
from kvservice.testing.builders import WALL, CoreHarness, make_chain, make_located, make_spec, run_of
from kvservice.units import AttachmentId, HandoffId

CHAIN = make_chain(4)


def ask(shard: CoreHarness, engine: AttachmentId, request_id: str, keys: tuple = CHAIN, timeout: float = 5.0) -> int:
    op = shard.next_op()
    shard.send(ev.Acquire(op, engine, AcquireRequest(keys, 0, timeout, request_id=request_id)))
    return op


def record_of(shard: CoreHarness, request_id: str):  # type: ignore[no-untyped-def]
    found = shard.state.explain(request_id, shard.now)
    assert found.matching == 1
    return found.records[-1]


def test_a_record_says_where_each_promised_block_came_from() -> None:
    shard = CoreHarness()
    engine = shard.attach()
    shard.store(engine, CHAIN[:1])
    op = ask(shard, engine, "r")
    shard.resolved(op, run_of(1, 2))
    shard.located(shard.locates[-1], make_located(shard.locates[-1].keys))
    shard.pulled(shard.pulls[-1], ev.PullResult.OK)
    record = record_of(shard, "r")
    assert record.runs == (SourceRun(0, 1, "local"), SourceRun(1, 2, "peer"))
    assert (record.promised, record.miss, record.miss_at) == (3, MissReason.NEVER_STORED, 3)


def test_a_record_names_the_node_that_was_asked_in_vain() -> None:
    shard = CoreHarness()
    engine = shard.attach()
    op = ask(shard, engine, "r")
    shard.resolved(op, run_of(0, 4))
    shard.located(shard.locates[-1], None)
    assert (record_of(shard, "r").miss, record_of(shard, "r").miss_node) == (MissReason.PEER_FAILED, "peer")


def test_a_record_names_the_node_whose_block_was_read_in_vain() -> None:
    """A block from before a clear, of a node that did not hear of it, is read and then refused."""
    shard = CoreHarness()
    engine = shard.attach()
    shard.clear(MarkKind.EVERYTHING)
    op = ask(shard, engine, "r")
    shard.resolved(op, run_of(0, 4))
    shard.located(shard.locates[-1], make_located(CHAIN, stored_at=WALL))
    shard.pulled(shard.pulls[-1], ev.PullResult.OK)
    assert (record_of(shard, "r").miss, record_of(shard, "r").miss_node) == (MissReason.STALE, "peer")


def test_a_deadline_is_recorded_a_cancelled_call_unanswered() -> None:
    shard = CoreHarness()
    engine = shard.attach()
    ask(shard, engine, "late", timeout=1.0)
    cancelled = ask(shard, engine, "cancelled")
    shard.send(ev.Cancel(cancelled))
    shard.advance(1.1)
    assert record_of(shard, "late").miss is MissReason.DEADLINE
    assert record_of(shard, "cancelled").answered_at is None


def test_the_engines_report_joins_the_record_or_makes_one() -> None:
    shard = CoreHarness()
    engine = shard.attach()
    shard.store(engine, CHAIN)
    ask(shard, engine, "r")
    reports = (RequestReport("r", 5, 1, 3, 1), RequestReport("unasked", 2, 0, 0, 2, asked=False))
    shard.send(ev.Renew(shard.next_op(), engine, (), reports))
    assert record_of(shard, "r").report == reports[0]
    assert record_of(shard, "unasked").report == reports[1]
    assert record_of(shard, "unasked").keys == b""


def test_a_request_is_found_by_its_beginning_and_exactly_first() -> None:
    shard = CoreHarness()
    engine = shard.attach()
    for name in ("cmpl-1-0-aa", "cmpl-1-1-bb", "cmpl-2-0-cc", "cmpl-2"):
        ask(shard, engine, name)
    assert shard.state.explain("cmpl-2", shard.now).matching == 1
    assert shard.state.explain("cmpl-1", shard.now).matching == 2
    assert shard.state.explain("cmpl-1-1", shard.now).records[0].request_id == "cmpl-1-1-bb"
    assert shard.state.explain("chat", shard.now).matching == 0
    assert shard.state.explain("", shard.now).records == ()


def test_records_are_bounded_by_time_number_and_keys() -> None:
    records, spec = RequestRecords(), make_spec()
    long, short = b"".join(make_chain(2000)), b"".join(CHAIN)
    for number in range(200):
        records.asked(number, spec, f"r{number}", long, 0, 0.0)
        records.answered(number, 0, {}, MissReason.NONE, "", 0.0)
        records.check_invariants()
    assert len(records) == KEYS_MAX // 2000
    for number in range(RECORDS_MAX + 100):
        records.asked(number, spec, f"s{number}", short, 0, 1.0)
    assert len(records) == RECORDS_MAX
    assert len(records.find("s", 1.0).records) == ANSWERED_MAX
    assert records.find("s", 2.0 + KEEP_SECONDS).matching == 0
    assert len(records) == 0
    records.check_invariants()


def test_engines_that_were_refused_are_remembered() -> None:
    shard = CoreHarness()
    shard.attach()
    with pytest.raises(FingerprintMismatch):
        shard.attach(make_spec("other", dtype="fp8"))
    (refused,) = shard.state.explain("x", shard.now).refused
    assert refused.model == "model"
    assert "dtype" in refused.message


def test_the_end_of_a_block_is_known_with_who_needed_room() -> None:
    shard = CoreHarness(slab_count=1)
    engine = shard.attach()
    shard.store(engine, CHAIN)
    held = shard.state.block_history(CHAIN, shard.now, shard.now)
    assert [(entry.index, entry.state) for entry in held] == [(i, "held") for i in range(4)]
    assert shard.state.block_history(make_chain(2, "unknown"), shard.now, shard.now) == ()
    shard.now += 7.0
    shard.reserve(engine, 1)
    (entry,) = [entry for entry in shard.state.block_history(CHAIN, shard.now, shard.now) if entry.state == "gone"]
    assert (entry.index, entry.cause, entry.at) == (3, "pressure", shard.now)
    assert (entry.held_seconds, entry.idle_seconds) == (7.0, 7.0)
    assert entry.caused_by.startswith("stores of model by engine ")


def test_a_block_stored_again_keeps_its_eviction() -> None:
    """It also keeps who stored it."""
    shard = CoreHarness(slab_count=1)
    engine = shard.attach()
    shard.store(engine, CHAIN)
    shard.now += 7.0
    evicted_at = shard.now
    shard.store(engine, make_chain(4, "others"))
    shard.now += 5.0
    asked_at = shard.now
    shard.now += 1.0
    shard.store(engine, CHAIN)
    entries = [entry for entry in shard.state.block_history(CHAIN, shard.now, asked_at) if entry.index == 0]
    assert [(entry.state, entry.at) for entry in entries] == [("held", shard.now), ("gone", evicted_at)]
    assert entries[0].engine == make_spec().engine_id.hex()[:8]
    shard.now += 1.0
    shard.store(engine, make_chain(4, "others"))  # and evicted again: no answer to the question of before
    (entry,) = [entry for entry in shard.state.block_history(CHAIN, shard.now, asked_at) if entry.index == 0]
    assert (entry.state, entry.at) == ("gone", evicted_at)


def test_a_record_knows_the_hand_off_it_waited_for() -> None:
    shard = CoreHarness()
    engine = shard.attach()
    shard.store(engine, CHAIN[:1])
    op = shard.next_op()
    handoff = Handoff(HandoffId(bytes(range(16))), shard.state.node_id)
    shard.send(ev.Acquire(op, engine, AcquireRequest(CHAIN, 0, 5.0, handoff=handoff, request_id="r")))
    shard.advance(2.0)
    shard.store(engine, CHAIN[1:])
    record = record_of(shard, "r")
    assert (record.handoff_node, record.handed_from, record.promised) == (shard.state.node_id, 1, 4)
    assert record.answered_at is not None and record.answered_at - record.asked_at >= 2.0


def test_a_block_that_is_being_digested_is_not_sealed_yet() -> None:
    shard = CoreHarness()
    engine = shard.attach()
    refs = shard.reserve(engine, 1)
    shard.write(refs[0], CHAIN[0])
    shard.begin_seal(engine, shard.items(refs, CHAIN))
    assert [entry.state for entry in shard.state.block_history(CHAIN, shard.now, shard.now)] == ["sealing"]


def test_a_report_joins_the_last_record_of_a_repeated_id() -> None:
    """An id that is used again has two records. When the first one is dropped, the second one is still found."""
    shard = CoreHarness()
    engine = shard.attach()
    ask(shard, engine, "r")
    shard.advance(KEEP_SECONDS - 1.0)
    ask(shard, engine, "r")
    shard.advance(2.0)
    report = RequestReport("r", 4, 0, 0, 4)
    shard.send(ev.Renew(shard.next_op(), engine, (), (report,)))
    assert record_of(shard, "r").report == report


def test_a_request_id_is_cut_and_printable() -> None:
    """It comes from a client, and ends in logs and on terminals."""
    assert "\x1b" not in check_request_id("a\x1b[2J")
    assert len(check_request_id("\n" * 100_000)) == REQUEST_ID_CHARS_MAX
