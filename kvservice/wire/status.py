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

_BY_CODE: dict[grpc.StatusCode, type[KVServiceError]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.CANCELLED: Unavailable,
}


def status_code(error: KVServiceError) -> grpc.StatusCode:
    return grpc.StatusCode[error.grpc_code]


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
