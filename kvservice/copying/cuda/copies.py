"""The copy engine of one engine and one segment on a GPU. It has not run on a GPU yet.

Large runs are copied by one `cuMemcpyBatchAsync`, or by a `cuMemcpyAsync` each if the driver is older or the host
memory is not pinned yet. Small runs (a layout that separates the tokens of one head) are gathered by a kernel into a
buffer on the GPU, in the order of the slots, and a few large copies take that across; loads go the other way. Each
direction has its own stream. Ends are polled; the device is never synchronised as a whole.

Copies by the GPU's copy engines run beside the engine's kernels. The gather kernel does not: kernels of two processes
take turns, whatever the priority of their streams. What that costs an engine has not been measured.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from kvservice.copying.cuda.driver import ORDER_ANY, ORDER_STREAM, Driver
from kvservice.copying.cuda.pinning import Pinning
from kvservice.copying.message import Direction
from kvservice.core.segment.copy_runs import Descriptors, Offsets, through_staging
from kvservice.errors import TransferError
from kvservice.units import KiB, MiB

log = logging.getLogger("kvservice.copying")

# If the mean run is shorter than this, the kernel is used. It is a guess, to be replaced by what
# benchmarks/gpu_copies.py measures.
SMALL_RUN_BYTES = 8 * KiB
# The buffer on the GPU of each direction. Larger jobs go through it in rounds; it is small beside the GPU's memory.
STAGING_BYTES = 64 * MiB
WORD_BYTES = 4  # the kernel moves words of this size; other runs are copied one by one
POLL_SECONDS = 50e-6  # Between two looks at a copy's end: short beside a copy of a block, which takes some 100 µs.

# (targets, sources, lengths in bytes, stream), each array `(runs,)` uint64: moves runs within the device's memory, in
# stream order.
Gather: TypeAlias = Callable[[Offsets, Offsets, Offsets, int], None]


class _DirectionState:
    """What one direction owns. One thread uses it at a time."""

    def __init__(self, driver: Driver) -> None:
        self.stream = driver.stream()
        self.event = driver.event()
        self.staging = 0  # device address of the buffer, allocated when first needed


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
        self._ways = {direction: _DirectionState(driver) for direction in Direction}
        self._lock = threading.Lock()

    def load(self, runs: Descriptors) -> None:
        self._copy(Direction.LOAD, runs)

    def store(self, runs: Descriptors) -> None:
        self._copy(Direction.STORE, runs)

    def close(self) -> None:
        # the context may be unusable, because the process is about to be replaced
        with contextlib.suppress(TransferError):
            self._driver.bind()
            for way in self._ways.values():
                self._driver.destroy_event(way.event)
                self._driver.destroy_stream(way.stream)
                if way.staging:
                    self._driver.free(way.staging)

    def _copy(self, direction: Direction, runs: Descriptors) -> None:
        if runs.lengths.size == 0:
            return
        self._driver.bind()
        way = self._ways[direction]
        try:
            if self._should_gather(runs):
                self._copy_staged(direction, way, runs)
            else:
                self._across(direction, way, self._kv + runs.engine, runs)
        finally:
            self._await(way)  # also after an error: no copy may run on after its job was reported as ended

    def _should_gather(self, runs: Descriptors) -> bool:
        mean = runs.byte_count / runs.lengths.size
        words = not np.any((runs.lengths | runs.engine | self._kv) % WORD_BYTES)
        return self._gather is not None and words and mean < self._small and int(runs.lengths.max()) <= STAGING_BYTES

    def _copy_staged(self, direction: Direction, way: _DirectionState, runs: Descriptors) -> None:
        assert self._gather is not None
        if not way.staging:
            way.staging = self._driver.allocate(STAGING_BYTES)
        for gathered, carried in through_staging(runs, STAGING_BYTES):
            # Stream order keeps the next round from using the buffer before this round has left it.
            blocks, staged = self._kv + gathered.engine, way.staging + gathered.segment
            if direction is Direction.STORE:
                self._gather(staged, blocks, gathered.lengths, way.stream)
                self._across(direction, way, way.staging + carried.engine, carried)
            else:
                self._across(direction, way, way.staging + carried.engine, carried)
                self._gather(blocks, staged, gathered.lengths, way.stream)

    def _across(self, direction: Direction, way: _DirectionState, device: Offsets, runs: Descriptors) -> None:
        """Copy between these device addresses, `(runs,)` uint64, and the segment."""
        host = self._segment + runs.segment
        targets, sources = (device, host) if direction is Direction.LOAD else (host, device)
        if self._driver.has_batch_copy and self._pinning.covers(int((runs.segment + runs.lengths).max())):
            # A load reads a sealed slot, which does not change. A store may read what the gather kernel writes.
            order = ORDER_ANY if direction is Direction.LOAD else ORDER_STREAM
            to, come_from, sizes = (array.astype(np.uint64) for array in (targets, sources, runs.lengths))
            self._driver.copy_batch(to, come_from, sizes, order, way.stream)
            return
        for target, source, length in zip(targets.tolist(), sources.tolist(), runs.lengths.tolist(), strict=True):
            self._driver.copy(target, source, length, way.stream)

    def _await(self, way: _DirectionState) -> None:
        _await(self._driver, way)


class DirectCopies:
    """Copies from one engine's memory to another's on the GPUs of this node; both are opened here. Uses the kernel if
    it can, for runs of any size, else a batched copy or one copy per run."""

    def __init__(self, driver: Driver, target: int, source: int, gather: Gather | None) -> None:
        self._driver = driver
        self._target, self._source = target, source
        self._gather = gather
        driver.bind()
        self._way = _DirectionState(driver)

    def load(self, runs: Descriptors) -> None:
        if runs.lengths.size == 0:
            return
        self._driver.bind()
        targets, sources, stream = self._target + runs.engine, self._source + runs.segment, self._way.stream
        try:
            if self._gather is not None and not np.any((targets | sources | runs.lengths) % WORD_BYTES):
                self._gather(targets, sources, runs.lengths, stream)
            elif self._driver.has_batch_copy:
                to, come_from, sizes = (array.astype(np.uint64) for array in (targets, sources, runs.lengths))
                self._driver.copy_batch(to, come_from, sizes, ORDER_STREAM, stream)
            else:
                for target, source, size in zip(targets.tolist(), sources.tolist(), runs.lengths.tolist(), strict=True):
                    self._driver.copy(target, source, size, stream)
        finally:
            _await(self._driver, self._way)

    def store(self, runs: Descriptors) -> None:
        raise NotImplementedError("engines read each other's blocks and never write them")

    def close(self) -> None:
        with contextlib.suppress(TransferError):
            self._driver.bind()
            self._driver.destroy_event(self._way.event)
            self._driver.destroy_stream(self._way.stream)


def _await(driver: Driver, way: _DirectionState) -> None:
    driver.record(way.event, way.stream)
    while not driver.has_passed(way.event):
        time.sleep(POLL_SECONDS)


def gather_launcher(driver: Driver) -> Gather | None:
    """The compiled Triton kernel. None if it cannot be used; runs are then copied one by one."""
    try:
        from kvservice.copying.cuda.gather_kernel import launcher  # imports torch and Triton, which takes seconds

        return launcher(driver.uuid)
    except Exception as error:  # noqa: BLE001  a probe: Triton fails in ways of its own, without a compiler for example
        log.warning("there is no gather kernel, so small runs are copied one by one: %s", error)
        return None
