"""What PoolRuntime does for callers that gave up: nothing of theirs stays promised."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvservice.core import actions as act
from kvservice.core.messages import AcquireRequest, AcquireResult, SealItem
from kvservice.core.segment.geometry import plan_geometry
from kvservice.errors import NotAttached, SegmentError, TierError
from kvservice.pool import vanished
from kvservice.pool.runtime import PoolConfig, PoolRuntime
from kvservice.pool.tier_specs import TierSpec
from kvservice.testing.builders import make_chain, make_spec
from kvservice.testing.eventually import eventually_async
from kvservice.testing.fake_tier import FakeTier
from kvservice.testing.unique import unique_name
from kvservice.tier.disk import DiskTier
from kvservice.units import MiB, NodeId, SpanRoute

CHAIN = make_chain(1)


@pytest.fixture
async def runtime() -> AsyncIterator[PoolRuntime]:
    path = Path(f"/dev/shm/kvservice-test{unique_name()}-n")
    made = await PoolRuntime.open(PoolConfig(NodeId("n"), path, plan_geometry(8 * MiB), lease_seconds=3600.0))
    yield made
    made.unlink()
    await made.close()


async def test_a_start_that_is_given_up_leaves_the_disk_to_the_next(tmp_path: Path) -> None:
    """A shared tier keeps the start waiting, and the disk is open already."""
    specs = [TierSpec(name, str(tmp_path), 64 * MiB, "stored", "none") for name in ("disk", "objects")]
    config, slow = PoolConfig(NodeId("n"), None, plan_geometry(8 * MiB), tiers=tuple(specs)), FakeTier("objects")
    slow.hang_at_start()
    opening = asyncio.create_task(
        PoolRuntime.open(config, tiers={"disk": lambda: DiskTier(tmp_path), "objects": lambda: slow})
    )
    await eventually_async(lambda: (tmp_path / "lock").exists(), "the disk to be opened")
    opening.cancel()
    slow.go_on()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert asyncio.all_tasks() == {asyncio.current_task()}

    def is_free() -> bool:
        disk = DiskTier(tmp_path)
        try:
            disk.start()
        except TierError:
            return False
        disk.close()
        return True

    await eventually_async(is_free, "the tier, which may have been opening, to let go of the disk")


async def test_an_answer_to_a_cancelled_caller_is_given_back(
    runtime: PoolRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = (await runtime.attach(make_spec(), lambda reason: None)).attachment_id
    (ref,) = await runtime.reserve(engine, 1)
    sealing = asyncio.create_task(runtime.seal(engine, [SealItem(ref, CHAIN[0], None, 0, SpanRoute(1))]))
    await asyncio.sleep(0)  # its digest is being computed: whoever asks waits for it
    asking = asyncio.create_task(runtime.acquire(engine, AcquireRequest(CHAIN, 0, 20.0)))
    answer, promised = runtime._answer, list[AcquireResult]()

    def answered(action: act.Reply | act.Refuse) -> None:
        answer(action)
        if isinstance(action, act.Reply) and isinstance(action.value, AcquireResult):
            promised.append(action.value)
            asking.cancel()  # before the caller has had its turn

    monkeypatch.setattr(runtime, "_answer", answered)
    await sealing
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert promised and promised[0].lease_id, "nothing was promised, so nothing is shown"
    await eventually_async(lambda: not runtime._state.lease_count, "the lease to be given back")


async def test_attaching_again_ends_the_stream_of_the_earlier_one(runtime: PoolRuntime) -> None:
    lost: list[str] = []
    spec = make_spec()
    await runtime.attach(replace(spec, attempt=1), lost.append)
    await runtime.attach(replace(spec, attempt=2), lost.append)
    assert lost == ["the engine attached again"]
    with pytest.raises(NotAttached):
        await runtime.attach(replace(spec, attempt=1), lost.append)
    assert len(lost) == 1, "an attach that was overtaken ends nothing"


async def test_slots_of_a_gone_engine_return_once_locks_work_again(
    runtime: PoolRuntime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The machine had no locks left."""
    asked = 0

    @contextlib.contextmanager
    def claim(engine_id: bytes) -> Iterator[bool]:
        nonlocal asked
        asked += 1
        if asked < 5:
            raise SegmentError("cannot lock the segment for its writers: No locks available")
        yield True

    monkeypatch.setattr(runtime._vanished, "_claim", claim)
    monkeypatch.setattr(vanished, "POLL_SECONDS", 0.001)
    caplog.set_level(logging.WARNING)
    engine = (await runtime.attach(make_spec(), lambda reason: None)).attachment_id
    await runtime.reserve(engine, 3)
    runtime.attachment_lost(engine)
    await eventually_async(lambda: not runtime.state.slot_counts()["quarantined"], "the slots to leave quarantine")
    assert [record.getMessage() for record in caplog.records] == ["engine_end_unknown"], "once, not at each look"


async def test_a_pool_ends_what_it_has_under_way_before_it_is_closed(runtime: PoolRuntime) -> None:
    """Or a digest would read a segment that is not mapped any more."""
    began, ended = asyncio.Event(), list[str]()

    async def endless() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("work")

    runtime._spawn(endless())
    await began.wait()
    await runtime.close()
    assert ended == ["work"]
