"""Which file system a folder lies in, and how its files are read and written there.

Whether bytes go straight between a file and memory (O_DIRECT) is decided by a table here, and proven by the tier with
one write, read and compare. The table follows LMCache's backend for GPUDirect Storage.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvservice.errors import TierError

MOUNTS = Path("/proc/self/mounts")
LOCAL_THREADS = 4  # a local NVMe drive is at its limit with so many requests of a block's size
LOCAL_THREADS_MIN = 2  # so that one reads while one writes; with more than there are cores the pool's loop waits
NETWORK_THREADS = 16  # each request waits for the network, so more of them are under way
UNKNOWN = "unknown"
_OCTAL = re.compile(r"\\([0-7]{3})")

# File systems in memory, or in layers: direct access fails there, or is a copy in disguise.
INDIRECT = frozenset({"tmpfs", "ramfs", "overlay", "overlayfs", "aufs", "fuse.overlayfs", "squashfs", UNKNOWN})
NETWORK = frozenset({"wekafs", "lustre", "gpfs", "beegfs", "ceph", "nfs", "nfs4", "cifs", "smb3", "9p"})
# Their drivers serve direct access and nothing else well: it cannot be switched off.
ALWAYS_DIRECT = frozenset({"wekafs"})


@dataclass(frozen=True, slots=True)
class MountPoint:
    path: Path
    kind: str  # "ext4"


@dataclass(frozen=True, slots=True)
class FileAccess:
    """How the files of a folder are read and written."""

    kind: str  # of the file system
    direct: bool
    threads: int


def parse_mounts(text: str) -> tuple[MountPoint, ...]:
    """The mount points in the text of /proc/self/mounts; lines that say nothing are left out."""
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 3:
            path = _OCTAL.sub(lambda match: chr(int(match[1], 8)), words[1])
            found.append(MountPoint(Path(path), words[2]))
    return tuple(found)


def mounts_here() -> tuple[MountPoint, ...]:
    """Those of this process. Blocks for one read. Empty where the kernel does not tell."""
    try:
        return parse_mounts(MOUNTS.read_text(errors="surrogateescape"))
    except OSError:
        return ()


def file_system_of(path: Path, mounts: Iterable[MountPoint]) -> str:
    """The kind of file system that an absolute path lies in; "unknown" when no mount point says so.

    It is that of the longest mount point, compared by whole names; of several at one place, that of the last.
    """
    found = MountPoint(Path(), UNKNOWN)
    for mount in mounts:
        if path.is_relative_to(mount.path) and len(mount.path.parts) >= len(found.path.parts):
            found = mount
    return found.kind


def decide_access(path: Path, mounts: Iterable[MountPoint], *, direct: bool | None = None) -> FileAccess:
    """How files below `path` are read and written. `direct` forces direct access on or off; None: the table decides.

    Raises TierError where the file system does not let the choice.
    """
    kind = file_system_of(path, mounts)
    if direct is False and kind in ALWAYS_DIRECT:
        raise TierError(f"{path} lies on {kind}, whose files are always accessed directly: choose another disk_io")
    cores = len(os.sched_getaffinity(0))
    local = min(LOCAL_THREADS, max(LOCAL_THREADS_MIN, cores))
    threads = NETWORK_THREADS if kind in NETWORK else local
    return FileAccess(kind, kind not in INDIRECT if direct is None else direct, threads)
