"""The ways in which a shard's segment can be read, as it tells its peers in a handshake. Bytes in, values out.

A record of named descriptions, each opaque to everybody but the reader of that name. A peer takes the first way that it
knows and that works for it, so each pair of shards has its own.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping

from kvservice.errors import TransferError

WAYS_MAGIC = b"KVSWAYS1"
WAYS_BYTES_MAX = 256 << 10  # a NIXL agent's description takes some KiB, and may take 64. A longer record is refused.
JOINED = "+"  # between the names of ways, where people read them: "shm+nixl"
_HEAD = struct.Struct("<8sI")  # magic; crc32 of all the rest
_ITEM = struct.Struct("<BI")  # bytes of the name and of the description, which follow


def pack_ways(ways: Mapping[str, bytes]) -> bytes:
    """The record of these descriptions, by the names of their ways."""
    body = b"".join(_ITEM.pack(len(name.encode()), len(data)) + name.encode() + data for name, data in ways.items())
    return _HEAD.pack(WAYS_MAGIC, zlib.crc32(body)) + body


def unpack_ways(record: bytes) -> dict[str, bytes]:
    """The descriptions by name. Raises TransferError for anything that `pack_ways` did not make."""
    wrong = TransferError("this is not a peer's description of this version")
    if not _HEAD.size <= len(record) <= WAYS_BYTES_MAX:
        raise wrong
    magic, crc = _HEAD.unpack_from(record)
    body = memoryview(record)[_HEAD.size :]
    if magic != WAYS_MAGIC or crc != zlib.crc32(body):
        raise wrong
    found: dict[str, bytes] = {}
    while body:
        if len(body) < _ITEM.size:
            raise wrong
        name_bytes, data_bytes = _ITEM.unpack_from(body)
        rest = body[_ITEM.size :]
        if len(rest) < name_bytes + data_bytes:
            raise wrong
        try:
            found[bytes(rest[:name_bytes]).decode()] = bytes(rest[name_bytes : name_bytes + data_bytes])
        except UnicodeDecodeError:
            raise wrong from None
        body = rest[name_bytes + data_bytes :]
    return found


def joined(names: Iterable[str]) -> str:
    """The names of ways as one word: 'shm+nixl'."""
    return JOINED.join(names)
