"""Where the copies of layers run while the forward computes: one thread on a CPU, one stream on a GPU.

A job is some blocks in one direction, copied layer by layer. Loads of a forward go before saves.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from kvservice.connector.layerwise.copies import BlockRun, LayerCopy
from kvservice.connector.worker.copier import NO_DIGESTS
from kvservice.copying.message import Direction

log = logging.getLogger("kvservice.connector")

LAYERS_AHEAD = 2  # copied while one layer is computed
WAKE_SECONDS = 1.0  # a copy thread that died is noticed so late


class LayerJob:
    """Some blocks, layer by layer in one direction. A Ticket. Fields belong to the lane once it has the job."""

    borrowed = 0  # always from slots
    digests = NO_DIGESTS  # a layer is a part of each slot

    def __init__(self, direction: Direction, runs: Sequence[BlockRun], via: LayerCopy, layer_count: int) -> None:
        self.direction = direction
        self.runs = runs
        self.via = via
        self.layer_count = layer_count
        self.copied = 0  # layers
        self.failed = False
        self.ended = threading.Event()
        self.mark: Any = None  # CUDA: event after its last copy

    def copy(self, layer: int) -> None:
        """Errors fail the job, not the thread; its other layers are then skipped."""
        try:
            if not self.failed:
                self.via.copy(self.direction, layer, self.runs)
        except Exception:  # boundary of the copy thread: the job is reported as failed
            log.warning("copying a layer failed", exc_info=True)
            self.failed = True
        self.copied += 1
        if self.copied == self.layer_count:
            self.ended.set()

    def query(self) -> bool:
        return self.ended.is_set() and (self.mark is None or bool(self.mark.query()))

    def synchronize(self) -> None:
        self.ended.wait()
        if self.mark is not None:
            self.mark.synchronize()

    def succeeded(self) -> bool:
        return not self.failed and self.copied == self.layer_count


class LayerLane(Protocol):
    """Where layers are copied. Used by the worker's main thread only."""

    def begin_loads(self, jobs: Sequence[LayerJob]) -> None:
        """Of one forward, which has not begun. Starts with the first layers."""
        ...

    def wait_layer(self, layer: int) -> None:
        """The forward is about to read this layer. Blocks until it is there; on CUDA the stream does."""
        ...

    def end_loads(self) -> None:
        """The forward has ended. Blocks until nothing is copied for it any more."""
        ...

    def save_layer(self, job: LayerJob, layer: int) -> None:
        """The forward has written this layer. Does not block; each layer of a job once."""
        ...

    def close(self) -> None:
        """Copies what is left, and ends."""
        ...


class ThreadLane:
    """One thread, started with the first copy. At most LAYERS_AHEAD layers are copied beyond the one computed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._loads: list[LayerJob] = []
        self._layer_count = 0
        self._next = 0  # the layer to copy next
        self._done = 0  # layers whose copies have ended
        self._allowed = 0  # layers that may be copied by now
        self._saves: deque[tuple[LayerJob, int]] = deque()
        self._closing = False
        self._thread: threading.Thread | None = None

    def begin_loads(self, jobs: Sequence[LayerJob]) -> None:
        with self._changed:
            assert not self._loads, "the loads of an earlier forward have not ended"
            self._start()
            self._loads = list(jobs)
            self._layer_count = jobs[0].layer_count if jobs else 0
            self._next = self._done = 0
            self._allowed = LAYERS_AHEAD

    def wait_layer(self, layer: int) -> None:
        with self._changed:
            if not self._loads:
                return
            self._allow(layer + 1 + LAYERS_AHEAD)
            self._wait_for(lambda: self._done > layer)

    def end_loads(self) -> None:
        with self._changed:
            if self._loads:
                self._allow(self._layer_count)
                self._wait_for(lambda: self._done >= self._layer_count)
                self._loads = []

    def save_layer(self, job: LayerJob, layer: int) -> None:
        with self._changed:
            self._start()
            self._saves.append((job, layer))

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    # -- inside, under the condition ----

    def _start(self) -> None:
        """Wake the thread, which finds what is added before the lock is let go. If there can be none, nothing may be
        added: it would be copied later, into what is somebody else's by then."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="kvservice-layers", daemon=True)
            thread.start()
            self._thread = thread
        self._changed.notify_all()

    def _allow(self, layers: int) -> None:
        if layers > self._allowed:
            self._allowed = layers
            self._changed.notify_all()

    def _wait_for(self, done: Callable[[], bool]) -> None:
        while not self._changed.wait_for(done, WAKE_SECONDS):
            if self._thread is None or not self._thread.is_alive():
                for job in self._loads:
                    job.failed = True
                self._done = self._layer_count
                return

    # -- the thread ----

    def _run(self) -> None:
        while (work := self._take()) is not None:
            jobs, layer, is_load = work
            for job in jobs:
                job.copy(layer)
            if is_load:
                with self._changed:
                    self._done = layer + 1
                    self._changed.notify_all()

    def _take(self) -> tuple[list[LayerJob], int, bool] | None:
        with self._changed:
            while True:
                if self._loads and self._next < min(self._allowed, self._layer_count):
                    self._next += 1
                    return self._loads, self._next - 1, True
                if self._saves:
                    job, layer = self._saves.popleft()
                    return [job], layer, False
                if self._closing:
                    return None
                self._changed.wait()


class StreamLane:
    """Copies on a CUDA stream of their own, ordered against the engine's stream by events; no thread waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._loads: list[LayerJob] = []
        self._events: list[torch.cuda.Event] = []  # per layer

    def begin_loads(self, jobs: Sequence[LayerJob]) -> None:
        self._loads, self._events = list(jobs), []
        self._after_engine()  # an earlier forward may still read these blocks
        self._enqueue(LAYERS_AHEAD)

    def wait_layer(self, layer: int) -> None:
        if self._loads:
            self._enqueue(layer + 1 + LAYERS_AHEAD)
            torch.cuda.current_stream(self._device).wait_event(self._events[layer])

    def end_loads(self) -> None:
        if self._loads:
            self._enqueue(self._loads[0].layer_count)
            self._events[-1].synchronize()
            self._loads, self._events = [], []

    def save_layer(self, job: LayerJob, layer: int) -> None:
        self._after_engine()
        with torch.cuda.stream(self._stream):
            job.mark = torch.cuda.Event()
            job.copy(layer)
            job.mark.record(self._stream)

    def close(self) -> None:
        self._stream.synchronize()

    def _after_engine(self) -> None:
        computed = torch.cuda.Event()
        computed.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(computed)

    def _enqueue(self, layers: int) -> None:
        with torch.cuda.stream(self._stream):
            while len(self._events) < min(layers, self._loads[0].layer_count):
                for job in self._loads:
                    job.copy(len(self._events))
                event = torch.cuda.Event()
                event.record(self._stream)
                self._events.append(event)
