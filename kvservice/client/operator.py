"""The calls of operators to the shards of a service: warm, pin, unpin, clear.

Runs on the caller's loop. A node that does not answer is a KVServiceError of its call; it stops no other call.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from kvservice.auth.tls import TlsFiles
from kvservice.auth.token import CallMetadata, Token
from kvservice.client.channels import Channels
from kvservice.core.acquire.clearing import ClearResult
from kvservice.core.block.marks import Mark
from kvservice.core.messages import EngineKind, Pin, WarmRequest, WarmResult
from kvservice.wire.calls import call_in_time
from kvservice.wire.clearing import decode_cleared, encode_marks
from kvservice.wire.codec import decode_engine_stats
from kvservice.wire.figures import check_figures
from kvservice.wire.holding import decode_pins, decode_warmed, encode_pin, encode_warm
from kvservice.wire.status import error_from_rpc
from kvservice.wire.v1 import shard_pb2, shard_pb2_grpc

CALL_SECONDS = 5.0  # of a call that a shard answers from memory; then it counts as silent
CLEAR_SECONDS = 30.0  # a shard looks at each of its blocks, and writes its marks down
SLACK_SECONDS = 1.0  # for the network, after the time that the shard was given
T = TypeVar("T", bound=Message, covariant=True)


class _Rpc(Protocol[T]):
    def __call__(self, request: object, *, timeout: float, metadata: CallMetadata) -> Awaitable[T]: ...


class OperatorClient:
    """Channels stay open until `close`."""

    def __init__(self, tls: TlsFiles | None = None, token: Token | None = None) -> None:
        """`token` is of the tenant whose prompts are meant."""
        self._channels = Channels(tls, token=token)

    async def engines(self, address: str) -> tuple[EngineKind, ...]:
        """The engines at a shard; with a tenant's token only its own. Raises KVServiceError, as all calls here do."""
        stub = shard_pb2_grpc.AdminServiceStub(self._channels.get(address))
        reply = await self._ask(address, stub.EngineStats, shard_pb2.EngineStatsRequest(), CALL_SECONDS)
        return decode_engine_stats(reply).engines

    async def warm(self, address: str, request: WarmRequest) -> WarmResult:
        """Warm a prompt, or pin it if the request names a pin."""
        stub, seconds = self._stub(address), request.timeout_seconds + SLACK_SECONDS
        if request.pin:
            return decode_warmed(await self._ask(address, stub.Pin, encode_pin(request), seconds))
        return decode_warmed(await self._ask(address, stub.Warm, encode_warm(request), seconds))

    async def unpin(self, address: str, name: str) -> Pin | None:
        """Returns the pin that has ended; None if there was none of this name."""
        request = shard_pb2.UnpinRequest(name=name)
        reply = await self._ask(address, self._stub(address).Unpin, request, CALL_SECONDS)
        return decode_pins([reply.pin])[0] if reply.HasField("pin") else None

    async def pins(self, address: str) -> tuple[Pin, ...]:
        request = shard_pb2.ListPinsRequest()
        reply = await self._ask(address, self._stub(address).ListPins, request, CALL_SECONDS)
        return decode_pins(reply.pins)

    async def clear(self, address: str, marks: Sequence[Mark], seconds: float = CLEAR_SECONDS) -> ClearResult:
        request = shard_pb2.ClearRequest(marks=encode_marks(marks))
        return decode_cleared(await self._ask(address, self._stub(address).Clear, request, seconds))

    async def close(self) -> None:
        await self._channels.close()

    def _stub(self, address: str) -> shard_pb2_grpc.OperatorServiceStub:
        return shard_pb2_grpc.OperatorServiceStub(self._channels.get(address))

    async def _ask(self, address: str, rpc: _Rpc[T], request: object, seconds: float) -> T:
        metadata, what = self._channels.metadata_for(address), f"the shard at {address}"
        try:
            return check_figures(await call_in_time(rpc, request, seconds, metadata), what)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, what) from error
