"""A pool whose machine's wall clock is set while it runs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvservice.core.block.marks import FUTURE_SECONDS_MAX, Mark, MarkKind
from kvservice.core.segment.geometry import plan_geometry
from kvservice.errors import InvalidRequest
from kvservice.pool import runtime as pool_runtime
from kvservice.pool.runtime import PoolRuntime
from kvservice.pool.runtime_ports import PoolConfig
from kvservice.testing.eventually import eventually_async
from kvservice.units import MiB, NodeId

SINCE_1970 = 1_800_000_000.0  # by the clock that is right, when the monotonic one began
LATE = 2 * FUTURE_SECONDS_MAX


async def test_a_clock_that_was_set_right_is_believed(tmp_path: Path) -> None:
    """The machine started with a wrong clock. Once it is right, an operator can clear, at once and later."""
    off = -LATE
    geometry = plan_geometry(8 * MiB)
    pool = await PoolRuntime.open(
        PoolConfig(
            NodeId("n"), None, geometry, directory=tmp_path, wall_clock=lambda: time.monotonic() + SINCE_1970 + off
        )
    )
    try:
        mark = Mark(MarkKind.EVERYTHING, time.monotonic() + SINCE_1970)
        with pytest.raises(InvalidRequest, match="set the clocks"):
            await pool.clears.clear([mark])
        off = 0.0
        assert (await pool.clears.clear([mark])).blocks == 0
    finally:
        await pool.close()


async def test_a_pool_looks_at_the_clock_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_runtime, "CHECK_SECONDS", 0.01)
    off = 0.0
    geometry = plan_geometry(8 * MiB)
    pool = await PoolRuntime.open(
        PoolConfig(
            NodeId("n"), None, geometry, directory=tmp_path, wall_clock=lambda: time.monotonic() + SINCE_1970 + off
        )
    )
    try:
        off = 60.0
        await eventually_async(lambda: pool.stats().counters.get("clock_steps", 0) >= 1, "the step is seen")
    finally:
        await pool.close()
