"""The RPCs of operators, and of routers that prepare a node for a request. Decides nothing.

Runs on the shard's event loop. Which certificate may call what is in auth.identity; with tenants, a token says whose
prompts are meant.
"""

from __future__ import annotations

from collections.abc import Callable

from kvservice.auth.authenticator import Authenticator, account_of
from kvservice.core.acquire.clearing import CLEAR_MARKS_MAX
from kvservice.core.acquire.holds import check_pin_name
from kvservice.errors import Forbidden
from kvservice.pool.runtime import PoolRuntime
from kvservice.wire.clearing import decode_marks, encode_cleared, encode_marks
from kvservice.wire.holding import decode_pin, decode_warm, encode_pinned, encode_warmed
from kvservice.wire.serving import Context
from kvservice.wire.v1 import shard_pb2


class OperatorServicer:
    """OperatorService. `on_marks_asked` is called when another node asks what was cleared."""

    def __init__(self, pool: PoolRuntime, authenticator: Authenticator, on_marks_asked: Callable[[], None]) -> None:
        self._pool = pool
        self._on_marks_asked = on_marks_asked
        self._authenticator = authenticator

    async def warm(self, request: shard_pb2.WarmRequest, context: Context) -> shard_pb2.WarmReply:
        account = account_of(self._authenticator.caller(context))
        return encode_warmed(await self._pool.warm(decode_warm(request), account))

    async def pin(self, request: shard_pb2.PinRequest, context: Context) -> shard_pb2.WarmReply:
        account = account_of(self._authenticator.caller(context))
        return encode_warmed(await self._pool.warm(decode_pin(request), account))

    async def unpin(self, request: shard_pb2.UnpinRequest, context: Context) -> shard_pb2.UnpinReply:
        account = account_of(self._authenticator.caller(context))
        ended = await self._pool.unpin(check_pin_name(request.name), account)
        return shard_pb2.UnpinReply(pin=None if ended is None else encode_pinned(ended))

    async def clear(self, request: shard_pb2.ClearRequest, context: Context) -> shard_pb2.ClearReply:
        caller = self._authenticator.caller(context)
        if caller is not None and not caller.tenant.admin:
            raise Forbidden("only an administrator's token may clear: it takes blocks from all tenants")
        return encode_cleared(await self._pool.clears.clear(decode_marks(request.marks, CLEAR_MARKS_MAX)))

    async def list_marks(self, request: shard_pb2.ListMarksRequest, context: Context) -> shard_pb2.ListMarksReply:
        self._on_marks_asked()  # the one that asks may itself know what this node has missed
        return shard_pb2.ListMarksReply(marks=encode_marks(self._pool.state.freshness.marks.all()))

    async def list_pins(self, request: shard_pb2.ListPinsRequest, context: Context) -> shard_pb2.ListPinsReply:
        account = self._authenticator.account(context)
        pins = self._pool.state.pins(self._pool.now())
        return shard_pb2.ListPinsReply(pins=[encode_pinned(pin) for pin in pins if account in (None, pin.account)])
