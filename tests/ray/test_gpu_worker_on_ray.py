"""GpuWorker on a node without a GPU: runs beside its shard, is found by an engine, restarted and taken down.

The engine of this test is real to both: its KV memory is a memfd, its blocks are sealed by the shard and read back.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvservice.actors import deploy
from kvservice.actors.supervisor import copy_worker_devices
from kvservice.client.shard import ShardClient
from kvservice.config import ServiceConfig
from kvservice.copying.device import HOST
from kvservice.copying.engine.link import KVOffer, WorkerLink
from kvservice.copying.memory import SharedMemory
from kvservice.copying.message import CopyRow, Direction, MemoryKind, PoolSource
from kvservice.core.block.keys import span_route
from kvservice.core.messages import SealItem, SealStatus
from kvservice.core.segment.copy_runs import RegionLayout
from kvservice.discovery import find_copy_workers, find_shards
from kvservice.testing.eventually import eventually, eventually_async
from kvservice.units import MiB
from tests.integration.engine import LAYOUT, Engine, chain, content
from tests.integration.test_copy_worker import WALL, stop_thread
from tests.ray_nodes import ray_nodes

pytestmark = pytest.mark.ray

BLOCKS = 8
MAPPED_SECONDS = 5.0  # until the thread that maps the pool ahead has ended
LAYER_BYTES = LAYOUT.layer_bytes * BLOCKS
REGION = RegionLayout(
    LAYER_BYTES * LAYOUT.layer_count,
    BLOCKS,
    tuple(layer * LAYER_BYTES for layer in range(LAYOUT.layer_count)),
    parts=1,
    heads=LAYOUT.kv_head_count,
    tokens=LAYOUT.block_tokens,
    cell_bytes=LAYOUT.cell_bytes // LAYOUT.block_tokens,
    block_stride=LAYOUT.layer_bytes,
    part_stride=0,
    head_stride=LAYOUT.cell_bytes,
    token_stride=LAYOUT.cell_bytes // LAYOUT.block_tokens,
)


@pytest.fixture(scope="module")
def runtime() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvr-") as folder:
        os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
        yield Path(folder)


@pytest.fixture(scope="module")
def config(runtime: Path) -> Iterator[ServiceConfig]:
    with ray_nodes({"num_cpus": 1, "object_store_memory": 80 * MiB}):
        wanted = ServiceConfig(
            service="gw",
            pool_bytes=32 * MiB,
            slab_bytes=8 * MiB,
            lookup_partitions=1,
            runtime_dir=str(runtime),
            copy_workers="1",
        )
        deploy.up(wanted).wait_complete(150)
        yield wanted
        deploy.down("gw")


def workers() -> list[dict[str, Any]]:
    handle = deploy.find("gw")
    assert handle is not None
    return [row for row in handle.describe()["copy_workers"] if row["running"]]


async def blocks_through(engine: Engine, link: WorkerLink, kv: np.ndarray, seed: int) -> None:
    """Store blocks from the engine's memory and load them back elsewhere, all bytes moved by the worker."""
    keys = chain(seed, 4)
    layers = kv.reshape(LAYOUT.layer_count, BLOCKS, LAYOUT.layer_bytes)
    for block, key in enumerate(keys):
        layers[:, block] = np.frombuffer(content(key), np.uint8).reshape(LAYOUT.layer_count, -1)
    refs = await engine.pool.reserve(engine.id, len(keys))
    await copied(link, Direction.STORE, [CopyRow(b, r.slot, r.generation, keys[b]) for b, r in enumerate(refs)])
    items = [
        SealItem(ref, key, keys[i - 1] if i else None, i, span_route(keys, i))
        for i, (ref, key) in enumerate(zip(refs, keys, strict=True))
    ]
    assert await engine.pool.seal(engine.id, items) == [SealStatus.SEALED] * len(keys)
    result = await engine.acquire(keys)
    assert len(result.blocks) == len(keys)
    layers[:, 4:] = 0
    rows = [CopyRow(4 + i, ref.slot, ref.generation, keys[i]) for i, ref in enumerate(result.blocks)]
    await copied(link, Direction.LOAD, rows)
    assert all(layers[:, 4 + i].tobytes() == content(key) for i, key in enumerate(keys))
    await engine.pool.release(engine.id, [result.lease_id])


async def copied(link: WorkerLink, direction: Direction, rows: list[CopyRow]) -> None:
    ticket = link.submit(direction, rows)
    assert ticket is not None
    link.flush()
    await eventually_async(ticket.query, "the end of the copy")
    assert ticket.succeeded()


@contextmanager
def kv_memory() -> Iterator[tuple[SharedMemory, KVOffer]]:
    kv = SharedMemory.make(REGION.region_bytes)
    memory = {"kind": MemoryKind.MEMFD.value, "bytes": REGION.region_bytes}
    yield kv, KVOffer(HOST, memory, REGION.fields(), kv.descriptor)
    kv.close()


def pool_of(engine: Engine) -> PoolSource:
    found = engine.attachment
    return PoolSource(1, found.segment_path, found.geometry, found.epoch, LAYOUT, engine.engine_id)


def threads_of(pid: int) -> set[int]:
    return {int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()}


def lanes_and_reader(pid: int, before: set[int]) -> list[int] | None:
    """The threads that a link made, in order; None while there are others."""
    made = sorted(threads_of(pid) - before)
    return made if len(made) == len(Direction) + 1 else None


def link_with_known_threads(offer: KVOffer, directory: Path, pool: PoolSource, pid: int) -> tuple[WorkerLink, int]:
    """(a link that is ready, the thread of the worker that does its stores).

    A thread that maps the pool's pages ends soon. Again when Ray made threads meanwhile.
    """
    for _ in range(10):
        before = threads_of(pid)
        link = WorkerLink(offer, wedge_seconds=120)
        link.follow(directory, pool)
        eventually(lambda: link.is_ready, "the link")  # noqa: B023  asked at once
        with suppress(AssertionError):
            made = eventually(lambda: lanes_and_reader(pid, before), "the worker's threads", MAPPED_SECONDS)  # noqa: B023
            return link, made[Direction.STORE]
        link.close()
    raise AssertionError("the worker's threads could not be told from Ray's")


def test_worker_that_hangs_is_replaced_by_the_supervisor(config: ServiceConfig, runtime: Path) -> None:
    [row] = eventually(workers, "a running worker")
    [shard] = find_shards("gw", runtime)

    async def run(offer: KVOffer) -> None:
        engine = await Engine.attach(ShardClient(shard.socket))
        place = (Path(shard.socket).parent, pool_of(engine), row["pid"])
        link, thread = await asyncio.to_thread(link_with_known_threads, offer, *place)
        stop_thread(thread)
        [ref] = await engine.pool.reserve(engine.id, 1)
        ticket = link.submit(Direction.STORE, [CopyRow(0, ref.slot, ref.generation, chain(9, 1)[0])])
        assert ticket is not None
        link.flush()
        await asyncio.to_thread(eventually, ticket.query, "the end of the copy")
        assert not ticket.succeeded()
        while os.WIFSTOPPED(os.waitpid(thread, WALL)[1]):
            pass
        await asyncio.to_thread(eventually, lambda: [r for r in workers() if r["pid"] != row["pid"]], "the next worker")
        await asyncio.to_thread(eventually, lambda: link.is_ready, "the link to find it")
        await asyncio.to_thread(link.close)
        engine.let_go()

    with kv_memory() as (_, offer):
        asyncio.run(run(offer))


def test_worker_serves_a_cpu_engine_also_after_a_kill(config: ServiceConfig, runtime: Path) -> None:
    [row] = eventually(workers, "a running worker")
    [shard] = find_shards("gw", runtime)
    directory = Path(shard.socket).parent
    assert [record.pid for record in find_copy_workers(directory)] == [row["pid"]]
    assert (row["device"], row["node_id"], row["wedged"]) == (HOST, shard.node_id, False)
    with kv_memory() as (kv, offer):
        link = WorkerLink(offer)

        async def run() -> None:
            engine = await Engine.attach(ShardClient(shard.socket))
            link.follow(directory, pool_of(engine))
            view = np.frombuffer(kv.buffer, np.uint8)
            await asyncio.to_thread(eventually, lambda: link.is_ready, "the link")
            await blocks_through(engine, link, view, 1)
            os.kill(row["pid"], signal.SIGKILL)
            await asyncio.to_thread(eventually, lambda: not link.is_ready, "the loss")
            await asyncio.to_thread(eventually, lambda: link.is_ready, "Ray to restart the worker")
            await blocks_through(engine, link, view, 2)
            engine.let_go()

        try:
            asyncio.run(run())
            eventually(
                lambda: [r for r in workers() if r["pid"] != row["pid"] and r["counters"].get("store_blocks") == 4],
                "the restarted worker to count its four blocks",
            )
        finally:
            link.close()
    deploy.down("gw")
    assert not list(directory.parent.glob("*")), "files of the service are left"


@pytest.mark.parametrize(
    ("setting", "gpus", "devices"),
    [
        ("off", 2, []),
        ("auto", 2, ["0", "1"]),
        ("auto", 0, []),
        ("1", 2, ["0"]),
        ("4", 2, ["0", "1"]),
        ("2", 0, [HOST]),
        ("0", 2, []),
    ],
)
def test_setting_says_which_workers_a_node_gets(setting: str, gpus: int, devices: list[str]) -> None:
    assert copy_worker_devices(setting, gpus) == devices
