"""Errors <-> gRPC status. The code is the gRPC one; `reason` and attributes travel as trailing metadata."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import grpc

from kvservice.errors import DeadlineExceeded, InvalidRequest, KVServiceError, Unavailable, error_types

REASON_KEY = "kvservice-reason"
ATTRIBUTES_KEY = "kvservice-attributes"
ATTRIBUTES_BYTES_MAX = 2048
TEXT_BYTES_MAX = 4096  # as gRPC sends it; with more than 8 KiB of headers in all, a client gets no status at all

_BY_CODE: dict[grpc.StatusCode, type[KVServiceError]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.CANCELLED: Unavailable,
}


def status_code(error: KVServiceError) -> grpc.StatusCode:
    return grpc.StatusCode[error.grpc_code]


def status_text(error: KVServiceError) -> str:
    """The error's text, cut where it is too long to travel: it may hold what the client sent."""
    length = 0
    for index, character in enumerate(error.message):
        plain = character.isascii() and character.isprintable() and character != "%"
        length += 1 if plain else 3 * len(character.encode(errors="replace"))  # percent-encoded
        if length > TEXT_BYTES_MAX:
            return error.message[:index] + " …"
    return error.message


def trailing_metadata(error: KVServiceError) -> tuple[tuple[str, str], ...]:
    """Reason always; attributes as JSON when they fit, because some proxies cut large metadata."""
    pairs = [(REASON_KEY, error.reason)]
    attributes = json.dumps({name: str(value) for name, value in error.attributes.items()})
    if error.attributes and len(attributes) <= ATTRIBUTES_BYTES_MAX:
        pairs.append((ATTRIBUTES_KEY, attributes))
    return tuple(pairs)


def error_from_rpc(error: grpc.RpcError, what: str) -> KVServiceError:
    """The error the server raised, rebuilt; or the nearest kind for a failure of the channel itself."""
    code = error.code() if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else grpc.StatusCode.UNKNOWN
    details = (error.details() if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else None) or str(error)
    metadata = _metadata(error.trailing_metadata() if isinstance(error, grpc.aio.AioRpcError) else ())
    kind = error_types().get(metadata.get(REASON_KEY, "")) or _BY_CODE.get(code, KVServiceError)
    try:
        attributes = json.loads(metadata.get(ATTRIBUTES_KEY, "{}"))
    except ValueError:
        attributes = {}
    return kind(f"{what}: {details}" if REASON_KEY not in metadata else details, **attributes)


def _metadata(pairs: Iterable[Any] | None) -> dict[str, str]:
    return {name: value for name, value in pairs or () if isinstance(value, str)}
