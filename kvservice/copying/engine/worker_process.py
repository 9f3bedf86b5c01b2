"""The worker's process as an engine sees it: can kill it, and can tell when it has done its last copy.

Linux only. A pidfd always names the same process, whereas a pid may belong to another process by the time it is used.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from enum import Enum

from kvservice.copying.message import MESSAGE_BYTES_MAX, Kind
from kvservice.errors import Refused

log = logging.getLogger("kvservice.copying")

# This long after a kill a process runs no instruction of its own any more, even if the kernel cannot end it yet.
KILLED_SECONDS = 2.0
POLL_SECONDS = 0.1  # Between two looks at a worker that is ending.
NAG_SECONDS = 10.0  # Between two log lines about a worker that does not end. A dead GPU can hold a process for minutes.


class WorkerProcess:
    """One worker process. `in_host_memory` means that its copies are its own instructions. Copies of a GPU may outlive
    those, so there only the end of the process is the end of its copies."""

    def __init__(self, pidfd: int, *, in_host_memory: bool) -> None:
        self._pidfd = pidfd
        self._in_host_memory = in_host_memory
        self._killed: float | None = None

    @classmethod
    def of_peer(cls, pid: int, user: int, *, in_host_memory: bool) -> WorkerProcess:
        """The process at the other end of a socket. Raises Refused if this process could not kill it."""
        if pid <= 0:
            raise Refused(
                "the copy worker runs in another PID namespace, so it could not be killed if it hung; let both "
                "share one (hostPID, shareProcessNamespace), or set copier to in_process"
            )
        if user != os.getuid():
            raise Refused(f"the copy worker runs as user {user}, the engine as {os.getuid()}; run both as one user")
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            raise Refused(f"cannot open the copy worker's process {pid}: {error.strerror}") from error
        try:
            signal.pidfd_send_signal(pidfd, 0)  # signal 0 only checks the permission
        except OSError as error:
            os.close(pidfd)
            raise Refused(f"this process may not kill the copy worker's process {pid}: {error.strerror}") from error
        return cls(pidfd, in_host_memory=in_host_memory)

    def kill(self) -> None:
        if self._killed is None:
            self._killed = time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def await_last_copy(self, connection: socket.socket, patience: float) -> None:
        """Block until the worker has said BYE, which it says after its last copy for this engine, or until it is dead.
        Kills it after `patience` seconds. Not needed for a worker that said BYE before."""
        started = nagged = time.monotonic()
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        reading: socket.socket | None = connection
        while True:
            watched = [self._pidfd] if reading is None else [self._pidfd, reading.fileno()]
            readable = readable_of(watched, POLL_SECONDS)
            if self._pidfd in readable:
                return
            if reading is not None and reading.fileno() in readable:
                said = _last_words(reading)
                if said is Words.BYE or (said is Words.NONE and self._in_host_memory):
                    return  # it ended without a word: the kernel closes the socket with the last thread of the process
                reading = reading if said is Words.OTHER else None
            now = time.monotonic()
            if self._killed is None and now - started > patience:
                self.kill()
            if self._killed is not None and self._in_host_memory and now - self._killed > KILLED_SECONDS:
                return
            if now - nagged > NAG_SECONDS:
                nagged = now
                log.error("the copy worker has not ended after %.0f s; its GPU may be gone", now - started)

    def forget(self) -> None:
        """Idempotent."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def readable_of(watched: Sequence[int], seconds: float | None, writing: Sequence[int] = ()) -> set[int]:
    """The watched descriptors that can be read or have ended. Blocks until there is one, or one of `writing` can be
    written, for so many seconds at most. Not select(), which knows no descriptor above 1,023: engines have thousands.
    """
    poll = select.poll()
    for descriptor in {*watched, *writing}:
        kinds = select.POLLIN * (descriptor in watched) | select.POLLOUT * (descriptor in writing)
        poll.register(descriptor, kinds)
    found = poll.poll(None if seconds is None else math.ceil(1000 * seconds))
    return {descriptor for descriptor, kinds in found if kinds & ~select.POLLOUT}.intersection(watched)


class Words(Enum):
    BYE = 1
    OTHER = 2
    NONE = 3  # the connection has ended


def _last_words(connection: socket.socket) -> Words:
    try:
        data = connection.recv(MESSAGE_BYTES_MAX, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return Words.OTHER
    except OSError:
        return Words.NONE
    if not data:
        return Words.NONE
    return Words.BYE if data[0] == Kind.BYE else Words.OTHER
