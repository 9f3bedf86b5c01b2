"""Removes the files of shards that ended without cleaning up, e.g. with a whole Ray cluster: segments, records and
sockets.

A Ray node gets a new id when it starts again, so no shard would ever adopt its segment. The segment of any other node
waits for a shard of that node, until `kvservice down` is asked to remove it. No Ray in here.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection
from pathlib import Path

from kvservice.discovery import (
    COPY_WORKER_PREFIX,
    KEPT_NAMES,
    OWN_NAMES,
    RECORD_NAME,
    SOCKET_NAME,
    ShardRecord,
    default_runtime_root,
    find_shards,
    kept_memory,
    name_kept_memory,
)
from kvservice.lookup.mirror_file import MIRROR_SUFFIX, mirror_path
from kvservice.memory.segment import is_owned, is_segment_of, remove_stale, remove_unowned, segment_path
from kvservice.private_files import is_listening
from kvservice.shard.server_config import DEV_SHM
from kvservice.units import NodeId

_RAY_NODE = re.compile(r"[0-9a-f]{12}")
_SHARD_COMMANDS = frozenset({b"shard", b"up"})  # of kvservice: those whose process is a shard


def remove_leftovers(service: str, alive: Collection[NodeId], runtime_root: Path | None = None) -> list[Path]:
    """Remove the files of this service's Ray nodes that are not in `alive` and belong to no running process. Returns
    them."""
    removed: list[Path] = []
    prefix = segment_path(service, "").name
    for path in sorted(DEV_SHM.glob(f"{prefix}*")):
        node = path.name.removeprefix(prefix).removesuffix(MIRROR_SUFFIX)
        if is_ray_node(node) and node not in alive:
            removed += remove_stale(DEV_SHM, path.name)
    own = (runtime_root or default_runtime_root()) / service
    # only after the whole service has ended: a lookup partition that is starting has a file before it listens
    if not alive:
        silent = [path for path in sorted(own.glob("lookup-*.sock")) if not is_listening(str(path))]
        for path in silent:
            path.unlink(missing_ok=True)
        removed += silent
        with contextlib.suppress(OSError):  # a node has files there
            own.rmdir()
    for directory in sorted(own.glob("*")):
        dead = is_ray_node(directory.name) and directory.name not in alive
        if dead and not is_listening(str(directory / SOCKET_NAME)):
            removed += _remove_record(directory)
    return removed


def is_ray_node(node: str) -> bool:
    return _RAY_NODE.fullmatch(node) is not None


def is_running(record: ShardRecord) -> bool:
    """Whether the shard listens, or its process is there all the same, as while it starts or ends."""
    return is_listening(record.socket) or _is_shard(record.pid)


def remove_dead(
    service: str, running: Collection[NodeId], *, keep_memory: bool = False
) -> tuple[list[Path], list[Path]]:
    """Remove the files of this service's nodes without Ray whose shard has ended, except of those in `running`. With
    `keep_memory` their next shards find the blocks. Returns what was removed, and segments that a process owns."""
    removed: list[Path] = []
    owned: list[Path] = []
    own = default_runtime_root() / service
    records = find_shards(service, live_only=False)
    elsewhere: dict[str, Path] = {node: path.parent for node, path in kept_memory(service).items()}
    elsewhere |= {each.node_id: Path(each.segment_dir) for each in records if each.segment_dir}
    for node in sorted(_nodes_without_ray(service, own) - set(running)):
        segment, directory = segment_path(service, node, elsewhere.get(node, DEV_SHM)), own / node
        mirror = mirror_path(segment)
        held = [path for path in (segment, mirror) if is_owned(path)]
        if held or is_listening(str(directory / SOCKET_NAME)):
            owned += held[:1]  # a shard is starting or ending
            continue
        removed += [path for path in ([mirror] if keep_memory else [segment, mirror]) if remove_unowned(path)]
        kept = {path.stem for path in directory.glob(f"{COPY_WORKER_PREFIX}*.sock") if is_listening(str(path))}
        if keep_memory and segment.exists():
            kept |= set(KEPT_NAMES)  # without marks a shard that takes the memory up would serve what was cleared
            name_kept_memory(directory, segment)
        removed += _remove_record(directory, kept)
    return removed, owned


def _nodes_without_ray(service: str, own: Path) -> set[str]:
    """The nodes that have a directory below `own` or a segment in shared memory."""
    prefix = segment_path(service, "").name
    names = {path.name.removeprefix(prefix): path for path in DEV_SHM.glob(f"{prefix}*")}
    found = {name for name, path in names.items() if name and is_segment_of(path, name)}
    found |= {path.name for path in own.glob("*") if path.is_dir() and not path.is_symlink()}
    return {node for node in found if not is_ray_node(node)}


def _is_shard(pid: int) -> bool:
    """Whether this is the process of a shard: not a later one with its number, and not a zombie, whose command line is
    empty."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    named = any(b"kvservice" in word for word in words)
    return pid != os.getpid() and named and not _SHARD_COMMANDS.isdisjoint(words)


def _remove_record(directory: Path, kept: Collection[str] = ()) -> list[Path]:
    """Remove a node's files, but not those whose names without a suffix are in `kept`."""
    found = [
        *directory.glob(f"{COPY_WORKER_PREFIX}*"),
        directory / RECORD_NAME,
        *(directory / name for name in OWN_NAMES),
    ]
    removed = [path for path in found if path.stem not in kept and (path.exists() or path.is_symlink())]
    for path in removed:
        path.unlink(missing_ok=True)
    for empty in (directory, directory.parent):
        with contextlib.suppress(OSError):  # files of another user stay
            empty.rmdir()
    return removed
