"""Marks of what was cleared <-> protobuf messages. Decoding checks every value. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kvservice.core.acquire.clearing import ClearResult
from kvservice.core.block.keys import pack_keys, unpack_keys
from kvservice.core.block.marks import Mark, MarkKind, check_mark
from kvservice.errors import InvalidRequest
from kvservice.wire.v1 import shard_pb2


def encode_marks(marks: Iterable[Mark]) -> list[shard_pb2.ClearMark]:
    return [
        shard_pb2.ClearMark(kind=mark.kind.value, at=mark.at, name=mark.name, keys=pack_keys(mark.keys))
        for mark in marks
    ]


def decode_marks(messages: Collection[shard_pb2.ClearMark], most: int) -> tuple[Mark, ...]:
    """At most `most` marks. Raises InvalidRequest for more."""
    if len(messages) > most:
        raise InvalidRequest(f"{len(messages)} marks in one message, at most {most}")
    return tuple(_mark(message) for message in messages)


def _mark(message: shard_pb2.ClearMark) -> Mark:
    try:
        kind = MarkKind(message.kind)
    except ValueError as error:
        known = ", ".join(kind.value for kind in MarkKind)
        raise InvalidRequest(f"{message.kind[:40]!r} cannot be cleared; there are {known}") from error
    return check_mark(Mark(kind, message.at, message.name, unpack_keys(message.keys)))


def encode_cleared(result: ClearResult) -> shard_pb2.ClearReply:
    return shard_pb2.ClearReply(
        blocks=result.blocks, bytes=result.bytes, reading=result.reading, tier_blocks=result.tier_blocks
    )


def decode_cleared(message: shard_pb2.ClearReply) -> ClearResult:
    return ClearResult(message.blocks, message.bytes, message.reading, message.tier_blocks)
