"""Places where a test holds a process, to kill or stop it exactly there. Off in production: one comparison a place.

With KVSERVICE_TEST_FAILPOINTS naming a folder, a process that comes to `failpoint("shard.seal")` while the folder has a
file `shard.seal.arm` takes that file, leaves `shard.seal.hit` with its process id, and waits until `shard.seal.release`
is there. The idea of files as switches is Mooncake's (oplog_test_failpoint_test.cpp).
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

VARIABLE = "KVSERVICE_TEST_FAILPOINTS"
HELD_SECONDS_MAX = 60.0  # a test that died releases nobody
_folder = Path(folder) if (folder := os.environ.get(VARIABLE)) else None


def failpoint(name: str) -> None:
    """Blocks the calling thread while a test holds it here; returns at once otherwise."""
    if _folder is not None:
        _hold(_folder, name)


def _hold(folder: Path, name: str) -> None:
    taken = folder / f"{name}.{os.getpid()}"
    try:
        (folder / f"{name}.arm").rename(taken)  # one process, once
    except FileNotFoundError:
        return
    taken.write_text(str(os.getpid()))
    taken.rename(folder / f"{name}.hit")
    deadline = time.monotonic() + HELD_SECONDS_MAX
    while not (folder / f"{name}.release").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    with contextlib.suppress(FileNotFoundError):
        (folder / f"{name}.release").unlink()
