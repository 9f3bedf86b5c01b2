"""The header of a block's file, which is also the header of its object: 4,096 bytes, then the payload.

    offset  size  field
         0     8  4088, little endian
         8  4088  JSON, padded with blanks: one tensor "kv" of bytes, and `__metadata__`, whose values are all strings
      4096     …  the payload as its codec stored it, to the end of the file

That is a valid safetensors file, so any tool that reads those opens it. The payload begins on a page boundary, so that
devices and direct I/O take it without a copy. `__metadata__` has, in this order:

    kvservice_block   version of this format
    key               block key, 32 hex digits
    digest            of the payload as the engine reads it (core.segment.digest), 16 hex digits
    payload_bytes     length of the payload as the engine reads it
    position, route   as in a slot's header
    tag               of the tenant that is charged, 0 is nobody
    fingerprint       first 16 bytes of the digest of the engine's fingerprint, in hex digits; empty: not known
    stored_at         when the bytes were computed, in seconds since 1970; 0.0: not known
    codec             what stored the payload; empty: it is stored as the engine reads it
    key_id, nonce     with which an encrypting codec encrypted it; empty without one
    check             CRC-32 of these 4,096 bytes with zeros in this place, 8 hex digits

There is one way to write a header. Bytes are a header only if packing what they say gives the same bytes, so a header
that is torn, damaged or written otherwise reads as "no block". The idea to put raw bytes behind a padded safetensors
header is LMCache's (its backend for GPUDirect Storage). Pure: bytes in, values out.
"""

from __future__ import annotations

import math
import re
import zlib
from dataclasses import dataclass, replace

from kvservice.core.block.tenants import TAG_MAX
from kvservice.core.segment.digest import digest_payload
from kvservice.core.segment.geometry import PAGE_BYTES
from kvservice.core.tier.tier_block import TierBlock
from kvservice.units import BlockKey, SpanRoute, align_up

BLOCKFILE_VERSION = 1  # of this format. A header of another version is no block; `version_of` names it.
FILE_HEADER_BYTES = PAGE_BYTES  # so that what follows is aligned for direct I/O
_LENGTH_BYTES = 8  # safetensors says the length of its JSON in so many bytes
_LENGTH = (FILE_HEADER_BYTES - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "little")
_BYTES_MAX = 1 << 48  # of a payload: far more than any block has. A header that says more is no header.
_U32 = 1 << 32  # positions and routes are below it, as in a slot's header

_START = b'{"__metadata__":{"kvservice_block":"'
_NO_CHECK = "0" * 8  # a CRC-32 in hex digits
_NUMBER = rb"(0|[1-9][0-9]{0,15})"
_CODEC, _KEY_ID, _NONCE = rb"[a-z0-9_.,:=+-]{0,128}", rb"[A-Za-z0-9_.:/=+-]{0,256}", rb"(?:[0-9a-f]{2}){0,64}"
_VERSION = re.compile(re.escape(_LENGTH + _START) + rb'([0-9]{1,9})"')
_HEADER = re.compile(
    re.escape(_LENGTH + _START + b'%d","key":"' % BLOCKFILE_VERSION)
    + rb'([0-9a-f]{32})","digest":"([0-9a-f]{16})","payload_bytes":"'
    + rb'","'.join(
        (
            _NUMBER + rb'","position":"' + _NUMBER,
            rb'route":"' + _NUMBER,
            rb'tag":"' + _NUMBER,
            rb'fingerprint":"((?:[0-9a-f]{32})?)',
            rb'stored_at":"([0-9.e+-]{1,32})',
            rb'codec":"(' + _CODEC + rb")",
            rb'key_id":"(' + _KEY_ID + rb")",
            rb'nonce":"(' + _NONCE + rb")",
            rb'check":"[0-9a-f]{8}"\},"kv":\{"dtype":"U8","shape":\[' + _NUMBER,
        )
    )
    + rb'\],"data_offsets":\[0,[0-9]{1,16}\]\}\} *'
)


@dataclass(frozen=True, slots=True)
class BlockFileHeader:
    """What the header of a block's file says."""

    block: TierBlock
    stored_bytes: int  # of the payload in the file, as the codec left it
    codec: str = ""  # small letters, digits and _.,:=+-, at most 128; "" = stored as the engine reads it
    key_id: str = ""  # names the key of an encrypting codec, never the key itself; at most 256 characters
    nonce: bytes = b""  # of an encrypting codec; at most 64 bytes

    @property
    def file_bytes(self) -> int:
        return FILE_HEADER_BYTES + self.stored_bytes

    @property
    def listed(self) -> TierBlock:
        """The block with what it takes in its tier, as a listing of the tier says it."""
        return replace(self.block, stored_bytes=self.stored_bytes)


def disk_room(stored_bytes: int) -> int:
    """What the file of a block takes on a disk, whose payload was stored in so many bytes: file systems give whole
    pages."""
    return align_up(FILE_HEADER_BYTES + stored_bytes, PAGE_BYTES)


def pack_file_header(header: BlockFileHeader) -> bytes:
    """The first 4,096 bytes of the block's file. Raises ValueError for values that have no place in it."""
    block = header.block
    text = (
        f'{_START.decode()}{BLOCKFILE_VERSION}","key":"{block.key.hex()}","digest":"{block.digest:016x}",'
        f'"payload_bytes":"{block.payload_bytes}","position":"{block.position}","route":"{block.route}",'
        f'"tag":"{block.account_tag}","fingerprint":"{block.fingerprint.hex()}",'
        f'"stored_at":"{float(block.stored_at)!r}","codec":"{header.codec}","key_id":"{header.key_id}",'
        f'"nonce":"{header.nonce.hex()}","check":"'
    )
    count = header.stored_bytes
    after = f'"}},"kv":{{"dtype":"U8","shape":[{count}],"data_offsets":[0,{count}]}}}}'
    start = _LENGTH + text.encode()
    blank = (start + (_NO_CHECK + after).encode()).ljust(FILE_HEADER_BYTES)
    packed = start + b"%08x" % zlib.crc32(blank) + blank[len(start) + len(_NO_CHECK) :]
    if _HEADER.fullmatch(packed) is None or not _is_in_range(header):
        raise ValueError(f"this has no place in the header of a block's file: {header}")
    return packed


def unpack_file_header(data: bytes | bytearray | memoryview) -> BlockFileHeader | None:
    """The header, or None when these bytes are no whole header of this version. Any bytes are safe to give."""
    if len(data) != FILE_HEADER_BYTES:
        return None
    found = _HEADER.fullmatch(data)
    if found is None:
        return None
    key, digest, payload, position, route, tag, fingerprint, stored_at, codec, key_id, nonce, count = found.groups()
    try:
        seconds = float(stored_at)
    except ValueError:
        return None
    block = TierBlock(
        key=BlockKey(bytes.fromhex(key.decode())),
        payload_bytes=int(payload),
        digest=int(digest, 16),
        position=int(position),
        route=SpanRoute(int(route)),
        account_tag=int(tag),
        fingerprint=bytes.fromhex(fingerprint.decode()),
        stored_at=seconds,
    )
    header = BlockFileHeader(block, int(count), codec.decode(), key_id.decode(), bytes.fromhex(nonce.decode()))
    return header if _is_in_range(header) and pack_file_header(header) == data else None


def version_of(data: bytes | bytearray | memoryview) -> int | None:
    """The version of this format that the header says it has, whole or not; None when it is no block's file."""
    found = _VERSION.match(data)
    return None if found is None else int(found[1])


def is_file_of(header: BlockFileHeader, wanted: TierBlock) -> bool:
    """Whether it is the file of this block: of its key, its length and, where both are known, its fingerprint. One
    that was stored before `wanted` is another."""
    block = header.block
    same = (block.key, block.payload_bytes) == (wanted.key, wanted.payload_bytes)
    if block.stored_at < wanted.stored_at:
        return False
    return same and (not wanted.fingerprint or not block.fingerprint or block.fingerprint == wanted.fingerprint)


def unpack_file(data: bytes | memoryview) -> tuple[BlockFileHeader, memoryview] | None:
    """Header and stored payload of a whole file; None unless it is whole.

    The digest of a payload that a codec stored is not checked here: it is over what the engine reads.
    """
    header = unpack_file_header(data[:FILE_HEADER_BYTES])
    if header is None or len(data) != header.file_bytes:
        return None
    stored = memoryview(data)[FILE_HEADER_BYTES:]
    if not header.codec and digest_payload(stored, header.block.key) != header.block.digest:
        return None
    return header, stored


def _is_in_range(header: BlockFileHeader) -> bool:
    block = header.block
    return (
        0 < block.payload_bytes < _BYTES_MAX
        and 0 < header.stored_bytes < _BYTES_MAX
        and (bool(header.codec) or header.stored_bytes == block.payload_bytes)
        and max(block.position, block.route) < _U32
        and block.account_tag <= TAG_MAX
        and math.isfinite(block.stored_at)
        and block.stored_at >= 0
    )
