"""The worker's process as an engine holds it: able to end it, and to know when it has done its last copy.

Linux only: a pidfd names one process for good, where a pid may be somebody else's by the time it is used.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import time

from kvservice.errors import Refused

log = logging.getLogger("kvservice.mover")

KILLED_SECONDS = 2.0  # a process that was killed runs no instruction of its own after this, even if it cannot end yet
POLL_SECONDS = 0.1
NAG_SECONDS = 10.0


class WorkerProcess:
    """`in_host_memory`: its copies are its own instructions. Copies of a GPU may outlive those, so that only the end of
    the process is the end of its copies."""

    def __init__(self, pidfd: int, *, in_host_memory: bool) -> None:
        self._pidfd = pidfd
        self._in_host_memory = in_host_memory
        self._killed: float | None = None

    @classmethod
    def of_peer(cls, pid: int, user: int, *, in_host_memory: bool) -> WorkerProcess:
        """Raises Refused when this process could not end that one."""
        if pid <= 0:
            raise Refused(
                "the move worker runs in another PID namespace, so that one that hangs could not be ended: let both "
                "share one (hostPID, shareProcessNamespace), or set mover to in_process"
            )
        if user != os.getuid():
            raise Refused(f"the move worker runs as user {user}, the engine as {os.getuid()}: use one user for both")
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            raise Refused(f"cannot hold the move worker's process {pid}: {error.strerror}") from error
        try:
            signal.pidfd_send_signal(pidfd, 0)  # whether it could be ended
        except OSError as error:
            os.close(pidfd)
            raise Refused(f"the move worker's process {pid} could not be ended: {error.strerror}") from error
        return cls(pidfd, in_host_memory=in_host_memory)

    def kill(self) -> None:
        if self._killed is None:
            self._killed = time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def await_last_copy(self, connection: socket.socket, patience: float) -> None:
        """Block until the worker has closed the connection, which it does after its last copy for this engine, or is
        dead. Killed when that takes longer than `patience` seconds."""
        started = nagged = time.monotonic()
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        while not self._is_over(connection):
            now = time.monotonic()
            if self._killed is None and now - started > patience:
                self.kill()
            if self._killed is not None and self._in_host_memory and now - self._killed > KILLED_SECONDS:
                return
            if now - nagged > NAG_SECONDS:
                nagged = now
                log.error("the killed move worker has not ended after %.0f s: is its GPU gone?", now - started)

    def _is_over(self, connection: socket.socket) -> bool:
        readable, _, _ = select.select([self._pidfd, connection.fileno()], [], [], POLL_SECONDS)
        if self._pidfd in readable:
            return True
        if connection.fileno() not in readable:
            return False
        try:
            closed = not connection.recv(1 << 17, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            closed = True
        if closed and not self._in_host_memory and self._killed is not None:
            time.sleep(POLL_SECONDS)  # its end shows by the process alone
            return False
        return closed

    def forget(self) -> None:
        """Idempotent."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
