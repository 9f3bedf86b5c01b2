"""How bytes go between an open file and memory: the seam, and its plain implementation.

`parts` are pieces of memory whose bytes follow one another in the file, from its beginning on. For direct access each
of them begins on a page boundary and is a multiple of a page long.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from typing import Protocol

from kvservice.core.segment.geometry import PAGE_BYTES
from kvservice.units import align_up


class FileIO(Protocol):
    """One thread uses an instance. Its methods block, and return only when no byte will move any more."""

    def read(self, descriptor: int, parts: Sequence[memoryview]) -> int:
        """Fill the parts. Returns how many bytes came: fewer than asked for where the file ends. Raises OSError."""
        ...

    def write(self, descriptor: int, parts: Sequence[memoryview]) -> None:
        """Write all parts. Raises OSError."""
        ...

    def close(self) -> None: ...


class VectoredIO:
    """One system call a file, straight between the file and the parts. Satisfies FileIO."""

    def read(self, descriptor: int, parts: Sequence[memoryview]) -> int:
        done, left = 0, list(parts)
        while left:
            count = os.preadv(descriptor, left, done)
            done += count
            # Direct access can only go on at a page boundary. A file that ends elsewhere has been read to its end.
            if count == 0 or count % PAGE_BYTES:
                break
            left = rest_of(left, count)
        return done

    def write(self, descriptor: int, parts: Sequence[memoryview]) -> None:
        done, left = 0, list(parts)
        while left:
            count = os.pwritev(descriptor, left, done)
            if count == 0:
                raise OSError(errno.EIO, "the file system takes no bytes and says nothing")
            done += count
            left = rest_of(left, count)

    def close(self) -> None:
        pass


def rest_of(parts: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of the parts behind their first `count` bytes."""
    left = []
    for part in parts:
        if count < len(part):
            left.append(part[count:])
        count = max(0, count - len(part))
    return left


def aligned_memory(size: int) -> memoryview:
    """New memory of at least so many bytes, a multiple of a page long, that begins on a page boundary."""
    return memoryview(mmap.mmap(-1, align_up(max(size, 1), PAGE_BYTES)))
