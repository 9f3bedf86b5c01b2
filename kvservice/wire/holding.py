"""What is warmed and pinned <-> protobuf messages. Decoding checks lengths and counts. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from kvservice.core.acquire.holds import PIN_NAME_CHARS_MAX, PINS_MAX
from kvservice.core.block.keys import pack_keys, unpack_keys
from kvservice.core.messages import MissReason, Pin, WarmRequest, WarmResult
from kvservice.errors import InvalidRequest
from kvservice.units import NAME_CHARS_MAX, NodeId, printable
from kvservice.wire.v1 import shard_pb2

DIGEST_BYTES = 32  # of a fingerprint; another length is refused
SOURCES_MAX = 64  # blocks of one prompt come from a few nodes; a longer list in an answer is refused


def encode_warm(request: WarmRequest) -> shard_pb2.WarmRequest:
    return shard_pb2.WarmRequest(
        fingerprint=request.fingerprint,
        keys=pack_keys(request.keys),
        timeout_seconds=request.timeout_seconds,
        hold_seconds=request.hold_seconds,
    )


def encode_pin(request: WarmRequest) -> shard_pb2.PinRequest:
    return shard_pb2.PinRequest(
        fingerprint=request.fingerprint,
        keys=pack_keys(request.keys),
        timeout_seconds=request.timeout_seconds,
        name=request.pin,
    )


def decode_warm(message: shard_pb2.WarmRequest) -> WarmRequest:
    fingerprint = _fingerprint(message.fingerprint)
    keys = unpack_keys(message.keys)
    return WarmRequest(fingerprint, keys, message.timeout_seconds, message.hold_seconds)


def decode_pin(message: shard_pb2.PinRequest) -> WarmRequest:
    if not message.name:
        raise InvalidRequest("a pin needs a name")
    fingerprint = _fingerprint(message.fingerprint)
    return WarmRequest(fingerprint, unpack_keys(message.keys), message.timeout_seconds, 0.0, message.name)


def encode_warmed(result: WarmResult) -> shard_pb2.WarmReply:
    return shard_pb2.WarmReply(
        asked=result.asked,
        local=result.local,
        fetched=[shard_pb2.WarmSource(node_id=node, blocks=count) for node, count in result.fetched[:SOURCES_MAX]],
        held=result.held,
        held_seconds=result.held_seconds,
        miss=result.miss.value,
    )


def decode_warmed(message: shard_pb2.WarmReply) -> WarmResult:
    if len(message.fetched) > SOURCES_MAX:
        raise InvalidRequest(f"{len(message.fetched)} sources of one prompt, at most {SOURCES_MAX}")
    try:
        miss = MissReason(message.miss)
    except ValueError:
        miss = MissReason.NEVER_STORED  # a reason that only newer shards know
    fetched = tuple((NodeId(printable(row.node_id[:NAME_CHARS_MAX])), row.blocks) for row in message.fetched)
    return WarmResult(message.asked, message.local, fetched, message.held, message.held_seconds, miss)


def encode_pinned(pin: Pin) -> shard_pb2.Pinned:
    return shard_pb2.Pinned(
        name=pin.name,
        tenant=pin.account,
        model=pin.model,
        blocks=pin.blocks,
        bytes=pin.bytes,
        age_seconds=pin.age_seconds,
    )


def decode_pins(messages: Iterable[shard_pb2.Pinned]) -> tuple[Pin, ...]:
    rows = tuple(messages)
    if len(rows) > PINS_MAX or any(len(row.name) > PIN_NAME_CHARS_MAX for row in rows):
        raise InvalidRequest(f"{len(rows)} pins, at most {PINS_MAX} with names of {PIN_NAME_CHARS_MAX} characters")
    return tuple(
        Pin(
            printable(row.name),
            printable(row.tenant[:NAME_CHARS_MAX]),
            printable(row.model[:NAME_CHARS_MAX]),
            row.blocks,
            row.bytes,
            row.age_seconds,
        )
        for row in rows
    )


def _fingerprint(digest: bytes) -> bytes:
    if len(digest) != DIGEST_BYTES:
        raise InvalidRequest(f"a fingerprint's digest is {DIGEST_BYTES} bytes, not {len(digest)}")
    return digest
