"""What a reader of slots has after it has ended its window."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvservice.core.segment.geometry import plan_geometry, slot_index
from kvservice.errors import SegmentError
from kvservice.memory import window
from kvservice.memory.segment import Segment
from kvservice.testing.unique import unique_name
from kvservice.units import MiB, SlotIndex

ROOM = 20  # mappings that are left: fewer than the window has pieces
MAPPINGS = 10  # of a window that has ended


def give_back(addresses: list[int]) -> None:
    for address in addresses:
        window._LIBC.munmap(address, mmap.PAGESIZE)


def opened_on(path: str) -> tuple[Segment, list[SlotIndex], window.ReadWindow]:
    """A window of 62 MiB over the slots of a new segment."""
    segment = Segment.create(Path(path), plan_geometry(66 * MiB, 64 * MiB), "n0")
    slots = [slot_index(0, index) for index in range(segment.geometry.slots_per_slab(MiB))]
    for slot in slots:
        segment.payload(slot, MiB)[:] = b"\x01" * MiB
    return segment, slots, window.ReadWindow(segment, slots, MiB)


def check_shows_no_slot(array: np.ndarray[Any, Any], segment: Segment, slots: list[SlotIndex]) -> None:
    """The array of a window that has ended, when other blocks come into its slots."""
    for slot in slots:
        segment.payload(slot, MiB)[:] = b"\x02" * MiB
    assert (array == 0xFF).all()


def end_a_window_without_mappings(path: str) -> None:
    """In a process of its own, which cannot do anything else meanwhile."""
    segment, slots, opened = opened_on(path)
    array = np.frombuffer(opened.buffer, np.uint8)
    taken, descriptor = [], os.memfd_create("page")
    os.ftruncate(descriptor, mmap.PAGESIZE)
    with contextlib.suppress(SegmentError):
        while True:
            taken.append(window._map(None, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0))
    give_back(taken[-ROOM:])
    opened.close()
    give_back(taken[:-ROOM])  # numpy needs some
    check_shows_no_slot(array, segment, slots)


def end_a_window_without_files(path: str) -> None:
    """Closing it raised OSError, and the array went on to show the slots."""
    segment, slots, opened = opened_on(path)
    array = np.frombuffer(opened.buffer, np.uint8)
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, allowed[1]))
    opened.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
    check_shows_no_slot(array, segment, slots)


def count_mappings(path: str) -> None:
    """Each MiB took one. A process with arrays of 64 GiB that had ended could not start a thread any more."""
    _, _, opened = opened_on(path)
    array = np.frombuffer(opened.buffer, np.uint8)
    opened.close()
    begin = array.ctypes.data
    rows = [line.split("-")[0] for line in Path("/proc/self/maps").read_text().splitlines()]
    assert sum(begin <= int(row, 16) < begin + array.nbytes for row in rows) <= MAPPINGS
    assert (array == 0xFF).all()


def drop_the_array_as_the_window_ends(path: str) -> None:
    """As another thread may. What was mapped next at these addresses had all bits set."""
    _, _, opened = opened_on(path)
    arrays, ended = [np.frombuffer(opened.buffer, np.uint8)], window._ended

    def dropped(wanted: int) -> tuple[int, int]:
        arrays.clear()
        return ended(wanted)

    window._ended = dropped
    opened.close()
    assert "kvservice-ended" not in Path("/proc/self/maps").read_text()


def end_a_window_amid_the_end_of_another(path: str) -> None:
    """As a signal's handler may, or the garbage collector. The thread waited for itself for ever."""
    segment, slots, opened = opened_on(path)
    other, write = window.ReadWindow(segment, slots, MiB), os.pwrite
    arrays = [np.frombuffer(each.buffer, np.uint8) for each in (opened, other)]
    signal.signal(signal.SIGUSR1, lambda *_: other.close())

    def interrupted(*arguments: Any) -> int:
        signal.raise_signal(signal.SIGUSR1)
        return write(*arguments)

    os.pwrite = interrupted
    opened.close()
    for array in arrays:
        check_shows_no_slot(array, segment, slots)


@pytest.mark.parametrize("end", [end_a_window_without_mappings, end_a_window_without_files])
def test_a_window_ends_where_the_kernel_gives_no_more(end: Callable[[str], None]) -> None:
    run_apart(end)


def test_an_ended_window_takes_few_mappings() -> None:
    run_apart(count_mappings)


def test_an_array_dropped_as_its_window_ends_leaves_no_mapping() -> None:
    run_apart(drop_the_array_as_the_window_ends)


def test_a_window_may_end_amid_the_end_of_another() -> None:
    run_apart(end_a_window_amid_the_end_of_another)


def run_apart(work: Callable[[str], None]) -> None:
    path = f"/dev/shm/kvservice-window{unique_name()}-n0"
    code = f"from {__name__} import {work.__name__} as end; end({path!r})"
    try:
        ended = subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parents[3], capture_output=True, timeout=60, check=False
        )
    finally:
        Path(path).unlink(missing_ok=True)
    assert ended.returncode == 0, ended.stderr.decode()
