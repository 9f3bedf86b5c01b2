"""The age of a block that a tier gives is what its header says, whatever was known of it before."""

from __future__ import annotations

import pytest

from kvservice.core.block.marks import CLOCK_SKEW_SECONDS, MarkKind
from kvservice.core.events import PullResult
from kvservice.core.messages import MissReason
from kvservice.testing.builders import WALL, CoreHarness, make_chain
from kvservice.units import AttachmentId
from tests.unit.core.tier.test_bring_back import DISK, OBJECTS, forget_memory, on_disk

CHAIN = make_chain(3)
LIMIT, NOW = 60.0, WALL + 100.0  # the age limit, and the wall's clock when a test begins


def in_a_store(max_age: float = LIMIT) -> tuple[CoreHarness, AttachmentId, int]:
    """A node that has asked the object store for a chain that another node wrote."""
    harness = CoreHarness(tiers=(OBJECTS,), slab_count=4, has_directory=False, max_age=max_age)
    engine = harness.attach()
    op = harness.acquire(engine, CHAIN)
    harness.probed(op, len(CHAIN))
    return harness, engine, op


@pytest.mark.parametrize("age", [0.0, 1.0, LIMIT - 5.0])
def test_an_object_below_the_age_limit_is_a_hit(age: float) -> None:
    harness, _, op = in_a_store()
    harness.advance(2.0)  # that the store takes
    harness.brought(harness.reads("objects")[0], PullResult.OK, stored_at=NOW - age)
    assert (len(harness.result(op).blocks), harness.count("arrived_too_old")) == (3, 0)
    assert {block.stored_at for block in harness.state.blocks()} == {NOW - age}


@pytest.mark.parametrize("age", [LIMIT - 1.0, -2.0 - CLOCK_SKEW_SECONDS - 1.0])
def test_an_object_too_old_or_from_the_future_is_dropped(age: float) -> None:
    harness, _, op = in_a_store()
    harness.advance(2.0)
    harness.brought(harness.reads("objects")[0], PullResult.OK, stored_at=NOW - age)
    assert (harness.result(op).blocks, harness.result(op).miss) == ((), MissReason.STALE)
    assert (harness.keys_held(), harness.count("arrived_too_old")) == (set(), 3)


def test_an_object_reaches_the_age_limit_in_memory() -> None:
    harness, engine, op = in_a_store()
    harness.brought(harness.reads("objects")[0], PullResult.OK, stored_at=NOW - LIMIT + 10.0)
    harness.release(engine, harness.result(op).lease_id)
    assert len(harness.keys_held()) == 3
    harness.advance(11.0)
    assert not harness.keys_held() and harness.count("evicted_aged") == 3


def test_an_object_has_its_age_without_a_limit_too() -> None:
    """Else every later clear of something else would drop it at other nodes."""
    harness, _, op = in_a_store(max_age=0.0)
    assert {block.stored_at for block, _ in harness.reads("objects")[0].items} == {0.0}, "anything is asked for"
    harness.brought(harness.reads("objects")[0], PullResult.OK, stored_at=NOW - 1.0)
    assert len(harness.result(op).blocks) == 3
    assert {block.stored_at for block in harness.state.blocks()} == {NOW - 1.0}


def test_a_younger_file_than_the_books_say_keeps_its_age() -> None:
    harness, engine = on_disk(DISK, chain=CHAIN, has_directory=False)
    op = harness.acquire(engine, CHAIN)
    harness.brought(harness.reads()[0], PullResult.OK, stored_at=NOW + 1.0)
    assert len(harness.result(op).blocks) == 3
    assert {block.stored_at for block in harness.state.blocks()} == {NOW + 1.0}


def test_a_file_of_no_age_makes_room_for_one_that_counts() -> None:
    """A start that keeps the memory finds blocks of no known age there, and may write them down. After a clear they are
    never served: the file goes when that is seen, or it would be read in vain as long as it lies there."""
    harness = CoreHarness(tiers=(DISK,), slab_count=4, has_directory=False)
    harness.clear(MarkKind.EVERYTHING)
    harness.advance(2 * CLOCK_SKEW_SECONDS)
    engine = harness.attach()
    harness.store(engine, CHAIN)
    harness.write_all()
    forget_memory(harness, engine)
    op = harness.acquire(engine, CHAIN)
    harness.brought(harness.reads()[0], PullResult.OK, stored_at=0.0)
    assert harness.result(op).blocks == () and harness.count("arrived_too_old") == len(CHAIN)
    assert set(harness.erased()) == set(CHAIN)
    harness.store(engine, CHAIN)
    assert harness.write_all() == list(CHAIN)
