"""One contract, every pool: a shard across its socket, a pool in the engine's process, and the fake."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvservice.client.shard import ShardClient
from kvservice.config import ServiceConfig
from kvservice.core.segment.geometry import Geometry
from kvservice.pool import vanished
from kvservice.pool.runtime import PoolConfig, PoolRuntime
from kvservice.shard.server import ShardServer
from kvservice.shard.server_config import ShardServerConfig
from kvservice.testing.fake_pool import FakePool
from kvservice.testing.pool_port_contract import PoolPortContract
from kvservice.testing.unique import unique_name
from kvservice.units import MiB, NodeId

GEOMETRY = Geometry(slab_bytes=MiB, slab_count=2)


@pytest.fixture(autouse=True)
def often_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether engines that left have let go."""
    monkeypatch.setattr(vanished, "POLL_SECONDS", 0.01)


@pytest.fixture
def path() -> Iterator[Path]:
    made = Path(f"/dev/shm/kvservice-contract{unique_name()}-n")
    yield made
    made.unlink(missing_ok=True)


class TestFake(PoolPortContract):
    @pytest.fixture
    async def pool(self, path: Path) -> AsyncIterator[FakePool]:
        made = FakePool(path, GEOMETRY)
        yield made
        await made.close()


class TestEmbedded(PoolPortContract):
    @pytest.fixture
    async def pool(self, path: Path) -> AsyncIterator[PoolRuntime]:
        made = await PoolRuntime.open(PoolConfig(NodeId("n"), path, GEOMETRY))
        yield made
        await made.close()


class TestShard(PoolPortContract):
    @pytest.fixture
    async def pool(self) -> AsyncIterator[ShardClient]:
        with tempfile.TemporaryDirectory(prefix="kvs-") as root:
            settings = ServiceConfig(
                service=f"contract{unique_name()}",
                pool_bytes=4 * MiB,
                runtime_dir=root,
                slab_bytes=MiB,
                transport="shm",
            )
            server = ShardServer(ShardServerConfig(settings, NodeId("n")))
            await server.start()
            client = ShardClient(str(next(Path(root).glob("*/*/shard.sock"))))
            yield client
            await client.close()
            await server.stop(leaving=True)
