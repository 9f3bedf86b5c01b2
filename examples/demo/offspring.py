"""No process outlives the demo, not even one whose parent died first: Ray's agents end some time after their raylet.

As a "child subreaper" (prctl(2)) this process inherits orphaned grandchildren, so that all of them can be found again.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
GRACE_SECONDS = 3.0
KILLED_SECONDS = 5.0
SHARED_MEMORY = Path("/dev/shm")
ENGINE_MEMORY = ("psm_*", "sem.mp-*", "vllm_dist_*")


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


@contextlib.contextmanager
def engine_memory_removed() -> Iterator[None]:
    """On leaving, removes shared memory of vLLM's own that came to be within and that no process has mapped any more:
    Ray Serve ends engines without letting them remove theirs."""
    before = _engine_memory()
    try:
        yield
    finally:
        left = _engine_memory() - before
        mapped = _mapped() if left else ""
        for path in left:
            if str(path) not in mapped:
                path.unlink(missing_ok=True)


def _engine_memory() -> set[Path]:
    return {path for pattern in ENGINE_MEMORY for path in SHARED_MEMORY.glob(pattern)}


def _mapped() -> str:
    """The files that all processes we may inspect have mapped."""
    found = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # ended meanwhile
            found.append("\n".join(line for line in maps.read_text().splitlines() if str(SHARED_MEMORY) in line))
    return "\n".join(found)


def _descendants() -> set[Any]:
    import psutil

    return set(psutil.Process().children(recursive=True))
