"""Removes the files of shards that ended without cleaning up, e.g. with a whole Ray cluster: segments, records and
sockets.

A Ray node gets a new id when it starts again, so no shard would ever adopt such a segment. No Ray in here.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection
from pathlib import Path

from kvservice.discovery import (
    COPY_WORKER_PREFIX,
    OWN_NAMES,
    RECORD_NAME,
    SOCKET_NAME,
    default_runtime_root,
)
from kvservice.lookup.mirror_file import MIRROR_SUFFIX
from kvservice.memory.segment import remove_stale, segment_path
from kvservice.private_files import is_listening
from kvservice.shard.server_config import DEV_SHM
from kvservice.units import NodeId

_RAY_NODE = re.compile(r"[0-9a-f]{12}")


def remove_leftovers(service: str, alive: Collection[NodeId], runtime_root: Path | None = None) -> list[Path]:
    """Remove the files of this service's Ray nodes that are not in `alive` and belong to no running process. Returns
    them."""
    removed: list[Path] = []
    prefix = segment_path(service, "").name
    for path in sorted(DEV_SHM.glob(f"{prefix}*")):
        node = path.name.removeprefix(prefix).removesuffix(MIRROR_SUFFIX)
        if _RAY_NODE.fullmatch(node) and node not in alive:
            removed += remove_stale(DEV_SHM, path.name)
    own = (runtime_root or default_runtime_root()) / service
    # only after the whole service has ended: a lookup partition that is starting has a file before it listens
    if not alive:
        silent = [path for path in sorted(own.glob("lookup-*.sock")) if not is_listening(str(path))]
        for path in silent:
            path.unlink(missing_ok=True)
        removed += silent
    for directory in sorted(own.glob("*")):
        dead = _RAY_NODE.fullmatch(directory.name) and directory.name not in alive
        if dead and not is_listening(str(directory / SOCKET_NAME)):
            removed += _remove_record(directory)
    return removed


def _remove_record(directory: Path) -> list[Path]:
    found = [
        *directory.glob(f"{COPY_WORKER_PREFIX}*"),
        directory / RECORD_NAME,
        *(directory / name for name in OWN_NAMES),
    ]
    removed = [path for path in found if path.exists() or path.is_symlink()]
    for path in removed:
        path.unlink(missing_ok=True)
    for empty in (directory, directory.parent):
        with contextlib.suppress(OSError):  # files of another user stay
            empty.rmdir()
    return removed
