"""What engines call their blocks outlives a restart, beside the disk that has the blocks."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest

from kvservice.core.block.keys import span_route
from kvservice.core.block.marks import Mark, MarkKind
from kvservice.core.messages import EngineSpec, SealItem
from kvservice.core.segment.geometry import plan_geometry
from kvservice.pool import name_files
from kvservice.pool import runtime as pool_runtime
from kvservice.pool.mark_files import MarkFiles
from kvservice.pool.runtime import PoolRuntime
from kvservice.pool.runtime_ports import PoolConfig
from kvservice.pool.tier_specs import DISK, TierSpec, marks_beside, names_beside
from kvservice.pool.tiers import TierPhase
from kvservice.private_files import write_private
from kvservice.testing.builders import make_chain, make_spec
from kvservice.testing.eventually import eventually_async
from kvservice.units import BlockKey, MiB, NodeId

GOES, STAYS = make_spec("goes", "goes", namespace="a/b"), make_spec("stays", "stays", namespace="c")
OF_GOES, OF_STAYS = make_chain(3, "goes"), make_chain(2, "stays")
MODEL, NAMESPACE = (MarkKind.MODEL, "goes"), (MarkKind.NAMESPACE, "a")


async def opened(folder: Path) -> PoolRuntime:
    """A pool on the disk of this folder, with new memory."""
    disk = TierSpec(DISK, f"{folder}/disk", 64 * MiB, "stored", "none")
    config = PoolConfig(
        NodeId("n"),
        None,
        plan_geometry(8 * MiB),
        directory=folder,
        tiers=(disk,),
        mark_files=marks_beside((disk,)),
        name_files=names_beside((disk,)),
    )
    return await PoolRuntime.open(config)


def on_disk(pool: PoolRuntime) -> set[BlockKey]:
    return {block.key for block in pool.state._tiers.blocks()}


async def store(pool: PoolRuntime, spec: EngineSpec, chain: tuple[BlockKey, ...]) -> None:
    engine = (await pool.attach(spec, lambda reason: None)).attachment_id
    refs, parents = await pool.reserve(engine, len(chain)), (None, *chain)
    items = [SealItem(ref, chain[i], parents[i], i, span_route(chain, i)) for i, ref in enumerate(refs)]
    await pool.seal(engine, items)
    await eventually_async(lambda: on_disk(pool).issuperset(chain), "the blocks are on the disk")


async def filled(folder: Path) -> None:
    """Two engines store, and the pool ends."""
    pool = await opened(folder)
    await eventually_async(lambda: pool.tier_states()[0].phase is TierPhase.OPEN, "the disk is open")
    await store(pool, GOES, OF_GOES)
    await store(pool, STAYS, OF_STAYS)
    await pool.close()


async def found_after(folder: Path, what: tuple[MarkKind, str]) -> set[BlockKey]:
    """What a start finds on the disk when this was cleared while the node was away."""
    MarkFiles([folder / "disk.marks"]).keep([Mark(what[0], time.time(), what[1])])
    pool = await opened(folder)
    try:
        total = len(OF_GOES) + len(OF_STAYS)

        def is_found() -> bool:
            counters = pool.stats().counters
            return counters.get("tier_disk_found", 0) + counters.get("tier_disk_found_too_old", 0) == total

        await eventually_async(is_found, "every block is looked at")
        return on_disk(pool)
    finally:
        await pool.close()


@pytest.mark.parametrize("what", [MODEL, NAMESPACE])
async def test_a_start_keeps_what_a_clear_did_not_name(tmp_path: Path, what: tuple[MarkKind, str]) -> None:
    await filled(tmp_path)
    assert await found_after(tmp_path, what) == set(OF_STAYS)


@pytest.mark.parametrize("what", [MODEL, NAMESPACE])
@pytest.mark.parametrize("harm", ["gone", "damaged"])
async def test_without_names_all_go_with_a_clear(tmp_path: Path, what: tuple[MarkKind, str], harm: str) -> None:
    await filled(tmp_path)
    names = tmp_path / "disk.names"
    data = bytearray(names.read_bytes())
    data[20] ^= 1
    names.unlink() if harm == "gone" else names.write_bytes(data)
    assert await found_after(tmp_path, what) == set()


async def test_every_name_that_blocks_ever_had_counts(tmp_path: Path) -> None:
    """Engines that are alike share blocks, whatever they are called, and a start forgets no name of an earlier one."""
    await filled(tmp_path)
    pool = await opened(tmp_path)
    await pool.attach(make_spec("other", "stays", namespace="d"), lambda reason: None)
    await pool.close()
    assert await found_after(tmp_path, (MarkKind.NAMESPACE, "c")) == set(OF_GOES)


async def test_names_that_cannot_be_kept_leave_none_behind(tmp_path: Path) -> None:
    """Some of the names would be worse than none: a clear of another would not reach the blocks."""
    await filled(tmp_path)
    draft = tmp_path / f".disk.names.{os.getpid()}"
    pool, names = await opened(tmp_path), tmp_path / "disk.names"
    (draft / "in the way").mkdir(parents=True)
    await pool.attach(make_spec("other", "stays", namespace="d"), lambda reason: None)
    assert not names.exists()
    (draft / "in the way").rmdir()
    draft.rmdir()
    await pool.attach(make_spec("other", "stays", namespace="d"), lambda reason: None)
    assert b"\x01\x00d" in names.read_bytes(), "the next attach tries again"
    await pool.close()


async def test_names_are_kept_as_soon_as_the_disk_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine may stay attached for weeks."""
    monkeypatch.setattr(pool_runtime, "CHECK_SECONDS", 0.01)
    draft = tmp_path / f".disk.names.{os.getpid()}"
    pool, names = await opened(tmp_path), tmp_path / "disk.names"
    (draft / "in the way").mkdir(parents=True)
    await pool.attach(STAYS, lambda reason: None)
    await asyncio.sleep(0.2)
    assert not names.exists() and [record.message for record in caplog.records].count("engine_names_not_kept") == 1
    (draft / "in the way").rmdir()
    draft.rmdir()
    await eventually_async(names.exists, "the names are kept")
    await pool.close()


@pytest.mark.parametrize("is_late", [False, True])
async def test_names_are_on_the_disk_before_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """But a disk that hangs keeps no engine from attaching."""
    may_write, names, pool = threading.Event(), tmp_path / "disk.names", await opened(tmp_path)

    def slowly(path: Path, data: bytes) -> None:
        may_write.wait(10)
        write_private(path, data)

    monkeypatch.setattr(name_files, "write_private", slowly)
    monkeypatch.setattr(name_files, "KEEP_SECONDS", 0.1 if is_late else 10.0)
    asyncio.get_running_loop().call_later(1.0, may_write.set)
    await pool.attach(STAYS, lambda reason: None)
    assert names.exists() is not is_late
    await eventually_async(names.exists, "the names are kept")
    await pool.close()
