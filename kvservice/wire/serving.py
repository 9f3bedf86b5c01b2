"""Makes gRPC handlers from an object with one coroutine per RPC. All RPCs then behave alike.

For every RPC: the caller's certificate must allow it (auth.identity). The request is parsed here, so malformed bytes
answer INVALID_ARGUMENT instead of gRPC's INTERNAL. A missing deadline is refused. A KVServiceError becomes its status.
Any other error is logged once, counted, and becomes INTERNAL without its text. The serving object has a coroutine
method `snake_case(request, context)` for each unary RPC and an async generator for each server stream. Everything runs
on the server's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, NoReturn

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message

from kvservice.aio import within
from kvservice.auth.identity import caller_of
from kvservice.errors import Exhausted, InvalidRequest, KVServiceError
from kvservice.observe import tracing
from kvservice.wire.parsing import parse
from kvservice.wire.status import status_code, status_text, trailing_metadata

log = logging.getLogger("kvservice.wire")

MESSAGE_BYTES_MAX = 4 << 20  # of a request: gRPC's own default. A longer one is refused before it is read.
# The same for services whose requests have lists of messages: an empty message takes 2 bytes on the wire and a hundred
# once parsed. The largest request that is meant offers 512 blocks, with a message of 60 bytes for each.
LISTS_BYTES_MAX = 1 << 20
REPLY_BYTES_MAX = 16 << 20  # ten times the largest reply that is meant: the state of 8,192 blocks. A larger one fails
# Notices in 13 s that a host is gone, and in 20 s that a process was stopped. By itself gRPC waits a minute for the
# answer to a ping. A busy machine can keep a process that is well from answering for some seconds.
_KEEPALIVE: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
]
_SERVER_OPTIONS: list[tuple[str, int]] = [
    *_KEEPALIVE,
    # Whoever connects and shows no certificate keeps a descriptor and 20 KiB for so long; gRPC's own is 120 s. Its
    # clients give up as soon.
    ("grpc.server_handshake_timeout_ms", 20_000),
    ("grpc.max_send_message_length", REPLY_BYTES_MAX),
    ("grpc.so_reuseport", 0),  # two servers on one port must be an error, not a coin toss
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # must be below the clients' keepalive_time_ms
]
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", REPLY_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    *_KEEPALIVE,
    ("grpc.http2.max_pings_without_data", 0),  # 0 = no limit, so that idle channels are watched as well
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_retries", 0),  # callers decide what is sent again
]
assert LISTS_BYTES_MAX <= MESSAGE_BYTES_MAX <= REPLY_BYTES_MAX

CLOSE_SECONDS = 0.5  # for the connections of a server that stops to close: each takes milliseconds

# Calls that are answered when something has happened, or after seconds.
LONG_CALLS = frozenset({"Follow", "TakeOver", "Warm", "Pin"})
# Calls under way at one server. Short ones take milliseconds; of the long ones a peer has one per hand-off it follows.
# Further calls are refused with Exhausted.
SHORT_CALLS_MAX, LONG_CALLS_MAX = 1024, 8192
CALLS_MAX = SHORT_CALLS_MAX + LONG_CALLS_MAX + 1024  # the 1024 are for streams, health and reflection

Context = grpc.aio.ServicerContext[bytes, bytes]


def server_options(request_bytes_max: int) -> list[tuple[str, int]]:
    """Options of a server. A request longer than `request_bytes_max` is refused with RESOURCE_EXHAUSTED, unread."""
    return [("grpc.max_receive_message_length", request_bytes_max), *_SERVER_OPTIONS]


async def stop_server(server: grpc.aio.Server, grace_seconds: float) -> None:
    """Let the calls under way end within `grace_seconds`, then end all of them, within CLOSE_SECONDS.

    gRPC's own `stop` waits until every connection is closed. A full Unix socket, whose other end does not read because
    its process is stopped, closes only with that process. Such a server is left as it is.
    """
    try:
        await within(grace_seconds + CLOSE_SECONDS, server.stop(grace_seconds))
    except asyncio.TimeoutError:
        log.warning("connections_not_closed: a process at their other end reads nothing")
        # Freeing the server would wait for the same connections, so it is never freed.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))


class Gate:
    """Limits how many calls of one server are under way, so that a flood is refused and does not fill the memory.

    Calls that wait for something by their nature are counted separately, so that they never keep out the others.
    """

    def __init__(self, short: int = SHORT_CALLS_MAX, long: int = LONG_CALLS_MAX) -> None:
        self._most = {False: short, True: long}
        self._now = {False: 0, True: 0}

    @contextlib.contextmanager
    def passing(self, rpc: str) -> Iterator[None]:
        """Count a call while it runs. Raises Exhausted when enough calls of its kind are under way."""
        kind = rpc in LONG_CALLS
        if self._now[kind] >= self._most[kind]:
            raise Exhausted(f"{self._most[kind]} calls like {rpc} are under way here already: try again", rpc=rpc)
        self._now[kind] += 1
        try:
            yield
        finally:
            self._now[kind] -= 1


def service_handler(
    service: ServiceDescriptor, implementation: object, gate: Gate | None = None
) -> grpc.GenericRpcHandler[bytes, bytes]:
    """Handlers for every RPC of the service. Raises AttributeError when the implementation lacks one.

    Unary calls pass the gate, which all services of a server share. Streams are limited by what they stand for: engines
    and watchers.
    """
    gate = gate or Gate()
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {}
    for method in service.methods:
        function = getattr(implementation, _snake_case(method.name))
        if method.server_streaming:
            handlers[method.name] = grpc.unary_stream_rpc_method_handler(_streaming(method, function))
        else:
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(_unary(method, function, gate))
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _unary(
    method: MethodDescriptor,
    function: Callable[[Any, Context], Awaitable[Message]],
    gate: Gate,
) -> Any:
    request_type = message_factory.GetMessageClass(method.input_type)
    spanned = f"{method.containing_service.name}/{method.name}"

    async def handle(data: bytes, context: Context) -> bytes:
        try:
            caller_of(context).check_may(method.full_name)
            request = parse(request_type, data)
            if context.time_remaining() is None:
                raise InvalidRequest(f"{method.full_name} needs a deadline: set a timeout on the call")
            with gate.passing(method.name), tracing.served_span(spanned, context.invocation_metadata):
                reply = await function(request, context)
            return reply.SerializeToString()
        except KVServiceError as error:
            await _refuse(context, error)
        except Exception:  # noqa: BLE001  RPC boundary: after a bug the caller must get an answer and not hang
            await _internal(context, method)

    return handle


def _streaming(method: MethodDescriptor, function: Callable[[Any, Context], AsyncIterator[Message]]) -> Any:
    request_type = message_factory.GetMessageClass(method.input_type)

    async def handle(data: bytes, context: Context) -> AsyncIterator[bytes]:
        try:
            caller_of(context).check_may(method.full_name)
            request = parse(request_type, data)
            async for event in function(request, context):
                yield event.SerializeToString()
        except KVServiceError as error:
            await _refuse(context, error)
        except Exception:  # noqa: BLE001  RPC boundary
            await _internal(context, method)

    return handle


async def _refuse(context: Context, error: KVServiceError) -> NoReturn:
    await context.abort(status_code(error), status_text(error), trailing_metadata(error))


async def _internal(context: Context, method: MethodDescriptor) -> NoReturn:
    log.exception("rpc_failed", extra={"rpc": method.full_name})
    await context.abort(grpc.StatusCode.INTERNAL, f"{method.name} failed; see the server's log")


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
