"""May any process of an engine still write? Each that maps the segment to write holds a shared lock on a byte of it.

The byte lies far beyond the data, at a place that the engine's id says, and belongs to the segment's own inode: the
lock lives and goes with the memory that it protects, whoever removes or keeps which file. It is an open file
description lock: the kernel drops it when the last descriptor of that description closes, so at the end of the process,
whatever kind of end. Each `hold` opens a description of its own, so that one engine's two holders do not share a lock.
Process ids are not used: they are reused, and mean nothing across containers.
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

_OFD_SETLK = getattr(fcntl, "F_OFD_SETLK", 37)  # Linux on every architecture; not in every build of Python
_FLOCK = struct.Struct("@hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid (0 for these locks)
_BASE = 1 << 62  # beyond any segment
_PLACES = 1 << 60
HOLD_SECONDS = 0.2  # a shard that takes slots back has the byte for milliseconds
_POLL_SECONDS = 0.001


class LivenessLock:
    """Held from `hold` until `release` or the end of the process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        """Idempotent. A forked child that got the descriptor keeps the lock until it ends."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def hold(segment: Segment, engine_id: bytes, epoch: BootEpoch) -> LivenessLock:
    """From now on the shard takes no slot back that this engine may write. Check each slot's header afterwards.

    Blocks for HOLD_SECONDS at most. Raises Unavailable when the shard takes this engine's slots back just now (try
    again), SegmentError when the mapped memory is not what the path names any more, or of another boot than `epoch`.
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
    """For the shard: whether no process of this engine can write. While it is True none can begin to: take back what
    the engine had before you let go. Never blocks."""
    is_free = _lock(segment.descriptor, fcntl.F_WRLCK, engine_id)
    try:
        yield is_free
    finally:
        if is_free:
            _lock(segment.descriptor, fcntl.F_UNLCK, engine_id)


def has_writers(segment: Segment) -> bool:
    """For the shard that has just opened it: whether a process of any engine of an earlier boot can still write. Nobody
    can begin to any more, because the segment says another boot by then."""
    if not _lock_bytes(segment.descriptor, fcntl.F_WRLCK, 0, _PLACES):
        return True
    _lock_bytes(segment.descriptor, fcntl.F_UNLCK, 0, _PLACES)
    return False


def _lock(descriptor: int, kind: int, engine_id: bytes) -> bool:
    """False when somebody else's lock is in the way. Raises SegmentError when the file system has no such locks."""
    place = int.from_bytes(hashlib.blake2b(engine_id, digest_size=8).digest(), "big") >> 4
    return _lock_bytes(descriptor, kind, place, 1)


def _lock_bytes(descriptor: int, kind: int, first: int, count: int) -> bool:
    try:
        fcntl.fcntl(descriptor, _OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, _BASE + first, count, 0))
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, as the kernel likes
        return False
    except OSError as error:
        raise SegmentError(f"cannot lock the segment for its writers: {error.strerror}") from error
    return True
