"""The copy worker of one device: listens where the engines of this node find it, and watches its copies.

Threads: one accepts, one watches; per engine one reads and one per direction copies. `state` never waits for a copy, so
a copy that hangs does not stop health checks or metrics.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvservice.copying.device import Device, Segments
from kvservice.copying.message import Direction
from kvservice.copying.worker.loans import Loans
from kvservice.copying.worker.session import SEND_SECONDS, EngineSession
from kvservice.discovery import (
    CopyWorkerRecord,
    copy_worker_socket,
    node_directory,
    read_copy_worker,
    write_copy_worker,
)
from kvservice.errors import ServiceConflict
from kvservice.observe.condition import Condition
from kvservice.private_files import check_socket_path, make_directory, peer_uid
from kvservice.units import NodeId

log = logging.getLogger("kvservice.copying")

# Between two looks at the copies: a hang is noticed this much later than `wedge_seconds` say.
WATCH_SECONDS = 0.25
# After a connection that could not be taken: without a descriptor or a thread the next one fails as well.
ACCEPT_PAUSE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class CopyWorkerConfig:
    service: str
    node_id: NodeId
    runtime_root: Path | None = None
    wedge_seconds: float = 10.0  # a batch of copies that takes longer counts as hanging


class CopyWorker:
    def __init__(self, config: CopyWorkerConfig, device: Device) -> None:
        self._config = config
        self._device = device
        self._segments = Segments(device)
        self.loans = Loans()
        self._sessions: set[EngineSession] = set()
        self._gone: dict[str, int] = {}  # counts of sessions that ended
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._record: Path | None = None
        self.record: CopyWorkerRecord | None = None
        self._stopping = threading.Event()
        self._started = time.monotonic()
        self.wedged = threading.Event()  # set for good, because a thread that hangs in a copy cannot be ended
        self.device_lost = threading.Event()  # set for good: no copy of this process can succeed any more

    def start(self) -> CopyWorkerRecord:
        """Listen and register. Raises ServiceConflict if another worker of this device listens."""
        config = self._config
        directory = node_directory(config.service, config.node_id, config.runtime_root)
        make_directory(directory)
        path = copy_worker_socket(directory, self._device.name)
        check_socket_path(str(path))
        self._listener = _listen(path)
        self.record = record = CopyWorkerRecord(
            config.service, config.node_id, self._device.name, str(path), os.getpid()
        )
        self._record = write_copy_worker(record, directory)
        for name, work in (("accept", self._accept), ("watch", self._watch)):
            threading.Thread(target=work, name=f"kvservice-copy-{name}", daemon=True).start()
        return record

    def state(self) -> dict[str, Any]:
        """State and counters, for health checks and metrics. Never waits for a copy."""
        with self._lock:
            sessions, counters = list(self._sessions), dict(self._gone)
        for session in sessions:
            _add(counters, _counts(session))
        return {
            "engines": len(sessions),
            "wedged": self.wedged.is_set(),
            "device_lost": self.device_lost.is_set(),
            "uptime_seconds": time.monotonic() - self._started,
            "counters": counters,
            **self._device.state(),
        }

    def condition(self) -> Condition:
        """For its probes. A worker whose device failed, or whose copy hangs, cannot be repaired."""
        if self.device_lost.is_set():
            return Condition(dead="the device failed")
        return Condition(dead="a copy hangs" if self.wedged.is_set() else "")

    def stop(self) -> None:
        """Deregister, end the batches under way, close. Blocks, and for ever if a copy hangs: watch `wedged`."""
        self._stopping.set()
        self._deregister()
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            session.close()

    def _deregister(self) -> None:
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        if self._record is not None and read_copy_worker(self._record) == self.record:  # not that of a successor
            self._record.unlink(missing_ok=True)
            copy_worker_socket(self._record.parent, self._device.name).unlink(missing_ok=True)

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._stopping.is_set():
            try:
                connection, _ = self._listener.accept()
                self._take(connection)
            except (OSError, RuntimeError) as error:  # the latter for a thread that cannot be started
                if not self._stopping.wait(ACCEPT_PAUSE_SECONDS):
                    log.error("an engine could not connect, and is asked to try again: %s", error)

    def _take(self, connection: socket.socket) -> None:
        if peer_uid(connection) != os.geteuid():
            connection.close()  # the directory is private, so somebody changed its mode
            return
        # A timeout for sends only. A receive that waits for ever is an engine with nothing to do.
        seconds = struct.pack("ll", int(SEND_SECONDS), 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        with self._lock:
            self._sessions.add(EngineSession(connection, self._device, self._segments, self.loans, self._forget))

    def _forget(self, session: EngineSession) -> None:
        with self._lock:
            _add(self._gone, _counts(session))
            self._sessions.discard(session)

    def _watch(self) -> None:
        while not self._stopping.wait(WATCH_SECONDS):
            if self._device.lost and not self.device_lost.is_set():
                log.error(
                    "this process can no longer use the device, so this worker must be replaced: %s", self._device.lost
                )
                self.device_lost.set()
            with self._lock:
                lanes = [lane for session in self._sessions for lane in session.lanes.values()]
            limit = time.monotonic() - self._config.wedge_seconds
            if any(since is not None and since < limit for since in (lane.waits_since for lane in lanes)):
                if not self.wedged.is_set():
                    log.error(
                        "a copy has not moved for %.1f s, so this worker must be replaced", self._config.wedge_seconds
                    )
                self.wedged.set()


def _counts(session: EngineSession) -> dict[str, int]:
    found: dict[str, int] = {}
    for direction, lane in session.lanes.items():
        name = direction.name.lower()
        counts = lane.counts
        _add(
            found,
            {
                f"{name}_jobs": counts.jobs,
                f"{name}_blocks": counts.blocks,
                f"{name}_bytes": counts.byte_count,
                f"{name}_stale": counts.stale,
                f"{name}_failed": counts.failed,
                **({"borrowed_blocks": counts.borrowed} if direction is Direction.LOAD else {}),
            },
        )
    return found


def _add(total: dict[str, int], more: dict[str, int]) -> None:
    for name, count in more.items():
        total[name] = total.get(name, 0) + count


def _listen(path: Path) -> socket.socket:
    """Listen on this socket. A socket that nobody listens on is a leftover and is replaced. Raises ServiceConflict if a
    worker listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            pass
        else:
            raise ServiceConflict(f"another worker of this device listens at {path}; stop it first")
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        draft.unlink(missing_ok=True)
        listener.bind(str(draft))
        draft.chmod(0o600)
        listener.listen(64)
        draft.replace(path)
    except BaseException:
        listener.close()
        raise
    return listener
