"""A pool whose state contradicts itself serves nothing any more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvservice.core.segment.geometry import plan_geometry
from kvservice.pool import runtime as pool_runtime
from kvservice.pool.runtime import PoolRuntime
from kvservice.pool.runtime_ports import PoolConfig
from kvservice.testing.eventually import eventually_async
from kvservice.units import MiB, NodeId


async def test_a_state_that_cannot_be_checked_fences_the_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check may fail on what is broken before it gets to say so."""
    monkeypatch.setattr(pool_runtime, "CHECK_SECONDS", 0.01)
    broken: Any = None
    pool = await PoolRuntime.open(PoolConfig(NodeId("n"), None, plan_geometry(8 * MiB), directory=tmp_path))
    try:
        pool.state._pulls._open[7] = broken
        await eventually_async(lambda: pool.fenced is not None, "the pool is fenced")
        assert (pool.fenced or "").startswith("fenced: AttributeError")
    finally:
        await pool.close()
