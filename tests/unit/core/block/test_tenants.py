"""Rules of accounts and quotas in one shard: who is charged, whose blocks go, and what is never taken."""

from __future__ import annotations

import pytest

from kvservice.core import events as ev
from kvservice.core.attachments import ATTACHMENTS_OF_TENANT_MAX
from kvservice.core.block.tenants import OTHERS, Accounts, TenantLimits, TenantUsage, tag_of
from kvservice.core.messages import MissReason, SealStatus, TakeOverItem
from kvservice.errors import Exhausted, FingerprintMismatch, InvalidRequest
from kvservice.testing.builders import LARGE, SMALL, CoreHarness, make_chain, make_holder, make_located, make_spec
from kvservice.units import MiB, SpanRoute

QUOTA = TenantLimits(quota_bytes=3 * SMALL)
FREE = TenantLimits()


def harness_with(slabs: int = 1, **tenants: TenantLimits) -> CoreHarness:
    return CoreHarness(slab_count=slabs, tenants=tenants)  # 4 small slots a slab


def usage(harness: CoreHarness, tenant: str) -> TenantUsage:
    return next(row for row in harness.state.tenants() if row.name == tenant)


def test_a_tenant_at_its_quota_gives_its_own_oldest_block() -> None:
    harness = harness_with(2, a=QUOTA, b=FREE)
    a, b = harness.attach(tenant="a"), harness.attach(tenant="b")
    theirs, first, second = make_chain(2, "b"), make_chain(3, "one"), make_chain(2, "two")
    harness.store(b, theirs)
    harness.store(a, first)
    assert harness.store(a, second) == [SealStatus.SEALED] * 2
    assert harness.keys_held() == {*theirs, first[0], *second}
    assert (usage(harness, "a").used_bytes, usage(harness, "a").counters["evicted"]) == (3 * SMALL, 2)


def test_a_tenant_with_all_blocks_leased_gets_fewer() -> None:
    """It is told the reason."""
    harness = harness_with(2, a=QUOTA)
    a = harness.attach(tenant="a")
    chain = make_chain(2)
    harness.store(a, chain)
    harness.hit(a, chain)
    assert len(harness.reserve(a, 4)) == 1
    assert usage(harness, "a").counters == {"quota_refused": 3}
    assert harness.count("quota_refused") == 3


def test_nobody_is_pushed_below_its_quota_by_another() -> None:
    harness = harness_with(1, a=QUOTA, hot=FREE)
    a, hot = harness.attach(tenant="a"), harness.attach(tenant="hot")
    mine = make_chain(3, "mine")
    harness.store(a, mine)
    for number in range(4):
        harness.store(hot, make_chain(3, f"hot{number}"))
    assert set(mine) <= harness.keys_held()
    assert harness.store(a, make_chain(1, "more")) == [SealStatus.SEALED]


def test_whoever_has_no_quota_gives_to_whoever_has() -> None:
    harness = harness_with(1, a=QUOTA, hot=FREE)
    a, hot = harness.attach(tenant="a"), harness.attach(tenant="hot")
    harness.store(hot, make_chain(4, "hot"))
    assert harness.store(a, make_chain(3, "mine")) == [SealStatus.SEALED] * 3


def test_a_slab_is_not_taken_from_who_would_miss_its_quota() -> None:
    harness = harness_with(1, a=QUOTA, big=FREE)
    a, big = harness.attach(tenant="a"), harness.attach(make_spec("big", "large", payload_bytes=LARGE), "big")
    harness.store(a, make_chain(3, "mine"))
    assert harness.reserve(big, 1) == []
    assert len(harness.keys_held()) == 3


def test_a_smaller_quota_is_reached_by_own_stores() -> None:
    harness = harness_with(1, a=FREE)
    a = harness.attach(tenant="a")
    harness.store(a, make_chain(4, "old"))
    harness.set_tenants(a=TenantLimits(quota_bytes=2 * SMALL))
    assert harness.store(a, make_chain(1, "new")) == [SealStatus.SEALED]
    assert usage(harness, "a").used_bytes == 2 * SMALL


def test_quotas_beyond_the_pool_are_protected_in_proportion() -> None:
    accounts = Accounts(100)
    accounts.set_limits({"a": TenantLimits(150), "b": TenantLimits(50)})
    accounts.used.update(a=75, b=26)
    assert not accounts.can_spare("a", 1) and accounts.can_spare("b", 1) and not accounts.can_spare("b", 2)


def test_fetched_blocks_are_charged_to_whoever_asked() -> None:
    harness = harness_with(1, a=QUOTA)
    a = harness.attach(tenant="a")
    chain = make_chain(4)
    op = harness.acquire(a, chain)
    harness.fetch_all(op, chain)
    assert len(harness.result(op).blocks) == 3
    assert harness.result(op).miss is MissReason.QUOTA
    assert usage(harness, "a").used_bytes == 3 * SMALL


def test_in_flight_counts_what_is_reserved_and_what_is_fetched() -> None:
    harness = harness_with(2, a=TenantLimits(in_flight=3))
    a = harness.attach(tenant="a")
    refs = harness.reserve(a, 2)
    chain = make_chain(2)
    op = harness.acquire(a, chain)
    harness.fetch_all(op, chain)
    assert len(harness.result(op).blocks) == 1 and harness.result(op).miss is MissReason.QUOTA
    assert len(harness.reserve(a, 2)) == 1
    assert usage(harness, "a").counters == {"in_flight_refused": 2}
    op = harness.next_op()
    harness.send(ev.Abort(op, a, tuple(refs)))
    assert usage(harness, "a").in_flight == 1


def test_a_restarted_shard_charges_the_same_tenants() -> None:
    harness = harness_with(2, a=QUOTA, b=FREE)
    a, b = harness.attach(tenant="a"), harness.attach(tenant="b")
    harness.store(a, make_chain(2, "a"))
    harness.store(b, make_chain(1, "b"))
    harness.reserve(a, 1)
    harness.restart()
    assert (usage(harness, "a").used_bytes, usage(harness, "b").used_bytes) == (3 * SMALL, SMALL)


def test_a_tag_of_two_tenants_charges_nobody() -> None:
    names = [f"t{number}" for number in range(600)]
    tags = [tag_of(name) for name in names]
    one, other = next(
        (a, b) for i, a in enumerate(names) for b in names[i + 1 :] if tags[names.index(a)] == tags[names.index(b)]
    )
    harness = harness_with(1, **{one: FREE, other: FREE})
    harness.store(harness.attach(tenant=one), make_chain(1))
    harness.restart()
    assert usage(harness, one).used_bytes == usage(harness, other).used_bytes == 0
    assert len(harness.keys_held()) == 1


def test_blocks_taken_over_are_charged_to_their_tenants() -> None:
    """They stay within the tenants' quotas."""
    harness = harness_with(2, a=QUOTA, b=FREE)
    chain, other = make_chain(4, "a"), make_chain(1, "b")
    items = [TakeOverItem(key, None, 0, SpanRoute(1), 1.0, tag_of("a")) for key in chain]
    items.append(TakeOverItem(other[0], None, 0, SpanRoute(1), 1.0, tag_of("b")))
    op = harness.next_op()
    harness.send(ev.PeerTakeOver(op, harness.state.epoch, make_holder("leaver"), SMALL, tuple(items), 5.0))
    harness.located(harness.locates[-1], make_located([*chain, *other]))
    harness.pulled(harness.pulls[-1], ev.PullResult.OK)
    assert harness.keys_held() == {*chain[:3], *other}
    assert (usage(harness, "a").used_bytes, usage(harness, "b").used_bytes) == (3 * SMALL, SMALL)


def test_a_tenants_older_block_makes_room_for_one_taken_over() -> None:
    harness = harness_with(2, a=QUOTA)
    old, new = make_chain(3, "old"), make_chain(1, "new")
    harness.store(harness.attach(tenant="a"), old)
    harness.advance(100.0)
    items = (TakeOverItem(new[0], None, 0, SpanRoute(1), 1.0, tag_of("a")),)
    op = harness.next_op()
    harness.send(ev.PeerTakeOver(op, harness.state.epoch, make_holder("leaver"), SMALL, items, 5.0))
    harness.located(harness.locates[-1], make_located(new))
    harness.pulled(harness.pulls[-1], ev.PullResult.OK)
    assert harness.keys_held() == {*old[:2], *new}


def test_another_tenants_fingerprint_is_nobodys_business() -> None:
    harness = harness_with(1, a=FREE, b=FREE)
    harness.attach(make_spec("one", dtype="bf16"), "a")
    harness.attach(make_spec("two", dtype="int8"), "b")
    with pytest.raises(FingerprintMismatch):
        harness.attach(make_spec("three", dtype="int8"), "a")
    with pytest.raises(InvalidRequest, match="another engine"):
        harness.attach(make_spec("one", dtype="bf16"), "b")
    assert [len(harness.state.engine_stats(who).engines) for who in ("a", "b", None)] == [1, 1, 2]


def test_many_tenants_make_a_bounded_number_of_rows() -> None:
    accounts = Accounts(MiB)
    accounts.set_limits({f"t{number}": TenantLimits(1) for number in range(10_000)})
    accounts.count("t9999", "evicted", 3)
    rows = accounts.usage()
    assert len(rows) == 65 and rows[-1].name == OTHERS
    assert rows[-1].counters == {"evicted": 3}


def test_one_tenants_engines_leave_room_for_others() -> None:
    harness = harness_with(1, a=FREE, b=FREE)
    for number in range(ATTACHMENTS_OF_TENANT_MAX):
        harness.attach(make_spec(f"a{number}"), "a")
    with pytest.raises(Exhausted, match="of this tenant"):
        harness.attach(make_spec("more"), "a")
    assert harness.attach(make_spec("b"), "b")


def test_a_tenant_that_is_removed_takes_its_counters_along() -> None:
    harness = harness_with(a=QUOTA, b=FREE)
    attachment = harness.attach(tenant="a")
    harness.store(attachment, make_chain(3))
    harness.store(attachment, make_chain(2, "beyond its quota"))
    assert usage(harness, "a").counters["evicted"] == 2
    harness.set_tenants(b=FREE)
    assert "a" not in {row.name for row in harness.state.tenants()}
    harness.set_tenants(a=QUOTA, b=FREE)
    assert not usage(harness, "a").counters.get("evicted")
