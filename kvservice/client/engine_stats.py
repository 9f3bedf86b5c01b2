"""Asks every node of the service which engines are attached and how fast they are; for routers, every few seconds.

The lookup partitions name the nodes, then each node's shard gets one call. Everything runs on the caller's
loop. Nothing is raised when a process does not answer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import grpc

from kvservice.aio import ask_each
from kvservice.auth.tls import TlsFiles
from kvservice.auth.token import Token
from kvservice.client.channels import Channels
from kvservice.core.messages import EngineStats, Holder
from kvservice.errors import ConfigError, InvalidRequest
from kvservice.units import NodeId
from kvservice.wire.calls import call_in_time
from kvservice.wire.codec import decode_engine_stats, decode_live_nodes, newest_holders
from kvservice.wire.status import readable
from kvservice.wire.v1 import lookup_pb2, lookup_pb2_grpc, shard_pb2, shard_pb2_grpc

AT_ONCE_MAX = 32  # nodes asked in parallel, so that a router of a large cluster opens few calls at a time


@dataclass(frozen=True, slots=True)
class NodeEngineStats:
    node: Holder
    stats: EngineStats


class EngineStatsReader:
    """Channels stay open between two readings; those of nodes that are gone are closed."""

    def __init__(self, tls: TlsFiles | None = None, token: Token | None = None) -> None:
        """`token` is of the tenant whose engines are read; without one, all engines are."""
        self._channels = Channels(tls, token=token)
        self.counters: Counter[str] = Counter()

    async def read(
        self,
        lookup_addresses: Sequence[str],
        timeout: float,
        known: Mapping[NodeId, NodeEngineStats] | None = None,
    ) -> dict[NodeId, NodeEngineStats] | None:
        """The statistics of every live node that answered, and those in `known` of one that did not and has not
        restarted since. None when no lookup partition knows a node.

        Takes at most `timeout` seconds for all lookup partitions, and `timeout` for all nodes together.
        """
        nodes = await self._nodes(lookup_addresses, timeout)
        if nodes is None:
            return None

        async def ask(node: Holder) -> NodeEngineStats | None:
            answer = await self._ask(node, timeout)
            last = known.get(node.node_id) if known else None
            return last if answer is None and last is not None and last.node == node else answer

        answers = await ask_each(ask, nodes, AT_ONCE_MAX)
        self._channels.keep_only({*lookup_addresses, *(node.peer_address for node in nodes)})
        return {answer.node.node_id: answer for answer in answers if answer is not None}

    async def close(self) -> None:
        await self._channels.close()

    async def _nodes(self, addresses: Sequence[str], timeout: float) -> list[Holder] | None:
        """The live nodes that at least one lookup partition knows. None if no partition knows a node: one that has just
        restarted waits until they announce themselves."""

        async def ask(address: str) -> list[Holder] | None:
            stub = lookup_pb2_grpc.LookupServiceStub(self._channels.get(address))
            try:
                reply = await call_in_time(stub.LookupStats, lookup_pb2.LookupStatsRequest(), timeout)
                return decode_live_nodes(reply) if readable(reply, "stats").nodes else None
            except grpc.aio.AioRpcError as error:
                self.counters[f"engine_stats_lookup_{error.code().name.lower()}"] += 1
            except InvalidRequest:
                self.counters["engine_stats_lookup_malformed"] += 1
            return None

        answers = [answer for answer in await asyncio.gather(*map(ask, addresses)) if answer is not None]
        return newest_holders(node for answer in answers for node in answer) if answers else None

    async def _ask(self, node: Holder, timeout: float) -> NodeEngineStats | None:
        stub = shard_pb2_grpc.AdminServiceStub(self._channels.get(node.peer_address))
        try:
            metadata = self._channels.metadata_for(node.peer_address)
            reply = await call_in_time(stub.EngineStats, shard_pb2.EngineStatsRequest(), timeout, metadata)
            return NodeEngineStats(node, decode_engine_stats(readable(reply, "engine stats")))
        except grpc.aio.AioRpcError as error:
            self.counters[f"engine_stats_shard_{error.code().name.lower()}"] += 1
        except InvalidRequest:
            self.counters["engine_stats_shard_malformed"] += 1
        except ConfigError:
            self.counters["engine_stats_without_token"] += 1
        return None
