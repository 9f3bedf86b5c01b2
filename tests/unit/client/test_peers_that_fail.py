"""What a client makes of servers that refuse, fail and fall silent: real gRPC servers, which do as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvservice.breaker import FAILURES_TO_OPEN
from kvservice.client import shard as shard_client
from kvservice.client.peer import PeerClient
from kvservice.client.shard import ShardClient
from kvservice.core.messages import Holder
from kvservice.errors import KVServiceError, Unavailable
from kvservice.lookup.client import LookupClient
from kvservice.testing.builders import make_chain, make_spec
from kvservice.units import BootEpoch, NodeId
from kvservice.wire.v1 import lookup_pb2, lookup_pb2_grpc, shard_pb2, shard_pb2_grpc

CHAIN = make_chain(4)


class Scripted(shard_pb2_grpc.PeerServiceServicer, lookup_pb2_grpc.LookupServiceServicer):
    """Each call ends with the next status; the last one stays."""

    def __init__(self) -> None:
        self.statuses: list[grpc.StatusCode] = []
        self.calls = 0

    async def _answer(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self.calls += 1
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if status is not grpc.StatusCode.OK:
            await context.abort(status, "as the test says")

    async def Locate(
        self, request: shard_pb2.LocateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> shard_pb2.LocateReply:
        await self._answer(context)
        return shard_pb2.LocateReply(epoch=1)

    async def Resolve(
        self, request: lookup_pb2.ResolveRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> lookup_pb2.ResolveReply:
        await self._answer(context)
        return lookup_pb2.ResolveReply()


@pytest.fixture
async def served() -> AsyncIterator[tuple[Scripted, str]]:
    scripted, server = Scripted(), grpc.aio.server()
    shard_pb2_grpc.add_PeerServiceServicer_to_server(scripted, server)
    lookup_pb2_grpc.add_LookupServiceServicer_to_server(scripted, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield scripted, f"127.0.0.1:{port}"
    await server.stop(0)


@pytest.mark.parametrize(
    ("status", "is_asked_again"),
    [
        (grpc.StatusCode.FAILED_PRECONDITION, True),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, True),
        (grpc.StatusCode.UNAVAILABLE, False),
    ],
)
async def test_a_peer_that_refuses_is_asked_again_a_failed_one_not(
    served: tuple[Scripted, str], status: grpc.StatusCode, is_asked_again: bool
) -> None:
    scripted, address = served
    scripted.statuses = [status]
    peers = PeerClient("shm", NodeId("me"), clock=lambda: 100.0)
    holder = Holder(NodeId("peer"), address, BootEpoch(1))
    try:
        for _ in range(FAILURES_TO_OPEN + 2):
            with pytest.raises(KVServiceError):
                await peers.locate(holder, CHAIN, NodeId("me"), 20.0)
    finally:
        await peers.close()
    assert scripted.calls == FAILURES_TO_OPEN + 2 * is_asked_again


async def test_an_answer_of_a_partition_forgives_its_failures(served: tuple[Scripted, str]) -> None:
    scripted, address = served
    fails, answers = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.OK
    scripted.statuses = [*[fails] * (FAILURES_TO_OPEN - 1), answers, *[fails] * (FAILURES_TO_OPEN - 1), answers]
    asked = len(scripted.statuses)
    lookup = LookupClient([address], clock=lambda: 100.0)
    try:
        for _ in range(asked):
            answer = await lookup.resolve(CHAIN, 0, 20.0)
    finally:
        await lookup.close()
    assert scripted.calls == asked and answer.complete
    assert not lookup.counters.get("lookup_skipped")


class SilentShard(shard_pb2_grpc.EngineServiceServicer):
    """Attaches, and then says nothing, as a stopped process."""

    async def Attach(
        self, request: shard_pb2.AttachRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[shard_pb2.AttachEvent]:
        attached = shard_pb2.Attached(attachment_id=1, node_id="n", epoch=1, lease_seconds=10.0, segment_path="/none")
        attached.geometry.slab_bytes, attached.geometry.slab_count = 1 << 20, 4
        yield shard_pb2.AttachEvent(attached=attached)
        await asyncio.Event().wait()


async def test_a_shard_whose_stream_is_silent_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_client, "STREAM_SILENCE_SECONDS", 0.2)
    server, lost = grpc.aio.server(), asyncio.Queue[str]()
    shard_pb2_grpc.add_EngineServiceServicer_to_server(SilentShard(), server)
    server.add_insecure_port(f"unix:{tmp_path}/socket")
    await server.start()
    client = ShardClient(str(tmp_path / "socket"))
    try:
        attachment = await client.attach(make_spec(), lost.put_nowait)
        async with asyncio.timeout(20):
            assert "no heartbeat" in await lost.get()
        with pytest.raises(KVServiceError):
            await client.reserve(attachment.attachment_id, 1)
    except Unavailable as error:
        pytest.fail(f"it never attached: {error}")
    finally:
        await client.close()
        await server.stop(0)
