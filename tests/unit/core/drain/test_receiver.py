"""A shard that is offered the blocks of one that leaves: what it reads, keeps, makes room for, and answers in time."""

from __future__ import annotations

import math

import pytest

from kvservice.core import events as ev
from kvservice.core.acquire.pulls import LEASE_MARGIN_SECONDS, LOCATE_GIVE_UP_SECONDS
from kvservice.core.block.marks import MarkKind
from kvservice.core.drain.receiver import TAKES_MAX
from kvservice.core.messages import EngineSpec, TakeOverItem, TakeOverResult
from kvservice.core.store.slots import BlockOrigin
from kvservice.errors import Exhausted, InvalidRequest, Unavailable, UnsupportedLayout
from kvservice.testing.builders import (
    LARGE,
    SMALL,
    WALL,
    CoreHarness,
    content_of,
    make_chain,
    make_holder,
    make_located,
    make_spec,
    run_of,
)
from kvservice.units import BlockKey, MiB, SpanRoute

CHAIN = make_chain(4)
OTHER = make_chain(3, "other")
PEER = make_holder("peer")


class Receiver(CoreHarness):
    def offer(
        self,
        keys: tuple[BlockKey, ...],
        *,
        idle: float = 0.0,
        size: int = SMALL,
        wait: float = 5.0,
        of: EngineSpec | None = None,
    ) -> int:
        whose = (of.fingerprint.block_mark, of.names[of.fingerprint.block_mark]) if of else ()
        items = tuple(
            TakeOverItem(key, keys[i - 1] if i else None, i, SpanRoute(1), idle, 0, *whose)
            for i, key in enumerate(keys)
        )
        op = self.next_op()
        self.send(ev.PeerTakeOver(op, self.state.epoch, make_holder("leaver"), size, items, wait))
        return op

    def taken(self, op: int) -> TakeOverResult:
        value = self.reply(op)
        assert isinstance(value, TakeOverResult)
        return value

    def finish(self, result: ev.PullResult = ev.PullResult.OK) -> None:
        self.located(self.locates[-1], make_located(self.locates[-1].keys))
        self.pulled(self.pulls[-1], result)


def test_offered_blocks_are_read_verified_and_kept_as_primary() -> None:
    receiver = Receiver()
    op = receiver.offer(CHAIN)
    assert receiver.open(op)
    receiver.finish()
    assert receiver.taken(op) == TakeOverResult((True,) * 4, full=False)
    assert receiver.keys_held() == set(CHAIN)
    assert not any(one.is_secondary for one in receiver.state.blocks())
    assert receiver.announced[CHAIN[3]] == 1
    assert len(receiver.remote_releases) == 1
    engine = receiver.attach()
    assert len(receiver.hit(engine, CHAIN).blocks) == 4


def test_a_secondary_copy_becomes_primary_without_a_read() -> None:
    receiver = Receiver()
    engine = receiver.attach()
    op = receiver.acquire(engine, CHAIN)
    receiver.fetch_all(op, CHAIN)
    receiver.release(engine, receiver.result(op).lease_id)
    asked = len(receiver.locates)
    assert receiver.state.secondary_bytes == 4 * SMALL
    assert receiver.taken(receiver.offer(CHAIN)).kept == (True,) * 4
    assert len(receiver.locates) == asked
    assert not any(one.is_secondary for one in receiver.state.blocks())
    assert receiver.state.secondary_bytes == 0


@pytest.mark.parametrize("is_read", [False, True])
def test_a_copy_that_became_primary_is_so_after_a_restart(is_read: bool) -> None:
    """Else the next start takes the last copy for a secondary one, which goes first. What is read keeps its header."""
    receiver = Receiver()
    engine = receiver.attach()
    op = receiver.acquire(engine, CHAIN)
    receiver.fetch_all(op, CHAIN)
    if not is_read:
        receiver.release(engine, receiver.result(op).lease_id)
    before = dict(receiver.headers)
    receiver.taken(receiver.offer(CHAIN))
    assert (receiver.headers == before) is is_read
    receiver.restart()
    assert {block.is_secondary for block in receiver.state.blocks()} == {is_read}


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_copy_that_became_primary_may_be_a_suspect(is_damaged: bool) -> None:
    """Also one of which the digest is being made then. Its header stays as its readers know it."""
    receiver = Receiver()
    engine = receiver.attach()
    op = receiver.acquire(engine, CHAIN)
    receiver.fetch_all(op, CHAIN)
    held = receiver.result(op)
    before = dict(receiver.headers)
    for slot in [ref.slot for ref in held.blocks]:
        receiver.contents[slot] = b"something else" if is_damaged else content_of(receiver.headers[slot].key)
    receiver.send(ev.Renew(receiver.next_op(), engine, (held.lease_id,), suspects=held.blocks))
    receiver.taken(receiver.offer(CHAIN))
    receiver.digest_all()
    assert receiver.headers == before
    assert receiver.keys_held() == (set() if is_damaged else set(CHAIN))


def test_room_is_made_only_of_what_was_used_earlier() -> None:
    receiver = Receiver(slab_count=2)  # 8 slots
    engine = receiver.attach()
    old, new = make_chain(4, "old"), make_chain(4, "new")
    receiver.store(engine, old)
    receiver.now += 100.0
    receiver.store(engine, new)
    receiver.now += 10.0
    op = receiver.offer(make_chain(6, "offered"), idle=50.0)
    receiver.finish()
    assert receiver.taken(op) == TakeOverResult((True,) * 4 + (False,) * 2, full=True)
    assert set(new) <= receiver.keys_held()
    assert not set(old) & receiver.keys_held()


def test_an_eviction_for_an_offer_names_who_offered_it() -> None:
    """Of a memory node, who offers blocks is most often only short of memory."""
    receiver = Receiver(slab_count=1)
    receiver.store(receiver.attach(), CHAIN)
    receiver.now += 100.0
    receiver.offer(OTHER, idle=50.0)
    receiver.finish()
    gone = receiver.state.block_history(CHAIN, receiver.now, receiver.now)
    assert {entry.caused_by for entry in gone if entry.state == "gone"} == {"blocks that node leaver offered"}


def test_a_shard_full_of_what_was_used_later_takes_nothing() -> None:
    receiver = Receiver(slab_count=1)
    engine = receiver.attach()
    receiver.store(engine, CHAIN)
    op = receiver.offer(OTHER, idle=1.0)
    receiver.located(receiver.locates[-1], make_located(OTHER))
    assert receiver.taken(op) == TakeOverResult((False,) * 3, full=True)
    assert receiver.keys_held() == set(CHAIN)
    assert len(receiver.remote_releases) == 1


def test_a_secondary_copy_makes_room_for_the_last_copy() -> None:
    """However recently it was used: another node has it, and of what is offered nobody else has any."""
    receiver = Receiver(slab_count=1)
    engine = receiver.attach()
    op = receiver.acquire(engine, CHAIN)
    receiver.fetch_all(op, CHAIN)
    receiver.release(engine, receiver.result(op).lease_id)
    op = receiver.offer(OTHER, idle=50.0)
    receiver.finish()
    assert receiver.taken(op) == TakeOverResult((True,) * 3, full=False)
    assert receiver.keys_held() == {*OTHER, CHAIN[0]}


@pytest.mark.parametrize(("idle", "kept"), [(50.0, True), (200.0, False)])
def test_an_offer_gets_the_slabs_of_what_was_used_earlier(idle: float, kept: bool) -> None:
    """Of another size: on a node without engines nothing else would ever take such a slab."""
    receiver = Receiver(slab_count=1)
    receiver.store(receiver.attach(), CHAIN)
    receiver.now += 100.0
    op = receiver.offer(OTHER[:2], idle=idle, size=LARGE)
    receiver.located(receiver.locates[-1], make_located(OTHER[:2], length=LARGE))
    if kept:
        receiver.pulled(receiver.pulls[-1], ev.PullResult.OK)
    assert receiver.taken(op) == TakeOverResult((kept,) * 2, full=not kept)
    assert receiver.keys_held() == set(OTHER[:2] if kept else CHAIN)


def test_offers_of_one_size_grow_into_the_slabs_of_another() -> None:
    """Else they would push each other out of one slab, beside slabs that nobody has used for longer."""
    receiver = Receiver(slab_count=4)
    receiver.store(receiver.attach(), make_chain(16, "old"))
    offered = [make_chain(2, f"offer {number}") for number in range(4)]
    for keys in offered:
        receiver.now += 100.0
        op = receiver.offer(keys, idle=1.0, size=LARGE)
        receiver.located(receiver.locates[-1], make_located(keys, length=LARGE))
        receiver.pulled(receiver.pulls[-1], ev.PullResult.OK)
        assert receiver.taken(op) == TakeOverResult((True, True), full=False)
    assert receiver.keys_held() == {key for keys in offered for key in keys}


@pytest.mark.parametrize("answered", ["waits", "timed_out", "cancelled"])
def test_a_take_over_that_is_never_located_gives_its_place_back(answered: str) -> None:
    receiver = Receiver()
    ops = [receiver.offer((key,), wait=1.0 if answered == "timed_out" else 30.0) for key in make_chain(TAKES_MAX)]
    with pytest.raises(Exhausted):
        receiver.taken(receiver.offer(OTHER))
    if answered == "cancelled":
        for op in ops:
            receiver.send(ev.Cancel(op))
    receiver.advance(LOCATE_GIVE_UP_SECONDS - 0.1)
    with pytest.raises(Exhausted):
        receiver.taken(receiver.offer(OTHER))
    assert [receiver.open(op) for op in ops] == [answered != "timed_out"] * TAKES_MAX
    receiver.advance(0.2)
    if answered == "waits":
        assert all(receiver.taken(op) == TakeOverResult((False,), full=False) for op in ops)
    late = receiver.locates[0]
    receiver.offer(OTHER)
    receiver.located(late, make_located(late.keys))
    assert not receiver.pulls, "an answer that comes after all reads nothing"
    receiver.finish()
    assert receiver.keys_held() == set(OTHER)


@pytest.mark.parametrize("result", [v for v in ev.PullResult if v is not ev.PullResult.OK])
def test_what_does_not_arrive_well_is_not_kept(result: ev.PullResult) -> None:
    receiver = Receiver()
    op = receiver.offer(CHAIN)
    receiver.finish(result)
    assert receiver.taken(op).kept == (False,) * 4
    assert receiver.keys_held() == set()
    receiver.send(ev.WritesEnded(receiver.pulls[-1].job))
    receiver.advance(61.0)
    assert receiver.slots("free") == receiver.state.capacity


def test_what_is_from_before_a_clear_is_not_read() -> None:
    """Of a block whose model nobody knows, each clear of a model counts."""
    receiver = Receiver()
    receiver.clear(MarkKind.MODEL, "another model")
    op = receiver.offer(CHAIN)
    receiver.located(receiver.locates[-1], make_located(CHAIN, stored_at=WALL))
    assert receiver.taken(op) == TakeOverResult((False,) * 4, full=False)
    assert not receiver.pulls and len(receiver.remote_releases) == 1
    receiver.advance(60.0)
    op = receiver.offer(CHAIN)
    receiver.located(receiver.locates[-1], make_located(CHAIN, stored_at=WALL + 150.0))
    receiver.pulled(receiver.pulls[-1], ev.PullResult.OK)
    assert receiver.taken(op).kept == (True,) * 4, "what was stored since is read"


@pytest.mark.parametrize(
    ("kind", "name", "is_taken"),
    [
        (MarkKind.MODEL, "of others", True),
        (MarkKind.NAMESPACE, "of others", True),
        (MarkKind.MODEL, "offered", False),
        (MarkKind.NAMESPACE, "prod", False),
    ],
)
def test_a_clear_keeps_no_block_of_others_from_being_taken(kind: MarkKind, name: str, is_taken: bool) -> None:
    receiver = Receiver()
    receiver.clear(kind, name)
    op = receiver.offer(CHAIN, of=make_spec(model="offered", namespace="prod"))
    receiver.located(receiver.locates[-1], make_located(CHAIN, stored_at=WALL))
    if is_taken:
        receiver.pulled(receiver.pulls[-1], ev.PullResult.OK)
    assert receiver.taken(op).kept == (is_taken,) * 4
    assert bool(receiver.pulls) is is_taken


def test_a_block_that_was_taken_over_keeps_its_origin() -> None:
    """A later clear of another model or namespace leaves it, and one of its own takes it."""
    spec = make_spec(model="offered", namespace="prod")
    receiver = Receiver()
    receiver.offer(CHAIN, of=spec)
    receiver.finish()
    (origin,) = {block.origin for block in receiver.state.blocks()}
    assert origin == BlockOrigin(b"", "offered", spec.fingerprint.block_mark)
    receiver.clear(MarkKind.MODEL, "of others")
    receiver.clear(MarkKind.NAMESPACE, "of others")
    assert receiver.keys_held() == set(CHAIN)
    receiver.clear(MarkKind.NAMESPACE, "prod")
    assert not receiver.keys_held()


def test_an_offer_is_answered_in_time_whatever_the_leaver_does() -> None:
    receiver = Receiver()
    silent = receiver.offer(CHAIN, wait=2.0)
    slow = receiver.offer(OTHER, wait=2.0)
    receiver.located(receiver.locates[-1], make_located(OTHER))
    receiver.advance(2.1)
    assert receiver.taken(silent).kept == (False,) * 4
    assert receiver.taken(slow).kept == (False,) * 3
    receiver.pulled(receiver.pulls[-1], ev.PullResult.OK)  # it goes on, and what arrives is kept
    receiver.located(receiver.locates[0], None)
    assert receiver.keys_held() == set(OTHER)


def test_an_engine_that_stores_the_same_block_meanwhile_wins() -> None:
    receiver = Receiver()
    engine = receiver.attach()
    op = receiver.offer(CHAIN[:2])
    receiver.located(receiver.locates[-1], make_located(CHAIN[:2]))
    receiver.store(engine, CHAIN[:1])
    receiver.pulled(receiver.pulls[-1], ev.PullResult.OK)
    assert receiver.taken(op).kept == (True, True)
    assert receiver.announced[CHAIN[0]] == 1


def test_a_block_that_a_fetch_brought_meanwhile_becomes_primary() -> None:
    """The leaver's copy goes away, and copies are evicted first."""
    receiver = Receiver()
    engine = receiver.attach()
    op = receiver.acquire(engine, CHAIN[:1])
    receiver.resolved(op, run_of(0, 1, PEER))
    receiver.located(receiver.locates[-1], make_located(CHAIN[:1]))
    fetch = receiver.pulls[-1]
    take = receiver.offer(CHAIN[:1])
    receiver.located(receiver.locates[-1], make_located(CHAIN[:1]))
    receiver.pulled(fetch, ev.PullResult.OK)
    assert [one.is_secondary for one in receiver.state.blocks()] == [True]
    receiver.pulled(receiver.pulls[-1], ev.PullResult.OK)
    assert receiver.taken(take).kept == (True,)
    assert [one.is_secondary for one in receiver.state.blocks()] == [False]


def test_a_take_over_ends_with_its_time_and_the_leavers_lease() -> None:
    for wait, lease_seconds in ((1.0, 10.0), (10.0, 3.0)):
        receiver = Receiver()
        receiver.offer(CHAIN, wait=wait)
        receiver.located(receiver.locates[-1], make_located(CHAIN, lease_seconds=lease_seconds))
        end = receiver.now + min(wait, lease_seconds - LEASE_MARGIN_SECONDS)
        assert receiver.now < receiver.pulls[-1].deadline <= end


def test_a_request_during_a_take_over_is_answered() -> None:
    """It asks for blocks that are being taken over. The next request hits."""
    receiver = Receiver()
    engine = receiver.attach()
    take = receiver.offer(CHAIN)
    receiver.located(receiver.locates[-1], make_located(CHAIN))
    op = receiver.acquire(engine, CHAIN)
    receiver.resolved(op, *[])
    receiver.pulled(receiver.pulls[0], ev.PullResult.OK)
    assert receiver.taken(take).kept == (True,) * 4
    assert len(receiver.hit(engine, CHAIN).blocks) == 4
    assert not receiver.open(op)


@pytest.mark.parametrize(
    ("keys", "size", "wait"),
    [((), SMALL, 1.0), ((CHAIN[0], CHAIN[0]), SMALL, 1.0), (CHAIN, SMALL, -1.0), (CHAIN, SMALL, math.nan)],
)
def test_malformed_offers_are_refused(keys: tuple[BlockKey, ...], size: int, wait: float) -> None:
    receiver = Receiver()
    with pytest.raises(InvalidRequest):
        receiver.taken(receiver.offer(keys, size=size, wait=wait))


def test_a_shard_that_leaves_itself_takes_nothing() -> None:
    receiver = Receiver()
    receiver.send(ev.Drain())
    with pytest.raises(Unavailable):
        receiver.taken(receiver.offer(CHAIN))


@pytest.mark.parametrize("size", [0, 2 * MiB])
def test_an_offer_of_blocks_that_fit_no_slab_is_refused(size: int) -> None:
    receiver = Receiver()
    with pytest.raises(UnsupportedLayout, match="do not fit a slab"):
        receiver.taken(receiver.offer(CHAIN, size=size))
