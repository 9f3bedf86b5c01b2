"""Rules of core.acquire.warming and holds: what is brought here before it is asked for, and how long it stays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvservice.core import events as ev
from kvservice.core.acquire.holds import HOLD_SECONDS_MAX, PIN_NAME_CHARS_MAX
from kvservice.core.acquire.warming import WARM_STEP_BLOCKS, WARMS_MAX, WARMS_OF_TENANT_MAX
from kvservice.core.block.tenants import TenantLimits
from kvservice.core.block.window_groups import Window, WindowGroup, group_key
from kvservice.core.messages import MissReason, WarmResult
from kvservice.core.store.listing import SlotFilter
from kvservice.errors import Exhausted, InvalidRequest, NotAttached, Unavailable
from kvservice.testing.builders import (
    SMALL,
    CoreHarness,
    make_chain,
    make_layout,
    make_located,
    make_spec,
    run_of,
)
from kvservice.units import KiB, SlotIndex

CHAIN = make_chain(3)
OTHER = make_chain(3, "other")


def result(harness: CoreHarness, op: int) -> WarmResult:
    value = harness.reply(op)
    assert isinstance(value, WarmResult)
    return value


def stored(slab_count: int = 8, count: int = 3) -> CoreHarness:
    """A pool with a chain in it. A quarter of its slots may be held."""
    harness = CoreHarness(slab_count)
    harness.store(harness.attach(), CHAIN[:count])
    return harness


def arrive(harness: CoreHarness) -> None:
    """What the peer was asked for last comes."""
    harness.located(harness.locates[-1], make_located(harness.locates[-1].keys))
    harness.pulled(harness.pulls[-1], ev.PullResult.OK)


def idle(harness: CoreHarness) -> list[float]:
    page = harness.state.list_slots(SlotFilter(), SlotIndex(0), harness.now)
    return [slot.idle_seconds for slot in page.slots]


# -- Warm --


def test_what_is_here_is_held_for_the_time_asked_for() -> None:
    harness = stored()
    found = result(harness, harness.warm(CHAIN, hold=20.0))
    assert found == WarmResult(3, 3, (), 3, 20.0, MissReason.NONE)
    assert (harness.slots("leased"), harness.count("warm_local_blocks")) == (3, 3)
    harness.advance(19.0)
    assert harness.slots("leased") == 3
    harness.advance(1.5)
    assert (harness.slots("leased"), harness.slots("sealed")) == (0, 3)


def test_what_is_missing_is_fetched_and_named_by_its_node() -> None:
    harness = stored(count=1)
    op = harness.warm(CHAIN)
    harness.resolved(harness.resolves[-1].op, run_of(1, 2))
    assert harness.open(op)
    arrive(harness)
    assert result(harness, op) == WarmResult(3, 1, (("peer", 2),), 3, 30.0, MissReason.NONE)


def test_a_warm_is_no_request_and_no_use_of_a_block() -> None:
    harness = stored()
    before = idle(harness)
    harness.advance(1.0)
    harness.warm(CHAIN)
    assert idle(harness) == [seconds + 1.0 for seconds in before]
    assert (harness.count("acquires"), harness.count("asked_blocks")) == (0, 0)


def test_a_warm_ends_where_nobody_has_more() -> None:
    harness = stored(count=1)
    op = harness.warm(CHAIN)
    harness.resolved(harness.resolves[-1].op)
    assert result(harness, op) == WarmResult(3, 1, (), 1, 30.0, MissReason.NEVER_STORED)


def test_a_warm_of_nothing_holds_nothing() -> None:
    harness = CoreHarness(has_directory=False)
    harness.attach()
    assert result(harness, harness.warm(CHAIN)) == WarmResult(3, 0, (), 0, 30.0, MissReason.NEVER_STORED)


def test_only_a_few_blocks_are_fetched_at_a_time() -> None:
    """So a request for other blocks waits for one small pull at most, however much is warmed."""
    harness = CoreHarness(slab_count=40)
    engine = harness.attach()
    chain = make_chain(WARM_STEP_BLOCKS + 10, "long")
    first, second = harness.warm(chain), harness.warm(CHAIN)
    harness.resolved(harness.resolves[-1].op, run_of(0, len(chain)))
    assert [len(locate.keys) for locate in harness.locates] == [WARM_STEP_BLOCKS]
    urgent = harness.acquire(engine, OTHER)
    harness.resolved(urgent, run_of(0, 3))
    assert [len(locate.keys) for locate in harness.locates] == [WARM_STEP_BLOCKS, 3]
    arrive(harness)
    assert not harness.open(urgent)
    harness.located(harness.locates[0], make_located(harness.locates[0].keys))
    harness.pulled(harness.pulls[-1], ev.PullResult.OK)
    harness.resolved(harness.resolves[-1].op, run_of(WARM_STEP_BLOCKS, 10))
    assert len(harness.locates[-1].keys) == 10
    assert harness.open(first) and harness.open(second)
    arrive(harness)
    assert result(harness, first).fetched == (("peer", len(chain)),)
    harness.resolved(harness.resolves[-1].op)
    assert result(harness, second).miss is MissReason.NEVER_STORED


def test_a_flood_is_refused_and_delays_no_request() -> None:
    harness = CoreHarness(slab_count=8)
    engine = harness.attach()
    ops = [harness.warm(make_chain(2, str(number))) for number in range(WARMS_MAX)]
    with pytest.raises(Exhausted, match="wait to be warmed"):
        harness.reply(harness.warm(CHAIN))
    assert (len(harness.resolves), harness.count("warms_refused")) == (1, 1)
    urgent = harness.acquire(engine, OTHER)
    harness.fetch_all(urgent, OTHER)
    assert len(harness.result(urgent).blocks) == 3
    waiting = [resolve for resolve in harness.resolves if resolve.op != urgent]
    for op in ops:
        harness.resolved(waiting[-1].op)
        assert result(harness, op).miss is MissReason.NEVER_STORED
        waiting = harness.resolves


def test_many_that_wait_end_together_when_all_is_here() -> None:
    """They are worked off one after the other, not one inside the other."""
    harness = stored()
    blocking = harness.warm(OTHER)
    ops = [harness.warm(CHAIN) for _ in range(WARMS_MAX - 1)]
    harness.resolved(harness.resolves[-1].op)
    assert {result(harness, op).held for op in ops} == {3}
    assert result(harness, blocking).held == 0


def test_one_tenants_flood_leaves_room_for_others() -> None:
    harness = CoreHarness(tenants={"a": TenantLimits(), "b": TenantLimits()})
    for tenant in ("a", "b"):
        harness.attach(make_spec(tenant), tenant=tenant)
    ops = [harness.warm(make_chain(2, str(i)), tenant="a", spec=make_spec("a")) for i in range(WARMS_MAX)]
    assert harness.count("warms_refused") == WARMS_MAX - WARMS_OF_TENANT_MAX
    assert harness.open(ops[WARMS_OF_TENANT_MAX - 1]) and not harness.open(ops[WARMS_OF_TENANT_MAX])
    assert harness.open(harness.warm(CHAIN, tenant="b", spec=make_spec("b")))


def test_a_warm_that_waits_too_long_says_so() -> None:
    harness = CoreHarness()
    harness.attach()
    first, second = harness.warm(CHAIN, timeout=60.0), harness.warm(OTHER, timeout=2.0)
    assert harness.state.next_deadline() is not None
    harness.advance(3.0)
    assert harness.open(first)
    assert result(harness, second) == WarmResult(3, 0, (), 0, 30.0, MissReason.DEADLINE)


def test_a_warm_that_nobody_waits_for_makes_way() -> None:
    harness = stored()
    first, second, third = harness.warm(OTHER), harness.warm(OTHER[:2]), harness.warm(CHAIN)
    harness.send(ev.Cancel(second))
    harness.send(ev.Cancel(first))
    harness.send(ev.Cancel(first))
    assert result(harness, third).held == 3
    assert harness.open(first) and harness.open(second)


def test_a_tenant_holds_a_part_of_the_pool_the_newest_first() -> None:
    """The pool has 32 slots, and a quarter of its bytes are 8 of them."""
    harness = CoreHarness(slab_count=8)
    engine = harness.attach()
    prompts = [make_chain(3, str(number)) for number in range(4)]
    for prompt in prompts:
        harness.store(engine, prompt)
    for prompt in prompts:
        assert result(harness, harness.warm(prompt)).held == 3
    assert (harness.slots("leased"), harness.count("warm_let_go")) == (6, 2)
    long = make_chain(10, "long")
    harness.store(engine, long)
    assert result(harness, harness.warm(long)).held == 8
    assert harness.slots("leased") == 8


def test_a_tenants_budget_is_a_part_of_its_quota() -> None:
    limits = {"acme": TenantLimits(quota_bytes=8 * SMALL), "other": TenantLimits()}
    harness = CoreHarness(slab_count=8, tenants=limits)
    spec = make_spec("acme")
    harness.store(harness.attach(spec, "acme"), CHAIN)
    assert result(harness, harness.warm(CHAIN, tenant="acme", spec=spec)).held == 2
    with pytest.raises(NotAttached):
        harness.reply(harness.warm(CHAIN, tenant="other", spec=spec))


@pytest.mark.parametrize("lost", [False, True])
def test_window_blocks_are_held_with_their_prefix(lost: bool) -> None:
    """If one is lost, only a shorter prefix is held, and the answer says why."""
    group = WindowGroup(make_layout(10 * KiB), Window(sliding_tokens=17))
    spec = replace(make_spec(), window_groups=(group,))
    harness = CoreHarness(slab_count=8, has_directory=False)
    engine = harness.attach(spec)
    harness.store(engine, CHAIN)
    for position in range(2 if lost else 3):
        (ref,) = harness.reserve(engine, group=1)
        key = group_key(CHAIN[position], 1)
        (item,) = harness.items([ref], [key])
        harness.begin_seal(engine, (item._replace(parent=None, position=1 << 31 | position),))
        harness.digest_all()
    found = result(harness, harness.warm(CHAIN, spec=spec))
    assert (found.held, found.miss) == ((2, MissReason.WINDOW) if lost else (3, MissReason.NONE))
    assert harness.slots("leased") == (3 if lost else 4)


def test_an_engine_that_leaves_meanwhile_ends_the_fetch() -> None:
    harness = CoreHarness()
    engine = harness.attach()
    op = harness.warm(CHAIN)
    harness.send(ev.Detach(engine))
    assert result(harness, op).miss is MissReason.DETACHED


@pytest.mark.parametrize(
    ("keys", "hold", "timeout", "pin", "says"),
    [
        ((), 30.0, 5.0, "", "1 to 8192"),
        (CHAIN[:1] * 2, 30.0, 5.0, "", "is there twice"),
        (CHAIN, 0.0, 5.0, "", "held for more than 0 and at most 600 s"),
        (CHAIN, HOLD_SECONDS_MAX + 1, 5.0, "", "held for more than 0 and at most 600 s"),
        (CHAIN, 30.0, 0.0, "", "timeout of more than 0 and at most 600 s, not 0"),
        (CHAIN, 30.0, 5.0, "x" * (PIN_NAME_CHARS_MAX + 1), "a pin's name"),
        (CHAIN, 30.0, 5.0, "a\nb", "a pin's name"),
    ],
)
def test_a_warm_that_makes_no_sense_is_refused(keys: tuple, hold: float, timeout: float, pin: str, says: str) -> None:  # type: ignore[type-arg]
    harness = stored()
    with pytest.raises(InvalidRequest, match=says):
        harness.reply(harness.warm(keys, hold=hold, timeout=timeout, pin=pin))


def test_nothing_is_warmed_for_an_engine_that_is_not_here() -> None:
    harness = stored()
    with pytest.raises(NotAttached, match="no engine with this fingerprint"):
        harness.reply(harness.warm(CHAIN, spec=make_spec(dtype="fp8")))


def test_a_node_that_drains_holds_nothing() -> None:
    harness = stored()
    harness.reply(harness.warm(CHAIN))
    harness.reply(harness.warm(CHAIN, pin="system"))
    waiting = harness.warm((*CHAIN, *OTHER))
    harness.send(ev.Drain(timeout_seconds=10.0, handover=False))
    assert (harness.slots("leased"), harness.state.pins(harness.now)) == (0, ())
    harness.resolved(harness.resolves[-1].op)
    for op in (waiting, harness.warm(CHAIN)):
        with pytest.raises(Unavailable, match="drain"):
            harness.reply(op)
    assert harness.slots("leased") == 0


# -- pins --


def test_a_pin_stays_after_its_engine() -> None:
    harness = stored()
    engine = harness.attach(make_spec("second"))
    assert result(harness, harness.warm(CHAIN, pin="system")).held_seconds == 0.0
    harness.send(ev.Detach(engine))
    harness.advance(10_000.0)
    (pin,) = harness.state.pins(harness.now)
    assert (pin.name, pin.model, pin.blocks, pin.bytes, pin.age_seconds) == ("system", "model", 3, 3 * SMALL, 10_000.0)
    assert harness.state.next_deadline() is None


def test_a_pinned_block_is_never_evicted() -> None:
    harness = CoreHarness(slab_count=4)
    engine = harness.attach()
    harness.store(engine, CHAIN)
    harness.reply(harness.warm(CHAIN, pin="system"))
    harness.store(engine, make_chain(20, "flood"))
    assert set(CHAIN) <= harness.keys_held()
    op = harness.next_op()
    harness.send(ev.Unpin(op, "", "system"))
    ended = harness.reply(op)
    assert ended is not None and ended.name == "system"  # type: ignore[attr-defined]
    assert (harness.slots("leased"), harness.state.pins(harness.now)) == (0, ())
    again = harness.next_op()
    harness.send(ev.Unpin(again, "", "system"))
    assert harness.reply(again) is None


def test_a_name_that_is_pinned_again_names_the_new_prompt() -> None:
    harness = stored()
    harness.reply(harness.warm(CHAIN, pin="system"))
    harness.reply(harness.warm(CHAIN[:1], pin="system"))
    (pin,) = harness.state.pins(harness.now)
    assert (pin.blocks, harness.slots("leased")) == (1, 1)


def test_the_pins_of_a_tenant_end_with_it() -> None:
    """Only the tenant itself could unpin them."""
    harness = CoreHarness(slab_count=4, tenants={"a": TenantLimits(), "b": TenantLimits()})
    for tenant, prompt in (("a", CHAIN[:1]), ("b", OTHER[:1])):
        harness.store(harness.attach(make_spec(tenant), tenant=tenant), prompt)
        harness.reply(harness.warm(prompt, pin="system", tenant=tenant, spec=make_spec(tenant)))
    harness.send(ev.SetTenants({"b": TenantLimits(in_flight=9)}))
    assert [pin.account for pin in harness.state.pins(harness.now)] == ["b"]
    assert harness.slots("leased") == 1


def test_pins_that_do_not_fit_their_part_are_refused() -> None:
    """A quarter of 16 slots."""
    harness = CoreHarness(slab_count=4)
    engine = harness.attach()
    for prompt in (CHAIN, OTHER):
        harness.store(engine, prompt)
    harness.reply(harness.warm(CHAIN, pin="first"))
    with pytest.raises(Exhausted, match="unpin another prompt"):
        harness.reply(harness.warm(OTHER, pin="second"))
    assert (len(harness.state.pins(harness.now)), harness.slots("leased")) == (1, 3)
    assert harness.count("pins_refused") == 1


def test_a_prompt_of_which_nothing_is_here_is_not_pinned() -> None:
    harness = CoreHarness(has_directory=False)
    harness.attach()
    assert result(harness, harness.warm(CHAIN, pin="system")).held == 0
    assert harness.state.pins(harness.now) == ()


def test_several_that_are_late_together_are_all_answered() -> None:
    harness = CoreHarness()
    harness.attach()
    ops = [harness.warm(CHAIN, timeout=2.0) for _ in range(3)]
    harness.advance(3.0)
    assert [result(harness, op).miss for op in ops] == [MissReason.DEADLINE] * 3
    assert harness.state.next_deadline() is None
