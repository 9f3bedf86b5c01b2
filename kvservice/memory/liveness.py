"""Can any process of an engine still write? Each process that maps the segment to write locks a byte of it (shared).

The byte is far beyond the data, at a place computed from the engine's id. It belongs to the segment's inode, so the
lock lives exactly as long as the memory that it protects, whatever happens to the file's name. It is an open file
description lock: the kernel releases it when the last descriptor of the description is closed, so at the latest when
the process ends, in whatever way. Each `hold` opens a description of its own, so two holders of one engine do not share
a lock. Process ids are not used: they are reused, and mean nothing across containers.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import struct
import time
from collections.abc import Iterator

from kvservice.errors import SegmentError, Unavailable
from kvservice.memory.segment import Segment
from kvservice.units import BootEpoch

_OFD_SETLK = getattr(fcntl, "F_OFD_SETLK", 37)  # the number on Linux; some builds of Python do not have the name
_FLOCK = struct.Struct("@hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid (0 for these locks)
_BASE = 1 << 62  # in bytes: beyond any segment, and within the offsets that a file lock can name
_PLACES = 1 << 60  # bytes to choose from: two engines hardly ever share one; if they do, one may wait for the other
HOLD_SECONDS = 0.2  # a shard that takes slots back locks the byte for milliseconds. Then Unavailable is raised.
_POLL_SECONDS = 0.001  # between two attempts to lock, because a file lock cannot be waited for with a timeout
assert _BASE + _PLACES < 1 << 63, "offsets of file locks have 63 bits"


class LivenessLock:
    """The lock of one process, held from `hold` until `release` or the end of the process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        """Release the lock. Idempotent. A forked child that inherited the descriptor keeps it until the child ends."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def hold(segment: Segment, engine_id: bytes, epoch: BootEpoch) -> LivenessLock:
    """Lock, so that the shard takes back no slot that this engine may write. Check each slot's header afterwards.

    Blocks for HOLD_SECONDS at most. Raises Unavailable while the shard takes back this engine's slots (try again), and
    SegmentError when the path does not name the mapped memory any more, or the memory is of another boot than `epoch`.
    """
    descriptor = segment.reopen()
    try:
        deadline = time.monotonic() + HOLD_SECONDS
        while not _lock(descriptor, fcntl.F_RDLCK, engine_id):
            if time.monotonic() > deadline:
                raise Unavailable(f"the shard takes back what this engine reserved in {segment.path}: try again")
            time.sleep(_POLL_SECONDS)
        if not segment.is_linked() or segment.current_epoch() != epoch:
            raise SegmentError(f"{segment.path} is not the memory of boot {epoch} of its shard any more: attach again")
    except BaseException:
        os.close(descriptor)
        raise
    return LivenessLock(descriptor)


@contextlib.contextmanager
def claim(segment: Segment, engine_id: bytes) -> Iterator[bool]:
    """For the shard: yields whether no process of this engine can write. Never blocks.

    While it is True no process can begin to write, so take back the engine's slots before leaving the context.
    """
    is_free = _lock(segment.descriptor, fcntl.F_WRLCK, engine_id)
    try:
        yield is_free
    finally:
        if is_free:
            _lock(segment.descriptor, fcntl.F_UNLCK, engine_id)


def has_writers(segment: Segment) -> bool:
    """For a shard that has just opened the segment: whether a process of an earlier boot's engine can still write.

    No further process can begin to, because the segment shows another boot by then.
    """
    if not _lock_bytes(segment.descriptor, fcntl.F_WRLCK, 0, _PLACES):
        return True
    _lock_bytes(segment.descriptor, fcntl.F_UNLCK, 0, _PLACES)
    return False


def _lock(descriptor: int, kind: int, engine_id: bytes) -> bool:
    """Lock or unlock. False when another holder's lock is in the way. Raises SegmentError without support for locks."""
    place = int.from_bytes(hashlib.blake2b(engine_id, digest_size=8).digest(), "big") >> 4
    return _lock_bytes(descriptor, kind, place, 1)


def _lock_bytes(descriptor: int, kind: int, first: int, count: int) -> bool:
    try:
        fcntl.fcntl(descriptor, _OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, _BASE + first, count, 0))
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, depending on the kernel
        return False
    except OSError as error:
        raise SegmentError(f"cannot lock the segment for its writers: {error.strerror}") from error
    return True
