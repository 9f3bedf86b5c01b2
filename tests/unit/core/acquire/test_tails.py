"""Rules of core.acquire.tails: of several names for the beginning of a block, one block is promised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvservice.core import events as ev
from kvservice.core.acquire.acquisitions import LOOKUP_SECONDS_MAX
from kvservice.core.block.keys import KEYS_PER_REQUEST_MAX
from kvservice.core.block.tails import TAIL_NAMES_MAX
from kvservice.core.block.window_groups import Window, WindowGroup
from kvservice.core.messages import AcquireRequest, Handoff, MissReason, SealItem
from kvservice.core.tier.rules import TierRules, WriteMoment
from kvservice.errors import InvalidRequest
from kvservice.testing.builders import CoreHarness, make_chain, make_layout, make_located, make_spec, run_of
from kvservice.units import AttachmentId, HandoffId, MiB, NodeId, SpanRoute

HEAD = make_chain(1)[0]
LONG, MIDDLE, SHORT = make_chain(3, "tails")
ASK = (HEAD, LONG, MIDDLE, SHORT)
NONE = MissReason.NONE


def store(harness: CoreHarness, engine: AttachmentId, *names: Any, at: int = 1) -> None:
    """Seal tails of this position, as an engine does when its request has ended."""
    for name in names:
        (ref,) = harness.reserve(engine)
        harness.write(ref, name)
        harness.begin_seal(engine, (SealItem(ref, name, HEAD if at else None, at, SpanRoute(7)),))
        harness.digest_all()


def test_the_longest_tail_of_this_node_is_promised() -> None:
    harness = CoreHarness()
    engine = harness.attach()
    harness.store(engine, (HEAD,))
    store(harness, engine, SHORT, MIDDLE)
    found = harness.result(harness.ask_tail(engine, ASK, 1))
    assert (len(found.blocks), found.tail_index, found.miss) == (1, 2, NONE)
    assert not harness.resolves, "what is here is not asked for elsewhere"
    assert harness.slots("leased") == 1
    harness.release(engine, found.lease_id)
    assert harness.slots("leased") == 0
    assert (harness.count("tails_asked"), harness.count("tails_found_local")) == (1, 1)
    assert (harness.count("acquires"), harness.count("asked_blocks")) == (0, 0), "hit rates are of whole blocks"


def test_a_tail_is_evicted_before_the_block_that_it_follows() -> None:
    harness = CoreHarness(slab_count=1)
    engine = harness.attach()
    harness.store(engine, (HEAD,))
    store(harness, engine, SHORT)
    harness.store(engine, make_chain(3, "others"))
    assert HEAD in harness.keys_held() and SHORT not in harness.keys_held()


@pytest.mark.parametrize("at", [0, 1])
def test_without_one_here_the_longest_of_another_node_comes(at: int) -> None:
    harness = CoreHarness()
    engine = harness.attach()
    op = harness.ask_tail(engine, ASK, at)
    (asked,) = harness.resolves
    assert (asked.op, asked.chain, asked.start, asked.timeout_seconds) == (op, ASK, 1, LOOKUP_SECONDS_MAX)
    harness.resolved(op, run_of(2, 2))
    part = harness.resolves[-1]
    assert part.chain == (HEAD, MIDDLE)
    harness.resolved(part.op, run_of(1, 1))
    harness.located(harness.locates[-1], make_located(harness.locates[-1].keys))
    harness.pulled(harness.pulls[-1], ev.PullResult.OK)
    found = harness.result(op)
    assert (len(found.blocks), found.tail_index, found.fetched_count, found.farthest) == (1, 2, 1, "peer")
    assert harness.count("tails_found_remote") == 1
    (block,) = harness.state.blocks()
    assert (block.key, block.position, block.is_secondary) == (MIDDLE, at, True)
    assert block.route == int.from_bytes(HEAD[:4], "big"), "it is announced where its head is"


def test_a_tail_comes_back_from_a_tier_of_this_node() -> None:
    harness = CoreHarness(tiers=(TierRules("disk", budget_bytes=MiB, write=WriteMoment.STORED),), slab_count=1)
    engine = harness.attach()
    store(harness, engine, MIDDLE)
    harness.write_all()
    refs = harness.reserve(engine, 4)
    harness.send(ev.Abort(harness.next_op(), engine, tuple(refs)))
    assert not harness.keys_held()
    op = harness.ask_tail(engine, ASK, 1)
    harness.brought(harness.reads()[0], ev.PullResult.OK)
    found = harness.result(op)
    assert (found.tail_index, found.tier_count, found.fetched_count, found.farthest) == (2, 1, 0, "disk")
    assert harness.count("tails_found_tier") == 1


@pytest.mark.parametrize(("complete", "reason"), [(True, MissReason.NEVER_STORED), (False, MissReason.LOOKUP_FAILED)])
def test_a_tail_that_nobody_has_is_a_miss_with_a_reason(complete: bool, reason: MissReason) -> None:
    harness = CoreHarness()
    engine = harness.attach()
    op = harness.ask_tail(engine, ASK, 1)
    harness.resolved(op, complete=complete)
    found = harness.result(op)
    assert (found.blocks, found.lease_id, found.tail_index, found.miss) == ((), 0, 0, reason)
    assert harness.count(f"tails_missed_{reason.value}") == 1


def test_the_directory_is_not_waited_for_beyond_the_deadline() -> None:
    harness = CoreHarness()
    engine = harness.attach()
    op = harness.ask_tail(engine, ASK, 1, timeout=0.1)
    assert harness.state.next_deadline() == pytest.approx(harness.now + 0.1)
    harness.advance(0.2)
    assert harness.result(op).miss is MissReason.DEADLINE
    harness.resolved(op, run_of(1, 1))
    assert len(harness.resolves) == 1, "a late answer begins nothing"


def test_a_tail_that_its_holder_lost_is_a_miss() -> None:
    harness = CoreHarness()
    engine = harness.attach()
    op = harness.ask_tail(engine, ASK, 1)
    harness.resolved(op, run_of(1, 1))
    part = harness.resolves[-1]
    harness.resolved(op, run_of(2, 1))
    assert harness.resolves[-1] is part, "one name is chosen, once"
    harness.resolved(part.op, run_of(1, 1))
    harness.located(harness.locates[-1], None)
    assert harness.result(op).miss is MissReason.PEER_FAILED
    assert harness.state.check_invariants() is None


def test_an_embedded_pool_and_a_leaving_node_ask_nobody() -> None:
    alone = CoreHarness(has_directory=False)
    assert alone.result(alone.ask_tail(alone.attach(), ASK, 1)).miss is MissReason.NEVER_STORED
    harness = CoreHarness()
    engine = harness.attach()
    harness.send(ev.Drain())
    assert not harness.resolves
    assert harness.result(harness.ask_tail(engine, ASK, 1)).blocks == ()


def test_who_goes_away_leaves_nothing_open() -> None:
    harness = CoreHarness()
    engine = harness.attach()
    asked, chosen = harness.ask_tail(engine, ASK, 1), harness.ask_tail(engine, (HEAD, *make_chain(2, "b")), 1)
    harness.resolved(chosen, run_of(1, 1))
    for op in (asked, chosen):
        harness.send(ev.Cancel(op))
        harness.send(ev.Cancel(op))
    assert harness.open(asked) and harness.open(chosen), "nobody waits for the answers"
    waiting, fetching = harness.ask_tail(engine, ASK, 1), harness.ask_tail(engine, (HEAD, *make_chain(2, "c")), 1)
    harness.resolved(fetching, run_of(1, 1))
    harness.send(ev.AttachmentLost(engine))
    assert harness.result(waiting).miss is MissReason.DETACHED
    assert harness.result(fetching).miss is MissReason.DETACHED


@pytest.mark.parametrize(
    "change",
    [
        {"keys": (HEAD,)},
        {"keys": (HEAD, *make_chain(TAIL_NAMES_MAX + 1, "many"))},
        {"skip": 0},
        {"handoff": Handoff(HandoffId(bytes(16)), NodeId("there"))},
        {"tail_at": -1},
        {"tail_at": KEYS_PER_REQUEST_MAX},
    ],
)
def test_a_question_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    harness = CoreHarness()
    engine, op = harness.attach(), harness.next_op()
    harness.send(ev.Acquire(op, engine, replace(AcquireRequest(ASK, 1, 5.0, tail_at=1), **change)))
    with pytest.raises(InvalidRequest):
        harness.reply(op)


def test_a_model_with_windows_has_no_tails() -> None:
    harness = CoreHarness()
    spec = replace(make_spec(), window_groups=(WindowGroup(make_layout(), Window(sliding_tokens=64)),))
    op = harness.ask_tail(harness.attach(spec), ASK, 1)
    with pytest.raises(InvalidRequest, match="one KV cache group"):
        harness.reply(op)
