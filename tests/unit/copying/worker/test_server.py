"""A copy worker whose system starts no more threads for a moment."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections import Counter
from pathlib import Path

import pytest

from kvservice.copying.device import HostDevice
from kvservice.copying.message import Kind, pack_json
from kvservice.copying.worker.server import CopyWorker, CopyWorkerConfig
from kvservice.units import NodeId

OF_AN_ENGINE = ("kvservice-load", "kvservice-store", "kvservice-copy-engine")
ANSWER_SECONDS = 10.0


def connected(path: str) -> socket.socket:
    engine = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    engine.settimeout(ANSWER_SECONDS)
    engine.connect(path)
    return engine


@pytest.mark.parametrize("missing", OF_AN_ENGINE)
def test_worker_without_threads_takes_engines_later(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took nobody any more, and was said to be well. Nothing stays of the engine that it could not take."""
    start, refused = threading.Thread.start, list[str]()

    def refuse_once(thread: threading.Thread) -> None:
        if thread.name == missing and not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    with tempfile.TemporaryDirectory() as root:
        server = CopyWorker(CopyWorkerConfig("s", NodeId("n"), Path(root)), HostDevice())
        path = server.start().socket
        monkeypatch.setattr(threading.Thread, "start", refuse_once)
        with connected(path) as engine:
            assert engine.recv(1) == b"" and refused
        with connected(path) as engine:
            engine.send(pack_json(Kind.HELLO, {}))
            assert engine.recv(4096)[0] == Kind.ANSWER
            names = Counter(thread.name for thread in threading.enumerate())
            assert [names[name] for name in OF_AN_ENGINE] == [1, 1, 1]
        server.stop()
