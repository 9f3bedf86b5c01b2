"""A copy worker whose system starts no more threads for a moment."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvservice.copying.device import HostDevice, Segments
from kvservice.copying.message import Kind, pack_json
from kvservice.copying.worker.server import CopyWorker, CopyWorkerConfig
from kvservice.core.segment.geometry import plan_geometry
from kvservice.memory.segment import Segment
from kvservice.units import MiB, NodeId

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


@contextlib.contextmanager
def without_threads() -> Iterator[None]:
    threading.stack_size(1 << 46)  # that no system has memory for
    try:
        yield
    finally:
        threading.stack_size(0)


def open_files(path: Path) -> int:
    """How often this process has it open. A mapping counts too."""
    count = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one of the folder itself
            count += descriptor.readlink() == path
    return count


def test_without_threads_no_segment_stays_open() -> None:
    """It kept the memory of a pool, and that of each engine that left."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        path = Path(root, "segment")
        shard = Segment.create(path, plan_geometry(4 * MiB), "n")
        before, segments = open_files(path), Segments(HostDevice())
        with without_threads(), pytest.raises(RuntimeError, match="thread"):
            segments.take(str(path), shard.geometry, shard.epoch)
        assert open_files(path) == before
        taken = segments.take(str(path), shard.geometry, shard.epoch)
        with without_threads():
            segments.give(taken)
        assert open_files(path) == before
        shard.close()
