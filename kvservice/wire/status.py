"""Errors <-> gRPC status. The code is gRPC's; `reason` and the attributes travel as trailing metadata. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, TypeVar

import grpc

from kvservice.errors import DeadlineExceeded, InvalidRequest, KVServiceError, Unauthenticated, Unavailable, error_types

R = TypeVar("R")
REASON_KEY = "kvservice-reason"
ATTRIBUTES_KEY = "kvservice-attributes"
# Without percent-encoding. A client that gets more than 8 KiB of headers in all gets no status, so the text is cut and
# attributes that are too long are left out.
ATTRIBUTES_BYTES_MAX = 2048
TEXT_BYTES_MAX = 4096  # as gRPC sends it; see above
assert TEXT_BYTES_MAX + ATTRIBUTES_BYTES_MAX <= 7 << 10, "a KiB is left for other headers"

_BY_CODE: dict[grpc.StatusCode, type[KVServiceError]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.CANCELLED: Unavailable,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
}

# Texts of gRPC 1.76 and later; tests/integration/test_tls.py causes each of them.
_SIGNS = (
    (
        "Method not found!",
        "what listens there knows no such call: it is another part of the service, such as a shard in place of a "
        "lookup partition, or of an older version. Correct the address, or upgrade it",
    ),
    (
        "WRONG_VERSION_NUMBER",
        "this side uses TLS and the other does not: give all processes of the service the same KVSERVICE_TLS_DIR",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "the other side's certificate is expired or signed by another CA: `kvservice certs DIR --renew` "
        "there makes a new one, which running processes take within seconds; see docs/howto/certificates.md, rotation",
    ),
    (
        "Hostname Verification Check failed",
        "the other side's certificate does not have the name DNS:kvservice: see docs/howto/certificates.md",
    ),
    (
        "failed to connect to all addresses; last error: UNAVAILABLE: ",
        "the other side closed the connection at once: it requires TLS, with a valid certificate signed by its CA, or "
        "it is no gRPC port, such as that of metrics. Correct the address, or set KVSERVICE_TLS_DIR to the same files "
        "as there, or renew them",
    ),
)


def status_code(error: KVServiceError) -> grpc.StatusCode:
    return grpc.StatusCode[error.grpc_code]


def status_text(error: KVServiceError) -> str:
    """The error's text, cut when it is too long to travel: it may contain what the client sent."""
    length = 0
    for index, character in enumerate(error.message):
        plain = character.isascii() and character.isprintable() and character != "%"
        length += 1 if plain else 3 * len(character.encode(errors="replace"))  # percent-encoded
        if length > TEXT_BYTES_MAX:
            return error.message[:index] + " …"
    return error.message


def trailing_metadata(error: KVServiceError) -> tuple[tuple[str, str], ...]:
    """The reason, and the attributes as JSON when they fit: some proxies cut large metadata."""
    pairs = [(REASON_KEY, error.reason)]
    attributes = json.dumps({name: str(value) for name, value in error.attributes.items()})
    if error.attributes and len(attributes) <= ATTRIBUTES_BYTES_MAX:
        pairs.append((ATTRIBUTES_KEY, attributes))
    return tuple(pairs)


def error_from_rpc(error: grpc.RpcError, what: str) -> KVServiceError:
    """The error that the server raised, rebuilt; or the nearest kind for a failure of the channel itself."""
    answered = isinstance(error, grpc.Call | grpc.aio.AioRpcError)
    code = error.code() if answered else grpc.StatusCode.UNKNOWN
    details = (error.details() if answered else None) or str(error)
    hint = connect_hint(details)
    metadata = _metadata(error.trailing_metadata() if answered else ())
    kind = error_types().get(metadata.get(REASON_KEY, "")) or _BY_CODE.get(code, KVServiceError)
    try:
        attributes = json.loads(metadata.get(ATTRIBUTES_KEY, "{}"))
    except (ValueError, RecursionError):  # RecursionError: it is nested a thousand levels deep
        attributes = {}
    attributes = attributes if isinstance(attributes, dict) else {}
    return kind(f"{what}: {hint or details}" if REASON_KEY not in metadata else details, **attributes)


def readable(reply: R | None, what: str) -> R:
    """The answer of a call of grpc.aio, which gives None for bytes that are no such message. Raises InvalidRequest."""
    if reply is None:
        raise InvalidRequest(f"{what}: the answer cannot be read")
    return reply


def connect_hint(details: str) -> str:
    """What to do about a call that failed because of TLS, or of an address of another part; "" for any other failure.

    gRPC reports those of TLS as UNAVAILABLE with a text of its TLS library.
    """
    return next((hint for sign, hint in _SIGNS if sign in details), "")


def has_hint(text: str) -> bool:
    """Whether this text of ours says already what `connect_hint` found."""
    return any(hint in text for _, hint in _SIGNS)


def _metadata(pairs: Iterable[Any] | None) -> dict[str, str]:
    return {name: value for name, value in pairs or () if isinstance(value, str)}
