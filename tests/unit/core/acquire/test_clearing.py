"""Rules of core.acquire.clearing: what a clear takes from memory and tiers, what is dropped later, and ages."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvservice.core import actions as act
from kvservice.core import events as ev
from kvservice.core.acquire import clearing
from kvservice.core.acquire.clearing import CLEAR_MARKS_MAX, ClearResult
from kvservice.core.block.marks import FUTURE_SECONDS_MAX, MARK_SECONDS, Mark, MarkKind
from kvservice.core.messages import MissReason, SealStatus, TakeOverItem, WarmResult
from kvservice.core.slices import SliceSizes
from kvservice.core.tier.rules import TierRules, WriteMoment
from kvservice.core.tier.tier_block import TierBlock
from kvservice.errors import InvalidRequest
from kvservice.testing.builders import (
    SMALL,
    WALL,
    CoreHarness,
    make_chain,
    make_holder,
    make_located,
    make_spec,
    run_of,
)
from kvservice.units import BlockKey, MiB, SpanRoute

CHAIN, OTHER = make_chain(3), make_chain(3, "other")
DISK = TierRules("disk", budget_bytes=100 * MiB, write=WriteMoment.STORED)
OBJECTS = TierRules("objects", is_shared=True, write=WriteMoment.STORED)
MODEL = (MarkKind.MODEL, "model")


def erased(harness: CoreHarness) -> set[bytes]:
    return {key for work in harness.tier_work if isinstance(work, act.Erase) for key in work.keys}


def test_a_clear_takes_what_it_names_and_nothing_else() -> None:
    harness = CoreHarness(slab_count=4)
    other = make_spec("other", "other model")
    harness.store(harness.attach(), CHAIN)
    harness.store(harness.attach(other), OTHER)
    assert harness.clear(*MODEL) == ClearResult(3, 3 * SMALL, 0, 0)
    assert harness.keys_held() == set(OTHER)
    assert harness.retracted == list(CHAIN) and len(harness.headers) == 3
    assert harness.clear(MarkKind.PROMPT, keys=OTHER[1:]).blocks == 2
    assert harness.clear(MarkKind.EVERYTHING).blocks == 1
    assert not harness.headers and harness.count("evicted_cleared") == 6


def test_a_restart_finds_no_cleared_block() -> None:
    """Evicted blocks stay in free slots, where a restart would find them."""
    harness = CoreHarness(slab_count=1)
    engine = harness.attach()
    harness.store(engine, make_chain(4, "early"))
    (ref,) = harness.reserve(engine)
    op = harness.next_op()
    harness.send(ev.Abort(op, engine, (ref,)))
    harness.clear(*MODEL)
    harness.restart()
    assert not harness.keys_held()


def test_what_is_read_is_given_up_when_that_ends() -> None:
    harness = CoreHarness()
    engine = harness.attach()
    harness.store(engine, CHAIN)
    lease = harness.hit(engine, CHAIN).lease_id
    assert harness.clear(*MODEL) == ClearResult(3, 3 * SMALL, 3, 0)
    assert (harness.slots("leased"), len(harness.headers), harness.keys_held()) == (3, 3, set())
    assert harness.hit(engine, CHAIN).blocks == ()
    harness.advance(1.0)
    assert harness.store(engine, CHAIN[:1]) == [SealStatus.SEALED], "the same prompt, computed again"
    harness.release(engine, lease)
    assert (harness.slots("leased"), harness.slots("sealed"), len(harness.headers)) == (0, 1, 1)


def test_what_is_held_for_nobody_is_not_held_after_a_clear() -> None:
    harness = CoreHarness(slab_count=8)
    engine = harness.attach()
    harness.store(engine, CHAIN)
    harness.store(engine, OTHER)
    harness.reply(harness.warm(CHAIN))
    harness.reply(harness.warm(CHAIN, pin="system"))
    harness.reply(harness.warm(OTHER, pin="other"))
    harness.clear(MarkKind.PROMPT, keys=CHAIN)
    assert [pin.name for pin in harness.state.pins(harness.now)] == ["other"]
    assert (harness.slots("leased"), harness.keys_held()) == (3, set(OTHER))


@pytest.mark.parametrize("pin", ["", "system"])
def test_a_warm_holds_nothing_that_a_clear_took_meanwhile(pin: str) -> None:
    """Its blocks are pinned in slices, and the clear comes between two of them."""
    harness = CoreHarness(slab_count=8, slices=SliceSizes(blocks=1))
    harness.store(harness.attach(), CHAIN)
    harness.waits = True
    op = harness.warm(CHAIN, pin=pin)
    harness.clear(MarkKind.PROMPT, keys=CHAIN)
    assert harness.slots("leased") == 1, "of the first slice"
    while harness.turns:
        harness.go_on()
    harness.resolved(op)
    result = harness.reply(op)
    assert isinstance(result, WarmResult) and (result.held, result.miss) == (0, MissReason.NEVER_STORED)
    assert not harness.state.pins(harness.now) and harness.slots("leased") == 0


def test_a_seal_that_began_before_is_dropped() -> None:
    harness = CoreHarness()
    engine = harness.attach()
    refs = harness.reserve(engine, 2)
    op = harness.begin_seal(engine, harness.items(refs[:1], CHAIN))
    harness.clear(MarkKind.PROMPT, keys=CHAIN)
    harness.digest_all()
    assert harness.statuses(op) == [SealStatus.STALE]
    harness.advance(1.0)
    op = harness.begin_seal(engine, harness.items(refs[1:], OTHER))
    harness.digest_all()
    assert harness.statuses(op) == [SealStatus.SEALED], "another prompt"
    assert harness.store(engine, CHAIN) == [SealStatus.SEALED] * 3, "computed after it"
    assert harness.count("seal_cleared") == 1


def test_a_fetch_that_began_before_is_dropped() -> None:
    harness = CoreHarness()
    op = harness.acquire(harness.attach(), CHAIN)
    harness.resolved(op, run_of(0, 3))
    harness.located(harness.locates[-1], make_located(CHAIN, stored_at=WALL + 99.0))
    harness.clear(*MODEL)
    harness.pulled(harness.pulls[-1], ev.PullResult.OK)
    assert (harness.result(op).miss, harness.keys_held()) == (MissReason.STALE, set())
    assert harness.count("arrived_cleared") == 3


@pytest.mark.parametrize(("stored_at", "count"), [(0.0, 0), (WALL + 50.0, 0), (WALL + 190.0, 3)])
def test_a_node_that_was_not_reached_gives_nothing_old(stored_at: float, count: int) -> None:
    harness = CoreHarness()
    engine = harness.attach()
    harness.clear(*MODEL)
    harness.advance(100.0)
    op = harness.acquire(engine, CHAIN)
    harness.resolved(op, run_of(0, 3))
    harness.located(harness.locates[-1], make_located(CHAIN, stored_at=stored_at))
    harness.pulled(harness.pulls[-1], ev.PullResult.OK)
    assert len(harness.result(op).blocks) == count
    assert all(block.stored_at == stored_at for block in harness.state.blocks())
    assert harness.count("arrived_too_old") == 3 - count


def test_a_leaving_node_hands_over_nothing_that_was_cleared() -> None:
    harness = CoreHarness()
    harness.clear(MarkKind.PROMPT, keys=CHAIN[:1])
    harness.advance(1.0)
    items = tuple(TakeOverItem(key, None, 0, SpanRoute(0), 1.0) for key in CHAIN[:2])
    op = harness.next_op()
    harness.send(ev.PeerTakeOver(op, harness.state.epoch, make_holder(), SMALL, items, 5.0))
    harness.located(harness.locates[-1], make_located(CHAIN[:2], stored_at=WALL))
    harness.pulled(harness.pulls[-1], ev.PullResult.OK)
    assert harness.keys_held() == {CHAIN[1]}
    assert harness.reply(op).kept == (False, True)  # type: ignore[attr-defined]


def test_a_clear_takes_from_tiers_also_what_is_being_written() -> None:
    harness = CoreHarness(tiers=(DISK,))
    engine = harness.attach()
    harness.store(engine, CHAIN[:2])
    harness.write_all()
    harness.store(engine, CHAIN, start=2)
    (write,) = harness.writes()
    found = harness.clear(*MODEL)
    assert (found.blocks, found.reading, found.tier_blocks) == (3, 1, 3)
    harness.send(ev.WrittenDown(write.job, (True,)))
    assert erased(harness) == set(CHAIN)
    assert (harness.slots("leased"), harness.state.inventory()) == (0, [])
    assert set(harness.retracted) == set(CHAIN)


def test_what_is_stored_after_a_clear_is_written_to_stores_again() -> None:
    """What lies there is of before the clear, so nobody may use it."""
    harness = CoreHarness(tiers=(OBJECTS,))
    engine = harness.attach()
    harness.store(engine, CHAIN)
    assert harness.write_all("objects") == list(CHAIN)
    harness.clear(*MODEL)
    harness.advance(1.0)
    harness.store(engine, CHAIN)
    assert harness.write_all("objects") == list(CHAIN)


def test_a_tier_brings_nothing_old_back_after_a_restart() -> None:
    """Nor what is older than any mark is kept, nor what nobody knows the age of."""
    harness = CoreHarness(tiers=(DISK,))
    harness.marks = (Mark(MarkKind.PROMPT, WALL + 50.0, keys=CHAIN[:2]),)
    harness.restart()
    ages = {CHAIN[0]: WALL + 40.0, CHAIN[1]: 0.0, CHAIN[2]: WALL - MARK_SECONDS, OTHER[0]: 0.0, OTHER[1]: WALL}
    blocks = tuple(TierBlock(key, SMALL, 5, 0, SpanRoute(0), stored_at=at) for key, at in ages.items())
    harness.send(ev.TierFound("disk", blocks))
    assert {key for key, _ in harness.state.inventory()} == set(OTHER[:2])
    assert erased(harness) == set(CHAIN) and harness.count("tier_disk_found_too_old") == 3


def test_blocks_of_nobody_knows_what_go_with_every_model() -> None:
    harness = CoreHarness()
    harness.store(harness.attach(), CHAIN)
    harness.restart()
    assert harness.clear(MarkKind.MODEL, "whatever").blocks == 3


@pytest.mark.parametrize("late", [FUTURE_SECONDS_MAX + 1, -MARK_SECONDS])
def test_a_clear_by_a_wrong_clock_is_refused(late: float) -> None:
    harness = CoreHarness()
    with pytest.raises(InvalidRequest, match="set the clocks"):
        harness.clear(*MODEL, at=WALL + harness.now + late)


def test_a_clear_counts_by_the_clock_as_it_is_now() -> None:
    """The machine started before its clock was set, or it slept: later it must not refuse the time of day."""
    harness = CoreHarness()
    engine = harness.attach()
    harness.store(engine, CHAIN)
    late = 2 * FUTURE_SECONDS_MAX
    with pytest.raises(InvalidRequest, match="set the clocks"):
        harness.clear(*MODEL, at=WALL + late)
    harness.send(ev.ClockSet(WALL + late))
    assert harness.clear(*MODEL, at=WALL + late).blocks == len(CHAIN)
    assert harness.count("clock_steps") == 1


@pytest.mark.parametrize(("limit", "held"), [(100.0, OTHER), (0.0, CHAIN + OTHER)])
def test_what_a_clock_ahead_made_young_does_not_stay(limit: float, held: tuple[BlockKey, ...]) -> None:
    """Its age would reach the limit an hour late. Without a limit it may stay."""
    harness = CoreHarness(slab_count=2, tiers=(DISK,), max_age=limit)
    engine = harness.attach()
    harness.send(ev.ClockSet(WALL + 3600.0))
    harness.store(engine, CHAIN)
    harness.send(ev.ClockSet(WALL))
    harness.advance(1.0)
    harness.store(engine, OTHER)
    assert harness.keys_held() == set(held)
    harness.send(ev.ClockSet(WALL + 3.0))
    assert harness.keys_held() == set(held), "a step ahead makes nothing too young"


@pytest.mark.parametrize("count", [0, CLEAR_MARKS_MAX + 1])
def test_a_clear_of_nothing_or_too_much_is_refused(count: int) -> None:
    harness = CoreHarness()
    op = harness.next_op()
    harness.send(ev.Clear(op, (Mark(MarkKind.EVERYTHING, WALL),) * count))
    with pytest.raises(InvalidRequest, match="marks"):
        harness.reply(op)


# -- slices --


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clearing, "SLICE", 2)


def begun(harness: CoreHarness, kind: MarkKind, name: str = "") -> int:
    op = harness.next_op()
    harness.send(ev.Clear(op, (Mark(kind, harness.state.freshness.wall(harness.now), name),)))
    return op


@pytest.mark.usefixtures("small_slices")
def test_no_step_of_a_clear_looks_at_more_than_a_slice() -> None:
    harness = CoreHarness(slab_count=8, tiers=(DISK,))
    engine = harness.attach()
    harness.store(engine, make_chain(7))
    harness.write_all()
    op = begun(harness, *MODEL)
    memory, steps = [len(harness.keys_held())], 0
    while harness.open(op):
        assert harness.state.next_deadline() == 0.0
        erased_before = len(erased(harness))
        harness.advance(0.0)
        memory.append(len(harness.keys_held()))
        assert len(erased(harness)) - erased_before <= 2
        steps += 1
    assert memory[0] == 5 and memory[-1] == 0 and steps >= 7
    assert all(before - after <= 2 for before, after in pairwise(memory))
    assert harness.reply(op) == ClearResult(7, 7 * SMALL, 0, 7)
    assert erased(harness) == set(make_chain(7)) and harness.state.next_deadline() is None


@pytest.mark.usefixtures("small_slices")
def test_what_is_stored_after_a_walk_stays() -> None:
    harness = CoreHarness(slab_count=8)
    engine = harness.attach()
    harness.store(engine, make_chain(7))
    op = begun(harness, *MODEL)
    harness.now += 0.001
    assert harness.store(engine, OTHER) == [SealStatus.SEALED] * 3
    assert harness.cleared(op).blocks in range(7, 11)
    assert harness.keys_held() <= set(OTHER)
    harness.store(engine, CHAIN)
    assert set(CHAIN) <= harness.keys_held()


@pytest.mark.usefixtures("small_slices")
def test_what_leaves_memory_during_a_walk_is_not_found_again() -> None:
    """Neither in the free slot where it lay, nor in a tier that it was being written into."""
    harness = CoreHarness(slab_count=8, tiers=(DISK,))
    engine = harness.attach()
    chain = make_chain(7)
    harness.store(engine, chain)
    op = begun(harness, *MODEL)
    harness.write_all()
    harness.now += 0.001
    harness.clear(MarkKind.PROMPT, keys=chain[5:])
    assert harness.cleared(op).tier_blocks == 7
    assert harness.state.inventory() == [] and erased(harness) == set(chain)
    harness.restart()
    assert not harness.keys_held()


@pytest.mark.usefixtures("small_slices")
def test_clears_end_in_the_order_in_which_they_came() -> None:
    harness = CoreHarness(slab_count=8)
    harness.store(harness.attach(), make_chain(7))
    first, second = begun(harness, *MODEL), begun(harness, MarkKind.EVERYTHING)
    harness.send(ev.Cancel(first))  # who asked has gone: the marks stay, and the walk goes on
    assert harness.cleared(first).blocks == 7 and harness.open(second)
    assert harness.cleared(second).blocks == 0


@pytest.mark.usefixtures("small_slices")
def test_old_blocks_go_in_slices_too() -> None:
    harness = CoreHarness(slab_count=8, max_age=60.0, tiers=(DISK,))
    harness.store(harness.attach(), make_chain(7))
    harness.write_all()
    harness.now += 61.0
    left = [7]
    while left[-1]:
        deadline = harness.state.next_deadline()
        assert deadline is not None and deadline <= harness.now
        harness.advance(0.0)
        left.append(len(harness.keys_held()))
    assert left == [7, 5, 3, 1, 0]
    while harness.state.next_deadline() == 0.0:
        harness.advance(0.0)
    assert erased(harness) == set(make_chain(7))


# -- the age limit --


def test_what_reaches_the_age_limit_is_dropped() -> None:
    harness = CoreHarness(max_age=60.0, tiers=(DISK,))
    engine = harness.attach()
    harness.store(engine, CHAIN)
    harness.write_all()
    harness.advance(30.0)
    harness.store(engine, OTHER[:1])
    harness.clear(MarkKind.PROMPT, keys=CHAIN[2:])
    harness.advance(31.0)
    assert harness.keys_held() == {OTHER[0]} and erased(harness) == set(CHAIN)
    assert harness.count("evicted_aged") == 2
    harness.advance(0.1)
    deadline = harness.state.next_deadline()
    assert deadline is not None and harness.now < deadline <= harness.now + 30.0


def test_the_age_counts_from_where_a_block_was_computed() -> None:
    harness = CoreHarness(max_age=60.0)
    engine = harness.attach()
    op = harness.acquire(engine, CHAIN)
    harness.resolved(op, run_of(0, 3))
    harness.located(harness.locates[-1], make_located(CHAIN, stored_at=WALL + 50.0))
    harness.pulled(harness.pulls[-1], ev.PullResult.OK)
    harness.release(engine, harness.result(op).lease_id)
    harness.advance(11.0)
    assert not harness.keys_held()


def test_ages_of_blocks_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an age limit of a day, a busy pool would remember a day of blocks."""
    monkeypatch.setattr(clearing, "AGES_MIN", 8)
    monkeypatch.setattr(clearing, "SLICE", 4)
    harness = CoreHarness(slab_count=1, max_age=3600.0)
    engine = harness.attach()
    held = 0
    for number in range(60):
        harness.store(engine, make_chain(2, str(number)))
        while harness.state.next_deadline() == 0.0:
            harness.advance(0.0)
        harness.advance(1.0)
        held = max(held, len(harness.keys_held()))
        assert len(harness.state._clearing._by_age) <= 2 * held + 8 + 2
    assert harness.count("evicted_pressure") > 60
    harness.advance(3540.0)
    assert len(harness.keys_held()) == held
    harness.advance(60.0)
    for _ in range(held):  # a slice at a time
        harness.advance(0.0)
    assert not harness.keys_held() and harness.count("evicted_aged") == held


def test_blocks_of_unknown_age_are_dropped_after_a_restart() -> None:
    harness = CoreHarness(max_age=60.0)
    harness.store(harness.attach(), CHAIN)
    harness.restart()
    assert harness.state.next_deadline() == 0.0
    harness.advance(0.0)
    assert not harness.keys_held()


def test_a_shared_tier_is_cleared_by_the_mark_alone() -> None:
    """Nobody knows here what other nodes stored in it; what this node is writing at the moment is erased."""
    harness = CoreHarness(tiers=(TierRules("objects", is_shared=True, write=WriteMoment.STORED),))
    harness.store(harness.attach(), CHAIN)
    assert harness.clear(*MODEL).tier_blocks == 1, "the first is being written"
    harness.written(harness.writes("objects")[0], True)
    assert harness.erased("objects") == [CHAIN[0]]
