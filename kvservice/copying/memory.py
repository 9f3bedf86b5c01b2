"""Memory that two processes of one node share: a memfd that holds an engine's KV cache, and its mapping elsewhere.

The engine makes it and sends the descriptor over the worker's socket; the kernel frees it when the last mapping goes,
whatever way the processes end, so nothing is left in /dev/shm.
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
        """Takes the descriptor over. Raises SegmentError when it is not memory of at least this size."""
        try:
            size = os.fstat(descriptor).st_size
            if byte_count <= 0 or size < byte_count:
                raise SegmentError(f"the engine's memory has {size} bytes, {byte_count} were promised")
            if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise SegmentError("the engine's memory can shrink, which would kill whoever has it mapped")
            self.buffer = mmap.mmap(descriptor, byte_count)
            self.buffer.madvise(mmap.MADV_DONTDUMP)  # a memfd has no name, so a core dump would hold its blocks
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
        """New zeroed memory. Its pages are taken when first touched, as with any large allocation. Raises
        SegmentError."""
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
        """Unmap, once nobody holds a view. Idempotent."""
        if self._closed:
            return
        self._closed = True
        os.close(self.descriptor)
        with contextlib.suppress(BufferError):  # a tensor still lies in it: unmapped when that is gone
            self.buffer.close()
