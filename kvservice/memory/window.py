"""The payloads of some slots as one piece of a reader's memory, which ends when the reader has done.

The blocks of a prompt are scattered over the slots of a segment. A window maps the pages of each slot once more, one
slot behind the other, so that a reader has one array over all of them without a copy. The pages are private to the
process: writing to them changes nothing in the pool.

After `close` nothing reads the slots through the window. Arrays over it that somebody still holds then have all bits
set, which is NaN in every floating-point type, and never what was put into the slots since.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Iterator, Sequence

from kvservice.core.segment.geometry import PAGE_BYTES
from kvservice.errors import SegmentError
from kvservice.memory.segment import Segment
from kvservice.units import MiB, SlotIndex, align_up

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value
# mmap(2) of Linux on x86-64 and arm64, which Python does not name.
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000  # pages that nobody writes take no memory
_MAP_POPULATE = 0x8000  # one call in place of a fault for every page
_PROT_NONE = 0  # memory that nobody may touch yet
# Of the file that is mapped, again and again, behind arrays that outlive their window: multiples of the page.
_ENDED_BYTES_MIN, _ENDED_BYTES_MAX = MiB, 64 * MiB
# A window takes about so many of these mappings: a process has 65,530, and with none left it starts no thread.
_ENDED_MAPPINGS = 8


class ReadWindow:
    """`stride` bytes a slot, in the order given. `buffer` is of the whole window and None after `close`."""

    def __init__(self, segment: Segment, slots: Sequence[SlotIndex], payload_bytes: int) -> None:
        """Raises SegmentError when the kernel maps no more. The segment may be closed afterwards."""
        self.stride = align_up(payload_bytes, PAGE_BYTES)
        self._size = self.stride * len(slots)
        anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._address = _map(None, self._size, _PROT_NONE, anonymous, -1, 0)
        buffer = (ctypes.c_ubyte * self._size).from_address(self._address)
        weakref.finalize(buffer, _LIBC.munmap, self._address, self._size).atexit = False
        flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE | _MAP_POPULATE
        at = self._address
        for offset, length in _runs([segment.geometry.payload_offset(s, payload_bytes) for s in slots], self.stride):
            _map(at, length, mmap.PROT_READ, flags, segment.descriptor, offset)
            at += length
        # Made writable behind the populating, which would have copied the pages otherwise. Some libraries know no
        # memory that is only for reading, and a program must not die of writing into its own.
        _LIBC.mprotect(self._address, self._size, mmap.PROT_READ | mmap.PROT_WRITE)
        _LIBC.madvise(self._address, self._size, mmap.MADV_DONTDUMP)
        self._lock = threading.Lock()
        self.buffer: ctypes.Array[ctypes.c_ubyte] | None = buffer

    def close(self) -> None:
        """End the window. Idempotent."""
        with self._lock:
            if self.buffer is None:
                return
            still_read = weakref.ref(self.buffer)
            self.buffer = None
        # Held until the end: who drops the last array meanwhile would give away the addresses that are mapped here.
        buffer = still_read()
        if buffer is not None:
            self._end()

    def _end(self) -> None:
        """Put memory with all bits set in place of the slots."""
        flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
        at = 0
        try:
            descriptor, size = _ended(self._size // _ENDED_MAPPINGS)
            for at in range(0, self._size, size):
                length = min(size, self._size - at)
                _map(self._address + at, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
        except (SegmentError, OSError):  # this process gets no more mappings or files: then its own pages take memory
            ctypes.memset(self._address + at, 0xFF, self._size - at)


def _runs(offsets: Sequence[int], stride: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of neighbours in the file that are neighbours in the window."""
    begin = 0
    for end in range(1, len(offsets) + 1):
        if end == len(offsets) or offsets[end] != offsets[end - 1] + stride:
            yield offsets[begin], (end - begin) * stride
            begin = end


def _map(address: int | None, length: int, protection: int, flags: int, descriptor: int, offset: int) -> int:
    found: int = _LIBC.mmap(address, length, protection, flags, descriptor, offset)
    if found == _FAILED:
        raise SegmentError(f"cannot map {length} bytes of a segment for reading: {os.strerror(ctypes.get_errno())}")
    return found


_ended_file: list[int] = []
# Its own thread may come again meanwhile: a signal's handler, or the garbage collector, may end another window.
_ended_lock = threading.RLock()


def _ended(wanted: int) -> tuple[int, int]:
    """(descriptor, bytes) of a file in memory with all bits set, of about as many bytes as are wanted. Raises
    OSError."""
    wanted = min(max(align_up(wanted, _ENDED_BYTES_MIN), _ENDED_BYTES_MIN), _ENDED_BYTES_MAX)
    with _ended_lock:
        if not _ended_file:
            _ended_file.append(os.memfd_create("kvservice-ended", os.MFD_CLOEXEC))
        while (size := os.fstat(_ended_file[0]).st_size) < wanted:
            os.pwrite(_ended_file[0], b"\xff" * _ENDED_BYTES_MIN, size)
        return _ended_file[0], size
