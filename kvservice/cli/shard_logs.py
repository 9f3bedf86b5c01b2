"""`kvservice logs`: finds what the cache shards of this machine log, prints its end, and follows it. Needs no Ray."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kvservice.cli.output import is_reader_gone
from kvservice.errors import ConfigError, NoService, Unavailable

POLL_SECONDS = 0.2  # Between two looks at a file that is followed: quick for a reader, nothing for the machine.


@dataclass(slots=True)
class FollowedLog:
    """The log of one shard, open at the end of what was shown."""

    node: str
    path: Path
    file: IO[str]


def run(service: str | None, node: str | None, lines: int, *, follow: bool) -> None:
    """Print the last lines of each log, with `follow` what comes after them until Ctrl-C, or until nobody reads it.
    Blocks. Raises NoService, ConfigError if no node has this name, and Unavailable if no log is a file; it says where
    the logs are."""
    records = _records(service, node)
    followed: list[FollowedLog] = []
    elsewhere: list[str] = []
    for record in records:
        if record.log and Path(record.log).exists():
            followed.append(_open(record, lines, name=len(records) > 1))
        else:
            elsewhere.append(f"node {record.node_id}: {where(record)}")
    if not followed:
        raise Unavailable("; ".join(elsewhere))
    for words in elsewhere:
        print(words, file=sys.stderr)
    with contextlib.suppress(KeyboardInterrupt):
        while follow and not is_reader_gone():
            moved = [_print_new(each, name=len(followed) > 1) for each in followed]
            if not any(moved):
                time.sleep(POLL_SECONDS)


def _records(service: str | None, node: str | None) -> list[Any]:
    from kvservice.client.members import chosen_service, unknown_service
    from kvservice.discovery import find_shards

    name = chosen_service(service)
    found = find_shards(name, live_only=False)
    if not found:
        raise NoService(unknown_service(name, or_elsewhere=False))
    chosen = [record for record in found if node is None or record.node_id.startswith(node)]
    if not chosen:
        there = ", ".join(record.node_id for record in found)
        raise ConfigError(f"no node {node!r} of service {name!r} is on this machine; there is {there}", key="node")
    return chosen


def where(record: Any) -> str:
    """Where a shard writes its logs if not into a file that its record names."""
    if record.log:
        return f"its log {record.log} is gone"
    try:
        target = str(Path(f"/proc/{record.pid}/fd/2").readlink())
    except FileNotFoundError:
        return f"it has ended, and its record names no log (it was pid {record.pid})"
    except OSError:
        return f"it runs as pid {record.pid} of another user or container, and writes its logs to its stderr"
    if target.startswith(("/dev/pts/", "/dev/tty")):
        return f"it writes its logs to the terminal {target}, where it was started as pid {record.pid}"
    if target == "/dev/null":
        return "it was started with its logs thrown away; start it with 2>FILE to keep them"
    return (
        f"it writes its logs to a {target.partition(':')[0]}: see `journalctl _PID={record.pid}` for a systemd unit, "
        "`kubectl logs` for a pod, or start it with 2>FILE"
    )


def _open(record: Any, lines: int, *, name: bool) -> FollowedLog:
    path = Path(record.log)
    file = path.open(encoding="utf-8", errors="replace")
    last = deque(file, maxlen=lines)
    print(f"==> {record.node_id}: {path}", file=sys.stderr)
    for line in last:
        _print(record.node_id if name else "", line)
    return FollowedLog(record.node_id, path, file)


def _print_new(log: FollowedLog, *, name: bool) -> bool:
    """Print what was added. Returns whether there was anything. A file that became shorter is read from its start, and
    one that another has replaced to its end; then that one is followed."""
    new = log.file.readlines()
    with contextlib.suppress(FileNotFoundError):  # it is being replaced
        now = log.path.stat()
        if not os.path.samestat(now, os.fstat(log.file.fileno())):
            log.file.close()
            log.file = log.path.open(encoding="utf-8", errors="replace")
        elif now.st_size < log.file.tell():
            log.file.seek(0)
    for line in new:
        _print(log.node if name else "", line)
    return bool(new)


def _print(node: str, line: str) -> None:
    from kvservice.units import printable

    print(f"{node}: {printable(line.rstrip())}" if node else printable(line.rstrip()), flush=True)
