"""What was cleared while a node was away: it asks all other nodes before it says what it holds, and when the directory
has heard of it again, because a clear asks the nodes that the directory knows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import grpc

from kvservice.aio import ask_each
from kvservice.auth.tls import TlsFiles
from kvservice.client.channels import Channels
from kvservice.core.block.marks import MARKS_MAX, Mark
from kvservice.errors import InvalidRequest, Unavailable
from kvservice.pool.clears import PoolClears
from kvservice.units import NodeId
from kvservice.wire.clearing import decode_marks
from kvservice.wire.codec import decode_live_nodes
from kvservice.wire.status import error_from_rpc, readable
from kvservice.wire.v1 import lookup_pb2, lookup_pb2_grpc, shard_pb2, shard_pb2_grpc

log = logging.getLogger("kvservice.shard")

ASK_SECONDS = 2.0  # for one round of calls; a node that takes longer is down, and those that answer know its marks
AT_ONCE_MAX = 32  # nodes asked in parallel


class MissedMarks:
    def __init__(self, node_id: NodeId, clears: PoolClears, tls: TlsFiles | None) -> None:
        self._node_id = node_id
        self._clears = clears
        self._tls = tls

    async def take(self, lookups: Sequence[str]) -> None:
        """Clear what others have cleared. Never raises: what does not answer is left out, and logged."""
        try:
            await self._clears.take(await marks_of_others(self._node_id, lookups, self._tls))
        except Unavailable as error:  # a node must not keep others from starting by a clock that is wrong
            log.error("marks_not_taken", extra={"reason": error.message})


async def marks_of_others(node_id: NodeId, lookups: Sequence[str], tls: TlsFiles | None) -> tuple[Mark, ...]:
    """The marks that other live nodes keep. Never raises: what does not answer is left out, and logged."""
    channels = Channels(tls)
    try:
        answers = await asyncio.gather(*[_nodes(channels, address) for address in lookups])
        nodes = {node: address for found in answers for node, address in found.items() if node != node_id}

        found: dict[Mark, None] = {}  # of each node much the same
        last = b""

        async def ask(node: str) -> None:
            nonlocal last
            stub, what = shard_pb2_grpc.OperatorServiceStub(channels.get(nodes[node])), f"the shard at {nodes[node]}"
            try:
                reply = readable(await stub.ListMarks(shard_pb2.ListMarksRequest(), timeout=ASK_SECONDS), what)
                answer = reply.SerializeToString()
                if answer != last:  # most nodes say the same, and decoding takes milliseconds of a shard's loop
                    found.update(dict.fromkeys(decode_marks(reply.marks, MARKS_MAX)))
                    last = answer
            except (grpc.aio.AioRpcError, InvalidRequest) as error:
                log.warning("marks_not_asked", extra={"node": node, "reason": _reason(error, what)})

        await ask_each(ask, sorted(nodes), AT_ONCE_MAX)
        return tuple(found)
    finally:
        await channels.close()


async def _nodes(channels: Channels, lookup: str) -> dict[str, str]:
    stub = lookup_pb2_grpc.LookupServiceStub(channels.get(lookup))
    try:
        reply = await stub.LookupStats(lookup_pb2.LookupStatsRequest(), timeout=ASK_SECONDS)
        rows = decode_live_nodes(readable(reply, "the lookup partition"))
    except (grpc.aio.AioRpcError, InvalidRequest) as error:
        log.warning("marks_not_asked", extra={"lookup": lookup, "reason": _reason(error, "the lookup partition")})
        return {}
    return {row.node_id: row.peer_address for row in rows}


def _reason(error: grpc.aio.AioRpcError | InvalidRequest, what: str) -> str:
    return error.message if isinstance(error, InvalidRequest) else error_from_rpc(error, what).message
