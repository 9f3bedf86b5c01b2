"""The supervisor replaces a GpuWorker whose GPU is lost to its process. On the stand-in driver."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvservice.actors import deploy
from kvservice.client.shard import ShardClient
from kvservice.config import ServiceConfig
from kvservice.copying.cuda import driver as cuda_driver
from kvservice.copying.cuda.driver import Driver
from kvservice.copying.engine.link import WorkerLink
from kvservice.copying.message import CopyRow, Direction
from kvservice.discovery import find_shards
from kvservice.testing.eventually import eventually
from kvservice.units import MiB
from tests.gpu.slots import KEY
from tests.integration.engine import Engine
from tests.ray.test_gpu_worker_on_ray import REGION, pool_of
from tests.ray_nodes import ray_nodes
from tests.stand_in_driver.build import build, compiler
from tests.stand_in_driver.engine import Cache, Offer, stand_in_environment

pytestmark = pytest.mark.ray

SERVICE = "lost"


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Ray's processes, and this one, have the stand-in for a driver. It dies at the first copy."""
    if compiler() is None:
        pytest.skip("no C compiler for the stand-in driver")
    monkeypatch.setattr(cuda_driver, "LIBRARY", str(build()))
    cuda_driver.load.cache_clear()
    for name, value in stand_in_environment(FAULTS_AT=1).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with tempfile.TemporaryDirectory(prefix="kvr-") as folder:
        yield Path(folder)
    cuda_driver.load.cache_clear()


def workers() -> list[dict[str, object]]:
    handle = deploy.find(SERVICE)
    assert handle is not None
    return [row for row in handle.describe()["copy_workers"] if row["running"]]


def test_worker_whose_gpu_is_lost_is_replaced(runtime: Path) -> None:
    config = ServiceConfig(
        service=SERVICE,
        pool_bytes=32 * MiB,
        slab_bytes=8 * MiB,
        lookup_partitions=1,
        runtime_dir=str(runtime),
        copy_workers="auto",
    )
    with ray_nodes({"num_cpus": 1, "num_gpus": 1, "object_store_memory": 80 * MiB}):
        deploy.up(config).wait_complete(150)
        try:
            eventually(workers, "a running worker", 120)
            [row] = workers()
            driver = Driver.of_device("0")
            assert row["device"] == driver.uuid
            asyncio.run(lose_the_gpu(driver, runtime))
            eventually(lambda: [new for new in workers() if new["pid"] != row["pid"]], "the next worker", 120)
        finally:
            deploy.down(SERVICE)


async def lose_the_gpu(driver: Driver, runtime: Path) -> None:
    [shard] = find_shards(SERVICE, runtime)
    engine = await Engine.attach(ShardClient(shard.socket))
    driver.bind()
    cache = Cache(driver)
    cache.layout = REGION  # of blocks as this shard's engines have them
    offer = Offer(cache)
    link = WorkerLink(offer.offer)
    link.follow(Path(shard.socket).parent, pool_of(engine))
    try:
        await asyncio.to_thread(eventually, lambda: link.is_ready, "the link")
        [ref] = await engine.pool.reserve(engine.id, 1)
        ticket = link.submit(Direction.STORE, [CopyRow(0, ref.slot, ref.generation, KEY)])
        assert ticket is not None
        link.flush(offer.mark())
        await asyncio.to_thread(ticket.synchronize)
        assert not ticket.succeeded()
    finally:
        await asyncio.to_thread(link.close)
        engine.let_go()
