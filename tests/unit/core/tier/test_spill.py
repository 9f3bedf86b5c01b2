"""Cold blocks are offered to nodes that accept them, ahead of need, and nothing here waits for those nodes."""

from __future__ import annotations

import itertools
import math

import pytest

from kvservice.core import actions as act
from kvservice.core import events as ev
from kvservice.core.messages import Peer, TakeOverResult
from kvservice.core.store.freshness import NAMES_MAX
from kvservice.core.tier import spill
from kvservice.core.tier.spill import (
    ANSWER_SECONDS,
    NONE_SECONDS,
    NONE_SECONDS_MAX,
    OFFERS_MAX,
    RECEIVERS_SECONDS,
    REFUSED_SECONDS,
)
from kvservice.core.tier.tiers import CLEAN_SECONDS
from kvservice.testing.builders import LARGE, SMALL, CoreHarness, make_chain, make_holder, make_spec
from kvservice.units import AttachmentId, BlockKey, MiB

CHAIN = make_chain(30)


def peer(name: str = "memory", *, free: int = 64 * MiB, accepts: bool = True, draining: bool = False) -> Peer:
    return Peer(make_holder(name), free, 64 * MiB, math.inf, draining, accepts)


class Sender(CoreHarness):
    """32 blocks; an offer may have two."""

    def __init__(self) -> None:
        super().__init__(slab_count=8, spills=True)

    def fill(self, chain: tuple[BlockKey, ...] = CHAIN) -> AttachmentId:
        engine = self.attach()
        self.store(engine, chain)
        self.clean()
        return engine

    def clean(self) -> None:
        self.advance(CLEAN_SECONDS)

    def find(self, *peers: Peer) -> None:
        assert self.searches and self.searches[-1] == act.FindTakers((), is_spill=True)
        self.send(ev.TakersFound(peers, {}, is_spill=True))

    def answer(self, *, kept: bool = True, full: bool = False) -> list[BlockKey]:
        """Answers the oldest offer. Returns the offered blocks."""
        offer = self.offers.pop(0)
        self.send(ev.Offered(offer.offer, TakeOverResult((kept,) * len(offer.items), full)))
        return [item.key for item in offer.items]

    def take_all(self) -> list[BlockKey]:
        taken: list[BlockKey] = []
        while self.offers:
            taken += self.answer()
        return taken


@pytest.fixture
def sender() -> Sender:
    return Sender()


def test_cold_blocks_are_offered_ahead_of_need(sender: Sender) -> None:
    sender.fill()
    sender.find(peer())
    assert len(sender.offers) == OFFERS_MAX and all(len(offer.items) == 2 for offer in sender.offers)
    (first, second), *_ = (offer.items for offer in sender.offers)
    assert (first.key, first.parent, first.position) == (CHAIN[29], CHAIN[28], 29), "the end of the chain goes first"
    assert (second.key, first.idle_seconds > 0) == (CHAIN[28], True)
    assert sender.take_all() == list(CHAIN[::-1])
    assert sender.count("spill_blocks_taken") == 30
    sender.clean()
    assert not sender.offers, "each is offered once"
    assert sender.keys_held() == set(CHAIN), "they stay until the room is needed"


@pytest.mark.parametrize("names", [1, NAMES_MAX, NAMES_MAX + 1])
def test_an_offer_says_whose_its_blocks_are(sender: Sender, names: int) -> None:
    """Not if some names are not known: a clear by one of them would not reach the block."""
    sender.fill()
    spec = make_spec()
    fingerprint = spec.fingerprint.block_mark
    for number in range(1, names):
        sender.state.freshness.learn({fingerprint: frozenset({("", f"run {number}")})})
    sender.find(peer())
    (item, *_) = sender.offers[0].items
    known = (fingerprint, frozenset({("", "model"), *(("", f"run {number}") for number in range(1, names))}))
    assert (item.fingerprint, item.names) == (known if names <= NAMES_MAX else (b"", frozenset()))
    assert item.model == ("model" if names == 1 else "")


def test_a_block_that_a_receiver_refused_is_offered_again_later(sender: Sender) -> None:
    """It may be from before a clear, and be refused each time. Or the receiver did not reach this node for a moment."""
    sender.fill()
    sender.find(peer())
    offered: list[BlockKey] = []
    while sender.offers:
        offered += sender.answer(kept=False)
    assert offered == list(CHAIN[::-1])
    sender.clean()
    assert not sender.offers and sender.count("spill_blocks_taken") == 0
    sender.advance(REFUSED_SECONDS)
    assert sender.take_all() == list(CHAIN[::-1])


def test_nothing_is_asked_while_memory_is_free(sender: Sender) -> None:
    sender.fill(CHAIN[:20])
    assert not sender.searches


def test_an_offered_block_is_evicted_when_room_is_needed(sender: Sender) -> None:
    engine = sender.fill()
    sender.find(peer())
    assert sender.slots("leased") == 0, "an offer pins nothing"
    sender.store(engine, make_chain(32, "other"))
    assert not sender.keys_held() & set(CHAIN)
    sender.take_all()
    assert sender.count("spill_blocks_evicted") > 0, "what waited is gone"


def test_all_that_is_lost_between_looks_of_the_cleaner_counts(sender: Sender) -> None:
    """32 blocks fit into memory. Nobody looked at the second and third prompt before the next one came."""
    engine = sender.fill()
    sender.find(peer())
    assert len(sender.take_all()) == 30
    chains = [make_chain(30, f"prompt {number}") for number in range(3)]
    for chain in chains:
        sender.store(engine, chain)
    held = sender.keys_held()
    lost = sum(key not in held for chain in chains for key in chain)
    assert sender.count("spill_blocks_evicted") == lost > 30


def test_a_block_computed_again_is_offered_again(sender: Sender) -> None:
    engine = sender.fill()
    sender.find(peer())
    sender.take_all()
    sender.store(engine, make_chain(32, "other"))
    sender.clean()
    sender.take_all()
    sender.store(engine, CHAIN)
    sender.clean()
    assert set(sender.take_all()) >= set(CHAIN[-8:])


def test_a_receivers_reading_is_no_use_of_the_block(sender: Sender) -> None:
    sender.fill()
    sender.find(peer())
    offered = tuple(item.key for item in sender.offers[0].items)
    before = {key: sender.state._store.policy.used_at(key) for key in CHAIN}
    sender.now += 5.0
    op = sender.next_op()
    sender.send(ev.PeerLocate(op, make_holder("memory").node_id, sender.state.epoch, (*offered, CHAIN[0])))
    used_at = sender.state._store.policy.used_at
    assert all(used_at(key) == before[key] for key in offered)
    assert used_at(CHAIN[0]) > before[CHAIN[0]], "somebody wants this one"


def test_the_node_with_the_most_room_gets_the_offer(sender: Sender) -> None:
    sender.fill()
    sender.find(peer("small", free=3 * SMALL), peer("large", free=4 * SMALL), peer("engine", accepts=False))
    assert [offer.peer.node_id for offer in sender.offers] == ["large", "small"]


@pytest.mark.parametrize("fault", ["full", "failed", "silent"])
def test_a_receiver_that_takes_nothing_is_left_alone(sender: Sender, fault: str) -> None:
    sender.fill()
    sender.find(peer())
    if fault == "full":
        sender.answer(kept=False, full=True)
    elif fault == "failed":
        sender.send(ev.Offered(sender.offers.pop(0).offer, None))
    else:
        sender.advance(ANSWER_SECONDS)
    sender.offers.clear()
    searches = len(sender.searches)
    for _ in range(5):
        sender.clean()
    assert not sender.offers
    sender.advance(RECEIVERS_SECONDS + 2 * CLEAN_SECONDS)
    sender.clean()
    assert len(sender.searches) >= searches + (fault != "silent")
    sender.find(peer())
    assert sender.offers, "it is asked again later"


def test_an_offer_without_an_answer_ends_though_nothing_waits(sender: Sender) -> None:
    sender.fill()
    sender.find(peer())
    sender.take_all()
    sender.fill(make_chain(1, "last"))
    sender.clean()
    assert sender.state._tiers.spill.is_offering
    sender.advance(ANSWER_SECONDS)
    assert not sender.state._tiers.spill.is_offering


def test_without_memory_nodes_questions_become_rare(sender: Sender) -> None:
    sender.fill()
    sender.find(peer(accepts=False), peer("gone", draining=True))
    times = []
    for _ in range(int(4 * NONE_SECONDS_MAX)):
        searches = len(sender.searches)
        sender.advance(1.0)
        if len(sender.searches) > searches:
            times.append(sender.now)
            sender.find(peer(accepts=False))
    gaps = [later - sooner for sooner, later in itertools.pairwise(times)]
    assert gaps[0] >= NONE_SECONDS and max(gaps) >= NONE_SECONDS_MAX and len(times) < 10
    assert not sender.offers


def test_with_one_receiver_full_the_other_gets_offers(sender: Sender) -> None:
    sender.fill()
    sender.find(peer("large"), peer("small", free=4 * SMALL))
    assert {offer.peer.node_id for offer in sender.offers} == {"large"}
    sender.answer(kept=False, full=True)
    assert sender.offers[-1].peer.node_id == "small"


def test_more_than_the_queue_holds_is_dropped(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "QUEUE_MAX", 3)
    sender.fill()
    assert sender.count("spill_blocks_dropped") > 0
    sender.find(peer())
    assert len(sender.take_all()) == 3


def test_one_offer_has_blocks_of_one_size(sender: Sender) -> None:
    small = sender.attach()
    sender.store(small, CHAIN[:24])
    large = sender.attach(make_spec("large", payload_bytes=LARGE))
    sender.store(large, make_chain(3, "large"))
    sender.clean()
    sender.find(peer())
    while sender.offers:
        assert len({item.key in CHAIN for item in sender.offers[0].items}) == 1
        sender.answer()


def test_a_draining_node_spills_nothing(sender: Sender) -> None:
    sender.fill()
    sender.send(ev.Drain())
    sender.find(peer())
    assert not sender.offers


def test_answers_to_other_offers_are_ignored(sender: Sender) -> None:
    sender.fill()
    sender.find(peer())
    sender.send(ev.Offered(spill.OFFER_NUMBERS_FROM - 1, None))
    sender.send(ev.Offered(spill.OFFER_NUMBERS_FROM + 77, None))
    assert len(sender.take_all()) == 30


def test_what_nobody_asks_for_again_is_not_offered(sender: Sender) -> None:
    sender.state._admission.admits = lambda account: False  # type: ignore[method-assign]
    sender.fill()
    assert not sender.searches


def test_without_a_directory_nothing_is_offered() -> None:
    harness = CoreHarness(slab_count=2, spills=True, has_directory=False)
    harness.store(harness.attach(), CHAIN[:8])
    harness.advance(CLEAN_SECONDS)
    assert not harness.searches
