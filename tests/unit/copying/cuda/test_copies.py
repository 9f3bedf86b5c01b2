"""What the CUDA copy engine asks of the driver, with a driver whose device memory is host memory: every way of copying
puts the same bytes in the same places. Streams, events and the kernel itself need a GPU: tests/gpu."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvservice.copying import profiling
from kvservice.copying.cuda import copies as cuda_copies
from kvservice.copying.cuda.copies import DIRECT_BATCH_BYTES, CudaCopies, DirectCopies
from kvservice.copying.cuda.pinning import Pinning
from kvservice.copying.message import Direction
from kvservice.core.segment.copy_runs import CopyTemplate, DirectTemplate, RegionLayout
from kvservice.core.segment.geometry import plan_geometry
from kvservice.core.segment.layout import SlotLayout
from kvservice.errors import TransferError
from kvservice.units import MiB

LAYERS, BLOCKS, HEADS, TOKENS, CELL = 2, 6, 4, 16, 64
SLOT = SlotLayout(LAYERS, HEADS, TOKENS * CELL, TOKENS)
SIZES = {"l": LAYERS, "b": BLOCKS, "h": HEADS, "n": TOKENS}
GEOMETRY = plan_geometry(8 * MiB)


def region(order: str) -> RegionLayout:
    stride, step = {}, CELL
    for name in reversed(order):
        stride[name] = step
        step *= SIZES[name]
    offsets = tuple(layer * stride["l"] for layer in range(LAYERS))
    return RegionLayout(step, BLOCKS, offsets, 1, HEADS, TOKENS, CELL, stride["b"], 0, stride["h"], stride["n"])


class HostDriver:
    """Device memory is numpy's; streams and events are numbers."""

    def __init__(self, batch: bool) -> None:
        self.has_batch_copy = batch
        self.calls: list[str] = []
        self.buffers: dict[int, Any] = {}
        self.unawaited: set[int] = set()  # streams with work that no event was recorded after
        self.fail = False

    def bind(self) -> None:
        return

    def stream(self) -> int:
        return len(self.calls) + 1

    event = stream

    def destroy_stream(self, stream: int) -> None:
        return

    destroy_event = destroy_stream

    def allocate(self, byte_count: int) -> int:
        buffer = np.zeros(byte_count, np.uint8)
        self.buffers[buffer.ctypes.data] = buffer
        return int(buffer.ctypes.data)

    def free(self, pointer: int) -> None:
        del self.buffers[pointer]

    def copy(self, target: int, source: int, byte_count: int, stream: int) -> None:
        self.calls.append("copy")
        self.unawaited.add(stream)
        if self.fail:
            raise TransferError("told to")
        ctypes.memmove(target, source, byte_count)

    def copy_batch(self, targets: Any, sources: Any, lengths: Any, order: int, stream: int) -> None:
        for target, source, length in zip(targets.tolist(), sources.tolist(), lengths.tolist(), strict=True):
            self.copy(target, source, length, stream)
            self.calls.pop()
        self.calls.append("batch")

    def gather(self, targets: Any, sources: Any, lengths: Any, stream: int) -> None:
        self.copy_batch(targets, sources, lengths, 0, stream)
        self.calls[-1] = "gather"

    def record(self, event: int, stream: int) -> None:
        self.unawaited.discard(stream)

    def has_passed(self, event: int) -> bool:
        return True


@pytest.mark.parametrize("order", ["lbhn", "lbnh", "blhn", "blnh", "lhbn"])
@pytest.mark.parametrize("way", ["batch", "one by one", "gather", "gather without batch", "unpinned"])
def test_every_way_of_copying_moves_the_same_bytes(order: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They land in the same places."""
    monkeypatch.setattr(cuda_copies, "STAGING_BYTES", 2 * SLOT.payload_bytes)  # several rounds for four blocks
    layout = region(order)
    kv = np.random.default_rng(1).integers(0, 256, layout.region_bytes, np.uint8)
    segment = np.zeros(GEOMETRY.segment_bytes, np.uint8)
    driver = HostDriver(batch=way in ("batch", "gather", "unpinned"))
    gate = threading.Event()
    if way != "unpinned":
        gate.set()
    pinning = Pinning(0, GEOMETRY, lambda *_: None if gate.is_set() else fail(), lambda _: None)
    pinning._thread.join(10)
    gather = driver.gather if way.startswith("gather") else None
    copies = CudaCopies(driver, kv.ctypes.data, segment.ctypes.data, pinning, gather, small_run_bytes=1 << 30)  # type: ignore[arg-type]
    offsets = [GEOMETRY.payload_offset(slot, SLOT.payload_bytes) for slot in (3, 1, 2, 7)]  # type: ignore[arg-type]
    runs = CopyTemplate(layout, SLOT).expand([5, 0, 2, 1], offsets)
    copies.store(runs)
    logical = kv.reshape([SIZES[name] for name in order] + [CELL]).transpose([order.index(n) for n in "blhn"] + [4])
    for block, offset in zip((5, 0, 2, 1), offsets, strict=True):
        assert segment[offset : offset + SLOT.payload_bytes].tobytes() == logical[block].tobytes()
    before = kv.copy()
    kv[:] = 0
    copies.load(runs)
    back = kv.reshape([SIZES[name] for name in order] + [CELL]).transpose([order.index(n) for n in "blhn"] + [4])
    wanted = before.reshape([SIZES[name] for name in order] + [CELL]).transpose([order.index(n) for n in "blhn"] + [4])
    for block in range(BLOCKS):
        assert np.array_equal(back[block], wanted[block] if block in (5, 0, 2, 1) else np.zeros_like(back[block]))
    expected = {
        "batch": {"batch"},
        "gather": {"gather", "batch"},
        "gather without batch": {"gather", "copy"},
    }.get(way, {"copy"})
    assert set(driver.calls) == expected
    assert not driver.unawaited
    copies.close()
    assert not driver.buffers


def fail() -> None:
    raise TransferError("not pinned")


def test_failed_copy_ends_after_what_it_started_has_ended() -> None:
    layout = region("lbnh")
    kv = np.zeros(layout.region_bytes, np.uint8)
    segment = np.zeros(GEOMETRY.segment_bytes, np.uint8)
    driver = HostDriver(batch=False)
    pinning = Pinning(0, GEOMETRY, lambda *_: None, lambda _: None)
    copies = CudaCopies(driver, kv.ctypes.data, segment.ctypes.data, pinning, None)  # type: ignore[arg-type]
    driver.fail = True
    with pytest.raises(TransferError):
        copies.store(CopyTemplate(layout, SLOT).expand([0], [0]))
    assert not driver.unawaited


def test_profiler_sees_load_store_gather_and_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    ranges = SimpleNamespace(range_push=said.append, range_pop=lambda: said.append("end"))
    monkeypatch.setattr(profiling, "_nvtx", lambda: ranges)
    layout = region("lbnh")
    kv, segment = np.zeros(layout.region_bytes, np.uint8), np.zeros(GEOMETRY.segment_bytes, np.uint8)
    driver = HostDriver(batch=True)
    pinning = Pinning(0, GEOMETRY, lambda *_: None, lambda _: None)
    copies = CudaCopies(driver, kv.ctypes.data, segment.ctypes.data, pinning, driver.gather)  # type: ignore[arg-type]
    runs = CopyTemplate(layout, SLOT).expand([0], [0])
    copies.store(runs)
    copies.load(runs)
    inner = ["kvservice gather", "end", "end", "kvservice wait", "end"]
    assert said == ["kvservice store", *inner, "kvservice load", *inner]


def test_copies_under_way_have_an_event_each() -> None:
    """An event that is recorded again stands for later copies."""
    layout = region("blhn")
    kv, segment = np.zeros(layout.region_bytes, np.uint8), np.zeros(GEOMETRY.segment_bytes, np.uint8)
    driver = HostDriver(batch=True)
    made = iter(range(100, 200))
    driver.event = lambda: next(made)  # type: ignore[method-assign]
    recorded: list[int] = []
    driver.record = lambda event, stream: recorded.append(event)  # type: ignore[method-assign]
    pinning = Pinning(0, GEOMETRY, lambda *_: None, lambda _: None)
    copies = CudaCopies(driver, kv.ctypes.data, segment.ctypes.data, pinning, None)  # type: ignore[arg-type]
    runs = CopyTemplate(layout, SLOT).expand([0], [0])
    first, second = copies.start(Direction.STORE, runs), copies.start(Direction.STORE, runs)
    first.wait()
    third = copies.start(Direction.STORE, runs)
    for started in (second, third):
        started.wait()
    assert recorded == [100, 101, 100]


@pytest.mark.parametrize(("way", "token_bytes"), [("batch", DIRECT_BATCH_BYTES), ("gather", 64)])
def test_large_runs_between_engines_need_no_kernel(way: str, token_bytes: int) -> None:
    slot = SlotLayout(1, 1, token_bytes, 1)
    layout = RegionLayout(4 * token_bytes, 4, (0,), 1, 1, 1, token_bytes, token_bytes, 0, token_bytes, token_bytes)
    memory = np.zeros(2 * layout.region_bytes, np.uint8)
    driver = HostDriver(batch=True)
    address = memory.ctypes.data
    copies = DirectCopies(driver, address, address + layout.region_bytes, driver.gather)  # type: ignore[arg-type]
    template = CopyTemplate(layout, slot)
    copies.load(DirectTemplate(template, template).expand([0, 2], [0, 2]))
    assert driver.calls == [way]


@pytest.mark.parametrize("way", ["gather", "batch", "one by one"])
def test_direct_copy_is_the_lent_blocks_in_the_readers_layout(way: str) -> None:
    one, other = region("lbnh"), region("blhn")
    source = np.random.default_rng(1).integers(0, 256, one.region_bytes, np.uint8)
    target = np.zeros(other.region_bytes, np.uint8)
    driver = HostDriver(batch=way == "batch")
    gather = driver.gather if way == "gather" else None
    copies = DirectCopies(driver, target.ctypes.data, source.ctypes.data, gather)  # type: ignore[arg-type]
    copies.load(DirectTemplate(CopyTemplate(one, SLOT), CopyTemplate(other, SLOT)).expand([4, 1], [0, 5]))
    lent = source.reshape(LAYERS, BLOCKS, TOKENS, HEADS, CELL).transpose(1, 0, 3, 2, 4)
    found = target.reshape(BLOCKS, LAYERS, HEADS, TOKENS, CELL)
    assert np.array_equal(found[[0, 5]], lent[[4, 1]])
    assert not found[1:5].any()
    assert set(driver.calls) == {"copy" if way == "one by one" else way}
    assert not driver.unawaited
    copies.close()
