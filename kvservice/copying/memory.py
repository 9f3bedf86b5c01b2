"""Memory that two processes of one node share: a memfd with an engine's KV cache, and its mapping in the other process.

The engine makes it and sends the descriptor over the worker's socket. The kernel frees it with the last mapping,
however the processes end, so nothing stays in /dev/shm.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os

from kvservice.errors import SegmentError
from kvservice.units import format_bytes


class SharedMemory:
    """One mapping of a memfd. `address` is valid until `close`."""

    def __init__(self, descriptor: int, byte_count: int) -> None:
        """Map the descriptor and take it over. Raises SegmentError if it is not memory of at least this size."""
        try:
            size = os.fstat(descriptor).st_size
            if byte_count <= 0 or size < byte_count:
                raise SegmentError(f"the engine's memory has {size} bytes, but {byte_count} were promised")
            if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise SegmentError(
                    "the engine's memory can shrink, which would kill every process that maps it; it must be sealed"
                )
            self.buffer = mmap.mmap(descriptor, byte_count)
            # a core dump would contain the blocks, because a memfd has no name by which to leave it out
            self.buffer.madvise(mmap.MADV_DONTDUMP)
        except (OSError, ValueError) as error:
            os.close(descriptor)
            raise SegmentError(f"cannot map the engine's memory: {error}") from error
        except SegmentError:
            os.close(descriptor)
            raise
        self.descriptor = descriptor
        self.byte_count = byte_count
        anchor = ctypes.c_char.from_buffer(self.buffer)
        self.address = ctypes.addressof(anchor)
        del anchor
        self._closed = False

    @classmethod
    def make(cls, byte_count: int) -> SharedMemory:
        """New zeroed memory. Its pages are allocated when first touched. Raises SegmentError."""
        try:
            descriptor = os.memfd_create("kvservice-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise SegmentError(f"cannot make shared memory: {error}") from error
        try:
            os.ftruncate(descriptor, byte_count)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except OSError as error:
            os.close(descriptor)
            raise SegmentError(f"cannot make {format_bytes(byte_count)} of shared memory: {error}") from error
        return cls(descriptor, byte_count)

    def close(self) -> None:
        """Unmap, if nobody holds a view. May be called again."""
        if self._closed:
            return
        self._closed = True
        os.close(self.descriptor)
        with contextlib.suppress(BufferError):  # a tensor still uses it; it is unmapped with that
            self.buffer.close()
