"""Rules of core.shard and store.blocks: storing, evicting, sharing memory between models, serving peers, adopting."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import get_args

import pytest

from kvservice.core import actions as act
from kvservice.core import events as ev
from kvservice.core.block.marks import CLOCK_SKEW_SECONDS, Mark, MarkKind
from kvservice.core.block.tenants import TenantLimits
from kvservice.core.messages import LocateResult, SealStatus
from kvservice.core.segment.geometry import slab_of, slot_index
from kvservice.core.segment.header import SlotFlags
from kvservice.core.segment.refs import BlockRef
from kvservice.core.writes import RESERVE_COUNT_MAX
from kvservice.errors import InvalidRequest, StaleEpoch
from kvservice.testing.builders import LARGE, SMALL, WALL, CoreHarness, content_of, make_chain, make_spec
from kvservice.units import BlockKey, BootEpoch, Generation, LeaseId, NodeId, SlotIndex

CHAIN = make_chain(4)
OTHER = make_chain(8, "other")
PEER = NodeId("peer")


def one_slab() -> CoreHarness:
    return CoreHarness(slab_count=1)  # 4 small slots or 2 large ones


def peer_locate(harness: CoreHarness, *keys: BlockKey, epoch: int | None = None) -> LocateResult:
    op = harness.next_op()
    harness.send(ev.PeerLocate(op, PEER, BootEpoch(harness.state.epoch if epoch is None else epoch), keys))
    value = harness.reply(op)
    assert isinstance(value, LocateResult)
    return value


# -- storing ----


def test_a_sealed_block_is_announced_and_has_its_header() -> None:
    harness = CoreHarness()
    engine = harness.attach()
    assert harness.store(engine, CHAIN) == [SealStatus.SEALED] * 4
    assert harness.announced == dict.fromkeys(CHAIN, 1)
    for position, key in enumerate(CHAIN):
        header = next(header for header in harness.headers.values() if header.key == key)
        assert header.is_stable and header.position == position and header.flags is SlotFlags.NONE


def test_a_reserved_slot_names_its_writer_first() -> None:
    """It does so before anybody is told of the reservation."""
    harness = CoreHarness()
    engine = harness.attach()
    op = harness.next_op()
    actions = harness.send(ev.Reserve(op, engine, 2))
    assert [type(action) for action in actions] == [act.AssignSlab, act.WriteHeader, act.WriteHeader, act.Reply]
    for ref in harness.reply(op):  # type: ignore[attr-defined]
        header = harness.headers[ref.slot]
        assert not header.is_stable and header.key == make_spec().engine_id and header.generation == ref.generation


def test_the_header_is_written_before_announce_and_answer() -> None:
    harness = CoreHarness()
    engine = harness.attach()
    refs = harness.reserve(engine, 1)
    harness.write(refs[0], CHAIN[0])
    harness.begin_seal(engine, harness.items(refs, CHAIN))
    digest = harness.digest_now(refs[0].slot, CHAIN[0])
    actions = harness.send(ev.Digested((ev.SlotDigest(refs[0].slot, CHAIN[0], digest),)))
    assert [type(action) for action in actions] == [act.WriteHeader, act.Announce, act.Reply]


def test_nothing_is_promised_before_its_digest_is_known() -> None:
    harness = CoreHarness(has_directory=False)
    engine = harness.attach()
    refs = harness.reserve(engine, 1)
    harness.write(refs[0], CHAIN[0])
    harness.begin_seal(engine, harness.items(refs, CHAIN))
    op = harness.acquire(engine, CHAIN[:1])
    assert harness.open(op) and harness.keys_held() == set()
    harness.digest_all()
    assert harness.result(op).blocks == (BlockRef(refs[0].slot, Generation(refs[0].generation + 1)),)


def test_an_aborted_slot_is_free_and_its_header_gone() -> None:
    harness = CoreHarness()
    engine = harness.attach()
    refs = harness.reserve(engine, 2)
    harness.send(ev.Abort(harness.next_op(), engine, (refs[0],)))
    assert refs[0].slot not in harness.headers and refs[1].slot in harness.headers
    assert harness.slots("writing") == 1
    harness.send(ev.Abort(harness.next_op(), engine, (refs[0],)))
    assert harness.count("abort_ignored") == 1
    status = harness.statuses(harness.begin_seal(engine, harness.items(refs[:1], CHAIN)))
    assert status == [SealStatus.STALE]


def test_only_its_owner_seals_or_aborts_a_slot() -> None:
    """The owner can do so only under the slot's generation."""
    harness = CoreHarness()
    engine, thief = harness.attach(make_spec("one")), harness.attach(make_spec("other"))
    (ref,) = harness.reserve(engine, 1)
    wrong = [(thief, ref), (engine, BlockRef(ref.slot, Generation(ref.generation + 2)))]
    wrong += [(engine, BlockRef(SlotIndex(1 << 30), ref.generation))]
    for attachment, claimed in wrong:
        op = harness.begin_seal(attachment, harness.items([claimed], CHAIN))
        assert harness.statuses(op) == [SealStatus.STALE]
        harness.send(ev.Abort(harness.next_op(), attachment, (claimed,)))
    assert harness.slots("writing") == 1
    assert not harness.digests


def test_the_slot_of_a_duplicate_goes_back() -> None:
    harness = CoreHarness()
    engine = harness.attach()
    harness.store(engine, CHAIN[:1])
    assert harness.store(engine, CHAIN[:1]) == [SealStatus.DUPLICATE]
    assert (harness.slots("sealed"), harness.slots("writing")) == (1, 0)


def test_two_engines_sealing_one_block_leave_one() -> None:
    harness = CoreHarness()
    engines = [harness.attach(make_spec("one")), harness.attach(make_spec("other"))]
    refs = [harness.reserve(engine, 1) for engine in engines]
    for ref in refs:
        harness.write(ref[0], CHAIN[0])
    ops = [harness.begin_seal(engine, harness.items(ref, CHAIN)) for engine, ref in zip(engines, refs, strict=True)]
    harness.digest_all()
    assert sorted(harness.statuses(op)[0].value for op in ops) == ["duplicate", "sealed"]
    assert (harness.slots("sealed"), harness.slots("writing")) == (1, 0)


def test_one_slot_in_two_items_and_one_key_in_two_items() -> None:
    harness = CoreHarness()
    engine = harness.attach()
    one, other = harness.reserve(engine, 2)
    items = (*harness.items([one], CHAIN), *harness.items([one], CHAIN[1:]), *harness.items([other], CHAIN))
    op = harness.begin_seal(engine, items)
    harness.digest_all()
    assert harness.statuses(op) == [SealStatus.SEALED, SealStatus.STALE, SealStatus.DUPLICATE]


def test_a_slot_that_cannot_be_read_is_given_back_and_said_so() -> None:
    harness = CoreHarness()
    engine = harness.attach()
    refs = harness.reserve(engine, 2)
    op = harness.begin_seal(engine, harness.items(refs, CHAIN))
    harness.digest_all(readable=False)
    assert harness.statuses(op) == [SealStatus.FAILED] * 2
    assert harness.slots("free") == harness.state.capacity


def test_who_waits_for_a_seal_that_fails_is_answered() -> None:
    harness = CoreHarness()
    engine = harness.attach()
    refs = harness.reserve(engine, 1)
    harness.begin_seal(engine, harness.items(refs, CHAIN))
    op = harness.acquire(engine, CHAIN[:1])
    harness.digest_all(readable=False)
    assert harness.result(op).blocks == ()


def test_a_batch_is_answered_once_when_its_last_digest_is_known() -> None:
    harness = CoreHarness()
    engine = harness.attach()
    refs = harness.reserve(engine, 3)
    op = harness.begin_seal(engine, harness.items(refs, CHAIN))
    for left in (2, 1, 0):
        assert harness.open(op)
        wanted = harness.digests.pop()
        harness.send(
            ev.Digested((ev.SlotDigest(wanted.slot, wanted.key, harness.digest_now(wanted.slot, wanted.key)),))
        )
        assert len(harness.digests) == left
        assert harness.send(ev.Digested((ev.SlotDigest(wanted.slot, wanted.key, 0),))) == [], (
            "a digest that nobody asked for"
        )
    assert harness.statuses(op) == [SealStatus.SEALED] * 3


def test_an_empty_batch_is_answered_at_once() -> None:
    harness = CoreHarness()
    assert harness.statuses(harness.begin_seal(harness.attach(), ())) == []


@pytest.mark.parametrize(
    "change",
    [
        {"key": b"short"},
        {"key": bytes(17)},
        {"parent": b"x"},
        {"position": -1},
        {"position": 1 << 32},
        {"route": 1 << 32},
    ],
    ids=str,
)
def test_what_no_header_can_hold_is_refused_without_side_effect(change: dict[str, object]) -> None:
    harness = CoreHarness()
    engine = harness.attach()
    refs = harness.reserve(engine, 2)
    good, bad = harness.items(refs, CHAIN)
    op = harness.begin_seal(engine, (good, bad._replace(**change)))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest):
        harness.statuses(op)
    assert not harness.digests
    assert harness.slots("writing") == 2


@pytest.mark.parametrize("count", [0, -1, RESERVE_COUNT_MAX + 1])
def test_reservations_are_limited(count: int) -> None:
    harness = CoreHarness()
    with pytest.raises(InvalidRequest):
        harness.reserve(harness.attach(), count)


# -- making room ----


def test_reserving_more_than_there_is_gives_what_there_is() -> None:
    harness = CoreHarness()
    engine = harness.attach()
    assert len(harness.reserve(engine, 100)) == 8
    assert harness.count("reserve_shortfall") == 92
    assert harness.reserve(engine, 1) == []


def test_eviction_retracts_the_end_of_the_oldest_chain() -> None:
    harness = one_slab()
    engine = harness.attach()
    harness.store(engine, CHAIN[:2])
    harness.store(engine, OTHER[:2])
    harness.reserve(engine, 1)
    assert harness.keys_held() == {CHAIN[0], *OTHER[:2]}
    assert harness.announced[CHAIN[1]] == 0
    harness.reserve(engine, 1)
    assert harness.keys_held() == set(OTHER[:2])


def test_a_leased_block_is_never_evicted() -> None:
    harness = one_slab()
    engine = harness.attach()
    harness.store(engine, CHAIN)
    lease = harness.hit(engine, CHAIN[:3])
    assert len(harness.reserve(engine, 4)) == 1
    assert harness.keys_held() == set(CHAIN[:3])
    harness.release(engine, lease.lease_id)
    assert len(harness.reserve(engine, 4)) == 3


def test_a_written_or_quarantined_slot_is_never_given_away() -> None:
    harness = one_slab()
    lost, engine = harness.attach(make_spec("lost")), harness.attach(make_spec("other", "another", payload_bytes=LARGE))
    refs = harness.reserve(lost, 1)
    assert harness.reserve(engine, 1) == []
    harness.send(ev.AttachmentLost(lost))
    assert harness.reserve(engine, 1) == []
    assert refs[0].slot in harness.headers
    harness.send(ev.EngineGone(make_spec("lost").engine_id))
    assert len(harness.reserve(engine, 1)) == 1


def test_a_second_model_takes_the_slab_whose_blocks_are_oldest() -> None:
    harness = CoreHarness(slab_count=2)
    small, large = harness.attach(make_spec("s", "s")), harness.attach(make_spec("l", "l", payload_bytes=LARGE))
    harness.store(small, OTHER)
    harness.hit(small, OTHER[:4])
    harness.advance(11.0)
    old = {slab_of(block.slot.index) for block in harness.state.blocks() if block.key in OTHER[4:]}
    refs = harness.reserve(large, 1)
    assert {slab_of(ref.slot) for ref in refs} == old
    assert harness.keys_held() == set(OTHER[:4])
    assert harness.announced[OTHER[7]] == 0
    assert harness.count("slabs_moved") == 1


def test_two_models_in_turn_both_keep_storing() -> None:
    """Whoever stored last does not starve the other one."""
    harness = CoreHarness(slab_count=2)
    small, large = harness.attach(make_spec("s", "s")), harness.attach(make_spec("l", "l", payload_bytes=LARGE))
    for number in range(12):
        assert harness.store(small, make_chain(3, f"s{number}")) == [SealStatus.SEALED] * 3
        assert harness.store(large, make_chain(2, f"l{number}")) == [SealStatus.SEALED] * 2
    assert {block.payload_bytes for block in harness.state.blocks()} == {make_spec().layout.payload_bytes, LARGE}


def test_a_model_that_stores_no_more_gives_all_its_slabs() -> None:
    harness = CoreHarness(slab_count=3)
    small, large = harness.attach(make_spec("s", "s")), harness.attach(make_spec("l", "l", payload_bytes=LARGE))
    harness.store(small, make_chain(12, "s"))
    for number in range(6):
        harness.store(large, make_chain(1, f"l{number}"))
    assert [block.payload_bytes for block in harness.state.blocks()] == [LARGE] * 6


def test_a_reservation_takes_its_own_blocks_then_others() -> None:
    """The others are those of another model."""
    harness = CoreHarness(slab_count=2)
    small, large = harness.attach(make_spec("s", "s")), harness.attach(make_spec("l", "l", payload_bytes=LARGE))
    harness.store(small, make_chain(4, "s"))
    harness.store(large, make_chain(2, "l"))
    assert len(harness.reserve(small, 8)) == 8


# -- peers ----


def test_a_peer_is_given_handles_and_a_lease_on_what_is_here() -> None:
    harness = CoreHarness()
    engine = harness.attach()
    harness.store(engine, CHAIN[:2])
    found = peer_locate(harness, *CHAIN[:3])
    assert [handle and handle.key for handle in found.handles] == [CHAIN[0], CHAIN[1], None]
    for handle in found.handles[:2]:
        assert handle is not None
        header = harness.headers[handle.slot]
        assert (header.generation, header.digest, header.length) == (handle.generation, handle.digest, handle.length)
    assert harness.slots("leased") == 2
    for reader, lease_id in ((NodeId("thief"), found.lease_id), (PEER, LeaseId(99))):
        harness.send(ev.PeerRelease(harness.next_op(), reader, harness.state.epoch, lease_id))
        assert harness.slots("leased") == 2
    harness.send(ev.PeerRelease(harness.next_op(), PEER, harness.state.epoch, found.lease_id))
    assert harness.slots("leased") == 0


def test_a_peer_that_never_releases_loses_its_lease() -> None:
    harness = CoreHarness()
    harness.store(harness.attach(), CHAIN)
    peer_locate(harness, *CHAIN, *CHAIN)
    assert harness.slots("leased") == 4
    harness.advance(10.0)
    assert (harness.slots("leased"), harness.state.lease_count) == (0, 0)


def test_a_peer_asking_for_nothing_that_is_here_gets_no_lease() -> None:
    harness = CoreHarness()
    assert peer_locate(harness, CHAIN[0]).lease_id == 0
    assert harness.state.lease_count == 0


@pytest.mark.parametrize(
    ("mark", "is_lent"),
    [
        (Mark(MarkKind.EVERYTHING, WALL), False),
        (Mark(MarkKind.PROMPT, WALL, "", CHAIN[:1]), False),
        (Mark(MarkKind.TENANT, WALL, "bolt"), True),
        (Mark(MarkKind.MODEL, WALL, "another"), True),
    ],
)
def test_a_peer_reads_nothing_that_it_would_refuse(mark: Mark, is_lent: bool) -> None:
    """A restart found the block, so its age is not known: after a clear it is good for this node only."""
    harness = CoreHarness(tenants={"acme": TenantLimits()})
    harness.store(harness.attach(tenant="acme"), CHAIN[:1])
    assert peer_locate(harness, CHAIN[0]).handles[0] is not None, "its age is known"
    harness.restart()
    harness.state.freshness.marks.add([mark])  # as a pool's start does
    (handle,) = peer_locate(harness, CHAIN[0]).handles
    assert (handle is not None) == is_lent
    reader, fingerprint = harness.state.freshness, make_spec().fingerprint.block_mark
    reader.learn({fingerprint: frozenset({("", "model")})})
    said = reader.accepts(reader.scopes(CHAIN[0], "acme", fingerprint), 0.0, harness.now)
    assert said == is_lent, "as a reader says that has an engine of the block"


def test_a_peer_reads_nothing_stored_right_after_a_clear() -> None:
    """Clocks differ, so a reader takes such a block for one from before the clear, each time that it asks for it."""
    harness = CoreHarness()
    engine = harness.attach()
    harness.state.freshness.marks.add([Mark(MarkKind.EVERYTHING, harness.state.freshness.wall(harness.now))])
    harness.store(engine, CHAIN[:1])
    assert peer_locate(harness, CHAIN[0]).handles == (None,)
    harness.advance(CLOCK_SKEW_SECONDS)
    harness.store(engine, CHAIN[:2], start=1)
    (handle,) = peer_locate(harness, CHAIN[1]).handles
    assert handle is not None


def test_a_clock_that_is_set_back_keeps_no_block_from_peers() -> None:
    """The reader's clock may be right, and then it takes the block."""
    harness = CoreHarness()
    engine, freshness = harness.attach(), harness.state.freshness
    freshness.marks.add([Mark(MarkKind.EVERYTHING, freshness.wall(harness.now) - 3600)])
    harness.store(engine, CHAIN[:1])
    freshness.set_clock(freshness.wall(0.0) - 60)
    (handle,) = peer_locate(harness, CHAIN[0]).handles
    assert handle is not None


def test_a_peer_of_another_epoch_is_refused() -> None:
    harness = CoreHarness()
    harness.store(harness.attach(), CHAIN)
    for epoch in (BootEpoch(0), BootEpoch(2)):
        for event in (
            ev.PeerLocate(harness.next_op(), PEER, epoch, CHAIN),
            ev.PeerRelease(harness.next_op(), PEER, epoch, LeaseId(1)),
        ):
            harness.send(event)
            with pytest.raises(StaleEpoch):
                harness.reply(event.op)
    assert harness.slots("leased") == 0


def test_every_sealed_block_survives_a_restart() -> None:
    """It is sealed under the new epoch."""
    harness = CoreHarness()
    harness.store(harness.attach(), CHAIN)
    generations = {header.key: header.generation for header in harness.headers.values()}
    harness.restart()
    assert harness.keys_held() == set(CHAIN)
    assert harness.announced == dict.fromkeys(CHAIN, 1)
    assert {header.key: header.generation for header in harness.headers.values()} == generations
    assert {header.epoch for header in harness.headers.values()} == {2}
    assert len(harness.hit(harness.attach(), CHAIN).blocks) == 4


def test_a_block_whose_bytes_do_not_verify_is_dropped() -> None:
    harness = CoreHarness()
    harness.store(harness.attach(), CHAIN)
    bad = next(block.slot.index for block in harness.state.blocks() if block.key == CHAIN[1])
    harness.contents[bad] = content_of(CHAIN[0])
    harness.restart()
    assert harness.keys_held() == set(CHAIN) - {CHAIN[1]}
    assert bad not in harness.headers
    assert harness.slots("free") == harness.state.capacity - 3


def test_of_a_block_found_twice_one_is_kept() -> None:
    harness = CoreHarness()
    harness.store(harness.attach(), CHAIN[:1])
    (slot,) = harness.headers
    twin = SlotIndex(slot + 1)
    harness.headers[twin], harness.contents[twin] = harness.headers[slot], harness.contents[slot]
    harness.restart()
    assert (harness.slots("sealed"), set(harness.headers)) == (1, {slot})
    assert harness.count("adopt_dropped") == 1


def test_a_block_of_another_length_than_its_slab_is_dropped() -> None:
    harness = CoreHarness()
    harness.store(harness.attach(), CHAIN[:1])
    (slot,) = harness.headers
    harness.headers[slot] = dataclasses.replace(harness.headers[slot], length=1)
    harness.restart()
    assert harness.keys_held() == set() and not harness.headers


def test_a_slot_being_written_is_quarantined_after_a_restart() -> None:
    """It stays so until its engine is gone or back."""
    for back in (False, True):
        harness = CoreHarness()
        spec = make_spec()
        refs = harness.reserve(harness.attach(spec), 2)
        harness.restart()
        assert harness.slots("quarantined") == 2
        assert harness.state.watch_list() == {spec.engine_id}
        harness.advance(1e6)
        assert [harness.headers[ref.slot].generation for ref in refs] == [ref.generation for ref in refs]
        if back:
            harness.attach(spec)
        else:
            harness.send(ev.EngineGone(spec.engine_id))
        assert harness.slots("quarantined") == 0 and not harness.headers
        assert harness.state.watch_list() == set()


def test_a_slot_our_own_fetch_was_writing_is_free() -> None:
    """The transfer ended with the process that made it."""
    harness = CoreHarness()
    harness.store(harness.attach(), CHAIN[:1])
    (slot,) = harness.headers
    writing = dataclasses.replace(harness.headers[slot], generation=Generation(3), key=BlockKey(bytes(16)))
    harness.headers[slot] = writing
    harness.restart()
    assert harness.slots("free") == harness.state.capacity and not harness.headers
    assert harness.state.watch_list() == set()


def test_an_adopted_prefix_is_still_evicted_from_its_end() -> None:
    harness = one_slab()
    harness.store(harness.attach(), CHAIN)
    harness.restart()
    engine = harness.attach()
    harness.hit(engine, CHAIN)
    harness.advance(10.0)
    harness.reserve(engine, 2)
    assert harness.keys_held() == set(CHAIN[:2])


def test_an_adopted_copy_stays_a_copy() -> None:
    harness = one_slab()
    engine = harness.attach()
    harness.store(engine, CHAIN[:1])
    op = harness.acquire(engine, OTHER[:1])
    harness.fetch_all(op, OTHER[:1])
    harness.restart()
    assert {block.key: block.is_secondary for block in harness.state.blocks()} == {CHAIN[0]: False, OTHER[0]: True}


def test_a_restart_gives_no_tenant_more_than_its_quota() -> None:
    """What was evicted at the quota still lies in free slots."""
    harness = CoreHarness(slab_count=4, tenants={"acme": TenantLimits(2 * SMALL)})
    engine = harness.attach(tenant="acme")
    for chain in (CHAIN[:2], OTHER[:2]):
        harness.store(engine, chain)
    harness.restart()
    assert len(harness.state.blocks()) == 2
    assert [tenant.used_bytes for tenant in harness.state.tenants()] == [2 * SMALL]


def test_a_slot_gets_no_generation_a_reader_may_wait_for() -> None:
    harness = one_slab()
    harness.store(harness.attach(), CHAIN)
    old = {(slot, header.generation) for slot, header in harness.headers.items()}
    harness.restart()
    engine = harness.attach()
    for number in range(3):
        harness.store(engine, make_chain(4, f"new{number}"))
        assert not old & {(slot, header.generation) for slot, header in harness.headers.items()}


def test_every_event_has_a_handler() -> None:
    assert set(get_args(ev.Event)) == set(CoreHarness().state._handlers)


def test_a_header_beyond_the_slots_of_its_slab_is_ignored() -> None:
    """Two headers of one slab that speak of different sizes: the slab has one."""
    harness = CoreHarness(slab_count=1)
    engine = harness.attach()
    harness.store(engine, CHAIN[:1])
    (slot, header), *_ = harness.headers.items()
    harness.restart()
    beyond = slot_index(slab_of(slot), 1000)
    assert harness.send(ev.Adopt(beyond, LARGE, replace(header, key=OTHER[0]), verified=True)) == []
    assert harness.keys_held() == {CHAIN[0]}
