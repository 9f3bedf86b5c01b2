"""What to do when a file system in memory has no room for a pool."""

from __future__ import annotations

import os
from pathlib import Path

from kvservice.units import GiB, MiB, div_ceil, format_bytes

LOWER = "lower the pool size (`pool_bytes` of a service, `memory` of an embedded pool)"
MIRROR_ROOM = 512 * MiB  # what the mirror beside a pool may grow to by default


def how_to_make_room(directory: Path, needed: int, total: int, free: int) -> str:
    """Advice for a pool of `needed` bytes in this file system of `total` bytes, `free` of them free. What is used there
    stays."""
    size, memory = total - free + needed + MIRROR_ROOM, machine_memory()
    if size > memory:
        return f"this machine has only {format_bytes(memory)} of memory; {LOWER}"
    return (
        f"make it larger (mount -o remount,size={div_ceil(size, GiB)}G {directory}; docker run --shm-size; in "
        f"Kubernetes an emptyDir with medium: Memory and a sizeLimit), or {LOWER}"
    )


def machine_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
