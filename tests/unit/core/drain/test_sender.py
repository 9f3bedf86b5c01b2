"""A shard that leaves: what it offers to whom, what ends its wait, and what it promises meanwhile."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from kvservice.core import context
from kvservice.core import events as ev
from kvservice.core.block.tenants import TenantLimits, tag_of
from kvservice.core.drain import sender
from kvservice.core.drain.sender import (
    NO_KEEPERS,
    OFFERS_PER_PEER,
    RAMP_FLOOR,
    RAMP_SECONDS,
    RETRY_SECONDS,
    TRIES_MAX,
    DrainPhase,
    pause,
    plan,
    ramps,
)
from kvservice.core.messages import Holder, MissReason, Peer, TakeOverResult
from kvservice.core.store.slots import Block, Slot
from kvservice.errors import Unavailable
from kvservice.testing.builders import (
    LARGE,
    SMALL,
    CoreHarness,
    make_chain,
    make_holder,
    make_located,
    make_spec,
    run_of,
)
from kvservice.units import AttachmentId, BlockKey, Generation, MiB, NodeId, SlotIndex, SpanRoute

CHAIN = make_chain(4)
OTHER = make_chain(3, "other")
PEER, SECOND = make_holder("peer"), make_holder("second")


def peer(holder: Holder = PEER, *, free: int = 64 * MiB, age: float = math.inf, draining: bool = False) -> Peer:
    return Peer(holder, free, 64 * MiB, age, draining)


class Leaver(CoreHarness):
    def begin(self, timeout: float = 30.0, *, handover: bool = True) -> None:
        self.send(ev.Drain(timeout_seconds=timeout, handover=handover))

    def find(self, *peers: Peer, holders: dict[BlockKey, tuple[Holder, ...]] | None = None) -> None:
        self.send(ev.TakersFound(peers, holders or {}))

    def answer(self, place: int = -1, *, kept: bool = True, full: bool = False) -> None:
        offer = self.offers[place]
        self.send(ev.Offered(offer.offer, TakeOverResult((kept,) * len(offer.items), full)))

    def no_answer(self, place: int = -1) -> None:
        self.send(ev.Offered(self.offers[place].offer, None))

    @property
    def phase(self) -> DrainPhase:
        return self.state.drain_phase

    def offered(self) -> list[BlockKey]:
        return [item.key for offer in self.offers for item in offer.items]


@pytest.fixture
def shard() -> Leaver:
    return Leaver(slab_count=4)


@pytest.fixture
def engine(shard: Leaver) -> AttachmentId:
    return shard.attach()


def test_the_last_used_is_offered_first(shard: Leaver, engine: AttachmentId) -> None:
    """Everything is offered, prefixes before their ends."""
    shard.store(engine, CHAIN)
    shard.store(engine, OTHER)
    shard.release(engine, shard.hit(engine, CHAIN[:2]).lease_id)
    shard.begin()
    shard.find(peer())
    assert shard.offered() == [*CHAIN[:2], *OTHER, *CHAIN[2:]]
    assert [item.parent for item in shard.offers[0].items[:2]] == [None, CHAIN[0]]
    shard.answer()
    assert shard.phase is DrainPhase.GONE
    progress = shard.state.progress(shard.now)
    assert (progress.blocks_handed, progress.blocks_lost, progress.bytes_handed) == (7, 0, 7 * SMALL)
    assert shard.farewells == 1


def test_what_another_node_holds_is_offered_to_that_node_only(shard: Leaver, engine: AttachmentId) -> None:
    shard.store(engine, CHAIN)
    shard.begin()
    shard.find(peer(), peer(SECOND, free=2 * SMALL), holders={CHAIN[0]: (SECOND,)})
    assert {offer.peer: [item.key for item in offer.items] for offer in shard.offers}[SECOND][0] == CHAIN[0]
    while shard.phase is DrainPhase.HANDING_OVER:
        for place in range(len(shard.offers)):
            shard.answer(place)
    progress = shard.state.progress(shard.now)
    assert (progress.blocks_handed, progress.blocks_elsewhere) == (3, 1)


@pytest.mark.parametrize(
    ("is_copy", "holders", "offered"),
    [(True, (PEER, SECOND), False), (True, (SECOND,), True), (False, (PEER, SECOND), True)],
    ids=["copy_of_two", "copy_of_one", "primary"],
)
def test_a_drain_makes_no_second_copy_primary(
    shard: Leaver, engine: AttachmentId, is_copy: bool, holders: tuple[Holder, ...], offered: bool
) -> None:
    """What is offered to a holder becomes primary there. Too many of those push out what nobody else has."""
    if is_copy:
        op = shard.acquire(engine, CHAIN)
        shard.fetch_all(op, CHAIN)
        shard.release(engine, shard.result(op).lease_id)
    else:
        shard.store(engine, CHAIN)
    shard.store(engine, OTHER)
    shard.begin()
    shard.find(peer(), peer(SECOND), holders=dict.fromkeys(CHAIN, holders))
    assert (set(CHAIN) <= set(shard.offered())) == offered
    assert set(OTHER) <= set(shard.offered())
    for place in range(len(shard.offers)):
        shard.answer(place)
    progress = shard.state.progress(shard.now)
    assert (progress.blocks_elsewhere, progress.blocks_handed, progress.blocks_lost) == (len(CHAIN), len(OTHER), 0)


def test_a_leaving_shard_is_read_but_stores_nothing(shard: Leaver, engine: AttachmentId) -> None:
    """Nobody attaches either."""
    shard.store(engine, CHAIN)
    shard.begin()
    shard.find(peer())
    assert shard.reserve(engine) == []
    with pytest.raises(Unavailable):
        shard.attach(make_spec("second"))
    assert len(shard.hit(engine, CHAIN).blocks) == 4
    op = shard.next_op()
    shard.send(ev.PeerLocate(op, NodeId("reader"), shard.state.epoch, CHAIN))
    located = shard.reply(op)
    assert [handle is not None for handle in located.handles] == [True] * 4  # type: ignore[attr-defined]


def test_after_its_farewell_it_only_waits_for_its_readers(shard: Leaver, engine: AttachmentId) -> None:
    shard.store(engine, CHAIN)
    held = shard.hit(engine, CHAIN)
    shard.begin(handover=False)
    assert shard.phase is DrainPhase.SETTLING
    result = shard.result(shard.acquire(engine, CHAIN))
    assert (result.blocks, result.miss) == ((), MissReason.DRAINING)
    op = shard.next_op()
    shard.send(ev.PeerLocate(op, NodeId("reader"), shard.state.epoch, CHAIN))
    assert shard.reply(op).lease_id == 0  # type: ignore[attr-defined]
    shard.release(engine, held.lease_id)
    assert shard.phase is DrainPhase.GONE


def test_a_lease_does_not_hold_it_longer_than_its_time(shard: Leaver, engine: AttachmentId) -> None:
    shard.store(engine, CHAIN)
    held = shard.hit(engine, CHAIN)
    shard.begin(timeout=5.0, handover=False)
    for _ in range(4):
        op = shard.next_op()
        shard.send(ev.Renew(op, engine, (held.lease_id,)))
        shard.advance(1.0)
    assert shard.phase is DrainPhase.SETTLING
    shard.advance(1.1)
    assert shard.phase is DrainPhase.GONE
    assert "still out" in shard.state.progress(shard.now).note


def test_second_begin_while_settling_only_shortens_the_wait(shard: Leaver, engine: AttachmentId) -> None:
    shard.store(engine, CHAIN)
    shard.hit(engine, CHAIN)
    shard.begin(timeout=8.0, handover=False)
    shard.begin(timeout=5.0, handover=False)
    for _ in range(4):
        shard.advance(1.0)
        due = shard.state.next_deadline()
        assert due is not None and due > shard.now, "it would be told of the time again and again"
    shard.advance(1.0)
    assert shard.phase is DrainPhase.GONE


def test_what_a_silent_peer_was_offered_goes_to_the_others(shard: Leaver, engine: AttachmentId) -> None:
    shard.store(engine, CHAIN)
    shard.begin()
    shard.find(peer(), peer(SECOND, free=0))
    assert [offer.peer for offer in shard.offers] == [PEER]
    shard.no_answer()
    assert [offer.peer for offer in shard.offers] == [PEER, SECOND]
    assert set(shard.offered()) == set(CHAIN)
    shard.answer()
    progress = shard.state.progress(shard.now)
    assert (shard.phase, progress.blocks_handed, progress.blocks_lost) == (DrainPhase.GONE, 4, 0)
    assert progress.note == "node peer did not answer"


def test_a_peer_that_did_not_answer_is_asked_again(shard: Leaver, engine: AttachmentId) -> None:
    """It may only have been busy."""
    shard.store(engine, CHAIN)
    shard.begin()
    shard.find(peer())
    shard.no_answer()
    assert len(shard.offers) == 1
    shard.advance(RETRY_SECONDS)
    assert len(shard.offers) == 2
    shard.answer()
    progress = shard.state.progress(shard.now)
    assert (shard.phase, progress.blocks_handed, progress.blocks_lost) == (DrainPhase.GONE, 4, 0)
    assert progress.note == "", "it has answered"


def test_a_peer_that_never_answers_is_given_up(shard: Leaver, engine: AttachmentId) -> None:
    shard.store(engine, CHAIN)
    shard.begin()
    shard.find(peer())
    for tries in range(1, TRIES_MAX):
        assert len(shard.offers) == tries
        shard.no_answer()
        shard.advance(0.99 * pause(tries))
        assert len(shard.offers) == tries
        shard.advance(0.02 * pause(tries))
    shard.no_answer()
    assert (shard.phase, len(shard.offers)) == (DrainPhase.GONE, TRIES_MAX)
    assert shard.state.progress(shard.now).blocks_lost == 4


def test_offers_that_fail_together_are_one_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "OFFER_BLOCKS_MAX", 2)
    monkeypatch.setattr(sender, "TRIES_MAX", 2)
    shard = Leaver(slab_count=4)
    shard.store(shard.attach(), CHAIN)
    shard.begin()
    shard.find(peer())
    assert len(shard.offers) == 2
    shard.no_answer(0)
    shard.no_answer(1)
    shard.advance(RETRY_SECONDS)
    assert sorted(shard.offered()[4:]) == sorted(CHAIN)


def test_an_answer_ends_the_rest_of_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two offers failed, so it rests; the other one is answered."""
    monkeypatch.setattr(context, "OFFER_BLOCKS_MAX", 1)
    shard = Leaver(slab_count=4)
    shard.store(shard.attach(), CHAIN)
    shard.begin()
    shard.find(peer(), peer(SECOND, free=0), holders={key: (PEER,) for key in CHAIN})
    assert [item.key for offer in shard.offers for item in offer.items] == list(CHAIN[:2])
    shard.no_answer(0)
    assert len(shard.offers) == 2, "it rests, and nobody else needs what it has"
    shard.answer(1)
    assert shard.offered() == [*CHAIN[:2], CHAIN[0], CHAIN[2]]
    shard.answer(2)
    shard.answer(3)
    shard.answer(4)
    progress = shard.state.progress(shard.now)
    assert (shard.phase, progress.blocks_elsewhere, progress.blocks_lost) == (DrainPhase.GONE, 4, 0)


def test_blocks_wait_for_the_only_peer_with_room(shard: Leaver, engine: AttachmentId) -> None:
    """What the other one could not take is offered to the first again when it has rested."""
    shard.store(engine, CHAIN)
    shard.begin()
    shard.find(peer(), peer(SECOND, free=0))
    shard.no_answer()
    shard.answer(kept=False, full=True)
    assert shard.phase is DrainPhase.HANDING_OVER and len(shard.offers) == 2
    shard.advance(RETRY_SECONDS)
    assert shard.offers[-1].peer == PEER
    shard.answer()
    progress = shard.state.progress(shard.now)
    assert (shard.phase, progress.blocks_handed) == (DrainPhase.GONE, 4)


def test_only_so_many_offers_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each peer gets one before any gets a second."""
    monkeypatch.setattr(context, "OFFER_BLOCKS_MAX", 1)
    monkeypatch.setattr(sender, "OFFERS_MAX", 4)
    shard = Leaver(slab_count=4)
    shard.store(shard.attach(), make_chain(12))
    shard.begin()
    peers = [make_holder(name) for name in "abc"]
    shard.find(*[peer(holder) for holder in peers])
    assert len(shard.offers) == 4 and {offer.peer for offer in shard.offers[:3]} == set(peers)
    for answered in range(12):
        assert len(shard.offers) - answered <= 4
        shard.answer(answered)
    assert len(shard.offers) == 12
    assert shard.state.progress(shard.now).blocks_handed == 12


def test_an_answer_after_the_time_for_it_ends_the_drain(shard: Leaver, engine: AttachmentId) -> None:
    """Nothing is offered any more."""
    shard.store(engine, CHAIN)
    shard.begin(timeout=10.0)
    shard.find(peer())
    shard.now += 7.5
    shard.no_answer()
    shard.advance(0.0)
    assert (shard.phase, len(shard.offers)) == (DrainPhase.GONE, 1)
    assert "out of time" in shard.state.progress(shard.now).note


def test_when_nobody_takes_anything_it_leaves_all_the_same(shard: Leaver, engine: AttachmentId) -> None:
    shard.store(engine, CHAIN)
    shard.begin()
    shard.find(peer())
    shard.answer(kept=False, full=True)
    assert shard.phase is DrainPhase.GONE
    assert shard.state.progress(shard.now).blocks_lost == 4


def test_the_last_node_leaves_without_a_receiver(shard: Leaver, engine: AttachmentId) -> None:
    shard.store(engine, CHAIN)
    shard.begin()
    shard.find(peer(draining=True))
    progress = shard.state.progress(shard.now)
    assert (progress.phase, progress.blocks_lost) == (DrainPhase.GONE, 4)
    assert progress.note == "no other node stays"


@pytest.mark.parametrize("answered", [False, True])
def test_silence_of_others_does_not_hold_it_for_ever(shard: Leaver, engine: AttachmentId, answered: bool) -> None:
    """Neither the directory nor a peer needs to answer."""
    shard.store(engine, CHAIN)
    shard.begin(timeout=10.0)
    if answered:
        shard.find(peer())
    shard.advance(7.1)
    assert shard.phase is DrainPhase.GONE
    assert shard.state.progress(shard.now).note
    shard.send(ev.Offered(1, TakeOverResult((True,) * 4, full=False)))  # too late
    shard.find(peer())
    assert shard.phase is DrainPhase.GONE


def test_it_can_be_undone_until_the_directory_was_told(shard: Leaver, engine: AttachmentId) -> None:
    shard.store(engine, CHAIN)
    shard.begin()
    shard.find(peer())
    shard.send(ev.Drain(undo=True))
    assert shard.phase is DrainPhase.SERVING
    assert len(shard.reserve(engine)) == 1
    shard.answer()  # of the offer that was out
    assert shard.phase is DrainPhase.SERVING
    shard.begin(handover=False)
    shard.send(ev.Drain(undo=True))
    assert shard.phase is DrainPhase.GONE
    assert shard.state.draining


def test_a_second_drain_only_shortens_the_first(shard: Leaver, engine: AttachmentId) -> None:
    shard.store(engine, CHAIN)
    shard.begin(timeout=100.0)
    shard.find(peer())
    shard.begin(timeout=1.0)
    shard.advance(0.8)
    assert shard.phase is DrainPhase.GONE
    assert len(shard.searches) == 1


# -- who gets what ----


def block(key: BlockKey, size: int = SMALL) -> Block:
    return Block(key, Slot(SlotIndex(0), size, Generation(0)), 0, 0, SpanRoute(0), is_secondary=False)


def test_a_chain_stays_on_one_node() -> None:
    chains = [make_chain(10, f"chain {number}") for number in range(8)]
    blocks = [block(key) for one in chains for key in one]
    parents: dict[BlockKey, BlockKey | None] = {}
    for one in chains:
        parents.update(zip(one, (None, *one), strict=False))
    shares = [(NodeId("a"), 0.5, 64 * MiB), (NodeId("b"), 0.5, 64 * MiB)]
    offers = plan(blocks, lambda one: parents[one.key], shares, NO_KEEPERS)
    found = {node: {one.key for one in mine} for node, mine in offers.items()}
    assert all(set(one) <= found[NodeId("a")] or set(one) <= found[NodeId("b")] for one in chains)
    assert len(found[NodeId("a")]) == len(found[NodeId("b")])


def test_a_chain_larger_than_a_share_is_split() -> None:
    """No peer gets more than it has room for."""
    chain = make_chain(40)
    parents: dict[BlockKey, BlockKey | None] = dict(zip(chain, (None, *chain), strict=False))
    shares = [(NodeId("a"), 0.5, 10 * SMALL), (NodeId("b"), 0.5, 20 * SMALL)]
    found = plan([block(key) for key in chain], lambda one: parents[one.key], shares, NO_KEEPERS)
    assert {node: len(mine) for node, mine in found.items()} == {"a": 10, "b": 20}
    given = [one.key for mine in found.values() for one in mine]
    assert set(given) == set(chain[:30])  # the hottest


def test_a_shard_that_just_joined_is_given_less(shard: Leaver, engine: AttachmentId) -> None:
    """It is given less although it has the most room."""
    chains = [make_chain(2, f"chain {number}") for number in range(8)]
    for chain in chains:
        shard.store(engine, chain)
    shard.begin()
    shard.find(peer(PEER, free=64 * MiB, age=1.0), peer(SECOND, free=16 * MiB))
    given = Counter({offer.peer: len(offer.items) for offer in shard.offers})
    assert 0 < given[PEER] < given[SECOND]


def test_who_is_as_old_as_half_of_the_others_is_not_young() -> None:
    assert ramps([0.0, RAMP_SECONDS, 2 * RAMP_SECONDS]) == [RAMP_FLOOR, 1.0, 1.0]
    assert ramps([RAMP_SECONDS / 2, RAMP_SECONDS]) == [0.5, 1.0]
    assert ramps([1.0, 20.0, 40.0, RAMP_SECONDS]) == [RAMP_FLOOR, 0.5, 1.0, 1.0]  # all but one were restarted
    assert ramps([0.0]) == [1.0]  # the only other node takes everything


def test_a_node_that_leaves_too_is_given_nothing(shard: Leaver, engine: AttachmentId) -> None:
    shard.store(engine, CHAIN)
    shard.begin()
    shard.find(peer(PEER, draining=True), peer(SECOND))
    assert {offer.peer for offer in shard.offers} == {SECOND}


def test_a_primary_copy_makes_way_only_where_none_has_room(shard: Leaver, engine: AttachmentId) -> None:
    """A young node gets more than its share before an old one, which is full, evicts what nobody else has."""
    shard.store(engine, CHAIN)
    shard.store(engine, OTHER)
    shard.begin()
    shard.find(peer(PEER, free=len(OTHER) * SMALL), peer(SECOND, free=len(CHAIN) * SMALL, age=0.0))
    given = Counter({offer.peer.node_id: len(offer.items) for offer in shard.offers})
    assert given == {PEER.node_id: len(OTHER), SECOND.node_id: len(CHAIN)}
    shard.send(ev.Drain(undo=True))
    shard.begin()
    shard.find(peer(PEER, free=0), peer(SECOND, free=0))
    assert sum(len(offer.items) for offer in shard.offers[2:]) == len(CHAIN) + len(OTHER)


def test_of_copies_one_becomes_primary_where_most_room_is(shard: Leaver, engine: AttachmentId) -> None:
    """The directory names holders in the order of their names. The first of them would get everything."""
    chains = [make_chain(2, f"chain {number}") for number in range(8)]
    for chain in chains:
        shard.store(engine, chain)
    shard.begin()
    held = {key: (PEER, SECOND) for key in shard.keys_held()}
    shard.find(peer(PEER, free=16 * MiB), peer(SECOND, free=48 * MiB), holders=held)
    given = {offer.peer: [item.key for item in offer.items] for offer in shard.offers}
    assert {node: len(keys) for node, keys in given.items()} == {PEER: 4, SECOND: 12}
    assert all(set(chain) <= set(given[PEER]) or set(chain) <= set(given[SECOND]) for chain in chains)


# -- what was not kept ----


def test_a_full_holder_gets_no_more_primary_copies(shard: Leaver, engine: AttachmentId) -> None:
    """In a rolling restart only the last old node holds copies of all. It would evict what nobody else has."""
    shard.store(engine, CHAIN)
    shard.begin()
    shard.find(peer(PEER), peer(SECOND, free=len(CHAIN) * SMALL), holders=dict.fromkeys(CHAIN, (SECOND,)))
    given = Counter({offer.peer: len(offer.items) for offer in shard.offers})
    assert given == {PEER: len(CHAIN) // 2, SECOND: len(CHAIN) // 2}
    for place in range(2):
        shard.answer(place)
    progress = shard.state.progress(shard.now)
    assert (progress.blocks_elsewhere, progress.blocks_lost) == (len(CHAIN), 0)


def test_what_only_a_dead_holder_has_goes_to_another_node(shard: Leaver, engine: AttachmentId) -> None:
    shard.store(engine, CHAIN)
    shard.begin()
    shard.find(peer(PEER, free=0), peer(SECOND), holders=dict.fromkeys(CHAIN, (SECOND,)))
    for tries in range(1, TRIES_MAX + 1):
        assert {offer.peer for offer in shard.offers} == {SECOND}
        shard.no_answer()
        shard.advance(pause(tries))
    assert [offer.peer for offer in shard.offers][TRIES_MAX:] == [PEER]


def test_a_receivers_read_does_not_make_a_block_hotter() -> None:
    shard = Leaver(slab_count=4)
    engine = shard.attach()
    shard.store(engine, CHAIN)
    shard.now += 50.0
    shard.begin()
    shard.find(peer(), peer(SECOND, free=0))
    op = shard.next_op()
    shard.send(ev.PeerLocate(op, NodeId("peer"), shard.state.epoch, CHAIN))
    shard.answer(0, kept=False, full=True)
    assert {item.idle_seconds for offer in shard.offers for item in offer.items} == {50.0}


def test_a_copy_that_is_gone_is_not_counted_as_safe(shard: Leaver, engine: AttachmentId) -> None:
    shard.store(engine, CHAIN[:1])
    shard.begin()
    shard.find(peer(), peer(SECOND), holders={CHAIN[0]: (SECOND,)})
    shard.answer(kept=False, full=True)
    assert shard.offers[-1].peer == PEER
    shard.answer()
    progress = shard.state.progress(shard.now)
    assert (progress.blocks_elsewhere, progress.blocks_handed, progress.blocks_lost) == (0, 1, 0)


@pytest.mark.parametrize("others", [(SECOND,), ()])
def test_a_block_that_was_not_kept_is_offered_again(
    shard: Leaver, engine: AttachmentId, others: tuple[Holder, ...]
) -> None:
    """A read failed, or its tenant's quota there is full. It goes to another node, if there is one."""
    shard.store(engine, CHAIN[:1])
    shard.begin()
    shard.find(peer(), *[peer(holder, free=0) for holder in others])
    for tries in range(1, TRIES_MAX):
        shard.answer(kept=False)
        assert len(shard.offers) == tries
        shard.advance(pause(tries))
    shard.answer(kept=False)
    expected = ([PEER, *(others or (PEER,))] * TRIES_MAX)[:TRIES_MAX]
    assert [offer.peer for offer in shard.offers] == expected
    progress = shard.state.progress(shard.now)
    assert (shard.phase, progress.blocks_lost) == (DrainPhase.GONE, 1)
    assert "1 block kept by no other node" in progress.note


def test_a_peer_that_is_full_for_one_size_is_offered_the_others(shard: Leaver, engine: AttachmentId) -> None:
    other = shard.attach(make_spec("other", "large", payload_bytes=LARGE))
    large = make_chain(2, "large", "large")
    shard.store(engine, CHAIN)
    shard.store(other, large)
    shard.begin()
    shard.find(peer())
    by_size = {offer.payload_bytes: offer for offer in shard.offers}
    assert set(by_size) == {SMALL, LARGE}
    shard.send(ev.Offered(by_size[SMALL].offer, TakeOverResult((False,) * 4, full=True)))
    shard.send(ev.Offered(by_size[LARGE].offer, TakeOverResult((True,) * 2, full=False)))
    progress = shard.state.progress(shard.now)
    assert (progress.blocks_handed, progress.blocks_lost) == (2, 4)
    assert shard.phase is DrainPhase.GONE


def test_a_node_that_is_alone_leaves_at_once() -> None:
    shard = Leaver(slab_count=4, has_directory=False)
    shard.store(shard.attach(), CHAIN)
    shard.begin()
    assert shard.phase is DrainPhase.GONE and not shard.searches
    assert shard.state.progress(shard.now).note == "this node is alone"


def test_a_peer_that_is_full_is_named_once(shard: Leaver, engine: AttachmentId) -> None:
    """It may be full for blocks of each size."""
    large = shard.attach(make_spec("large", "large", payload_bytes=LARGE))
    shard.store(engine, CHAIN)
    shard.store(large, make_chain(2, "large", "large"))
    shard.begin()
    shard.find(peer())
    for place in range(len(shard.offers)):
        shard.answer(place, kept=False, full=True)
    assert shard.state.progress(shard.now).note.count("has no room for more") == 1


def test_a_block_that_went_before_its_offer_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch that was under way when the drain began needs its slot."""
    monkeypatch.setattr(context, "OFFER_BLOCKS_MAX", 1)
    shard = Leaver(slab_count=1)
    engine = shard.attach()
    shard.store(engine, CHAIN)
    op = shard.acquire(engine, OTHER[:1])
    shard.resolved(op, run_of(0, 1))
    shard.begin()
    shard.find(peer())
    assert shard.offered() == list(CHAIN[:OFFERS_PER_PEER])
    shard.located(shard.locates[-1], make_located(OTHER[:1]))
    assert CHAIN[3] not in shard.keys_held()
    for place in range(3):
        shard.answer(place)
    assert shard.offered() == list(CHAIN[:3])
    assert shard.state.progress(shard.now).blocks_handed == 3


def test_a_block_that_was_stored_again_is_charged_to_its_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot that the block was in before is another tenant's now."""
    monkeypatch.setattr(context, "OFFER_BLOCKS_MAX", 1)
    shard = Leaver(slab_count=1, tenants={"a": TenantLimits(), "b": TenantLimits()})
    engine, other = shard.attach(tenant="a"), shard.attach(tenant="b")
    refs = shard.reserve(engine)
    shard.store(engine, CHAIN[:3])
    op = shard.acquire(other, OTHER[:1])
    shard.resolved(op, run_of(0, 1))
    shard.begin()
    shard.find(peer())
    shard.located(shard.locates[-1], make_located(OTHER[:1]))
    assert CHAIN[2] not in shard.keys_held()
    shard.write(refs[0], CHAIN[2])
    shard.begin_seal(engine, shard.items(refs, CHAIN, 2))
    shard.digest_all()
    for place in range(3):
        shard.answer(place)
    assert [item.account_tag for offer in shard.offers for item in offer.items] == [tag_of("a")] * 3
