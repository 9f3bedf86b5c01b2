"""A node's mirror of the directory as a file in shared memory. Its shard makes and locks it; others map it to read.

The file has its final size from the start, and memory only where `reserve` took it, so a mirror costs what it holds.
Only its owner can open it. The shard keeps it locked for its whole life; one without an owner is removed like a segment
(memory.segment.remove_stale).
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

from kvservice.core.directory.key_table import ROWS_MIN
from kvservice.core.directory.mirror import MAGIC, TABLE_AT, mirror_bytes
from kvservice.errors import SegmentError
from kvservice.memory.segment import open_locked, open_private, replace_locked
from kvservice.units import format_bytes

MIRROR_SUFFIX = "~mirror"
MADV_POPULATE_READ = 22  # from linux/mman.h; Python's mmap module does not have it yet


class MirrorSegment:
    """A mapping of one mirror. Make it with `create` (the shard) or `attach` (readers)."""

    def __init__(self, path: Path, descriptor: int, size: int, *, writable: bool) -> None:
        self.path = path
        self.inode = os.fstat(descriptor).st_ino
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
        self.buffer = memoryview(self._map)
        self._reserved = self._mapped = 0
        self._closed = False

    @classmethod
    def create(cls, path: Path, size: int) -> MirrorSegment:
        """Make an empty one, in place of what an earlier boot left.

        Raises SegmentError when there is no memory for its first part, ServiceConflict when another process owns it.
        """
        descriptor = open_locked(path)
        try:
            if os.fstat(descriptor).st_size:
                descriptor = replace_locked(descriptor, path)  # readers may still map the old file
            os.ftruncate(descriptor, size)
            segment = cls(path, descriptor, size, writable=True)
        except BaseException:
            os.close(descriptor)
            raise
        if not segment.reserve(mirror_bytes(ROWS_MIN)):
            segment.close()
            segment.unlink()
            raise SegmentError(f"{path.parent} has no room for a mirror of the directory, {format_bytes(TABLE_AT)}")
        return segment

    @classmethod
    def attach(cls, path: Path) -> MirrorSegment:
        """Map an existing one to read it. Raises SegmentError when the file is not a mirror."""
        descriptor = open_private(path, os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            if size <= TABLE_AT or os.pread(descriptor, len(MAGIC), 0) != MAGIC:
                raise SegmentError(f"{path} is not a mirror of the directory", path=path)
            return cls(path, descriptor, size, writable=False)
        except BaseException:
            os.close(descriptor)
            raise

    def reserve(self, end: int) -> bool:
        """Take memory for everything before `end`. When there is none, returns False; nothing after may be touched."""
        if end > self._reserved:
            try:
                os.posix_fallocate(self._descriptor, self._reserved, end - self._reserved)
            except OSError:
                return False
            self._reserved = end
        return True

    def map_ahead(self, end: int, bytes_max: int) -> None:
        """Map the next `bytes_max` bytes before `end`, so that the first read of a page does not wait for that.

        Does nothing on kernels before 5.14, where the first read waits. 16 MiB take about a millisecond.
        """
        end = min(end // mmap.PAGESIZE * mmap.PAGESIZE, self._mapped + bytes_max)
        if end > self._mapped:
            with contextlib.suppress(OSError):
                self._map.madvise(MADV_POPULATE_READ, self._mapped, end - self._mapped)
            self._mapped = end

    @property
    def reserved_bytes(self) -> int:
        return self._reserved

    def close(self) -> None:
        """Unmap. Idempotent. Views that callers still hold keep the memory mapped until they are dropped."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(BufferError):
            self.buffer.release()
            self._map.close()
        os.close(self._descriptor)

    def unlink(self) -> None:
        """Remove the file. Mappings of it stay valid. Idempotent."""
        self.path.unlink(missing_ok=True)


def mirror_path(segment: Path) -> Path:
    """The path of a mirror: beside the node's segment."""
    return segment.with_name(segment.name + MIRROR_SUFFIX)
