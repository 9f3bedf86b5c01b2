"""What a shard tells probes, and which request its log lines name."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2

from kvservice.client.shard import ShardClient
from kvservice.config import ServiceConfig
from kvservice.core.drain.sender import DrainPhase
from kvservice.core.messages import AcquireRequest
from kvservice.errors import Unavailable
from kvservice.observe import logs
from kvservice.observe.condition import Condition
from kvservice.shard.server import PEER_SERVICE, ShardServer
from kvservice.shard.server_config import ShardServerConfig
from kvservice.testing.builders import make_chain, make_spec
from kvservice.testing.eventually import eventually_async
from kvservice.testing.unique import unique_name
from kvservice.units import MiB, NodeId
from tests.integration.engine import attached, chain


@pytest.fixture
async def server() -> AsyncIterator[ShardServer]:
    with tempfile.TemporaryDirectory(prefix="kvs-") as root:
        settings = ServiceConfig(
            service=f"t{unique_name()}", pool_bytes=4 * MiB, slab_bytes=MiB, runtime_dir=root, transport="shm"
        )
        # nobody listens there, so each lookup fails
        made = ShardServer(ShardServerConfig(settings, NodeId("n"), (f"unix:{root}/nobody.sock",)))
        await made.start()
        yield made
        await made.stop()


async def test_ready_goes_away_with_a_drain_and_comes_back(server: ShardServer) -> None:
    assert server.condition() == Condition()
    server.pool.drain()
    assert server.condition() == Condition(unready="draining")
    server.pool.drain(undo=True)
    assert server.condition() == Condition()


async def test_a_shard_that_stays_after_all_is_as_before(server: ShardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is healthy, makes its segment again when something removes it, and a later drain does not end the process."""
    name = PEER_SERVICE

    async def health() -> int:
        return (await server._health.Check(health_pb2.HealthCheckRequest(service=name), None)).status

    async def for_ever(*_: object) -> None:
        await asyncio.Event().wait()

    (socket,) = Path(server._config.settings.runtime_dir).glob("*/*/shard.sock")
    engine = await attached(str(socket))
    await engine.store(chain(1, 2))
    monkeypatch.setattr(server.pool._remote, "_find_takers", for_ever)
    server.leave(60.0, handover=True, exit=True)
    while await health() == health_pb2.HealthCheckResponse.SERVING:
        await asyncio.sleep(0)
    assert (await server.stay()).phase is DrainPhase.SERVING
    assert await health() == health_pb2.HealthCheckResponse.SERVING
    server.pool.unlink()
    made_again = lambda: server.condition() == Condition() and server.pool.is_linked()  # noqa: E731
    await eventually_async(made_again, "the segment is there again")
    engine.let_go()
    await engine.pool.close()
    await server.drain(0.5)
    assert server.pool.drained.is_set() and not server.left.is_set()


async def test_a_fenced_pool_needs_a_restart(server: ShardServer) -> None:
    server.pool._fence("fenced: a slot is free twice")
    assert server.condition().dead == "fenced: a slot is free twice"


async def test_without_a_pool_it_is_alive_and_not_ready(server: ShardServer) -> None:
    await server.stop()
    assert not server.condition().dead and "no pool" in server.condition().unready
    assert server.timings() is None


async def test_a_line_about_a_request_names_it(server: ShardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise Unavailable("nobody answers")

    assert server._directory is not None
    monkeypatch.setattr(server._directory.lookup, "resolve", fail)
    stream, logger = io.StringIO(), logging.getLogger("kvservice.pool")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.JsonFormatter())
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        (socket,) = Path(server._config.settings.runtime_dir).glob("*/*/shard.sock")
        client = ShardClient(str(socket))
        attachment = await client.attach(make_spec(), lambda reason: None)
        wanted = AcquireRequest(make_chain(2), 0, 2.0, request_id="chat-7")
        await client.acquire(attachment.attachment_id, wanted)
        await client.close()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    (line,) = (json.loads(text) for text in stream.getvalue().splitlines())
    assert (line["event"], line["request_id"], line["error"]) == ("lookup_failed", "chat-7", "nobody answers")
