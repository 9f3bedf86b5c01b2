"""Whether memory has room for a pool, and what to do when it has not."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from kvservice.units import GiB, KiB, MiB, div_ceil, format_bytes

LOWER = "lower the pool size (`pool_bytes` of a service, `memory` of an embedded pool)"
MIRROR_ROOM = 512 * MiB  # what the mirror beside a pool may grow to by default

_VERSIONS = (  # of cgroups: the files of the limit and the usage, and how memory.stat names what is below, too
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
_SWAP = ("memory.swap.max", "memory.swap.current")  # of version 2
_WITH_SWAP = ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes")  # of version 1: memory and swap together


def how_to_make_room(directory: Path, needed: int, total: int, free: int) -> str:
    """Advice for a pool of `needed` bytes in this file system of `total` bytes, `free` of them free. What is used there
    stays."""
    size, memory = total - free + needed + MIRROR_ROOM, machine_memory()
    if size > memory:
        return f"this machine or container has only {format_bytes(memory)} of memory; {LOWER}"
    return (
        f"make it larger (mount -o remount,size={div_ceil(size, GiB)}G {directory}; docker run --shm-size; in "
        f"Kubernetes an emptyDir with medium: Memory and a sizeLimit), or {LOWER}"
    )


def machine_memory() -> int:
    """What there is for this process: of the machine, or of the container that it runs in."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(group.limit_bytes for group in cgroups())])


def free_memory() -> int:
    """What the kernel can still give before it ends processes to get more."""
    sizes = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available, swap = (int(sizes[name].split()[0]) * KiB for name in ("MemAvailable", "SwapFree"))
    groups = [group.free_bytes + min(group.swap_bytes, swap) for group in cgroups()]
    return min([available + swap, *groups])


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A control group with a limit of memory, as a container has one."""

    limit_bytes: int
    free_bytes: int  # with the files that the kernel drops for others
    swap_bytes: int  # how much more swap it may use; the machine may have less


def cgroups(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> list[Cgroup]:
    """Those of this process and above it that limit memory, of either version. Within a container that sees paths of
    its host, the container's own is at the top."""
    folders: list[Path] = []
    try:
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                top = root / "memory" if controllers else root
                own = top / path.lstrip("/")
                folders += [each for each in (own, *own.parents) if each == top or top in each.parents]
    except (OSError, ValueError):  # a machine without them
        return []
    return [group for group in map(_cgroup, folders) if group is not None]


def _cgroup(folder: Path) -> Cgroup | None:
    """None when it does not limit memory, or is not there."""
    for limit, usage, kind in _VERSIONS:
        try:
            limit_bytes, used = (int((folder / name).read_text()) for name in (limit, usage))
            sizes = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            files = sum(int(sizes.get(f"{kind}{which}_file", 0)) for which in ("active", "inactive"))
        except (OSError, ValueError):  # the other version, or "max"
            continue
        return Cgroup(limit_bytes, max(limit_bytes - used + files, 0), _swap(folder, limit_bytes - used))
    return None


def _swap(folder: Path, free_bytes: int) -> int:
    """Kubernetes allows a container none on a machine that has some."""
    for names, memory in ((_SWAP, 0), (_WITH_SWAP, free_bytes)):
        try:
            limit, used = (int((folder / name).read_text()) for name in names)
        except (OSError, ValueError):  # the other version, no swap in this kernel, or "max"
            continue
        return max(limit - used - memory, 0)
    return sys.maxsize
