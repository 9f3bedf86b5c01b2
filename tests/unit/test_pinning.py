"""Pinning a segment piece by piece: order, progress, failure half way, and everything undone."""

from __future__ import annotations

import threading

import pytest

from kvservice.core.geometry import Geometry
from kvservice.errors import TransferError
from kvservice.mover.pinning import Pinning, pieces
from kvservice.units import MiB

GEOMETRY = Geometry(slab_bytes=4 * MiB, slab_count=10)
BASE = 1 << 40


@pytest.mark.parametrize("piece_bytes", [1, 4 * MiB, 12 * MiB, 1 << 40])
def test_pieces_cover_the_segment_and_end_with_slabs(piece_bytes: int) -> None:
    found = list(pieces(GEOMETRY, piece_bytes))
    assert [offset for offset, _ in found] == [0, *(offset + size for offset, size in found)][:-1]
    assert sum(size for _, size in found) == GEOMETRY.segment_bytes
    ends = {GEOMETRY.slab_offset(slab) for slab in range(1, GEOMETRY.slab_count + 1)}
    assert all(offset + size in ends for offset, size in found)


class Driver:
    """Remembers what is pinned; `fail_at` is the call that fails, `gate` holds each call back."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.pinned: dict[int, int] = {}
        self.gate = threading.Semaphore(0)
        self.fail_at = fail_at

    def pin(self, address: int, byte_count: int) -> None:
        assert self.gate.acquire(timeout=10)
        if len(self.pinned) == self.fail_at:
            raise TransferError("no more")
        self.pinned[address] = byte_count

    def unpin(self, address: int) -> None:
        del self.pinned[address]


def test_progress_is_shown_while_it_runs_and_undo_leaves_nothing_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvservice.mover.pinning.pieces", lambda geometry: pieces(geometry, 8 * MiB))
    driver = Driver()
    pinning = Pinning(BASE, GEOMETRY, driver.pin, driver.unpin)
    assert pinning.share == 0 and not pinning.covers(1)
    driver.gate.release()
    while not pinning.share:
        threading.Event().wait(0.005)
    end = GEOMETRY.slab_offset(2)
    assert pinning.covers(end) and not pinning.covers(end + 1)
    assert pinning.share == end / GEOMETRY.segment_bytes
    for _ in range(9):
        driver.gate.release()
    while pinning.share < 1:
        threading.Event().wait(0.005)
    assert pinning.covers(GEOMETRY.segment_bytes)
    pinning.undo()
    assert driver.pinned == {} and pinning.share == 0


def test_what_was_pinned_before_a_failure_stays_usable() -> None:
    driver = Driver(fail_at=0)
    driver.gate.release()
    pinning = Pinning(BASE, GEOMETRY, driver.pin, driver.unpin)
    pinning._thread.join(10)
    assert not pinning.covers(1)
    pinning.undo()
    assert driver.pinned == {}
