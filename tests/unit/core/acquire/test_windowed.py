"""A shard's promises to an engine with a window: all that a hit needs is leased, or the hit is shorter, or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvservice.core import events as ev
from kvservice.core.acquire.windowed import STATES_TRIED_MAX
from kvservice.core.block.keys import span_route
from kvservice.core.block.window_groups import STATE_EVERY, WINDOW_BIT, Window, WindowGroup, group_key
from kvservice.core.messages import AcquireResult, EngineSpec, FollowResult, Handoff, HandoffState, MissReason, SealItem
from kvservice.errors import InvalidRequest
from kvservice.testing.builders import (
    SMALL,
    CoreHarness,
    make_chain,
    make_holder,
    make_layout,
    make_located,
    make_spec,
    run_of,
)
from kvservice.units import AttachmentId, BlockKey, HandoffId, NodeId

LARGE = 2 * SMALL  # what a slot of group 1 holds here
WINDOW_BLOCKS = 3
WINDOWED = WindowGroup(make_layout(LARGE), Window(sliding_tokens=WINDOW_BLOCKS * 16))


def spec(name: str = "engine") -> EngineSpec:
    return replace(make_spec(name), window_groups=(WINDOWED,))


@pytest.fixture
def harness() -> CoreHarness:
    return CoreHarness(slab_count=6)


def window_keys(chain: Sequence[BlockKey]) -> list[BlockKey]:
    return [group_key(key, 1) for key in chain]


def store_window(
    harness: CoreHarness, engine: AttachmentId, chain: Sequence[BlockKey], positions: Sequence[int]
) -> None:
    if not positions:
        return
    keys = window_keys(chain)
    refs = harness.reserve(engine, len(positions), group=1)
    for ref, i in zip(refs, positions, strict=True):
        harness.write(ref, keys[i])
    items = tuple(
        SealItem(ref, keys[i], None, WINDOW_BIT | i, span_route(keys, i))
        for ref, i in zip(refs, positions, strict=True)
    )
    harness.begin_seal(engine, items)
    harness.digest_all()


def answer(harness: CoreHarness, op: int) -> AcquireResult:
    """Nobody else holds anything."""
    while harness.open(op):
        harness.resolved(harness.resolves[-1].op)
    return harness.result(op)


def test_hit_leases_the_prefix_and_the_window_before_its_end(harness: CoreHarness) -> None:
    chain = make_chain(8)
    engine = harness.attach(spec())
    harness.store(engine, chain)
    store_window(harness, engine, chain, range(8))
    result = answer(harness, harness.acquire(engine, chain))
    assert (len(result.blocks), [len(refs) for refs in result.window_blocks]) == (8, [WINDOW_BLOCKS])
    assert result.miss is MissReason.NONE
    assert harness.slots("leased") == 8 + WINDOW_BLOCKS
    headers = [harness.headers[ref.slot] for ref in result.window_blocks[0]]
    assert [header.key for header in headers] == window_keys(chain)[5:]
    harness.release(engine, result.lease_id)
    assert harness.slots("leased") == 0


@pytest.mark.parametrize(
    ("stored", "hit", "window"),
    [
        ((0, 1, 2, 3, 4, 5, 6), 7, 3),  # the last one is missing
        ((0, 1, 2, 3, 4, 7), 5, 3),  # two in the window of the end
        ((0, 1), 2, 2),  # less than a window from the beginning is a whole one
        ((1, 2, 5), 0, 0),
        ((), 0, 0),
        ((5, 6, 7), 8, 3),
    ],
)
def test_gap_in_a_window_shortens_the_hit(harness: CoreHarness, stored: tuple[int, ...], hit: int, window: int) -> None:
    chain = make_chain(8)
    engine = harness.attach(spec())
    harness.store(engine, chain)
    store_window(harness, engine, chain, stored)
    result = answer(harness, harness.acquire(engine, chain))
    assert (len(result.blocks), [len(refs) for refs in result.window_blocks]) == (hit, [window])
    assert (result.miss is MissReason.WINDOW) == (hit < 8) == bool(harness.count("acquires_cut_window"))
    assert harness.slots("leased") == hit + window
    assert bool(result.lease_id) == bool(hit)


def test_gap_in_the_chain_ends_the_hit_where_its_window_is(harness: CoreHarness) -> None:
    chain = make_chain(8)
    engine = harness.attach(spec())
    harness.store(engine, chain[:6])
    store_window(harness, engine, chain, range(8))
    result = answer(harness, harness.acquire(engine, chain))
    assert len(result.blocks) == 6
    assert [harness.headers[ref.slot].key for ref in result.window_blocks[0]] == window_keys(chain)[3:6]


def test_chain_and_window_are_fetched_from_a_peer(harness: CoreHarness) -> None:
    chain = make_chain(8)
    engine = harness.attach(spec())
    op = harness.acquire(engine, chain)
    harness.fetch_all(harness.resolves[-1].op, chain)
    assert harness.open(op), "promised without the window"
    resolve = harness.resolves[-1]
    keys = window_keys(chain)
    assert (list(resolve.chain), resolve.start) == (keys, 5)
    harness.resolved(resolve.op, run_of(5, 3))
    assert list(harness.locates[-1].keys) == keys[5:]
    harness.located(harness.locates[-1], make_located(keys[5:], length=LARGE))
    harness.pulled(harness.pulls[-1], ev.PullResult.OK)
    result = harness.result(op)
    assert (len(result.blocks), len(result.window_blocks[0]), result.fetched_count) == (8, 3, 8)
    assert {harness.headers[ref.slot].position for ref in result.window_blocks[0]} == {
        WINDOW_BIT | i for i in (5, 6, 7)
    }


def test_nobody_is_asked_for_a_window_that_adds_nothing(harness: CoreHarness) -> None:
    """The engine has those blocks itself, and would wait for them."""
    chain = make_chain(8)
    engine = harness.attach(spec())
    op = harness.acquire(engine, chain, skip=4)
    harness.resolved(harness.resolves[-1].op)
    assert not harness.open(op)
    assert harness.result(op).blocks == ()
    assert [list(resolve.chain) for resolve in harness.resolves] == [list(chain)]


@pytest.mark.parametrize("result", [ev.PullResult.CORRUPT, ev.PullResult.STALE, ev.PullResult.FAILED])
def test_window_that_does_not_arrive_whole_is_not_promised(harness: CoreHarness, result: ev.PullResult) -> None:
    chain = make_chain(8)
    engine = harness.attach(spec())
    harness.store(engine, chain)
    store_window(harness, engine, chain, range(5))
    op = harness.acquire(engine, chain)
    resolve = harness.resolves[-1]
    harness.resolved(resolve.op, run_of(5, 3))
    keys = window_keys(chain)[5:]
    harness.located(harness.locates[-1], make_located(keys, length=LARGE))
    harness.pulled(harness.pulls[-1], ev.PullResult.OK, result, ev.PullResult.OK)
    answered = answer(harness, op)
    assert len(answered.blocks) == 6, "the end before the one that did not come"
    assert len(answered.window_blocks[0]) == 3


def test_deadline_settles_for_what_is_complete_here(harness: CoreHarness) -> None:
    chain = make_chain(8)
    engine = harness.attach(spec())
    harness.store(engine, chain)
    store_window(harness, engine, chain, range(5))
    op = harness.acquire(engine, chain, timeout=2.0)
    assert harness.open(op)
    harness.advance(2.0)
    result = harness.result(op)
    assert (len(result.blocks), len(result.window_blocks[0])) == (5, 3)


def test_gaps_far_away_are_looked_for_so_many_times_only() -> None:
    chain = make_chain(40)
    harness = CoreHarness(slab_count=14)
    engine = harness.attach(spec())
    harness.store(engine, chain)
    store_window(harness, engine, chain, (0, 1, 2))
    op = harness.acquire(engine, chain)
    asked = 0
    while harness.open(op):
        asked += 1
        harness.resolved(harness.resolves[-1].op)
    assert len(harness.result(op).blocks) == 3
    assert asked == 3


def test_end_of_attachment_or_caller_lets_everything_go(harness: CoreHarness) -> None:
    chain = make_chain(8)
    engine = harness.attach(spec())
    harness.store(engine, chain)
    op = harness.acquire(engine, chain)
    harness.send(ev.Cancel(op))
    assert harness.slots("leased") == 0
    assert harness.open(op)
    op = harness.acquire(engine, chain)
    harness.send(ev.AttachmentLost(engine))
    assert harness.result(op).blocks == ()
    assert harness.result(op).miss is MissReason.DETACHED
    assert harness.slots("leased") == 0


def test_handoff_follows_the_window_too(harness: CoreHarness) -> None:
    chain = make_chain(8)
    engine = harness.attach(spec())
    handoff = Handoff(HandoffId(b"h" * 16), NodeId("peer"))
    op = harness.acquire(engine, chain, handoff=handoff)
    harness.followed(harness.follows[-1], 8)
    harness.pulled(harness.pulls[-1], ev.PullResult.OK)
    follow = harness.follows[-1]
    assert list(follow.keys) == window_keys(chain)[5:]
    result = FollowResult(HandoffState.OPEN, make_located(follow.keys, length=LARGE))
    harness.send(ev.Followed(follow.follow, follow.op, make_holder(), result, harness.now))
    harness.pulled(harness.pulls[-1], ev.PullResult.OK)
    assert (len(harness.result(op).blocks), len(harness.result(op).window_blocks[0])) == (8, 3)


def test_handoff_on_this_node_that_ends_short_is_no_hang(harness: CoreHarness) -> None:
    chain = make_chain(8)
    writer, reader = harness.attach(spec("writer")), harness.attach(spec("reader"))
    identity = HandoffId(b"w" * 16)
    harness.send(ev.OpenHandoff(harness.next_op(), writer, identity))
    op = harness.acquire(reader, chain, handoff=Handoff(identity, harness.state.node_id))
    harness.store(writer, chain[:6])
    store_window(harness, writer, chain, range(4))
    assert harness.open(op)
    harness.send(ev.CloseHandoff(harness.next_op(), writer, identity))
    result = answer(harness, op)
    assert (len(result.blocks), len(result.window_blocks[0])) == (4, 3)


def test_window_inside_an_extended_prompt_goes_first() -> None:
    small = CoreHarness(slab_count=5)
    chain = make_chain(6)
    engine = small.attach(spec())
    small.store(engine, chain)
    store_window(small, engine, chain, range(6))
    result = answer(small, small.acquire(engine, chain))
    small.release(engine, result.lease_id)
    for gone in (1, 2, 3):
        assert len(small.reserve(engine, 1, group=1)) == 1
        assert small.keys_held() == {*chain, *window_keys(chain)[gone:]}


def test_slots_fit_their_group_and_unknown_groups_are_refused(harness: CoreHarness) -> None:
    engine = harness.attach(spec())
    ref = harness.reserve(engine, 1, group=1)[0]
    assert harness.headers[ref.slot].length == LARGE
    with pytest.raises(InvalidRequest, match="groups 0 to 1, not 2"):
        harness.reserve(engine, 1, group=2)


@settings(max_examples=60)
@given(st.integers(0, 8), st.sets(st.integers(0, 7)), st.integers(1, 100))
def test_promise_is_the_longest_that_is_complete(length: int, here: set[int], window: int) -> None:
    harness = CoreHarness(slab_count=8, has_directory=False)
    group = WindowGroup(make_layout(LARGE), Window(sliding_tokens=window))
    engine = harness.attach(replace(make_spec(), window_groups=(group,)))
    chain = make_chain(8)
    if length:
        harness.store(engine, chain[:length])
    store_window(harness, engine, chain, sorted(here))
    result = harness.result(harness.acquire(engine, chain))
    firsts = {end: max(0, end * 16 - window + 1) // 16 for end in range(length + 1)}
    wanted = max(end for end, first in firsts.items() if set(range(first, end)) <= here)
    assert len(result.blocks) == wanted
    assert [harness.headers[ref.slot].key for ref in result.window_blocks[0]] == window_keys(chain)[
        firsts[wanted] : wanted
    ]
    assert harness.slots("leased") == len(result.blocks) + len(result.window_blocks[0])


def test_restarted_shard_knows_windows_from_chains(harness: CoreHarness) -> None:
    chain = make_chain(8)
    engine = harness.attach(spec())
    harness.store(engine, chain)
    store_window(harness, engine, chain, range(8))
    harness.restart()
    engine = harness.attach(spec())
    result = answer(harness, harness.acquire(engine, chain))
    assert (len(result.blocks), len(result.window_blocks[0])) == (8, 3)
    harness.release(engine, result.lease_id)
    assert len(harness.reserve(engine, 3, group=1)) == 3
    gone = {*chain, *window_keys(chain)} - harness.keys_held()
    assert gone <= set(window_keys(chain)[:5]), "a chain was cut, or the window of its end"


def test_models_with_and_without_windows_share_no_block(harness: CoreHarness) -> None:
    """Their keys differ by the fingerprint; an equal key of another size is not promised either."""
    chain = make_chain(3)
    harness.store(harness.attach(make_spec("plain")), [group_key(key, 1) for key in chain])
    other = replace(make_spec("windows", "other"), window_groups=(WINDOWED,))
    engine = harness.attach(other)
    harness.store(engine, chain)
    assert answer(harness, harness.acquire(engine, chain)).blocks == ()


def test_one_engine_that_detaches_ends_only_its_own_hits(harness: CoreHarness) -> None:
    chain = make_chain(8)
    engine, other = harness.attach(spec()), harness.attach(spec("other"))
    ops = [harness.acquire(each, chain) for each in (engine, other)]
    harness.send(ev.AttachmentLost(engine))
    assert harness.result(ops[0]).miss is MissReason.DETACHED
    assert harness.open(ops[1])
    assert answer(harness, ops[1]).miss is MissReason.NEVER_STORED


def test_a_window_before_a_hit_of_nothing_is_let_go(harness: CoreHarness) -> None:
    """The engine has the first six blocks itself; a window that begins before them is not whole."""
    chain = make_chain(8)
    engine = harness.attach(spec())
    harness.store(engine, chain)
    store_window(harness, engine, chain, (5,))
    result = answer(harness, harness.acquire(engine, chain, skip=6))
    assert (result.blocks, result.miss) == ((), MissReason.WINDOW)
    assert harness.slots("leased") == 0


def test_a_gap_in_one_window_shortens_the_other() -> None:
    """Blocks of the first group that lie behind the new end are unpinned, and the shorter windows are leased."""
    harness = CoreHarness(slab_count=8)
    chain, narrow = make_chain(8), WindowGroup(make_layout(LARGE), Window(sliding_tokens=17))
    engine = harness.attach(replace(spec(), window_groups=(WINDOWED, narrow)))
    harness.store(engine, chain)
    store_window(harness, engine, chain, range(8))
    for i in (4, 5):
        (ref,) = harness.reserve(engine, 1, group=2)
        keys = [group_key(key, 2) for key in chain]
        harness.write(ref, keys[i])
        harness.begin_seal(engine, (SealItem(ref, keys[i], None, WINDOW_BIT | i, span_route(keys, i)),))
        harness.digest_all()
    result = answer(harness, harness.acquire(engine, chain))
    assert (len(result.blocks), [len(refs) for refs in result.window_blocks]) == (6, [3, 1])
    assert result.miss is MissReason.WINDOW
    assert harness.slots("leased") == 6 + 3 + 1


STATE = WindowGroup(make_layout(LARGE), Window(is_state=True))


def state_spec() -> EngineSpec:
    return replace(make_spec(), window_groups=(STATE,))


@pytest.mark.parametrize(("stored", "hit"), [((7,), 8), ((2, 5), 6), ((0,), 1), ((), 0)])
def test_hit_ends_where_a_state_is(harness: CoreHarness, stored: tuple[int, ...], hit: int) -> None:
    chain = make_chain(8)
    engine = harness.attach(state_spec())
    harness.store(engine, chain)
    store_window(harness, engine, chain, stored)
    result = answer(harness, harness.acquire(engine, chain))
    assert len(result.blocks) == hit
    assert [harness.headers[ref.slot].key for ref in result.window_blocks[0]] == window_keys(chain)[hit - 1 : hit][:hit]
    assert harness.slots("leased") == hit + bool(hit)
    assert harness.count("acquires_cut_window") == (hit < 8)


def test_state_without_its_chain_is_no_hit(harness: CoreHarness) -> None:
    chain = make_chain(8)
    engine = harness.attach(state_spec())
    harness.store(engine, chain[:5])
    store_window(harness, engine, chain, (3, 7))
    result = answer(harness, harness.acquire(engine, chain))
    assert (len(result.blocks), len(result.window_blocks[0])) == (4, 1)


def test_state_far_before_the_end_is_fetched_from_a_peer() -> None:
    harness = CoreHarness(slab_count=20)
    chain = make_chain(STATES_TRIED_MAX + 3)
    engine = harness.attach(state_spec())
    harness.store(engine, chain)
    op = harness.acquire(engine, chain)
    for _ in range(STATES_TRIED_MAX):
        harness.resolved(harness.resolves[-1].op)
    resolve = harness.resolves[-1]
    assert len(resolve.chain) == 3, "a position was left out, or asked twice"
    keys = window_keys(chain)[2:3]
    harness.resolved(resolve.op, run_of(2, 1))
    harness.located(harness.locates[-1], make_located(keys, length=LARGE))
    harness.pulled(harness.pulls[-1], ev.PullResult.OK)
    result = harness.result(op)
    assert (len(result.blocks), len(result.window_blocks[0])) == (3, 1)


def test_nearest_state_here_counts_when_enough_is_tried() -> None:
    harness = CoreHarness(slab_count=20)
    chain = make_chain(STATES_TRIED_MAX + 6)
    engine = harness.attach(state_spec())
    harness.store(engine, chain)
    store_window(harness, engine, chain, (0, 2))
    op = harness.acquire(engine, chain)
    asked = len(harness.resolves)
    result = answer(harness, op)
    assert len(harness.resolves) - asked == STATES_TRIED_MAX
    assert (len(result.blocks), len(result.window_blocks[0])) == (3, 1)


def test_slots_for_states_are_few() -> None:
    spec = replace(make_spec(), window_groups=(WINDOWED, STATE))
    assert [spec.slots_for(group, 40) for group in range(3)] == [40, 40, 40 // STATE_EVERY]
