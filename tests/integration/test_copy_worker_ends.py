"""What a copy worker and an engine's link leave when they end, also when something fails on the way out."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvservice.copying.copies import HostCopies
from kvservice.copying.device import HOST, HostDevice, HostKV
from kvservice.copying.engine.link import KVOffer, WorkerLink
from kvservice.copying.worker.server import CopyWorker, CopyWorkerConfig
from kvservice.memory.segment import Segment
from kvservice.testing.eventually import eventually
from kvservice.units import NodeId
from tests.integration.test_copy_worker import Bench


class CopiesThatFailToClose(HostCopies):
    def close(self) -> None:
        raise RuntimeError("the device says no")


class DeviceThatFailsToClose(HostDevice):
    def copies(self, kv: object, segment: Segment) -> CopiesThatFailToClose:
        assert isinstance(kv, HostKV)
        return CopiesThatFailToClose(kv.shared, segment)


@pytest.fixture
def bench() -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="kvm-") as folder:
        made = Bench(Path(folder))
        yield made
        made.close()


def held_by_engines(bench: Bench) -> int:
    """How many files of the engine's memory and of the segment this process has open."""
    wanted = {os.fstat(descriptor).st_ino for descriptor in (bench.kv.descriptor, bench.segment.descriptor)}
    count = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one of the folder itself
            count += path.stat().st_ino in wanted
    return count


def test_what_fails_to_close_keeps_neither_lock_nor_memory(bench: Bench) -> None:
    """The shard never got the slots of such an engine back, and the engine's memory stayed until the worker ended."""
    server = CopyWorker(CopyWorkerConfig("s", NodeId("n"), bench.root), DeviceThatFailsToClose())
    server.start()
    try:
        before = held_by_engines(bench)
        bench.follow()
        assert not bench.is_free and held_by_engines(bench) > before
        bench.link.close()
        eventually(lambda: server.state()["engines"] == 0, "the session to end")
        assert bench.is_free
        eventually(lambda: held_by_engines(bench) == before, "the memory to be closed")
    finally:
        server.stop()


def test_closed_link_leaves_files_of_others_alone() -> None:
    """It closed, and wrote into, whatever file had got its numbers since."""
    link = WorkerLink(KVOffer(HOST, {}, {}))
    link.close()
    taken = [os.memfd_create(f"of-others-{number}") for number in range(64)]
    try:
        link.leave()
        link.close()
        assert [os.fstat(descriptor).st_size for descriptor in taken] == [0] * len(taken)
    finally:
        for descriptor in taken:
            os.close(descriptor)
