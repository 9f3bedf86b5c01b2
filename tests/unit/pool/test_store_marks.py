"""Marks of clears that a pool keeps in a shared tier, and takes from it when it starts: a real store in a folder."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from kvservice.core.acquire import clearing
from kvservice.core.block.keys import span_route
from kvservice.core.block.marks import Mark, MarkKind
from kvservice.core.messages import SealItem
from kvservice.core.segment.geometry import plan_geometry
from kvservice.errors import TierError, Unavailable
from kvservice.pool import mark_files
from kvservice.pool import runtime as pool_runtime
from kvservice.pool import tiers as pool_tiers
from kvservice.pool.runtime import PoolRuntime
from kvservice.pool.runtime_ports import PoolConfig
from kvservice.pool.tier_specs import DISK, OBJECTS, TierSpec
from kvservice.pool.tiers import TierPhase
from kvservice.testing.builders import make_chain, make_spec
from kvservice.testing.eventually import eventually_async
from kvservice.tier.objects import ObjectTier
from kvservice.units import MiB, NodeId

CHAIN = make_chain(3)
TENANT_MARK = Mark(MarkKind.TENANT, time.time(), "acme")
Opened = Callable[..., Awaitable[PoolRuntime]]


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Opened]:
    """Opens a pool of this node; the memory of each node outlives it."""
    pools: list[PoolRuntime] = []

    async def make(name: str, disk: bool = False, unusable: str = "") -> PoolRuntime:
        tiers = [TierSpec(OBJECTS, f"file://{tmp_path}/store", 0, "stored", "none", "a")]
        if disk:
            tiers.append(TierSpec(DISK, f"{tmp_path}/disk", 64 * MiB, "stored", "none", unusable=unusable))
        config = PoolConfig(
            NodeId(name),
            tmp_path / name,
            plan_geometry(8 * MiB),
            directory=tmp_path,
            tiers=tuple(tiers),
            mark_files=(tmp_path / "disk.marks",) if disk else (),
        )
        pools.append(await PoolRuntime.open(config))
        return pools[-1]

    yield make
    for pool in pools:
        await pool.close()


async def store(pool: PoolRuntime) -> None:
    engine = (await pool.attach(make_spec(), lambda reason: None)).attachment_id
    refs = await pool.reserve(engine, len(CHAIN))
    parents = (None, *CHAIN)
    await pool.seal(
        engine, [SealItem(ref, CHAIN[i], parents[i], i, span_route(CHAIN, i)) for i, ref in enumerate(refs)]
    )
    assert len(pool.inventory()) == len(CHAIN)


def everything() -> Mark:
    return Mark(MarkKind.EVERYTHING, time.time())


def set_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the node's clock were set: a mark of some minutes from now is none of its future any more."""
    for module in (mark_files, clearing):
        monkeypatch.setattr(module, "FUTURE_SECONDS_MAX", 1000.0)


async def is_open(pool: PoolRuntime) -> None:
    await eventually_async(lambda: pool.tier_states()[0].phase is TierPhase.OPEN, "the store is open")


async def test_a_node_that_was_away_learns_of_a_clear_from_the_store(opened: Opened) -> None:
    away = await opened("away")
    await store(away)
    await away.close()
    there = await opened("there")
    await is_open(there)
    await there.clears.clear([everything()])
    await there.close()
    back = await opened("away")
    assert back.inventory() == [] and back.tier_states()[0].phase is TierPhase.OPEN
    assert len(back.state.freshness.marks.all()) == 1


async def test_a_running_node_learns_of_a_clear_from_the_store(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the store joins the two nodes. A mark is taken once, and a store that fails is asked again."""
    monkeypatch.setattr(pool_tiers, "MARKS_EVERY_SECONDS", 0.02)
    one, other = await opened("one"), await opened("other")
    await is_open(one)
    await is_open(other)
    await store(one)
    await store(other)
    load = ObjectTier.load_marks
    monkeypatch.setattr(ObjectTier, "load_marks", lambda tier: 1 / 0)
    await eventually_async(lambda: one.stats().counters.get("tier_objects_marks_failed", 0), "the store fails")
    monkeypatch.setattr(ObjectTier, "load_marks", load)
    await other.clears.clear([everything()])
    await eventually_async(lambda: one.inventory() == [], "what was there is gone")
    assert one.stats().counters["clears"] == 1
    await store(one)
    await asyncio.sleep(0.1)
    assert len(one.inventory()) == len(CHAIN) and one.stats().counters["clears"] == 1


async def test_a_clear_from_before_a_known_one_is_not_taken(opened: Opened) -> None:
    """Another node tells it that could not be reached at the later clear. What was stored since stays."""
    pool = await opened("n")
    await pool.clears.take([Mark(MarkKind.EVERYTHING, time.time() - 3600.0)])
    await store(pool)
    before = time.time() - 7200.0
    await pool.clears.take([Mark(MarkKind.EVERYTHING, before), Mark(MarkKind.TENANT, before, "acme")])
    assert len(pool.inventory()) == len(CHAIN) and pool.stats().counters["clears"] == 1


async def test_what_is_not_in_the_store_is_told_to_it(opened: Opened, tmp_path: Path) -> None:
    mark = everything()
    first = await opened("first")
    await is_open(first)
    assert await first.clears.take([mark]) == (mark,), "of another node, which could not reach the store"
    folder = tmp_path / "store" / "a" / "marks"
    assert not folder.exists()
    await first._tiers._catch_up(OBJECTS)
    (kept,) = folder.iterdir()
    assert kept.name.startswith(f"{mark.at:.6f}-")
    await first._tiers._catch_up(OBJECTS)
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("error", [TierError("the disk is full"), RuntimeError("the disk is full")])
async def test_a_clear_is_not_done_while_the_store_refuses_its_mark(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Whatever the tier raises: it may be of another package."""
    pool = await opened("n")
    await is_open(pool)
    await store(pool)

    def refuse(tier: ObjectTier, marks: object) -> None:
        raise error

    monkeypatch.setattr(ObjectTier, "keep_marks", refuse)
    with pytest.raises(Unavailable, match=r"kept in a tier: .*the disk is full"):
        await pool.clears.clear([everything()])
    assert pool.inventory() == [], "the blocks are gone all the same"


async def test_a_clear_is_not_done_while_a_disk_cannot_be_used(opened: Opened) -> None:
    """The disk comes back at another start, with what was cleared. The store hears of the clear all the same."""
    away = await opened("away")
    await store(away)
    await away.close()
    there = await opened("there", disk=True, unusable="it is gone")
    await is_open(there)
    with pytest.raises(Unavailable, match="kept everywhere: it is gone"):
        await there.clears.clear([everything()])
    assert (await opened("away")).inventory() == []


async def test_a_store_whose_marks_cannot_be_read_is_not_used(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tier: ObjectTier) -> None:
        raise TierError("it may not be listed")

    monkeypatch.setattr(ObjectTier, "load_marks", refuse)
    pool = await opened("n")
    await eventually_async(lambda: pool.tier_states()[0].phase is TierPhase.FAILED, "the store is given up")
    assert "may not be listed" in pool.tier_states()[0].detail
    await store(pool)


async def test_a_node_whose_clock_is_late_does_not_use_the_store(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot apply a clear of its future, and takes the others. When its clock is set, the store is used."""
    monkeypatch.setattr(pool_tiers, "REOPEN_SECONDS_MIN", 0.02)
    first, ahead = await opened("first"), Mark(MarkKind.EVERYTHING, time.time() + 400)
    await is_open(first)
    await asyncio.to_thread(first._tiers._open[OBJECTS].keep_marks, [ahead, TENANT_MARK])  # type: ignore[attr-defined]
    await first.close()
    late = await opened("late")
    await eventually_async(lambda: late.tier_states()[0].phase is TierPhase.FAILED, "the store is not used")
    assert "after this node's time: set the clocks" in late.tier_states()[0].detail
    assert late.state.freshness.marks.all() == (TENANT_MARK,)
    set_the_clock(monkeypatch)
    await is_open(late)
    assert ahead in late.state.freshness.marks.all()


async def test_a_running_node_asks_again_for_marks_of_its_future(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_tiers, "MARKS_EVERY_SECONDS", 0.02)
    pool, ahead = await opened("n"), Mark(MarkKind.EVERYTHING, time.time() + 400)
    await is_open(pool)
    await asyncio.to_thread(pool._tiers._open[OBJECTS].keep_marks, [ahead])  # type: ignore[attr-defined]
    await eventually_async(lambda: pool.stats().counters.get("tier_objects_marks_failed", 0) > 2, "it is refused")
    set_the_clock(monkeypatch)
    await eventually_async(lambda: ahead in pool.state.freshness.marks.all(), "and taken in the end")


async def test_a_store_that_hangs_holds_a_start_up_for_a_moment(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await opened("n")
    await store(first)
    await first.close()
    monkeypatch.setattr(pool_runtime, "MARKS_SECONDS", 0.2)
    monkeypatch.setattr(ObjectTier, "load_marks", lambda tier: time.sleep(2.5) or ())
    began = time.monotonic()
    pool = await opened("n")
    assert 0.2 <= time.monotonic() - began < 2.0 and len(pool.inventory()) == len(CHAIN)


async def test_a_repeated_clear_costs_nothing_at_a_restart(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store keeps the marks of both. What was stored since the second one is on the node's disk."""
    pool = await opened("n", disk=True)
    await is_open(pool)
    await eventually_async(lambda: pool.tier_states()[1].phase is TierPhase.OPEN, "the disk is open")
    now = time.time()
    for ago in (60, 30):
        await pool.clears.clear([Mark(MarkKind.EVERYTHING, now - ago)])
    await store(pool)
    await eventually_async(lambda: len(list((tmp_path / "disk").rglob("*.safetensors"))) == len(CHAIN), "written down")
    await pool.close()
    (tmp_path / "n").unlink()
    load = ObjectTier.load_marks

    def load_late(tier: ObjectTier) -> tuple[Mark, ...]:
        time.sleep(0.5)  # as a store that is not in this machine; the disk is open before
        return load(tier)

    monkeypatch.setattr(ObjectTier, "load_marks", load_late)
    back = await opened("n", disk=True)
    await is_open(back)
    assert back.stats().counters["tier_disk_found"] == len(CHAIN) == len(back.inventory())
