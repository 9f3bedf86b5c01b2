"""Pinning a segment piece by piece: order, progress, failure half way, and everything undone."""

from __future__ import annotations

import threading

import pytest

from kvservice.copying.cuda.pinning import Pinning, PinningOnUse, pieces
from kvservice.core.segment.geometry import Geometry
from kvservice.errors import TransferError
from kvservice.testing.eventually import eventually
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


def test_progress_is_shown_and_undo_leaves_nothing_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvservice.copying.cuda.pinning.pieces", lambda geometry: pieces(geometry, 8 * MiB))
    driver = Driver()
    pinning = Pinning(BASE, GEOMETRY, driver.pin, driver.unpin)
    assert pinning.share == 0 and not pinning.covers(1)
    driver.gate.release()
    eventually(lambda: pinning.share, "the first piece pinned")
    end = GEOMETRY.slab_offset(2)
    assert pinning.covers(end) and not pinning.covers(end + 1)
    assert pinning.share == end / GEOMETRY.segment_bytes
    for _ in range(9):
        driver.gate.release()
    eventually(lambda: pinning.share == 1, "every piece pinned")
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


def test_piece_that_cannot_be_unpinned_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps no other piece from being unpinned."""
    monkeypatch.setattr("kvservice.copying.cuda.pinning.pieces", lambda geometry: pieces(geometry, 8 * MiB))
    driver = Driver()
    for _ in range(len(list(pieces(GEOMETRY, 8 * MiB)))):
        driver.gate.release()
    tried = []

    def unpin(address: int) -> None:
        tried.append(address)
        if len(tried) == 2:
            raise TransferError("the context is dead")
        driver.unpin(address)

    pinning = Pinning(BASE, GEOMETRY, driver.pin, unpin)
    pinning._thread.join(10)
    pinning.undo()
    assert tried == sorted(tried) and len(tried) == 5
    assert len(driver.pinned) == pinning.unpin_failures == 1


def test_error_that_is_not_ours_leaves_the_rest_unpinned() -> None:
    """Torch's binding raises what it likes; the thread must end as with a driver that refuses."""

    def pin(address: int, byte_count: int) -> None:
        raise TypeError("int() argument must be ...")

    pinning = Pinning(BASE, GEOMETRY, pin, lambda address: None)
    pinning._thread.join(10)
    assert pinning.share == 0
    pinning.undo()


class Watch:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_fallback_pins_only_after_copies_ran_for_a_while() -> None:
    clock, begun = Watch(), []

    def begin() -> Pinning:
        begun.append(clock.now)
        return Pinning(BASE, GEOMETRY, lambda *_: None, lambda _: None)

    pinning = PinningOnUse(begin, 5.0, clock)
    pinning.used()  # before the worker was there
    for _ in range(2):
        clock.now += 60  # a worker has had all copies
        pinning.used()
        clock.now += 4
        pinning.used()
        assert begun == [], "the worker is being replaced"
    clock.now += 2
    pinning.used()
    pinning.used()
    assert begun == [230.0]
    pinning.undo()
    pinning.undo()


def test_without_a_worker_the_first_copy_begins_the_pinning() -> None:
    begun = []

    def begin() -> Pinning:
        begun.append(1)
        return Pinning(BASE, GEOMETRY, lambda *_: None, lambda _: None)

    pinning = PinningOnUse(begin, 0.0)
    assert begun == []
    pinning.used()
    assert begun == [1]
    pinning.undo()
