"""What was cleared while a node was away: it asks all other nodes before it says what it holds, and when the directory
has heard of it again, because a clear asks the nodes that the directory knows."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence

import grpc

from kvservice.aio import ask_each
from kvservice.auth.tls import TlsFiles
from kvservice.client.channels import Channels
from kvservice.core.block.marks import MARKS_MAX, Mark
from kvservice.errors import InvalidRequest, Unavailable
from kvservice.units import NodeId
from kvservice.wire.calls import call_in_time
from kvservice.wire.clearing import decode_marks
from kvservice.wire.codec import decode_live_nodes
from kvservice.wire.status import error_from_rpc, readable
from kvservice.wire.v1 import lookup_pb2, lookup_pb2_grpc, shard_pb2, shard_pb2_grpc

log = logging.getLogger("kvservice.shard")

ASK_SECONDS = 2.0  # for one round of calls; a node that takes longer is down, and those that answer know its marks
AT_ONCE_MAX = 32  # nodes asked in parallel
# Between two calls when the directory is back. After an outage all nodes ask all others: 300 make 90,000 calls.
APART_SECONDS = 0.01


class MissedMarks:
    def __init__(
        self, node_id: NodeId, take: Callable[[Sequence[Mark]], Awaitable[object]], tls: TlsFiles | None
    ) -> None:
        """`take` clears what marks name. It gets each mark of a round once, with the first answer that has it."""
        self._node_id = node_id
        self._take = take
        self._tls = tls
        self._answered: frozenset[str] = frozenset()

    async def take(self, lookups: Sequence[str], apart_seconds: float = 0.0, *, only_new: bool = False) -> None:
        """Clear what others have cleared. With `only_new` only those are asked that did not answer the last time, like
        one that the directory did not know. Never raises: what does not answer is left out, and logged."""
        if not only_new:
            self._answered = frozenset()
        channels = Channels(self._tls)
        try:
            self._answered |= await self._ask_all(channels, lookups, apart_seconds)
        finally:
            await channels.close()

    async def ask_again(self, lookups: Callable[[], Sequence[str]], is_later: bool) -> None:
        """The directory has heard of this node again; or, later, of others that may know more. Never raises."""
        await self.take(lookups(), APART_SECONDS, only_new=is_later)

    async def _ask_all(self, channels: Channels, lookups: Sequence[str], apart_seconds: float) -> set[str]:
        """Ask the other live nodes that have not answered yet. Returns who answers now."""
        answers = await asyncio.gather(*[_nodes(channels, address) for address in lookups])
        without = self._answered | {self._node_id}
        nodes = {node: address for found in answers for node, address in found.items() if node not in without}
        answered: set[str] = set()
        told: set[Mark] = set()
        last = b""
        begun_at = asyncio.get_running_loop().time()

        async def ask(turn: tuple[int, str]) -> None:
            nonlocal last
            index, node = turn
            stub, what = shard_pb2_grpc.OperatorServiceStub(channels.get(nodes[node])), f"the shard at {nodes[node]}"
            await asyncio.sleep(begun_at + index * apart_seconds - asyncio.get_running_loop().time())
            try:
                asked = shard_pb2.ListMarksRequest()
                reply = readable(await call_in_time(stub.ListMarks, asked, ASK_SECONDS), what)
                answer = reply.SerializeToString()
                # Most nodes say the same, and decoding takes milliseconds of a shard's loop.
                marks = () if answer == last else decode_marks(reply.marks, MARKS_MAX)
            except (grpc.aio.AioRpcError, InvalidRequest) as error:
                log.warning("marks_not_asked", extra={"node": node, "reason": _reason(error, what)})
                return
            last = answer
            answered.add(node)
            new = [mark for mark in marks if mark not in told]
            told.update(new)
            try:
                if new:
                    await self._take(new)
            except Unavailable as error:  # a node must not keep others from starting by a clock that is wrong
                log.error("marks_not_taken", extra={"reason": error.message})

        await ask_each(ask, enumerate(order_of(self._node_id, nodes)), AT_ONCE_MAX)
        return answered


def order_of(node_id: NodeId, nodes: Iterable[str]) -> list[str]:
    """The order in which this node asks the others: one of its own, or all would ask the same node first."""
    ordered = sorted(nodes)
    random.Random(node_id).shuffle(ordered)
    return ordered


async def _nodes(channels: Channels, lookup: str) -> dict[str, str]:
    stub = lookup_pb2_grpc.LookupServiceStub(channels.get(lookup))
    try:
        reply = await call_in_time(stub.LookupStats, lookup_pb2.LookupStatsRequest(), ASK_SECONDS)
        rows = decode_live_nodes(readable(reply, "the lookup partition"))
    except (grpc.aio.AioRpcError, InvalidRequest) as error:
        log.warning("marks_not_asked", extra={"lookup": lookup, "reason": _reason(error, "the lookup partition")})
        return {}
    return {row.node_id: row.peer_address for row in rows}


def _reason(error: grpc.aio.AioRpcError | InvalidRequest, what: str) -> str:
    return error.message if isinstance(error, InvalidRequest) else error_from_rpc(error, what).message
