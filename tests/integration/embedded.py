"""An embedded pool with a disk, and the runtime behind it."""

from __future__ import annotations

from pathlib import Path

from kvservice.api.pool import ConnectOptions, Pool
from kvservice.api.pool_thread import PoolThread
from kvservice.pool.runtime import PoolRuntime


def open_embedded(disk: Path, **options: str) -> tuple[Pool, PoolRuntime]:
    """16 MiB of memory, and a disk of 64 MiB on which each block is written when it is stored."""
    given = {"memory": "16MiB", "disk_path": str(disk), "disk_bytes": "64MiB", "disk_write": "stored", **options}
    thread = PoolThread(ConnectOptions(mode="embedded", **given))  # type: ignore[arg-type]  # checked there
    thread.loop.wait(thread.open())
    assert thread._runtime is not None
    return Pool(thread), thread._runtime
