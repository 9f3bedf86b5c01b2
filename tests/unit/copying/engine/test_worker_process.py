"""The worker process as an engine holds it: one it could not end is refused, and the end of a copy is proven."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from kvservice.copying.engine.worker_process import WorkerProcess
from kvservice.copying.message import Kind, pack_json
from kvservice.errors import Refused

pytestmark = pytest.mark.processes


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def test_worker_of_another_namespace_or_user_is_refused(sleeper: subprocess.Popen[bytes]) -> None:
    """The error says what to do."""
    with pytest.raises(Refused, match="hostPID"):
        WorkerProcess.of_peer(0, os.getuid(), in_host_memory=True)
    with pytest.raises(Refused, match="run both as one user"):
        WorkerProcess.of_peer(sleeper.pid, os.getuid() + 1, in_host_memory=True)
    sleeper.kill()
    sleeper.wait()
    with pytest.raises(Refused, match="cannot open"):
        WorkerProcess.of_peer(sleeper.pid, os.getuid(), in_host_memory=True)


def wait_for_end(worker: WorkerProcess, ours: socket.socket, patience: float) -> threading.Thread:
    waiting = threading.Thread(target=worker.await_last_copy, args=(ours, patience))
    waiting.start()
    return waiting


@pytest.mark.parametrize("in_host_memory", [True, False])
def test_copies_have_ended_when_the_worker_says_bye(sleeper: subprocess.Popen[bytes], in_host_memory: bool) -> None:
    worker = WorkerProcess.of_peer(sleeper.pid, os.getuid(), in_host_memory=in_host_memory)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.send(b"an answer that came too late")
    waiting = wait_for_end(worker, ours, 30)
    assert theirs.recv(10) == b"", "the worker is not told to end"
    waiting.join(0.3)
    assert waiting.is_alive()
    theirs.send(pack_json(Kind.BYE, {}))
    waiting.join(5)
    assert not waiting.is_alive() and sleeper.poll() is None
    theirs.close()
    worker.forget()
    ours.close()


@pytest.mark.parametrize("in_host_memory", [True, False])
def test_silent_close_ends_copies_in_host_memory_only(sleeper: subprocess.Popen[bytes], in_host_memory: bool) -> None:
    """The kernel closes it when the process dies; what a GPU was told to copy may go on until the process is gone."""
    worker = WorkerProcess.of_peer(sleeper.pid, os.getuid(), in_host_memory=in_host_memory)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    waiting = wait_for_end(worker, ours, 30)
    waiting.join(0.5)
    assert waiting.is_alive() is not in_host_memory
    sleeper.kill()
    waiting.join(5)
    assert not waiting.is_alive()
    worker.forget()
    ours.close()


@pytest.mark.parametrize("in_host_memory", [True, False])
def test_worker_that_does_not_close_is_killed_and_waited_for(
    sleeper: subprocess.Popen[bytes], in_host_memory: bool
) -> None:
    worker = WorkerProcess.of_peer(sleeper.pid, os.getuid(), in_host_memory=in_host_memory)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sleeper.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    waiting = wait_for_end(worker, ours, 0.5)
    waiting.join(10)
    assert not waiting.is_alive() and 0.5 <= time.monotonic() - started < 5
    assert sleeper.wait(1) == -signal.SIGKILL
    worker.forget()
    for end in (ours, theirs):
        end.close()
