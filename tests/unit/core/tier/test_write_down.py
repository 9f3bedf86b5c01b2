"""Which blocks are written into which tier and when, what is dropped, and what is announced."""

from __future__ import annotations

from typing import Any

import pytest

from kvservice.core import actions as act
from kvservice.core import events as ev
from kvservice.core.block.marks import MarkKind
from kvservice.core.block.tenants import TenantLimits
from kvservice.core.messages import AcquireRequest
from kvservice.core.segment.blockfile import disk_room
from kvservice.core.tier.rules import TierRules, WriteMoment
from kvservice.core.tier.tier_block import TierBlock
from kvservice.core.tier.tiers import CLEAN_SECONDS, FULL_SECONDS, HOLD_SECONDS
from kvservice.core.tier.write_queue import WriteQueue
from kvservice.testing.builders import SMALL, CoreHarness, make_chain
from kvservice.units import BlockKey, MiB, SpanRoute

FILE = disk_room(SMALL)
STORED, REUSED, EVICTED = WriteMoment.STORED, WriteMoment.REUSED, WriteMoment.EVICTED


def disk(write: WriteMoment = STORED, room: int = 100) -> TierRules:
    return TierRules("disk", budget_bytes=room * FILE, write=write)


def objects(write: WriteMoment = STORED) -> TierRules:
    return TierRules("objects", is_shared=True, write=write)


def harness_with(*tiers: TierRules, **options: Any) -> CoreHarness:
    return CoreHarness(tiers=tiers, **options)


def found_block(key: BlockKey, position: int = 0) -> TierBlock:
    return TierBlock(key, SMALL, 5, position, SpanRoute(3))


def test_a_stored_block_is_written_and_pinned_meanwhile() -> None:
    harness, chain = harness_with(disk()), make_chain(3)
    harness.store(harness.attach(), chain)
    (write,) = harness.writes()
    ((block, slot),) = write.items
    assert (block.key, block.payload_bytes, block.position) == (chain[0], SMALL, 0)
    held = {one.key: one for one in harness.state.blocks()}[block.key]
    assert (slot, block.digest, block.route) == (held.slot.index, held.digest, held.route)
    assert harness.slots("leased") == 1, "what is being written stays in memory"
    assert harness.write_all() == list(chain) and harness.slots("leased") == 0
    (usage,) = harness.state.tier_usage()
    assert (usage.blocks, usage.used_bytes, usage.waiting, usage.writing_bytes) == (3, 3 * FILE, 0, 0)
    assert (harness.count("tier_disk_written_blocks"), harness.count("tier_disk_written_bytes")) == (3, 3 * SMALL)


def test_a_block_is_written_once() -> None:
    harness, chain = harness_with(disk(REUSED)), make_chain(2)
    engine = harness.attach()
    harness.store(engine, chain)
    assert not harness.writes(), "nobody has used it yet"
    for _ in range(3):
        harness.hit(engine, chain)
    assert harness.write_all() == list(chain)
    harness.hit(engine, chain)
    assert not harness.writes()


def test_nothing_is_written_while_nothing_comes_back() -> None:
    harness, chain = harness_with(disk()), make_chain(2)
    engine = harness.attach()
    harness.state._admission.admits = lambda account: False  # type: ignore[method-assign]
    harness.store(engine, chain)
    assert not harness.tier_work


def test_copies_of_other_nodes_blocks_are_not_written() -> None:
    harness, chain = harness_with(disk()), make_chain(2)
    engine = harness.attach()
    harness.fetch_all(harness.acquire(engine, chain), chain)
    assert len(harness.keys_held()) == 2 and not harness.tier_work


def test_the_cleaner_writes_ahead_of_need() -> None:
    harness = harness_with(disk(EVICTED))
    engine = harness.attach()
    first, second = make_chain(7, "first"), make_chain(8, "second")
    harness.store(engine, first[:4])
    harness.advance(1.0)
    assert not harness.writes(), "half of the memory is free"
    harness.store(engine, first, 4)
    harness.store(engine, second[:1])
    harness.advance(CLEAN_SECONDS)
    written = harness.write_all()
    assert set(written[:7]) == set(first) and written[:4] == list(first[3::-1]), "a prefix after what hangs on it"
    harness.store(engine, second, 1)
    assert harness.keys_held() == set(second)
    assert all(harness.announced[key] == 1 for key in first), "the disk has them"


def test_the_cleaner_looks_again_after_a_moment() -> None:
    harness, chain = harness_with(disk(EVICTED)), make_chain(8)
    engine = harness.attach()
    harness.store(engine, chain[:7])
    harness.store(engine, chain, 7)
    assert harness.state.next_deadline() == pytest.approx(harness.now + CLEAN_SECONDS)
    harness.write_all()
    harness.advance(CLEAN_SECONDS)
    assert len(harness.write_all()) + 7 >= 8
    assert harness.state.tier_usage()[0].blocks == 8
    harness.advance(CLEAN_SECONDS)
    harness.advance(CLEAN_SECONDS)
    assert not harness.writes()


@pytest.mark.parametrize(("room", "count"), [(2, 1), (4, 2), (100, 4)])
def test_one_look_fills_at_most_half_of_a_small_tier(room: int, count: int) -> None:
    """Else the cold end would evict itself from the tier, for ever."""
    harness = harness_with(disk(EVICTED, room), slab_count=1)
    harness.store(harness.attach(), make_chain(4))
    harness.advance(CLEAN_SECONDS)
    (tier,) = harness.state.tier_usage()
    assert sum(len(write.items) for write in harness.writes()) + tier.waiting == count


def test_a_block_evicted_while_it_waits_is_dropped() -> None:
    """Eviction does not wait for the tier, which does not answer here."""
    harness, first, second = harness_with(disk()), make_chain(8, "first"), make_chain(7, "second")
    engine = harness.attach()
    harness.store(engine, first)
    (write,) = harness.writes()
    harness.store(engine, second)
    assert len(harness.keys_held()) == 8 and write.items[0][0].key in harness.keys_held()
    assert set(harness.write_all()) == {first[0], *second}
    assert harness.count("tier_disk_dropped_evicted") == 7


def test_all_that_is_lost_between_looks_of_the_cleaner_counts() -> None:
    """Eight blocks fit into memory. The cleaner came to the first prompt, and to none of the next three."""
    harness = harness_with(disk(EVICTED))
    engine = harness.attach()
    chains = [make_chain(8, f"prompt {number}") for number in range(5)]
    for chain in chains:
        harness.store(engine, chain)
        if chain is chains[0]:
            harness.advance(CLEAN_SECONDS)
        harness.write_all()
    there = {key for key, _ in harness.state.inventory()}
    lost = sum(key not in there for chain in chains for key in chain)
    assert harness.count("tier_disk_dropped_evicted") == lost == 24


def test_what_needs_no_tier_is_not_lost_to_it() -> None:
    """Copies of other nodes' blocks, what the tier has, and everything while nothing comes back."""
    harness, chain = harness_with(disk(EVICTED)), make_chain(8)
    engine = harness.attach()
    op = harness.acquire(engine, chain)
    harness.fetch_all(op, chain)
    harness.release(engine, harness.result(op).lease_id)
    harness.store(engine, make_chain(8, "own"))
    for _ in range(2):
        harness.advance(CLEAN_SECONDS)
        harness.write_all()
    harness.state._admission.admits = lambda account: False  # type: ignore[method-assign]
    for name in ("third", "fourth"):
        harness.store(engine, make_chain(8, name))
    assert harness.count("evicted_pressure") == 24 and not harness.count("tier_disk_dropped_evicted")


def test_a_full_queue_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvservice.core.tier.write_queue.QUEUE_MAX", 3)
    harness, chain = harness_with(disk()), make_chain(6)
    harness.store(harness.attach(), chain)
    assert harness.write_all() == list(chain[:3]), "three wait"
    assert harness.count("tier_disk_dropped_full") == 3


def test_a_tier_without_room_drops_what_is_larger() -> None:
    harness, chain = harness_with(TierRules("disk", budget_bytes=FILE - 1, write=STORED)), make_chain(2)
    harness.store(harness.attach(), chain)
    assert not harness.tier_work and harness.count("tier_disk_dropped_no_room") == 2


def test_a_job_has_as_many_blocks_as_its_bytes_allow() -> None:
    harness = harness_with(disk(), slab_count=64)
    chain = make_chain(30)
    harness.store(harness.attach(), chain)
    assert [len(write.items) for write in harness.writes()] == [16], "4 MiB are in flight, and not a block more"
    assert harness.write_all() == list(chain)


def test_what_is_stored_while_a_tier_writes_is_one_job() -> None:
    """One job is written while the next gathers: each end of a job is an event that engines wait for."""
    harness, chain = harness_with(disk(), slab_count=64), make_chain(8)
    engine = harness.attach()
    for end in range(1, 9):
        harness.store(engine, chain[:end], end - 1)
    first, second = harness.writes()
    assert (len(first.items), len(second.items)) == (1, 1)
    harness.written(first, True)
    (third,) = harness.writes()[1:]
    assert [block.key for block, _ in third.items] == list(chain[2:])


def test_no_write_begins_while_an_engine_waits_for_a_digest() -> None:
    """Not for long, however many engines store: here one stores a block before the digest of the last is there."""
    harness, chain = harness_with(disk(), slab_count=64), make_chain(40)
    engine = harness.attach()

    def begin(number: int) -> None:
        (ref,) = harness.reserve(engine, 1)
        harness.write(ref, chain[number])
        harness.begin_seal(engine, harness.items([ref], chain, number))

    def digest() -> None:
        wanted = harness.digests.popleft()
        found = ev.SlotDigest(wanted.slot, wanted.key, harness.digest_now(wanted.slot, wanted.key))
        harness.send(ev.Digested((found,)))

    begin(0)
    began = harness.now
    for number in range(1, 40):
        begin(number)
        digest()
        if harness.writes():
            break
        assert harness.now < began + HOLD_SECONDS
        assert (harness.state.next_deadline() or 0.0) <= began + HOLD_SECONDS
        harness.advance(0.003)
    (write,) = harness.writes()
    assert 3 < len(write.items) <= number, "what was stored meanwhile goes together"
    digest()
    assert len(harness.writes()) == 2, "nobody waits any more"


def test_a_failed_write_leaves_no_trace_and_the_tier_rests() -> None:
    harness, chain = harness_with(disk()), make_chain(8)
    engine = harness.attach()
    harness.store(engine, chain[:1])
    harness.written(harness.writes()[0], False)
    harness.digest_all()  # whether the block is damaged
    assert harness.state.tier_usage()[0].used_bytes == 0 and harness.slots("leased") == 0
    harness.store(engine, chain[:2], 1)
    assert not harness.writes(), "it rests for a second"
    harness.advance(1.1)
    harness.store(engine, chain[:3], 2)
    harness.written(harness.writes()[0])
    harness.advance(1.1)
    harness.store(engine, chain[:4], 3)
    assert not harness.writes(), "then for two"
    harness.advance(1.1)
    harness.store(engine, chain[:5], 4)
    assert harness.write_all() == [chain[4]]
    harness.store(engine, chain[:6], 5)
    assert harness.write_all() == [chain[5]]
    assert harness.count("tier_disk_write_failed") == 2


def test_what_waits_is_written_when_the_rest_ends() -> None:
    """Jobs that were under way when the first one failed are the same failure, and double nothing."""
    harness, chain = harness_with(disk()), make_chain(8)
    engine = harness.attach()
    harness.store(engine, chain)
    (first,) = harness.writes()
    assert harness.state.tier_usage()[0].waiting == 7
    harness.written(first, False)
    assert not harness.writes() and harness.state.tier_usage()[0].waiting == 7
    assert harness.state.next_deadline() == harness.now + 1.0
    harness.advance(1.0)
    assert harness.write_all() == list(chain[1:])


def test_a_tier_with_less_room_than_its_budget_holds_what_fits() -> None:
    harness, chain, more = harness_with(disk()), make_chain(2), make_chain(6, "second")
    engine = harness.attach()
    harness.store(engine, chain)
    assert harness.write_all() == list(chain)
    harness.store(engine, more[:1])
    harness.written(harness.writes()[0], False, is_full=True)
    harness.advance(1.0)
    harness.store(engine, more[1:3])
    assert len(harness.write_all()) == 2 and len(harness.erased()) == 2
    assert harness.state.tier_usage()[0].used_bytes == 2 * FILE, "no more than fitted"
    harness.advance(FULL_SECONDS)
    harness.store(engine, more[3:])
    harness.write_all()
    assert len(harness.erased()) == 2 and harness.state.tier_usage()[0].blocks > 2, "it is tried anew"


def test_a_disk_with_a_codec_holds_more_blocks() -> None:
    harness, chain = harness_with(disk(room=4)), make_chain(8)
    harness.store(harness.attach(), chain)
    while writes := harness.writes():
        harness.written(writes[0], True, stored_bytes=SMALL // 4)
    (usage,) = harness.state.tier_usage()
    assert (usage.blocks, usage.used_bytes) == (8, 8 * disk_room(SMALL // 4)) and not harness.erased()
    assert harness.count("tier_disk_written_bytes") == 8 * (SMALL // 4), "what the device has to bear"


def test_jobs_that_fail_together_are_one_failure() -> None:
    queue = WriteQueue(64 * MiB)
    for _ in range(5):
        queue.report(0, 10.0)
    assert queue.is_resting(10.9) and not queue.is_resting(11.0)
    queue.report(0, 11.0)
    assert queue.is_resting(12.9) and not queue.is_resting(13.0)


def test_the_end_of_an_unknown_write_is_ignored() -> None:
    harness = harness_with(disk(), objects())
    assert harness.send(ev.WrittenDown(99, (True,))) == []


def test_a_tier_that_never_answers_delays_no_other() -> None:
    harness, chain = harness_with(disk(), objects()), make_chain(8)
    engine = harness.attach()
    harness.store(engine, chain)
    assert harness.write_all("objects") == list(chain)
    assert len(harness.writes("disk")) == 1
    harness.advance(60.0)
    harness.store(engine, make_chain(7, "second"))
    assert len(harness.keys_held()) == 8, "all but the pinned block went"
    usage = {usage.name: usage for usage in harness.state.tier_usage()}
    assert usage["objects"].blocks == 8 and usage["disk"].blocks == 0
    assert usage["objects"].is_shared and usage["objects"].used_bytes == usage["objects"].budget_bytes == 0


def test_each_tier_has_its_own_moment() -> None:
    harness, chain = harness_with(disk(STORED), objects(REUSED)), make_chain(2)
    engine = harness.attach()
    harness.store(engine, chain)
    assert harness.write_all("disk") == list(chain) and not harness.writes("objects")
    harness.hit(engine, chain)
    assert harness.write_all("objects") == list(chain) and not harness.writes("disk")


def test_the_cleaner_leaves_tiers_of_other_moments_alone() -> None:
    harness, chain = harness_with(disk(EVICTED), objects(REUSED)), make_chain(9)
    engine = harness.attach()
    harness.store(engine, chain[:8])
    harness.advance(CLEAN_SECONDS)
    assert harness.write_all("disk") and not harness.writes("objects")
    harness.acquire(engine, chain)
    assert harness.write_all("objects") == list(chain[:8]), "what is used and not here is not written"


def test_what_a_shared_tier_has_is_not_announced() -> None:
    harness, chain = harness_with(objects()), make_chain(8)
    engine = harness.attach()
    harness.store(engine, chain)
    harness.write_all("objects")
    harness.store(engine, make_chain(8, "second"))
    assert all(harness.announced[key] == 0 for key in chain)
    assert {key for key, _ in harness.state.inventory()} == harness.keys_held()


def test_a_block_is_announced_while_memory_or_disk_has_it() -> None:
    harness, first, second = harness_with(disk(REUSED, 4)), make_chain(4, "first"), make_chain(8, "second")
    engine = harness.attach()
    harness.store(engine, first)
    harness.release(engine, harness.hit(engine, first).lease_id)
    harness.write_all()
    harness.store(engine, second)
    assert not harness.keys_held() & set(first) and not harness.retracted
    assert {key for key, _ in harness.state.inventory()} == {*first, *second}
    harness.hit(engine, second)
    harness.write_all()
    assert harness.count("tier_disk_evicted") == len(harness.erased())
    assert set(harness.erased()) >= set(first), "the second prompt needed the disk's room"
    assert set(harness.retracted) == set(first)
    assert {key for key, _ in harness.state.inventory()} == set(second)


def test_found_blocks_are_announced_once() -> None:
    harness, chain = harness_with(disk(room=3)), make_chain(4)
    engine = harness.attach()
    harness.store(engine, chain[:1])
    harness.written(harness.writes()[0], False)
    found = [found_block(key, place) for place, key in enumerate(chain)]
    actions = harness.send(ev.TierFound("disk", tuple(reversed(found))))
    assert [action.key for action in actions if isinstance(action, act.Announce)] == list(reversed(chain[1:]))
    assert harness.erased() == harness.retracted == [chain[3]], "there is room for three"
    again = harness.send(ev.TierFound("disk", (found_block(chain[0]),)))
    assert again == [], "it is known already"
    assert harness.count("tier_disk_found") == 4 and harness.count("tier_disk_evicted") == 1


def test_only_a_tier_of_this_node_finds_blocks() -> None:
    harness, chain = harness_with(objects()), make_chain(1)
    for tier in ("objects", "nothing"):
        assert harness.send(ev.TierFound(tier, (found_block(chain[0]),))) == []


def test_a_block_found_while_it_waits_is_not_written_again() -> None:
    harness, chain = harness_with(disk()), make_chain(2)
    harness.store(harness.attach(), chain)
    harness.send(ev.TierFound("disk", (found_block(chain[1], 1),)))
    assert harness.write_all() == [chain[0]]


def test_a_tenant_keeps_its_quota_of_a_tier() -> None:
    limits = {"a": TenantLimits(tier_bytes={"disk": 2 * FILE})}
    harness, chain = harness_with(disk(), objects(), tenants=limits), make_chain(4)
    harness.store(harness.attach(tenant="a"), chain)
    assert harness.write_all() == list(chain) and len(harness.erased()) == 2
    assert harness.write_all("objects") == list(chain), "a quota is of one tier"
    assert harness.state.tier_usage()[0].used_bytes == 2 * FILE
    (row,) = harness.state.tenants()
    assert (row.name, row.disk_used_bytes, row.disk_quota_bytes) == ("a", 2 * FILE, 2 * FILE)


def test_a_drain_and_a_restart_keep_what_the_disk_has() -> None:
    harness, chain = harness_with(disk()), make_chain(2)
    harness.store(harness.attach(), chain)
    harness.write_all()
    blocks = tuple(found_block(key, place) for place, key in enumerate(chain))
    harness.restart()
    harness.send(ev.TierFound("disk", blocks))
    assert all(harness.announced[key] == 1 for key in chain) and not harness.writes()
    harness.send(ev.Drain(timeout_seconds=1.0, handover=False))
    assert harness.farewells == 1


def test_memory_that_is_asked_for_again_is_not_counted_as_read() -> None:
    harness, chain = harness_with(disk(), slab_count=1, slab_bytes=2 * MiB), make_chain(2)
    engine = harness.attach()
    harness.store(engine, chain)
    harness.write_all()
    op = harness.next_op()
    harness.send(ev.Acquire(op, engine, AcquireRequest(chain, 0, 1.0)))
    assert len(harness.result(op).blocks) == 2 and not harness.tier_work


def test_nothing_is_asked_of_a_tier_before_it_is_open() -> None:
    harness, chain = harness_with(disk()), make_chain(3)
    harness.restart()
    engine = harness.attach()
    harness.store(engine, chain[:2])
    assert not harness.tier_work
    harness.send(ev.TierFound("disk", ()))
    harness.store(engine, chain, 2)
    assert harness.write_all() == list(chain), "those of before too"


def test_what_a_tier_has_yet_to_name_is_not_written_over_it() -> None:
    """A disk names its blocks some at a time. Kept memory does not know whose they are, and how old."""
    harness, chain = harness_with(disk()), make_chain(4)
    engine = harness.attach()
    harness.store(engine, chain[:3])
    harness.write_all()
    harness.restart()
    harness.send(ev.TierFound("disk", (found_block(chain[0]),), more=True))
    harness.store(harness.attach(), chain, 3)
    assert not harness.writes()
    harness.send(ev.TierFound("disk", tuple(found_block(chain[place], place) for place in (1, 2))))
    assert harness.write_all() == [chain[3]]


def test_copies_of_before_are_not_written_when_a_tier_opens() -> None:
    harness, chain = harness_with(disk()), make_chain(3)
    harness.restart()
    engine = harness.attach()
    harness.store(engine, chain[:1])
    harness.fetch_all(harness.acquire(engine, chain, skip=1), chain[1:], 1)
    harness.send(ev.TierFound("disk", ()))
    assert harness.write_all() == list(chain[:1])


@pytest.mark.parametrize("tier", [disk(), objects()])
def test_stored_again_since_a_clear_is_written_again(tier: TierRules) -> None:
    """What was being written when it was cleared is erased then. Its name is no less wanted for that."""
    harness = harness_with(tier, slab_count=4, has_directory=False)
    chain = make_chain(3)
    engine = harness.attach()
    harness.store(engine, chain)
    (old,) = harness.writes(tier.name)
    harness.clear(MarkKind.EVERYTHING)
    harness.advance(1.0)
    harness.store(engine, chain)
    harness.written(old, True)
    gone = [block.key for block, _ in old.items]
    assert gone and harness.erased(tier.name) == gone
    assert set(harness.write_all(tier.name)) == set(chain)
