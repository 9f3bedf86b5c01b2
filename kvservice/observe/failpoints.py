"""Named places where a test can hold a process, in order to kill or stop it exactly there.

In production they are off and cost one comparison each. A test sets KVSERVICE_TEST_FAILPOINTS to a folder. A process
that reaches `failpoint("shard.seal")` looks there for a file `shard.seal.arm`. If there is one, the process removes it,
writes its process id into `shard.seal.hit`, and waits until `shard.seal.release` exists. Using files as switches is
Mooncake's idea (oplog_test_failpoint_test.cpp).
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

VARIABLE = "KVSERVICE_TEST_FAILPOINTS"
# After this time a held process goes on by itself, because a test that died cannot release it. No test holds one
# longer.
HELD_SECONDS_MAX = 60.0
_folder = Path(folder) if (folder := os.environ.get(VARIABLE)) else None


def failpoint(name: str) -> None:
    """Block the calling thread while a test holds it here. Returns at once otherwise."""
    if _folder is not None:
        _hold(_folder, name)


def _hold(folder: Path, name: str) -> None:
    taken = folder / f"{name}.{os.getpid()}"
    try:
        (folder / f"{name}.arm").rename(taken)  # the rename succeeds in one process, and once
    except FileNotFoundError:
        return
    taken.write_text(str(os.getpid()))
    taken.rename(folder / f"{name}.hit")
    deadline = time.monotonic() + HELD_SECONDS_MAX
    while not (folder / f"{name}.release").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    with contextlib.suppress(FileNotFoundError):
        (folder / f"{name}.release").unlink()
