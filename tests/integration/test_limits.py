"""How much one server lets be under way: what is too much is refused at once, and the rest is served meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvservice.client.peer import PeerClient
from kvservice.config import ServiceConfig
from kvservice.core.actions import Follow, Locate
from kvservice.core.messages import Handoff
from kvservice.errors import Exhausted
from kvservice.lookup import watch
from kvservice.lookup.server import LookupServer
from kvservice.shard import server as shard_server
from kvservice.shard.server import ShardServer
from kvservice.shard.server_config import ShardServerConfig
from kvservice.units import HandoffId, MiB, NodeId
from kvservice.wire.serving import Gate
from kvservice.wire.status import error_from_rpc
from kvservice.wire.v1 import lookup_pb2, lookup_pb2_grpc, shard_pb2, shard_pb2_grpc
from kvservice.wire.versions import PROTOCOL_VERSION
from tests.integration.engine import chain

CALL_SECONDS = 5.0
WAITERS = 3


async def test_calls_that_wait_are_bounded_and_starve_no_short_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_server, "Gate", lambda: Gate(short=1, long=WAITERS))
    server = ShardServer(
        ShardServerConfig(
            ServiceConfig(
                service=f"limits{tmp_path.name[:8]}",
                pool_bytes=8 * MiB,
                slab_bytes=1 * MiB,
                transport="shm",
                runtime_dir=str(tmp_path),
            ),
            NodeId("n0"),
            segment_dir=tmp_path,
        )
    )
    holder = await server.start()
    peers = PeerClient("shm", NodeId("n1"))
    keys = chain(seed=1, count=2)

    def follow(number: int) -> asyncio.Future[object]:
        handoff = Handoff(HandoffId(bytes([number]) * 16), holder.node_id)
        return asyncio.ensure_future(peers.follow(holder, Follow(0, 0, handoff, keys, 10.0), 20.0))

    try:
        waiting = [follow(number + 1) for number in range(WAITERS)]
        await asyncio.sleep(0.2)
        with pytest.raises(Exhausted, match=f"{WAITERS} calls like Follow are under way"):
            await follow(99)
        assert not any(one.done() for one in waiting)
        await peers.locate(Locate(0, holder, keys, CALL_SECONDS))
        async with grpc.aio.insecure_channel(holder.peer_address) as channel:
            admin = shard_pb2_grpc.AdminServiceStub(channel)
            assert not (await admin.Stats(shard_pb2.StatsRequest(), timeout=CALL_SECONDS)).draining
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=CALL_SECONDS)
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        again = follow(5)  # who gave up makes room
        await asyncio.sleep(0.2)
        assert not again.done()
        again.cancel()
    finally:
        await peers.close()
        await server.stop()


def test_a_gate_counts_each_kind_apart() -> None:
    """It forgets calls that failed."""
    gate = Gate(short=1, long=1)
    for _ in range(3):
        with pytest.raises(KeyError), gate.passing("Stats"), gate.passing("Follow"):
            raise KeyError
    with gate.passing("Stats"), pytest.raises(Exhausted), gate.passing("Locate"):
        pass
    with gate.passing("Follow"), pytest.raises(Exhausted), gate.passing("TakeOver"):
        pass


async def test_watchers_are_bounded_and_starve_no_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SUBSCRIBERS_MAX", 2)
    server = LookupServer("127.0.0.1:0", allow_plaintext=True)
    address = await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = lookup_pb2_grpc.LookupServiceStub(channel)
            streams = [stub.Watch(lookup_pb2.WatchRequest(protocol_version=PROTOCOL_VERSION)) for _ in range(2)]
            for stream in streams:
                assert (await stream.read()).snapshot_end
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Watch(
                    lookup_pb2.WatchRequest(protocol_version=PROTOCOL_VERSION), timeout=CALL_SECONDS
                ).read()
            assert isinstance(error_from_rpc(refused.value, "watch"), Exhausted)
            request = lookup_pb2.ResolveRequest(keys=b"".join(chain(seed=1, count=4)))
            assert not (await stub.Resolve(request, timeout=CALL_SECONDS)).runs
            for stream in streams:
                stream.cancel()
    finally:
        await server.stop(0)
