"""Whether memory has room for a pool, and what to do when it has not."""

from __future__ import annotations

import os
from pathlib import Path

from kvservice.units import GiB, KiB, MiB, div_ceil, format_bytes

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


def free_memory() -> int:
    """What the kernel can still give before it ends processes to get more."""
    sizes = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(int(sizes[name].split()[0]) * KiB for name in ("MemAvailable", "SwapFree"))
