"""Maps the pages of a segment into this process on a thread, before they are needed.

Memory that is reserved is not mapped: the first touch of each page is a fault, and the first touch of all also clears
it. For a pull into fresh slots that is half of its time, and for an engine's first copies as well. This takes it where
nobody waits. It changes no byte, so it runs beside everything else.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading

import numpy as np

from kvservice.core.segment.geometry import PAGE_BYTES
from kvservice.units import MiB

# Of one call: a millisecond or two, for which a thread that maps or unmaps other memory may have to wait.
PIECE_BYTES = 4 * MiB
NICENESS = 19  # of the thread: it takes the time that nothing else wants
_MADV_POPULATE_WRITE = 23  # of Linux 5.14 and later, which Python does not name
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class MapAhead:
    """One pass over the first `size` bytes of a mapping. `stop` it before the mapping ends."""

    def __init__(self, buffer: memoryview, address: int, size: int) -> None:
        self._buffer = buffer
        self._address = address
        self._size = size
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvservice-pages", daemon=True)
        self.mapped_bytes = 0  # so far
        self._thread.start()

    def stop(self) -> None:
        """Blocks for the piece that is being mapped. Idempotent."""
        self._stopping.set()
        self._thread.join()

    def wait(self, seconds: float) -> bool:
        """Wait until all is mapped. Returns whether it is."""
        self._thread.join(seconds)
        return self.mapped_bytes == self._size

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)  # of this thread alone, on Linux
        while self.mapped_bytes < self._size and not self._stopping.is_set():
            length = min(PIECE_BYTES, self._size - self.mapped_bytes)
            if not self._populate(length):
                return
            self.mapped_bytes += length

    def _populate(self, length: int) -> bool:
        """Map the next piece. False when the kernel has no memory for it: then pages are mapped when they are used."""
        if not _LIBC.madvise(self._address + self.mapped_bytes, length, _MADV_POPULATE_WRITE):
            return True
        if ctypes.get_errno() != errno.EINVAL:
            return False
        touch(self._buffer[self.mapped_bytes : self.mapped_bytes + length])
        return True


def touch(piece: memoryview) -> int:
    """Map pages on kernels before 5.14: reads one byte of each. Writing could undo what somebody else writes."""
    return int(np.frombuffer(piece, np.uint8)[::PAGE_BYTES].max(initial=0))
