"""Are all processes of an engine gone? Each holds a shared flock on one file; the kernel drops it when a process ends.

Process ids are not used: they are reused, and mean nothing across containers. The file system must be one where flock
works between the processes (any local one).
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class LivenessLock:
    """Held from `hold` until `release` or the end of the process, whatever kind of end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        """Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def hold(path: Path) -> LivenessLock:
    """Take the lock, making the file if needed. Does not block for longer than an `is_free` probe elsewhere."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return LivenessLock(descriptor)


def is_free(path: Path) -> bool:
    """True when no process holds the lock (or the file is not there)."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
