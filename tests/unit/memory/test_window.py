"""What a reader of slots has after it has ended its window."""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np

from kvservice.core.segment.geometry import plan_geometry, slot_index
from kvservice.errors import SegmentError
from kvservice.memory import window
from kvservice.memory.segment import Segment
from kvservice.units import MiB

ROOM = 20  # mappings that are left: fewer than the window has pieces


def give_back(addresses: list[int]) -> None:
    for address in addresses:
        window._LIBC.munmap(address, mmap.PAGESIZE)


def end_a_window_without_mappings(path: str) -> None:
    """In a process of its own, which cannot do anything else meanwhile."""
    segment = Segment.create(Path(path), plan_geometry(66 * MiB, 64 * MiB), "n0")
    slots = [slot_index(0, index) for index in range(segment.geometry.slots_per_slab(MiB))]
    for slot in slots:
        segment.payload(slot, MiB)[:] = b"\x01" * MiB
    opened = window.ReadWindow(segment, slots, MiB)
    array = np.frombuffer(opened.buffer, np.uint8)
    taken, descriptor = [], os.memfd_create("page")
    os.ftruncate(descriptor, mmap.PAGESIZE)
    with contextlib.suppress(SegmentError):
        while True:
            taken.append(window._map(None, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0))
    give_back(taken[-ROOM:])
    opened.close()
    give_back(taken[:-ROOM])  # numpy needs some
    for slot in slots:
        segment.payload(slot, MiB)[:] = b"\x02" * MiB
    assert (array == 0xFF).all()


def test_a_window_ends_where_no_more_can_be_mapped() -> None:
    path = f"/dev/shm/kvservice-window{uuid.uuid4().hex[:6]}-n0"
    code = f"from {__name__} import end_a_window_without_mappings as end; end({path!r})"
    try:
        ended = subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parents[3], capture_output=True, timeout=60, check=False
        )
    finally:
        Path(path).unlink(missing_ok=True)
    assert ended.returncode == 0, ended.stderr.decode()
