"""What people see of a shard: its memory by state, its engines, its slowest requests, and its slots page by page."""

from __future__ import annotations

import pytest

from kvservice.core import events as ev
from kvservice.core.messages import AcquireRequest, ListedSlot
from kvservice.core.store import listing
from kvservice.core.store.listing import SlotFilter, SlotPage
from kvservice.errors import FingerprintMismatch
from kvservice.testing.builders import LARGE, SMALL, CoreHarness, make_chain, make_located, make_spec, run_of
from kvservice.units import SlotIndex

CHAIN = make_chain(4)


def listed(shard: CoreHarness, **fields: object) -> list[ListedSlot]:
    wanted = SlotFilter(**fields)  # type: ignore[arg-type]
    return list(shard.state.list_slots(wanted, SlotIndex(0), shard.now).slots)


def test_reserved_slots_are_not_counted_as_being_written() -> None:
    """Engines hold slots ahead for their stores. The shard itself writes those that it fetches or verifies."""
    shard = CoreHarness()
    engine = shard.attach()
    refs = shard.reserve(engine, 3)
    assert shard.state.slot_usage()["reserved"] == (3, 3 * SMALL)
    assert shard.state.slot_usage()["writing"] == (0, 0)
    shard.begin_seal(engine, shard.items(refs[:1], CHAIN))
    assert shard.state.slot_usage()["reserved"] == (2, 2 * SMALL)
    assert shard.state.slot_usage()["writing"] == (1, SMALL)
    shard.digest_all()
    op = shard.acquire(engine, make_chain(2, "other"))
    shard.resolved(op, run_of(0, 2))
    shard.located(shard.locates[-1], make_located(shard.locates[-1].keys))
    usage = shard.state.slot_usage()
    assert (usage["reserved"], usage["writing"]) == ((2, 2 * SMALL), (2, 2 * SMALL))
    assert sum(slots for slots, _ in usage.values()) == shard.state.capacity


def test_bytes_by_state_know_the_size_of_each_slot() -> None:
    shard = CoreHarness(slab_count=2)
    shard.store(shard.attach(make_spec("a", "small")), make_chain(1, model="small"))
    shard.store(shard.attach(make_spec("b", "large", payload_bytes=LARGE)), make_chain(1, model="large"))
    usage = shard.state.slot_usage()
    assert usage["sealed"] == (2, SMALL + LARGE)
    assert usage["free"] == (4, 3 * SMALL + LARGE)


def test_evictions_are_counted_by_their_cause() -> None:
    shard = CoreHarness(slab_count=1)
    engine = shard.attach()
    shard.store(engine, CHAIN)
    shard.store(engine, make_chain(3, "other"))
    assert shard.count("evicted_pressure") == 3 == shard.count("evicted_primary")


def test_bytes_are_counted_on_each_way() -> None:
    shard = CoreHarness()
    engine = shard.attach()
    shard.store(engine, CHAIN[:2])
    op = shard.acquire(engine, CHAIN)
    shard.resolved(op, run_of(2, 2))
    shard.located(shard.locates[-1], make_located(shard.locates[-1].keys))
    shard.pulled(shard.pulls[-1], ev.PullResult.OK)
    assert (shard.count("stored_bytes"), shard.count("hit_bytes")) == (2 * SMALL, 4 * SMALL)
    (speed,) = shard.state.peer_speeds()
    assert (speed.node_id, speed.pulled_bytes) == ("peer", 2 * SMALL)


def test_attached_engines_have_names_and_ages() -> None:
    shard = CoreHarness()
    shard.attach(make_spec("a", "m1"))
    shard.now += 5
    shard.attach(make_spec("b", "m2", namespace="tests"))
    first, second = shard.state.attached_engines(shard.now)
    assert (first.model, first.attached_seconds, second.attached_seconds) == ("m1", 5, 0)
    assert (second.namespace, len(second.fingerprint), len(second.engine)) == ("tests", 12, 8)


def test_a_refused_engine_is_remembered_with_what_differs() -> None:
    shard = CoreHarness()
    shard.attach(make_spec("a", dtype="bf16"))
    with pytest.raises(FingerprintMismatch):
        shard.attach(make_spec("b", dtype="fp8"))
    (refused,) = shard.state.records.latest_refused()
    (field,) = refused.differences
    assert (field.name, field.ours, field.theirs, refused.difference_count) == ("dtype", "fp8", "bf16", 1)


def test_the_slowest_requests_come_slowest_first() -> None:
    shard = CoreHarness()
    engine = shard.attach()
    for name, seconds in (("quick", 0.1), ("slow", 3.0), ("middle", 1.0)):
        op = shard.next_op()
        shard.send(ev.Acquire(op, engine, AcquireRequest(CHAIN, 0, 5.0, request_id=name)))
        shard.now += seconds
        shard.resolved(op)
    unanswered = shard.next_op()
    shard.send(ev.Acquire(unanswered, engine, AcquireRequest(CHAIN, 0, 5.0, request_id="open")))
    slowest = shard.state.records.slowest(2, shard.now)
    assert [record.request_id for record in slowest] == ["slow", "middle"]
    assert shard.state.records.slowest(2, shard.now, "another tenant") == []


def test_a_listed_block_says_what_is_known_of_it() -> None:
    shard = CoreHarness()
    engine = shard.attach()
    shard.store(engine, CHAIN[:2])
    shard.now += 7
    shard.release(engine, shard.hit(engine, CHAIN[:2]).lease_id)
    shard.now += 2
    first, second = listed(shard)
    assert (first.key, first.model, first.state, first.position) == (CHAIN[0], "model", "sealed", 0)
    assert (second.position, second.age_seconds, second.idle_seconds, second.uses) == (1, 9, 2, 1)


def test_fetched_blocks_are_of_the_model_that_asked() -> None:
    shard = CoreHarness()
    op = shard.acquire(shard.attach(), CHAIN)
    shard.fetch_all(op, CHAIN)
    assert {(one.model, one.is_secondary, one.state) for one in listed(shard)} == {("model", True, "leased")}


def test_slots_are_listed_by_state_model_tenant_and_key() -> None:
    shard = CoreHarness()
    shard.set_tenants()
    engine = shard.attach(tenant="a")
    shard.store(engine, CHAIN[:3])
    shard.reserve(engine, 1)
    assert [one.state for one in listed(shard)] == ["sealed"] * 3 + ["reserved"]
    assert len(listed(shard, states=frozenset({"reserved"}))) == 1
    assert len(listed(shard, states=frozenset({"free"}))) == 0
    assert len(listed(shard, model="model")) == 3 and not listed(shard, model="mod")
    assert len(listed(shard, account="a")) == 4 and not listed(shard, account="b")
    assert [one.key for one in listed(shard, key_prefix=CHAIN[1].hex()[:9])] == [CHAIN[1]]


def test_a_page_is_bounded_and_the_next_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many slots there are and however few match, one page costs the shard the same."""
    monkeypatch.setattr(listing, "SCANNED_MAX", 3)
    monkeypatch.setattr(listing, "PAGE_SLOTS_MAX", 2)
    shard = CoreHarness(slab_count=2)
    shard.store(shard.attach(), make_chain(7))
    pages: list[SlotPage] = []
    start: SlotIndex | None = SlotIndex(0)
    while start is not None:
        pages.append(shard.state.list_slots(SlotFilter(), start, shard.now))
        start = pages[-1].next_slot
    assert [len(page.slots) for page in pages] == [2, 2, 2, 1]
    assert {one.key for page in pages for one in page.slots} == set(make_chain(7))
    nothing = shard.state.list_slots(SlotFilter(model="other"), SlotIndex(0), shard.now)
    assert (nothing.slots, nothing.next_slot is not None) == ((), True)


def test_a_page_may_start_at_a_slot_that_is_gone() -> None:
    assert CoreHarness().state.list_slots(SlotFilter(), SlotIndex(1 << 31), 0.0) == SlotPage((), None)


def test_hits_are_counted_by_model_and_tenant() -> None:
    shard = CoreHarness(slab_count=2)
    assert shard.state.free_slab_count == 2
    engine = shard.attach()
    shard.store(engine, CHAIN)
    shard.hit(engine, CHAIN)
    (row,) = shard.state.model_usage()
    assert (row.model, row.asked_blocks, row.hit_local_blocks, row.hit_remote_blocks) == ("model", 4, 4, 0)
    assert shard.state.free_slab_count == 1
