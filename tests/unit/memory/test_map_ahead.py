"""Pages that are mapped before they are needed: all of them, without changing a byte, and never after the mapping."""

from __future__ import annotations

import ctypes
import errno
import resource
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvservice.core.segment.geometry import PAGE_BYTES, plan_geometry
from kvservice.memory import map_ahead
from kvservice.memory.segment import Segment, segment_path
from kvservice.units import MiB

GEOMETRY = plan_geometry(24 * MiB)
FAR = GEOMETRY.segment_bytes - PAGE_BYTES  # where the last page begins


@pytest.fixture
def path() -> Iterator[Path]:
    made = segment_path(f"ahead{uuid.uuid4().hex[:8]}", "node", Path("/dev/shm"))
    yield made
    made.unlink(missing_ok=True)


@pytest.fixture
def segment(path: Path) -> Iterator[Segment]:
    made = Segment.create(path, GEOMETRY, "node")
    yield made
    made.close()


def mapped_bytes(path: Path) -> int:
    """What this process has mapped of the file."""
    found, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            is_ours = str(path) in line
        elif is_ours and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


def faults_of(segment: Segment) -> int:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for at in range(0, GEOMETRY.segment_bytes, PAGE_BYTES):
        segment.buffer[at] = segment.buffer[at]
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_what_is_mapped_ahead_needs_no_fault_later(segment: Segment) -> None:
    segment.buffer[FAR] = 7
    assert segment.map_ahead().wait(30.0)
    assert faults_of(segment) < 100 < GEOMETRY.segment_bytes // PAGE_BYTES
    assert segment.buffer[FAR] == 7
    assert segment.map_ahead() is segment.map_ahead(), "one pass is enough"


def test_without_it_each_page_is_a_fault(segment: Segment) -> None:
    assert faults_of(segment) > GEOMETRY.segment_bytes // PAGE_BYTES // 32  # a kernel may map some pages at a fault


def test_an_old_kernel_maps_pages_by_reading_them(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    class OldLibc:
        @staticmethod
        def madvise(*_: object) -> int:
            ctypes.set_errno(errno.EINVAL)
            return -1

    monkeypatch.setattr(map_ahead, "_LIBC", OldLibc)
    segment.buffer[FAR] = 7
    assert segment.map_ahead().wait(30.0)
    assert mapped_bytes(segment.path) >= GEOMETRY.segment_bytes and segment.buffer[FAR] == 7


def test_a_kernel_without_memory_for_it_ends_the_pass(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullLibc:
        @staticmethod
        def madvise(*_: object) -> int:
            ctypes.set_errno(errno.ENOMEM)
            return -1

    monkeypatch.setattr(map_ahead, "_LIBC", FullLibc)
    assert not segment.map_ahead().wait(30.0)


def test_an_engine_maps_only_so_much_of_a_large_pool(segment: Segment) -> None:
    attached = Segment.attach(segment.path, GEOMETRY)
    assert attached.map_ahead(5 * MiB).wait(30.0)
    assert attached.map_ahead().mapped_bytes == 5 * MiB
    attached.close()


def test_a_mapping_that_ends_ends_the_pass(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing touches the addresses afterwards: they may be somebody else's."""
    monkeypatch.setattr(map_ahead, "PIECE_BYTES", PAGE_BYTES)
    for _ in range(20):
        segment = Segment.create(path, GEOMETRY, "node")
        pages = segment.map_ahead()
        segment.close()
        assert not pages._thread.is_alive()
