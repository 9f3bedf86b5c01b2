"""The 64-byte slot header in shared memory, which peers read one-sided.

    offset  size  field
         0     4  magic       0x4B56534C ("KVSL" read as big endian)
         4     2  version     1
         6     2  flags       bit 0: a secondary copy, fetched from another node; bits 1 to 15: the tenant that is
                              charged for it (core.block.tenants.tag_of), 0 is nobody
         8     8  epoch       boot epoch of the shard that wrote this header
        16     8  generation  odd while the payload is being written, even when it is stable
        24    16  key         block key; while writing: the writer's engine id
        40     4  length      payload bytes
        44     4  route       span route, so that a restarted shard can announce the block again
        48     8  digest      xxh3_64(payload, seed = low 64 bits of key); 0 while writing
        56     4  position    index of the block in its chain; bit 31 (core.block.window_groups.WINDOW_BIT) is set for
                              a block of a window group, which is in no chain
        60     4  crc         crc32 over bytes 0..59

All fields are little endian. A torn header fails its CRC and is read as "no block". Pure: bytes in, values out.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntFlag

from kvservice.core.block.tenants import TAG_MAX
from kvservice.core.segment.geometry import HEADER_BYTES
from kvservice.units import BlockKey, BootEpoch, Generation, SpanRoute

SLOT_MAGIC = 0x4B56534C  # "KVSL": tells a header from whatever else was in memory
SLOT_VERSION = 1  # of this format. A header of another version is read as no header.
_TAG_SHIFT = 1  # the account's tag is behind bit 0, SlotFlags.SECONDARY

_BODY = struct.Struct("<IHHQQ16sIIQI")
_CRC = struct.Struct("<I")
_BEGIN = struct.pack("<IH", SLOT_MAGIC, SLOT_VERSION)
_NAME, _NAME_AT = struct.Struct("<QQ16s"), 8  # epoch, generation, key
_TERM = struct.Struct("<QQ")  # epoch, generation
_LENGTH, _LENGTH_AT = struct.Struct("<I"), 40
_DIGEST, _DIGEST_AT = struct.Struct("<Q"), 48
# Where the fields are in a header of eight 64-bit words, and what else is in their word.
BEGIN_WORD, EPOCH_WORD, GENERATION_WORD, KEY_WORDS, LENGTH_WORD, DIGEST_WORD = 0, 1, 2, slice(3, 5), 5, 6
BEGIN_MASK, BEGIN_VALUE = (1 << 48) - 1, int.from_bytes(_BEGIN, "little")  # of its word; flags are above
LENGTH_MASK = (1 << 32) - 1  # of its word; the route is above
assert _BODY.size + _CRC.size == HEADER_BYTES
assert TAG_MAX << _TAG_SHIFT < 1 << 16, "the flags have 16 bits"


class SlotFlags(IntFlag):
    NONE = 0
    SECONDARY = 1  # fetched from another node, which has the primary copy; so it is evicted first


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """The fields of a slot's header: see the table above."""

    epoch: BootEpoch
    generation: Generation
    key: BlockKey
    length: int  # payload bytes
    route: SpanRoute
    digest: int  # xxh3_64; 0 while writing
    position: int
    flags: SlotFlags = SlotFlags.NONE
    account_tag: int = 0  # 0 to TAG_MAX

    @property
    def is_stable(self) -> bool:
        return self.generation % 2 == 0


def pack_header(header: SlotHeader) -> bytes:
    body = _BODY.pack(
        SLOT_MAGIC,
        SLOT_VERSION,
        int(header.flags) | header.account_tag << _TAG_SHIFT,
        header.epoch,
        header.generation,
        header.key,
        header.length,
        header.route,
        header.digest,
        header.position,
    )
    return body + _CRC.pack(zlib.crc32(body))


def is_whole(data: bytes | memoryview) -> bool:
    """Whether these bytes are a whole header of this version: not a free slot's, not torn, not something else."""
    return (
        len(data) == HEADER_BYTES
        and data[: len(_BEGIN)] == _BEGIN
        and _CRC.unpack_from(data, _BODY.size)[0] == zlib.crc32(data[: _BODY.size])
    )


def is_of(data: bytes, epoch: BootEpoch, generation: Generation, key: BlockKey) -> bool:
    """Whether it is a whole header of this boot, generation and key. A third of the cost of `unpack_header`."""
    return data[_NAME_AT : _NAME_AT + _NAME.size] == _NAME.pack(epoch, generation, key) and is_whole(data)


def is_in_term(data: bytes, epoch: BootEpoch, generation: Generation) -> bool:
    """Whether it is a whole header of this boot and generation, with any key. As cheap as `is_of`."""
    return data[_NAME_AT : _NAME_AT + _TERM.size] == _TERM.pack(epoch, generation) and is_whole(data)


def has_length(data: bytes, length: int) -> bool:
    """Whether the payload has this length in bytes. `data` is a whole header: check with `is_of` first."""
    return data[_LENGTH_AT : _LENGTH_AT + _LENGTH.size] == _LENGTH.pack(length)


def has_digest(data: bytes, digest: int) -> bool:
    """Whether the payload has this digest. `data` is a whole header: check with `is_of` first."""
    return data[_DIGEST_AT : _DIGEST_AT + _DIGEST.size] == _DIGEST.pack(digest)


def unpack_header(data: bytes | memoryview) -> SlotHeader | None:
    """The header, or None when these bytes are not a whole header."""
    if not is_whole(data):
        return None
    _, _, flags, epoch, generation, key, length, route, digest, position = _BODY.unpack_from(data)
    return SlotHeader(
        epoch=BootEpoch(epoch),
        generation=Generation(generation),
        key=BlockKey(key),
        length=length,
        route=SpanRoute(route),
        digest=digest,
        position=position,
        flags=SlotFlags(flags & int(SlotFlags.SECONDARY)),
        account_tag=flags >> _TAG_SHIFT,
    )
