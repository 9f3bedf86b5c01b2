"""Rules of core.acquire.hinted: what hints of clients do in the pool, and that they cannot fill it."""

from __future__ import annotations

import pytest

from kvservice.core import events as ev
from kvservice.core.acquire.holds import HOLD_SECONDS_MAX
from kvservice.core.messages import AcquireRequest, Hints, MissReason
from kvservice.core.store.kinds import Expected, expected_of
from kvservice.core.store.worth import GuardedWorth
from kvservice.testing.builders import CoreHarness, make_chain, make_located, run_of
from kvservice.units import AttachmentId

CHAIN = make_chain(2)
PIN = Hints(pin_seconds=20.0)
ALL = Hints(20.0, True, True, True, True, 60.0, True)


def acquire(harness: CoreHarness, engine: AttachmentId, hints: Hints, recompute: float = 0.0) -> int:
    op = harness.next_op()
    harness.send(ev.Acquire(op, engine, AcquireRequest(CHAIN, 0, 5.0, recompute, hints=hints)))
    return op


def store(harness: CoreHarness, engine: AttachmentId, hints: Hints) -> None:
    refs = harness.reserve(engine, len(CHAIN))
    for ref, key in zip(refs, CHAIN, strict=True):
        harness.write(ref, key)
    items = tuple(item._replace(hints=hints) for item in harness.items(refs, CHAIN))
    harness.begin_seal(engine, items)
    harness.digest_all()


def test_every_hint_of_a_request_is_counted() -> None:
    harness = CoreHarness()
    engine = harness.attach()
    harness.resolved(acquire(harness, engine, ALL))
    names = ("pin", "prefetch", "write_down", "share", "no_store", "reuse", "last_turn")
    assert [harness.count(f"hints_{name}") for name in names] == [1] * 7
    harness.resolved(acquire(harness, engine, Hints()))
    assert [harness.count(f"hints_{name}") for name in names] == [1] * 7


def test_a_pinned_prompt_stays_for_its_time() -> None:
    harness = CoreHarness(slab_count=8)
    engine = harness.attach()
    harness.store(engine, CHAIN)
    found = harness.result(acquire(harness, engine, PIN))
    harness.release(engine, found.lease_id)
    assert (harness.slots("leased"), harness.count("hints_pinned_blocks")) == (2, 2)
    harness.advance(19.0)
    assert harness.slots("leased") == 2
    harness.advance(2.0)
    assert harness.slots("leased") == 0


def test_what_a_pinned_request_stores_is_held_too() -> None:
    harness = CoreHarness(slab_count=8)
    store(harness, harness.attach(), PIN)
    assert (harness.slots("leased"), harness.count("hints_pinned_blocks")) == (2, 2)
    harness.advance(21.0)
    assert (harness.slots("leased"), harness.slots("sealed")) == (0, 2)


def test_pinning_again_renews_the_hold_and_takes_no_more_room() -> None:
    harness = CoreHarness(slab_count=8)
    engine = harness.attach()
    harness.store(engine, CHAIN)
    for _ in range(10):
        harness.release(engine, harness.result(acquire(harness, engine, PIN)).lease_id)
        harness.advance(5.0)
    assert harness.state.lease_count == 1
    assert harness.count("warm_let_go") == 0
    harness.advance(14.0)
    assert harness.slots("leased") == 2, "twenty seconds from the last time"


def test_a_pin_is_bounded_in_time_and_room() -> None:
    harness = CoreHarness(slab_count=1)
    engine = harness.attach()
    harness.store(engine, CHAIN)
    found = harness.result(acquire(harness, engine, Hints(pin_seconds=1e9)))
    harness.release(engine, found.lease_id)
    assert harness.slots("leased") <= 1, "a quarter of the pool at most"
    harness.advance(HOLD_SECONDS_MAX + 1)
    assert harness.slots("leased") == 0


@pytest.mark.parametrize("prefetch", [False, True])
def test_prefetch_brings_what_computing_would_be_faster_for(prefetch: bool) -> None:
    harness = CoreHarness()
    engine = harness.attach()
    measured = harness.acquire(engine, make_chain(4, "speed"))
    harness.resolved(measured, run_of(0, 4))
    harness.located(harness.locates[-1], make_located(harness.locates[-1].keys))
    harness.now += 1.0
    harness.pulled(harness.pulls[-1], ev.PullResult.OK)
    op = acquire(harness, engine, Hints(prefetch=prefetch), recompute=1e-9)
    harness.resolved(op, run_of(0, 2))
    if not prefetch:
        assert harness.result(op).miss is MissReason.SLOWER_THAN_RECOMPUTE
        return
    harness.located(harness.locates[-1], make_located(harness.locates[-1].keys))
    harness.pulled(harness.pulls[-1], ev.PullResult.OK)
    assert len(harness.result(op).blocks) == 2


@pytest.mark.parametrize(
    ("hints", "expected"),
    [
        (ALL, Expected.LAST_TURN),
        (Hints(reuse_seconds=300.0, share=True, write_down=True), Expected.SOON),
        (Hints(reuse_seconds=301.0), Expected.LATER),
        (Hints(write_down=True, share=True), Expected.LATER),
        (Hints(share=True), Expected.SHARED),
        (PIN, Expected.NOTHING_SAID),
        (Hints(), Expected.NOTHING_SAID),
    ],
)
def test_eviction_is_told_what_clients_expect(hints: Hints, expected: Expected) -> None:
    """Of a prompt that is new, and of what is stored of it."""
    harness = CoreHarness(slab_count=8)
    engine = harness.attach()
    harness.resolved(acquire(harness, engine, hints))
    harness.store(engine, CHAIN)
    policy = harness.state._store.policy
    assert isinstance(policy, GuardedWorth)
    [kind] = {stretch.group.kind for stretch in policy._tree.of.values()}
    assert expected_of(kind) is expected


def test_a_leaving_node_holds_nothing() -> None:
    harness = CoreHarness(slab_count=8)
    engine = harness.attach()
    refs = harness.reserve(engine, len(CHAIN))
    items = tuple(item._replace(hints=PIN) for item in harness.items(refs, CHAIN))
    harness.begin_seal(engine, items)
    harness.send(ev.Drain())
    harness.digest_all()
    assert harness.count("hints_pinned_blocks") == 0
