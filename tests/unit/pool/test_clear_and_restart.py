"""What was cleared while somebody read it does not come back with the memory that a restart finds."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvservice.core.block.keys import span_route
from kvservice.core.block.marks import FUTURE_SECONDS_MAX, MARK_SECONDS, Mark, MarkKind
from kvservice.core.messages import AcquireRequest, SealItem
from kvservice.core.segment.geometry import plan_geometry
from kvservice.pool.mark_files import CLEAR_AGAIN_SECONDS
from kvservice.pool.runtime import PoolRuntime
from kvservice.pool.runtime_ports import PoolConfig
from kvservice.testing.builders import make_chain, make_spec
from kvservice.testing.unique import unique_name
from kvservice.units import MiB, NodeId

CHAIN = make_chain(3)
HOUR = 3600.0


@pytest.fixture
def path() -> Iterator[Path]:
    made = Path(f"/dev/shm/kvservice-test{unique_name()}-n")
    yield made
    made.unlink(missing_ok=True)


async def opened(path: Path, tmp_path: Path, later: float = 0.0) -> PoolRuntime:
    """A pool on this memory and the marks of this folder, whose clock of the wall is so much later."""
    return await PoolRuntime.open(
        PoolConfig(
            NodeId("n"),
            path,
            plan_geometry(8 * MiB),
            directory=path.parent,
            mark_files=(tmp_path / "marks",),
            wall_clock=lambda: time.time() + later,
        )
    )


async def read_and_end(pool: PoolRuntime, *, is_cleared: bool) -> None:
    """Store blocks and begin to read them. Maybe clear everything. Then the pool ends."""
    engine = (await pool.attach(make_spec(), lambda reason: None)).attachment_id
    refs = await pool.reserve(engine, len(CHAIN))
    parents = (None, *CHAIN)
    items = [SealItem(ref, CHAIN[i], parents[i], i, span_route(CHAIN, i)) for i, ref in enumerate(refs)]
    await pool.seal(engine, items)
    assert len((await pool.acquire(engine, AcquireRequest(CHAIN, 0, 1.0))).blocks) == len(CHAIN)
    if is_cleared:
        result = await pool.clears.clear([Mark(MarkKind.EVERYTHING, time.time())])
        assert (result.blocks, result.reading) == (len(CHAIN), len(CHAIN))
    await pool.close()


@pytest.mark.parametrize("later", [0.0, 2 * CLEAR_AGAIN_SECONDS, MARK_SECONDS - HOUR, -2 * FUTURE_SECONDS_MAX])
async def test_read_and_cleared_is_gone_however_late_the_start(path: Path, tmp_path: Path, later: float) -> None:
    """A clock that was set back makes the mark one of the future."""
    await read_and_end(await opened(path, tmp_path), is_cleared=True)
    pool = await opened(path, tmp_path, later)
    try:
        assert pool.inventory() == []
    finally:
        await pool.close()


async def test_an_engine_that_outlives_its_shard_changes_nothing(path: Path, tmp_path: Path) -> None:
    """The kernel notes its first write to each page as a change of the file."""
    await read_and_end(await opened(path, tmp_path), is_cleared=True)
    later = time.time() + 2 * CLEAR_AGAIN_SECONDS
    os.utime(path, (later, later))
    pool = await opened(path, tmp_path, 2 * CLEAR_AGAIN_SECONDS)
    try:
        assert pool.inventory() == []
    finally:
        await pool.close()


async def test_a_clear_of_long_before_the_end_costs_no_memory(path: Path, tmp_path: Path) -> None:
    """Whoever read what was cleared has ended since. What was stored after the clear stays."""
    await read_and_end(await opened(path, tmp_path), is_cleared=True)
    await read_and_end(await opened(path, tmp_path, 2 * CLEAR_AGAIN_SECONDS), is_cleared=False)
    pool = await opened(path, tmp_path, 2 * CLEAR_AGAIN_SECONDS)
    try:
        assert len(pool.inventory()) == len(CHAIN)
    finally:
        await pool.close()


async def test_memory_that_outlived_the_marks_is_not_taken_up(path: Path, tmp_path: Path) -> None:
    """Others may have cleared since, and nobody knows of it any more."""
    await read_and_end(await opened(path, tmp_path, -MARK_SECONDS - HOUR), is_cleared=False)
    pool = await opened(path, tmp_path)
    try:
        assert pool.inventory() == []
    finally:
        await pool.close()
