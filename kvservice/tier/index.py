"""The log of what a folder of block files holds, so that a start need not open every file.

A head, then rows of 80 bytes: a block that was written, or a key that was erased. Rows are only appended; the log is
written anew, one row a block, at every start and when it has grown long. Nothing relies on it: a start lists the
folders, reads the headers of files that the log does not name, and forgets rows without a file. So it is never synced,
and a row that is torn or damaged ends it. Rows that a full disk does not take wait for the next ones.

    head, 16 bytes:  8  magic "KVSINDEX"     4  version     4  bytes of a row
    row, 80 bytes:   1  kind: bit 0: the block was written, else erased; bit 1: its fingerprint is known
                    16  key                  8  payload bytes   8  digest    4  position    4  route
                     2  tag                 16  fingerprint     8  stored_at (float)
                     8  stored bytes         1  zero            4  CRC-32 of the row before it

All is little endian. One thread at a time uses an IndexLog; it blocks for a write to the page cache.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from kvservice.core.segment.blockfile import BLOCKFILE_VERSION
from kvservice.core.tier.tier_block import TierBlock
from kvservice.observe.failpoints import failpoint
from kvservice.units import BlockKey, SpanRoute

log = logging.getLogger("kvservice.tier")

# Of this format, which is its second, and of the files that it names: it is believed without opening them. A log of
# another version is named and replaced; the headers of files are read.
INDEX_VERSION = 1 + BLOCKFILE_VERSION
INDEX_NAME = "index"
_MAGIC = b"KVSINDEX"
_HEAD = struct.Struct("<8sII")
_ROW = struct.Struct("<B16sQQIIH16sdQB")
_CRC = struct.Struct("<I")
ROW_BYTES = _ROW.size + _CRC.size
ROWS_EXTRA = 1 << 16  # so many rows more than three times the blocks, 5 MiB, and the log is written anew
ROWS_WAITING_MAX = 1 << 12  # for room on the disk, 320 KiB; with more the log ends
_WRITTEN, _KNOWN = 1, 2  # the bits of a row's kind
assert ROW_BYTES == 80


@dataclass(frozen=True, slots=True)
class ParsedIndex:
    """What a log says."""

    blocks: dict[BlockKey, TierBlock]
    rows: int
    is_whole: bool  # it has this version, and every row to its end is sound
    version: int | None  # that it says it has; None: it is no log


def pack_head() -> bytes:
    return _HEAD.pack(_MAGIC, INDEX_VERSION, ROW_BYTES)


def pack_row(block: TierBlock) -> bytes:
    """The row of a block that was written."""
    kind = _WRITTEN | (_KNOWN if block.fingerprint else 0)
    body = _ROW.pack(
        kind,
        block.key,
        block.payload_bytes,
        block.digest,
        block.position,
        block.route,
        block.account_tag,
        block.fingerprint,
        block.stored_at,
        block.stored_bytes,
        0,
    )
    return body + _CRC.pack(zlib.crc32(body))


def pack_erased(key: BlockKey) -> bytes:
    """The row of a key that was erased."""
    body = _ROW.pack(0, key, 0, 0, 0, 0, 0, b"", 0.0, 0, 0)
    return body + _CRC.pack(zlib.crc32(body))


def parse_index(data: bytes | memoryview) -> ParsedIndex:
    """Read a log up to its end or to the first row that is not sound. Any bytes are safe to give."""
    blocks: dict[BlockKey, TierBlock] = {}
    if len(data) < _HEAD.size:
        return ParsedIndex(blocks, 0, False, None)
    magic, version, row_bytes = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        return ParsedIndex(blocks, 0, False, None)
    if (version, row_bytes) != (INDEX_VERSION, ROW_BYTES):
        return ParsedIndex(blocks, 0, False, version)
    rows = 0
    for at in range(_HEAD.size, len(data) - ROW_BYTES + 1, ROW_BYTES):
        if _CRC.unpack_from(data, at + _ROW.size)[0] != zlib.crc32(data[at : at + _ROW.size]):
            return ParsedIndex(blocks, rows, False, version)
        row = _ROW.unpack_from(data, at)
        kind, key, payload_bytes, digest, position, route, tag, fingerprint, stored_at, stored_bytes, _ = row
        rows += 1
        if not kind & _WRITTEN:
            blocks.pop(BlockKey(key), None)
            continue
        known = fingerprint if kind & _KNOWN else b""
        blocks[BlockKey(key)] = TierBlock(
            BlockKey(key), payload_bytes, digest, position, SpanRoute(route), tag, known, stored_at, stored_bytes
        )
    return ParsedIndex(blocks, rows, (len(data) - _HEAD.size) % ROW_BYTES == 0, version)


def read_index(folder: int) -> ParsedIndex:
    """The log in this folder (a descriptor); one without rows where there is none or it cannot be read."""
    try:
        descriptor = os.open(INDEX_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        with os.fdopen(descriptor, "rb") as file:
            return parse_index(file.read())
    except OSError:
        return ParsedIndex({}, 0, False, None)


class IndexLog:
    """The log that rows are appended to. What it cannot write it counts: the next start finds the files anyway."""

    def __init__(self, folder: int, blocks: Iterable[TierBlock]) -> None:
        """Write the log anew with these blocks. `folder` is a descriptor, which stays the caller's."""
        self._folder = folder
        self._descriptor = -1
        self._rows = self._live = 0
        self._waiting: list[bytes] = []  # rows that the disk had no room for
        self.failed = 0  # rows that could not be written
        self._write_anew([pack_row(block) for block in blocks])

    def append(self, rows: list[bytes], live: int) -> None:
        """Append these rows. `live` is how many more blocks there are than before."""
        self._waiting += rows
        self._live += live
        if not self._write_waiting():
            return
        if self._rows > 3 * max(self._live, 0) + ROWS_EXTRA:
            found = read_index(self._folder)
            if found.is_whole:
                self._write_anew([pack_row(block) for block in found.blocks.values()])
            else:
                self._rows = 0  # somebody damaged it, and it takes seconds to read: not with every row

    def _write_waiting(self) -> bool:
        """Whether no row waits any more, because all of them were appended."""
        if self._descriptor >= 0:
            data = b"".join(self._waiting)
            with contextlib.suppress(OSError):
                if os.write(self._descriptor, data) == len(data):
                    self._rows += len(self._waiting)
                    self._waiting.clear()
                    return True
            if len(self._waiting) <= ROWS_WAITING_MAX and self._is_cut():
                return False
            self.close()
        self.failed += len(self._waiting)
        self._waiting.clear()
        return False

    def _is_cut(self) -> bool:
        """Cut off a row that was written in part: what follows it would not be read. Whole rows may stay, because they
        are appended again in the same order."""
        try:
            size = os.fstat(self._descriptor).st_size
            os.ftruncate(self._descriptor, size - (size - _HEAD.size) % ROW_BYTES)
        except OSError:
            return False
        return True

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write_anew(self, rows: list[bytes]) -> None:
        self.close()
        draft = f"{INDEX_NAME}.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(draft, flags, 0o600, dir_fd=self._folder)
            try:
                with os.fdopen(os.dup(descriptor), "wb") as file:
                    file.write(pack_head())
                    file.writelines(rows)
                failpoint("tier.anew")
                os.replace(draft, INDEX_NAME, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            self.failed += len(rows)
            log.warning("tier_index_not_written", extra={"error": error.strerror})
            with contextlib.suppress(OSError):
                os.unlink(draft, dir_fd=self._folder)
            with contextlib.suppress(OSError):
                os.unlink(INDEX_NAME, dir_fd=self._folder)
            return
        self._descriptor = descriptor
        self._rows = self._live = len(rows)
