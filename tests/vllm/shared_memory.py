"""vLLM's own shared memory: its processes do not remove it when they are killed, its ranks not even otherwise."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import SHARED_MEMORY, mapping_processes

PATTERNS = ("vllm_dist_*", "psm_*", "sem.mp-*")


@contextlib.contextmanager
def vllm_segments_removed() -> Iterator[None]:
    """On leaving, removes those that came to be within and that no process has mapped any more."""
    before = _segments()
    try:
        yield
    finally:
        for path in _segments() - before:
            if not mapping_processes(path):
                path.unlink(missing_ok=True)


def _segments() -> set[Path]:
    return {path for pattern in PATTERNS for path in SHARED_MEMORY.glob(pattern)}
