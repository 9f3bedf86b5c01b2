"""Rules of core.acquire.suspects: what an engine doubts is looked at, and only what is damaged goes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvservice.core import actions as act
from kvservice.core import events as ev
from kvservice.core.acquire import suspects as module
from kvservice.core.acquire.suspects import CHECKED_MAX
from kvservice.core.block.marks import MarkKind
from kvservice.core.messages import AcquireResult, LocateResult, MissReason, SealStatus
from kvservice.core.segment.refs import BlockRef
from kvservice.core.tier.rules import TierRules, WriteMoment
from kvservice.testing.builders import CoreHarness, make_chain, make_spec
from kvservice.units import AttachmentId, Generation, MiB, NodeId, SlotIndex

CHAIN = make_chain(3)


class Line:
    """An engine that stored CHAIN and holds it under a lease."""

    def __init__(self) -> None:
        self.shard = CoreHarness(slab_count=10)
        self.attachment = self.shard.attach()
        self.shard.store(self.attachment, CHAIN)
        self.held = self.shard.hit(self.attachment, CHAIN)

    def names(self, *refs: BlockRef, attachment: AttachmentId | None = None) -> None:
        op = self.shard.next_op()
        self.shard.send(ev.Renew(op, attachment or self.attachment, (self.held.lease_id,), suspects=refs))
        self.shard.reply(op)

    def damages(self, ref: BlockRef) -> None:
        self.shard.contents[ref.slot] = b"something else"

    def asks(self) -> AcquireResult:
        return self.shard.hit(self.attachment, CHAIN)


@pytest.fixture
def line() -> Line:
    return Line()


def test_a_damaged_block_goes_and_its_next_store_brings_it_back(line: Line) -> None:
    damaged = line.held.blocks[1]
    line.damages(damaged)
    line.names(damaged)
    assert len(line.asks().blocks) == 3, "an engine's word alone takes nothing away"
    line.shard.digest_all()
    found = line.asks()
    assert len(found.blocks) == 1 and found.miss is MissReason.NEVER_STORED
    assert line.shard.announced[CHAIN[1]] == 0 and line.shard.count("evicted_corrupt") == 1
    assert line.shard.store(line.attachment, CHAIN, start=1) == [SealStatus.SEALED, SealStatus.DUPLICATE]
    again = line.asks()
    assert len(again.blocks) == 3 and again.blocks[1] != damaged


def test_a_damaged_block_stays_for_those_that_read_it(line: Line) -> None:
    """Their loads fail by themselves; the slot must not be written meanwhile."""
    damaged = line.held.blocks[0]
    line.damages(damaged)
    line.names(damaged)
    line.shard.digest_all()
    assert line.shard.slots("leased") == 3
    line.shard.release(line.attachment, line.held.lease_id)
    assert line.shard.slots("leased") == 0 and line.shard.slots("sealed") == 2


def test_a_sound_block_stays_and_has_its_header_again(line: Line) -> None:
    suspect = line.held.blocks[1]
    header = line.shard.headers[suspect.slot]
    line.shard.headers[suspect.slot] = replace(header, length=header.length + 1)
    line.names(suspect)
    line.shard.digest_all()
    assert line.shard.headers[suspect.slot] == header
    assert line.asks().blocks == line.held.blocks
    assert (line.shard.count("suspects_checked"), line.shard.count("suspects_damaged")) == (1, 0)


def test_a_suspect_keeps_its_block_while_it_is_looked_at(line: Line) -> None:
    line.names(line.held.blocks[2])
    line.shard.release(line.attachment, line.held.lease_id)
    assert line.shard.slots("leased") == 1
    line.shard.digest_all()
    assert line.shard.slots("leased") == 0


def test_a_block_that_was_given_up_meanwhile_is_left_alone(line: Line) -> None:
    suspect = line.held.blocks[0]
    line.damages(suspect)
    line.names(suspect)
    line.shard.clear(MarkKind.EVERYTHING)
    line.shard.digest_all()
    assert line.shard.count("suspects_damaged") == 0 and not line.shard.keys_held()


def test_a_block_stored_again_meanwhile_is_not_that_one(line: Line) -> None:
    suspect = line.held.blocks[0]
    line.damages(suspect)
    line.names(suspect)
    (digest,) = line.shard.digests
    line.shard.digests.clear()
    line.shard.clear(MarkKind.EVERYTHING)
    line.shard.now += 1.0
    line.shard.store(line.attachment, CHAIN)
    line.shard.digests.append(digest)
    line.shard.digest_all()
    assert line.shard.keys_held() == set(CHAIN) and line.shard.count("suspects_damaged") == 0


def test_a_prompt_with_a_damaged_block_is_not_pinned_any_more(line: Line) -> None:
    """Nothing is held whose block is no more, as after a clear."""
    line.shard.warm(CHAIN, pin="system", spec=make_spec())
    assert [pin.blocks for pin in line.shard.state.pins(line.shard.now)] == [3]
    line.damages(line.held.blocks[1])
    line.names(line.held.blocks[1])
    line.shard.digest_all()
    line.shard.release(line.attachment, line.held.lease_id)
    assert line.shard.state.pins(line.shard.now) == ()
    assert line.shard.slots("leased") == 0 and line.shard.slots("sealed") == 2


def test_when_its_digest_cannot_be_made_a_block_stays(line: Line) -> None:
    line.names(line.held.blocks[0])
    line.shard.digest_all(readable=False)
    assert line.asks().blocks == line.held.blocks


def test_what_is_no_block_is_not_looked_at(line: Line) -> None:
    sealed = line.held.blocks[0]
    (written,) = line.shard.reserve(line.attachment, 1)
    later, nowhere = Generation(sealed.generation + 2), SlotIndex(1 << 40)
    line.names(BlockRef(sealed.slot, later), BlockRef(nowhere, Generation(2)), written)
    assert not line.shard.digests and line.shard.count("suspects_checked") == 0


def test_a_suspect_is_looked_at_once_at_a_time(line: Line) -> None:
    suspect = line.held.blocks[0]
    line.names(suspect, suspect)
    line.names(suspect, attachment=line.shard.attach(make_spec("another")))
    assert len(line.shard.digests) == 1
    line.shard.digest_all()
    line.names(suspect)
    assert len(line.shard.digests) == 1


def test_many_suspects_are_looked_at_in_turn() -> None:
    shard = CoreHarness(slab_count=CHECKED_MAX)
    engine, chain = shard.attach(), make_chain(2 * CHECKED_MAX)
    shard.store(engine, chain)
    held = shard.hit(engine, chain)
    shard.send(ev.Renew(shard.next_op(), engine, (), suspects=held.blocks))
    assert len(shard.digests) == CHECKED_MAX
    shard.digest_all()
    assert shard.count("suspects_checked") == 2 * CHECKED_MAX


def test_no_more_suspects_wait_than_are_remembered(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots without a block take no place from others."""
    monkeypatch.setattr(module, "WAITING_MAX", 2)
    line.names(*(BlockRef(SlotIndex(number), Generation(900)) for number in range(9)), *line.held.blocks)
    assert line.shard.count("suspects_checked") == 2 and line.shard.count("suspects_dropped") == 1


def test_a_reader_names_what_it_leased_and_nothing_else(line: Line) -> None:
    """It does so when it gives the lease back."""
    shard, op, reader = line.shard, line.shard.next_op(), NodeId("reader")
    shard.send(ev.PeerLocate(op, reader, shard.state.epoch, CHAIN[:1]))
    located = shard.reply(op)
    assert isinstance(located, LocateResult)
    line.damages(line.held.blocks[0])
    for _ in range(2):  # the second time, its lease is over
        event = ev.PeerRelease(shard.next_op(), reader, shard.state.epoch, located.lease_id, line.held.blocks)
        shard.send(event)
        assert len(shard.digests) == 1
    shard.digest_all()
    assert shard.count("suspects_damaged") == 1 and line.asks().miss is MissReason.NEVER_STORED


def test_a_heartbeat_of_a_strange_attachment_names_nothing(line: Line) -> None:
    actions = line.shard.send(ev.Renew(99, AttachmentId(12345), (), suspects=line.held.blocks))
    assert [type(action) for action in actions] == [act.Refuse] and not line.shard.digests


def test_a_damaged_block_that_a_tier_refuses_goes() -> None:
    """A lossy codec refuses its bytes at each look of the cleaner."""
    shard = CoreHarness(tiers=(TierRules("disk", budget_bytes=1 * MiB, write=WriteMoment.STORED),))
    engine = shard.attach()
    shard.store(engine, CHAIN[:1])
    (write,) = shard.writes()
    ((_, slot),) = write.items
    shard.contents[slot] = b"something else"
    shard.written(write, False)
    assert shard.keys_held() == {CHAIN[0]}
    shard.digest_all()
    assert not shard.keys_held() and shard.count("suspects_damaged") == 1


def test_a_sound_block_that_a_tier_refuses_stays() -> None:
    """It says nothing of a block that the tier has no room."""
    for is_full in (False, True):
        shard = CoreHarness(tiers=(TierRules("disk", budget_bytes=1 * MiB, write=WriteMoment.STORED),))
        shard.store(shard.attach(), CHAIN[:1])
        (write,) = shard.writes()
        shard.written(write, False, is_full=is_full)
        assert len(shard.digests) == (not is_full)
        shard.digest_all()
        assert shard.keys_held() == {CHAIN[0]} and shard.count("suspects_damaged") == 0
