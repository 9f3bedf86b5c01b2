"""No process outlives the demo, not even one whose parent died first: Ray's agents end some time after their raylet.

As a "child subreaper" (prctl(2)) this process inherits orphaned grandchildren, so that all of them can be found again.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
GRACE_SECONDS = 3.0
KILLED_SECONDS = 5.0


@contextlib.contextmanager
def offspring_ended() -> Iterator[None]:
    """On leaving, waits `GRACE_SECONDS` for all descendants of this process to end, then kills those that have not."""
    import psutil

    earlier = frozenset(_descendants())
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        psutil.wait_procs(_descendants() - earlier, timeout=GRACE_SECONDS)
        while left := _descendants() - earlier:  # again: one may have started others before it was killed
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=KILLED_SECONDS)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _descendants() -> set[Any]:
    import psutil

    return set(psutil.Process().children(recursive=True))
