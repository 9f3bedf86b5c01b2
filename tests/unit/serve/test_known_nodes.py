"""What a router knows of the nodes while shards are late and lookup partitions restart: real servers, which do as the
test says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from kvservice.client.engine_stats import NodeEngineStats
from kvservice.core.messages import EngineStats, Holder
from kvservice.serve.holdings import Holdings, KnownNodes
from kvservice.units import BootEpoch, NodeId
from kvservice.wire.codec import encode_holder
from kvservice.wire.v1 import lookup_pb2, lookup_pb2_grpc, shard_pb2, shard_pb2_grpc


class Lookup(lookup_pb2_grpc.LookupServiceServicer):
    def __init__(self) -> None:
        self.nodes: list[Holder] = []

    async def LookupStats(
        self, request: lookup_pb2.LookupStatsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> lookup_pb2.LookupStatsReply:
        rows = [lookup_pb2.LookupNodeStats(node=encode_holder(node), alive=True) for node in self.nodes]
        return lookup_pb2.LookupStatsReply(nodes=rows)


class Shard(shard_pb2_grpc.AdminServiceServicer):
    answers = True

    async def EngineStats(
        self, request: shard_pb2.EngineStatsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> shard_pb2.EngineStatsReply:
        if not self.answers:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "as the test says")
        return shard_pb2.EngineStatsReply()


class Service:
    """Two lookup partitions and one shard, and the router that asks them."""

    def __init__(self) -> None:
        self.lookups, self.shard = (Lookup(), Lookup()), Shard()
        self._servers = [grpc.aio.server() for _ in range(3)]
        for lookup, server in zip(self.lookups, self._servers, strict=False):
            lookup_pb2_grpc.add_LookupServiceServicer_to_server(lookup, server)
        shard_pb2_grpc.add_AdminServiceServicer_to_server(self.shard, self._servers[2])
        *lookups, self._peer = [f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}" for server in self._servers]
        self.holdings = Holdings(lambda: lookups, refresh_seconds=1, answer_seconds=1)

    async def start(self) -> None:
        for server in self._servers:
            await server.start()

    async def stop(self) -> None:
        await self.holdings.close()
        for server in self._servers:
            await server.stop(0)

    def node(self, epoch: int = 1) -> Holder:
        return Holder(NodeId("n"), self._peer, BootEpoch(epoch))

    async def known(self) -> list[Holder]:
        """The nodes that the router knows after it has asked once more."""
        await self.holdings.refresh()
        return [found.node for found in self.holdings.known.nodes.values()]


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    service = Service()
    await service.start()
    yield service
    await service.stop()


async def test_a_partition_that_has_restarted_hides_no_node(service: Service) -> None:
    service.lookups[1].nodes = [service.node()]
    assert await service.known() == [service.node()]
    service.lookups[0].nodes, service.lookups[1].nodes = [service.node(2)], [service.node(1)]
    assert await service.known() == [service.node(2)], "the newest epoch"


async def test_nodes_stay_known_while_no_partition_knows_any(service: Service) -> None:
    service.lookups[0].nodes = service.lookups[1].nodes = [service.node()]
    assert await service.known() == [service.node()]
    service.lookups[0].nodes = service.lookups[1].nodes = []
    assert await service.known() == [service.node()]


async def test_a_shard_that_is_late_once_stays_known(service: Service) -> None:
    service.lookups[0].nodes = [service.node()]
    service.shard.answers = False
    assert await service.known() == []
    gone = NodeEngineStats(Holder(NodeId("gone"), "h:1", BootEpoch(1)), EngineStats((), ()))
    before = NodeEngineStats(service.node(), EngineStats((), ()))
    service.holdings.known = KnownNodes({found.node.node_id: found for found in (before, gone)})
    assert await service.known() == [service.node()], "who is no longer named is forgotten"
    service.lookups[0].nodes = [service.node(2)]
    assert await service.known() == [], "it restarted: nobody knows its engines"
