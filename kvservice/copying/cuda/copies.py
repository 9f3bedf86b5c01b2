"""The copy engine of one engine and one segment on a GPU.

Large runs are copied by one `cuMemcpyBatchAsync`, or by a `cuMemcpyAsync` each if the driver is older or the host
memory is not pinned yet. Small runs (a layout that separates the tokens of one head) are gathered by a kernel into a
buffer on the GPU, in the order of the slots, and a few large copies take that across; loads go the other way. Each
direction has its own stream. Ends are polled; the device is never synchronised as a whole.

Copies by the GPU's copy engines run beside the engine's kernels. The gather kernel does not: kernels of two processes
take turns, whatever the priority of their streams. On an H200 the median step of an engine does not notice, and the
slowest of a hundred takes up to half as long again.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np

from kvservice.copying.copies import AlreadyEnded, StartedCopies
from kvservice.copying.cuda.driver import ORDER_ANY, ORDER_STREAM, Driver
from kvservice.copying.cuda.pinning import Pinning
from kvservice.copying.message import Direction
from kvservice.copying.profiling import profiled
from kvservice.core.segment.copy_runs import Descriptors, Offsets, through_staging
from kvservice.errors import TransferError
from kvservice.units import KiB, MiB

log = logging.getLogger("kvservice.copying")

# If the mean run is shorter than this, the kernel is used. On an H200, a batch of 16 KiB runs reaches 7 % of the bus
# and the kernel 97 %; from 64 KiB on a batch reaches 70 %, and it takes nothing from an engine.
SMALL_RUN_BYTES = 64 * KiB
# From this mean on, copies between two engines' memories are one batch, which takes nothing from the multiprocessors.
# Below it, starting so many copies costs more than the kernel, which moves ten times as much at 256 KiB.
DIRECT_BATCH_BYTES = 2 * MiB
# The buffer on the GPU of each direction. Larger jobs go through it in rounds; no engine's memory budget knows of it.
STAGING_BYTES = 16 * MiB
WORD_BYTES = 4  # the kernel moves words of this size; other runs are copied one by one
POLL_SECONDS = 50e-6  # Between two looks at a copy's end: short beside a copy of a block, which takes some 100 µs.

# (targets, sources, lengths in bytes, stream), each array `(runs,)` uint64: moves runs within the device's memory, in
# stream order.
Gather: TypeAlias = Callable[[Offsets, Offsets, Offsets, int], None]


def start_across(
    driver: Driver,
    direction: Direction,
    device: Offsets,
    host: Offsets,
    lengths: Offsets,
    stream: int,
    *,
    is_pinned: bool,
) -> None:
    """Start copies between these addresses of the device and of host memory, each `(runs,)`, on this stream: as one
    batch, if the driver has that and all of the host memory is pinned, else one by one. Raises TransferError."""
    targets, sources = (device, host) if direction is Direction.LOAD else (host, device)
    if driver.has_batch_copy and is_pinned:
        # A load reads a sealed slot, which does not change. A store may read what an earlier kernel writes.
        order = ORDER_ANY if direction is Direction.LOAD else ORDER_STREAM
        _start_batch(driver, targets, sources, lengths, order, stream)
    else:
        _start_each(driver, targets, sources, lengths, stream)


def _start_batch(driver: Driver, targets: Offsets, sources: Offsets, lengths: Offsets, order: int, stream: int) -> None:
    to, come_from, sizes = (array.astype(np.uint64) for array in (targets, sources, lengths))
    driver.copy_batch(to, come_from, sizes, order, stream)


def _start_each(driver: Driver, targets: Offsets, sources: Offsets, lengths: Offsets, stream: int) -> None:
    for target, source, length in zip(targets.tolist(), sources.tolist(), lengths.tolist(), strict=True):
        driver.copy(target, source, length, stream)


class _Way:
    """What one direction owns. One thread uses it at a time."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.stream = driver.stream()
        self.events: list[int] = []  # that nobody waits for
        self.staging = 0  # device address of the buffer, allocated when first needed

    def close(self) -> None:
        for event in self.events:
            self.driver.destroy_event(event)
        self.driver.destroy_stream(self.stream)
        if self.staging:
            self.driver.free(self.staging)


class OnStream:
    """Copies on the stream of a direction: they have ended when the event behind them has passed."""

    def __init__(self, way: _Way) -> None:
        self._way = way
        self._event = way.events.pop() if way.events else way.driver.event()
        way.driver.record(self._event, way.stream)

    def wait(self) -> None:
        driver = self._way.driver
        driver.bind()
        with profiled("wait"):
            while not driver.has_passed(self._event):
                time.sleep(POLL_SECONDS)
        self._way.events.append(self._event)  # only now: recorded again, it would stand for other copies


class CudaCopies:
    def __init__(
        self,
        driver: Driver,
        kv_address: int,
        segment_address: int,
        pinning: Pinning,
        gather: Gather | None,
        small_run_bytes: int = SMALL_RUN_BYTES,
    ) -> None:
        self._driver = driver
        self._kv = kv_address
        self._segment = segment_address
        self._pinning = pinning
        self._gather = gather
        self._small = small_run_bytes
        driver.bind()
        self._ways = {direction: _Way(driver) for direction in Direction}

    def start(self, direction: Direction, runs: Descriptors) -> StartedCopies:
        if runs.lengths.size == 0:
            return AlreadyEnded()
        self._driver.bind()
        way = self._ways[direction]
        with _nothing_runs_on(way), profiled(direction.name.lower()):
            if self._should_gather(runs):
                self._start_staged(direction, way, runs)
            else:
                self._start_across(direction, way, self._kv + runs.engine, runs)
        return OnStream(way)

    def load(self, runs: Descriptors) -> None:
        self.start(Direction.LOAD, runs).wait()

    def store(self, runs: Descriptors) -> None:
        self.start(Direction.STORE, runs).wait()

    def close(self) -> None:
        # the context may be unusable, because the process is about to be replaced
        with contextlib.suppress(TransferError):
            self._driver.bind()
            for way in self._ways.values():
                way.close()

    def _should_gather(self, runs: Descriptors) -> bool:
        mean = runs.byte_count / runs.lengths.size
        words = not np.any((runs.lengths | runs.engine | self._kv) % WORD_BYTES)
        return self._gather is not None and words and mean < self._small and int(runs.lengths.max()) <= STAGING_BYTES

    def _start_staged(self, direction: Direction, way: _Way, runs: Descriptors) -> None:
        assert self._gather is not None
        if not way.staging:
            way.staging = self._driver.allocate(STAGING_BYTES)
        for gathered, carried in through_staging(runs, STAGING_BYTES):
            # Stream order keeps the next round, and the next copies, from using the buffer before this round has left.
            blocks, staged = self._kv + gathered.engine, way.staging + gathered.segment
            if direction is Direction.STORE:
                self._start_gather(staged, blocks, gathered.lengths, way.stream)
                self._start_across(direction, way, way.staging + carried.engine, carried)
            else:
                self._start_across(direction, way, way.staging + carried.engine, carried)
                self._start_gather(blocks, staged, gathered.lengths, way.stream)

    def _start_gather(self, targets: Offsets, sources: Offsets, lengths: Offsets, stream: int) -> None:
        assert self._gather is not None
        with profiled("gather"):
            self._gather(targets, sources, lengths, stream)

    def _start_across(self, direction: Direction, way: _Way, device: Offsets, runs: Descriptors) -> None:
        """Copy between these device addresses, `(runs,)`, and the segment."""
        is_pinned = self._pinning.covers(int((runs.segment + runs.lengths).max()))
        host = self._segment + runs.segment
        start_across(self._driver, direction, device, host, runs.lengths, way.stream, is_pinned=is_pinned)


class DirectCopies:
    """Copies from one engine's memory to another's on the GPUs of this node; both are opened here. The kernel moves
    small runs, a batched copy large ones; without either each run is a copy."""

    def __init__(self, driver: Driver, target: int, source: int, gather: Gather | None) -> None:
        self._driver = driver
        self._target, self._source = target, source
        self._gather = gather
        driver.bind()
        self._way = _Way(driver)

    def start(self, direction: Direction, runs: Descriptors) -> StartedCopies:
        assert direction is Direction.LOAD, "engines read each other's blocks and never write them"
        if runs.lengths.size == 0:
            return AlreadyEnded()
        driver, stream = self._driver, self._way.stream
        driver.bind()
        targets, sources, lengths = self._target + runs.engine, self._source + runs.segment, runs.lengths
        is_large = runs.byte_count >= DIRECT_BATCH_BYTES * lengths.size and driver.has_batch_copy
        with _nothing_runs_on(self._way), profiled("load from an engine"):
            if self._gather is not None and not is_large and not np.any((targets | sources | lengths) % WORD_BYTES):
                self._gather(targets, sources, lengths, stream)
            elif driver.has_batch_copy:
                _start_batch(driver, targets, sources, lengths, ORDER_STREAM, stream)
            else:
                _start_each(driver, targets, sources, lengths, stream)
        return OnStream(self._way)

    def load(self, runs: Descriptors) -> None:
        self.start(Direction.LOAD, runs).wait()

    def close(self) -> None:
        with contextlib.suppress(TransferError):
            self._driver.bind()
            self._way.close()


@contextlib.contextmanager
def _nothing_runs_on(way: _Way) -> Iterator[None]:
    """After an error, wait for what was started: no copy may run after its job was reported as ended."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(TransferError):  # it would hide the error that mattered
            OnStream(way).wait()
        raise


def gather_launcher(driver: Driver) -> Gather | None:
    """The compiled Triton kernel. None if it cannot be used; runs are then copied one by one."""
    try:
        from kvservice.copying.cuda.gather_kernel import launcher  # imports torch and Triton, which takes seconds

        return launcher(driver.uuid)
    except Exception as error:  # noqa: BLE001  a probe: Triton fails in ways of its own, without a compiler for example
        log.warning("there is no gather kernel, so small runs are copied one by one: %s", error)
        return None
