"""`python -m tests.faults.failing_disk FOLDER MOUNTED FAULTS`: FOLDER is seen at MOUNTED, and fails as FAULTS say.

A file FAULTS/CALL with a number makes every such call fail with that errno: `open`, `create`, `read`, `write`,
`rename`, `unlink`, `truncate`. FAULTS/short cuts each read in half, FAULTS/flip flips a bit of each, and FAULTS/late
makes each of them wait as long as the file exists. It needs FUSE: `make .venv-fuse/.installed`.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

SITE = Path(__file__).parent.parent.parent / ".venv-fuse"
LIBRARY = SITE / "deb/lib/x86_64-linux-gnu/libfuse.so.2"


class FailingCalls:
    """What fusepy asks. Each call is that of the system below, unless a fault is set. An OSError is its answer."""

    def __init__(self, folder: str, faults: str) -> None:
        self._folder = folder
        self._faults = Path(faults)

    def _below(self, path: str) -> str:
        return self._folder + path

    def __call__(self, call: str, *arguments: Any) -> Any:
        fault = self._faults / call
        if fault.exists():
            raise OSError(int(fault.read_text()), call)
        if not hasattr(self, call):
            raise OSError(errno.EFAULT, call)
        return getattr(self, call)(*arguments)

    def init(self, path: str) -> None:
        pass

    destroy = init

    def access(self, path: str, mode: int) -> None:
        if not os.access(self._below(path), mode):
            raise OSError(errno.EACCES if os.path.lexists(self._below(path)) else errno.ENOENT, path)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, float]:
        found = os.fstat(fh) if fh is not None else os.lstat(self._below(path))
        names = ("atime", "ctime", "gid", "mode", "mtime", "nlink", "size", "uid")
        return {f"st_{name}": getattr(found, f"st_{name}") for name in names}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *(one.name for one in Path(self._below(path)).iterdir())]

    def mkdir(self, path: str, mode: int) -> None:
        Path(self._below(path)).mkdir(mode)

    def rmdir(self, path: str) -> None:
        Path(self._below(path)).rmdir()

    def chmod(self, path: str, mode: int) -> None:
        Path(self._below(path)).chmod(mode)

    def unlink(self, path: str) -> None:
        Path(self._below(path)).unlink()

    def rename(self, old: str, new: str) -> None:
        Path(self._below(old)).rename(self._below(new))

    def open(self, path: str, flags: int) -> int:
        return os.open(self._below(path), flags & ~os.O_DIRECT)

    def create(self, path: str, mode: int, fi: object = None) -> int:
        return os.open(self._below(path), os.O_RDWR | os.O_CREAT, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        while (self._faults / "late").exists():
            time.sleep(0.01)
        data = os.pread(fh, size, offset)
        if (self._faults / "short").exists():
            return data[: len(data) // 2]
        if (self._faults / "flip").exists() and data:
            return data[:-1] + bytes([data[-1] ^ 1])
        return data

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        os.truncate(self._below(path) if fh is None else fh, length)

    def release(self, path: str, fh: int) -> None:
        os.close(fh)

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._below(path))
        names = ("bavail", "bfree", "blocks", "bsize", "favail", "ffree", "files", "flag", "frsize", "namemax")
        return {f"f_{name}": getattr(found, f"f_{name}") for name in names}


def main(folder: str, mounted: str, faults: str) -> None:
    os.environ["FUSE_LIBRARY_PATH"] = str(LIBRARY)
    sys.path.insert(0, str(SITE))
    import fuse

    # direct_io: the kernel keeps nothing, so that every read and write comes here
    calls = FailingCalls(folder, faults)
    fuse.FUSE(calls, mounted, foreground=True, direct_io=True, default_permissions=True, big_writes=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
