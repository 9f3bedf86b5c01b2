"""Worker half that loads and saves layer by layer: copies of the next layers run while one is computed.

The main thread enters every hook; on CPU one thread of the lane copies, on CUDA a stream does. Loads go before saves.
A load is checked like one of whole blocks, before the first copy and after the last; the last check comes when the
forward has ended, and until `end_layered` has named a request, nothing that its forward computed may be kept.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from kvservice.connector.options import Verify
from kvservice.connector.plan import CopyEntry, LoadPlan, PoolInfo, StepPlan, StorePlan
from kvservice.connector.worker.block_copier import BlockCopier
from kvservice.connector.worker.copier import Copier
from kvservice.connector.worker.half import Copying, WorkerHalf, WritingStore
from kvservice.copying.message import Direction
from kvservice.core.segment.layout import HeadShare
from kvservice.errors import UnsupportedLayout

log = logging.getLogger("kvservice.connector")

LAYERS_AHEAD = 2  # copied while one layer is computed
WAKE_SECONDS = 1.0  # a copy thread that died is noticed so late
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class BlockRun:
    """`count` blocks that follow each other in the engine, `stride` bytes apart in the segment."""

    block: int
    offset: int
    stride: int
    count: int


def runs_of(entries: Sequence[CopyEntry], pool: PoolInfo) -> list[BlockRun]:
    """Neighbours merged: one strided copy a layer for each run, in place of one a block."""
    payload_bytes = pool.layout.payload_bytes
    runs: list[BlockRun] = []
    for entry in entries:
        offset = pool.geometry.payload_offset(entry.ref.slot, payload_bytes)
        last = runs[-1] if runs else None
        if last is not None and entry.block_id == last.block + last.count:
            step = offset - last.offset if last.count == 1 else last.stride
            if step > 0 and offset == last.offset + last.count * step:
                runs[-1] = BlockRun(last.block, last.offset, step, last.count + 1)
                continue
        runs.append(BlockRun(entry.block_id, offset, payload_bytes, 1))
    return runs


class LayerCopy(Protocol):
    """Copies one layer of some blocks. On CUDA: enqueued on the current stream."""

    def copy(self, direction: Direction, layer: int, runs: Sequence[BlockRun]) -> None: ...


class HostLayers:
    """For KV tensors in host memory; lets go of the interpreter while bytes move."""

    def __init__(self, block_copier: BlockCopier, pool: PoolInfo) -> None:
        assert block_copier.slots is not None
        self._layers = [_integers(layer).numpy().swapaxes(1, 2) for layer in block_copier.layers]  # head before part
        self._slots = block_copier.slots.numpy()
        self._layout = pool.layout
        self._heads = block_copier.heads

    def copy(self, direction: Direction, layer: int, runs: Sequence[BlockRun]) -> None:
        engine = self._layers[layer]
        shape, item = engine.shape[1:], engine.itemsize  # (head, part, token, K‖V)
        inner = tuple(int(np.prod(shape[i + 1 :], dtype=np.int64)) * item for i in range(len(shape)))
        first = layer * self._layout.layer_bytes + self._heads.start * self._layout.cell_bytes
        for run in runs:
            slots: np.ndarray[Any, Any] = np.ndarray(
                (run.count, *shape), engine.dtype, self._slots, run.offset + first, (run.stride, *inner)
            )
            blocks = engine[run.block : run.block + run.count]
            if direction is Direction.LOAD:
                np.copyto(blocks, slots)
            else:
                np.copyto(slots, blocks)


class CudaLayers:
    """For KV tensors on a GPU: through a buffer there, so that only contiguous bytes cross the bus.

    Has not run on a GPU yet.
    """

    def __init__(self, block_copier: BlockCopier, pool: PoolInfo) -> None:
        assert block_copier.slots is not None
        self._layers = block_copier.layers
        self._slots = block_copier.slots
        self._layout = pool.layout
        self._heads = block_copier.heads

    def copy(self, direction: Direction, layer: int, runs: Sequence[BlockRun]) -> None:
        engine = self._layers[layer]
        first = layer * self._layout.layer_bytes + self._heads.start * self._layout.cell_bytes
        length = len(self._heads) * self._layout.cell_bytes
        _, parts, heads, tokens, width = engine.shape
        for run in runs:
            blocks = engine[run.block : run.block + run.count].transpose(1, 2)
            staging = torch.empty((run.count, length), dtype=torch.uint8, device=engine.device)
            typed = staging.view(engine.dtype).view(run.count, heads, parts, tokens, width)
            if direction is Direction.STORE:
                typed.copy_(blocks)
            for index in range(run.count):
                start = run.offset + first + index * run.stride
                there, here = self._slots[start : start + length], staging[index]
                if direction is Direction.STORE:
                    there.copy_(here, non_blocking=True)
                else:
                    here.copy_(there, non_blocking=True)
            if direction is Direction.LOAD:
                blocks.copy_(typed)


class LayerJob:
    """Some blocks, layer by layer in one direction. A Ticket. Fields belong to the lane once it has the job."""

    borrowed = 0  # always from slots

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
        return not self.failed


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
            self._loads = list(jobs)
            self._layer_count = jobs[0].layer_count if jobs else 0
            self._next = self._done = 0
            self._allowed = LAYERS_AHEAD
            self._start()

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
            self._saves.append((job, layer))
            self._start()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    # -- inside, under the condition ----

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvservice-layers", daemon=True)
            self._thread.start()
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
    """Copies on a CUDA stream of their own, ordered against the engine's stream by events; no thread waits.

    Has not run on a GPU yet.
    """

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


@dataclass(slots=True)
class _LoadByLayers:
    plan: LoadPlan
    headers: list[bytes]
    job: LayerJob


class LayerwiseWorker(WorkerHalf):
    """`begin_layer` and `end_layer` are called around each layer of a forward that loads or stores; the rest as in
    WorkerHalf, for what is not done layer by layer."""

    def __init__(
        self,
        block_copier: BlockCopier,
        verify: Verify,
        copier: Copier,
        share: HeadShare,
        layer_names: Sequence[str],
        *,
        save: bool,
        lane: LayerLane | None = None,
    ) -> None:
        """`layer_names`: the engine's, in the order of the slot. `save`: stores too go layer by layer."""
        super().__init__(block_copier, verify, copier, share)
        self._blocks = block_copier
        self._layer_of = {name: index for index, name in enumerate(layer_names)}
        self._on_gpu = block_copier.device.type == "cuda"
        self._lane: LayerLane = lane or (StreamLane(block_copier.device) if self._on_gpu else ThreadLane())
        self._via: LayerCopy | None = None
        self._layered: list[_LoadByLayers] = []  # of this step
        self._waited = 0  # layers that the forward has waited for
        self._saving: list[tuple[StorePlan, LayerJob]] = []  # of this step
        self._saved = 0  # layers of them that are computed
        self._save_plan: StepPlan | None = None
        self._save = save

    # -- loads ----

    def start_loads(self, plan: StepPlan) -> set[str]:
        whole = [load for load in plan.loads if not load.layered]
        layered = [load for load in plan.loads if load.layered]
        super().start_loads(StepPlan(plan.pool, whole))
        self._waited = 0
        for load in layered:
            started = self._attempt(partial(self._start_layered, load))
            if started is not None:
                self._layered.append(started)
        if self._layered:
            self._lane.begin_loads([load.job for load in self._layered])
        return {load.request_id for load in plan.loads}

    def begin_layer(self, name: str) -> None:
        """Blocks until this layer of everything that the forward loads is there. Raises UnsupportedLayout when the
        layer is none of ours or not the next one."""
        if self._layered:
            layer = self._layer_of.get(name)
            if layer != self._waited:
                raise UnsupportedLayout(f"the engine waits for layer {name!r}, which is not number {self._waited}")
            self._lane.wait_layer(layer)
            self._waited += 1

    def end_layered(self) -> set[str]:
        """The forward has ended. Requests whose layered load was sound, and computed on; each other one has to lose
        what this step computed for it. Blocks until no copy of these loads is under way."""
        layered, self._layered = self._layered, []
        self._lane.end_loads()
        sound: set[str] = set()
        for load in layered:
            if self._waited < load.job.layer_count:
                self._count("load_layers_not_waited_for")  # the forward has read blocks that were not there yet
            elif self._attempt(partial(self._is_sound, Copying(load.plan, load.headers, load.job))):
                self._count("loaded_blocks", len(load.plan.entries))
                self._count("loaded_blocks_layerwise", len(load.plan.entries))
                sound.add(load.plan.request_id)
        return sound

    def _start_layered(self, load: LoadPlan) -> _LoadByLayers | None:
        headers = self._promised_headers(load)
        if headers is None:
            return None
        return _LoadByLayers(load, headers, self._job(Direction.LOAD, load.entries))

    # -- stores ----

    def end_layer(self, name: str, plan: StepPlan) -> None:
        """This layer of the forward is written. Does not block."""
        if not self._save or not plan.stores:
            return
        if self._save_plan is not plan:
            self._begin_saves(plan)
        layer = self._layer_of.get(name)
        if layer == self._saved:  # out of order: the rest follows when the forward has ended
            self._save_up_to(layer + 1)

    def store(self, plan: StepPlan) -> set[int]:
        if self._save_plan is not plan:
            return super().store(plan)
        saving, self._saving, self._save_plan = self._saving, self._saving, None
        if saving:
            self._save_up_to(saving[0][1].layer_count)
        for store, job in saving:
            self._stores.append(WritingStore(store, job))
        self._saving = []
        return {store.store_id for store in plan.stores}

    def _begin_saves(self, plan: StepPlan) -> None:
        self._save_plan, self._saving, self._saved = plan, [], 0
        self._follow_pool(plan)
        behind = any(not store.ticket.query() for store in self._stores)
        for store in plan.stores:
            if behind:
                self._count("store_behind", len(store.entries))  # a dropped store is only a later miss
                self._report.failed[store.store_id] = 1
                continue
            job = self._attempt(partial(self._start_save, store))
            if job is None:
                self._report.failed[store.store_id] = 1
            else:
                self._saving.append((store, job))

    def _start_save(self, store: StorePlan) -> LayerJob | None:
        return self._job(Direction.STORE, self._to_write(store)) if self._may_write(store) else None

    def _save_up_to(self, layers: int) -> None:
        for layer in range(self._saved, layers):
            for _, job in self._saving:
                self._lane.save_layer(job, layer)
        self._saved = layers

    # -- inside ----

    def _job(self, direction: Direction, entries: Sequence[CopyEntry]) -> LayerJob:
        assert self._pool is not None
        if self._via is None:
            self._via = (CudaLayers if self._on_gpu else HostLayers)(self._blocks, self._pool)
        return LayerJob(direction, runs_of(entries, self._pool), self._via, len(self._layer_of))

    def _unmap(self) -> None:
        self._lane.end_loads()
        self._via = None  # holds on to the mapping
        super()._unmap()

    def close(self) -> None:
        super().close()
        self._lane.close()


def _integers(layer: torch.Tensor) -> torch.Tensor:
    """The same bytes in a type that numpy has."""
    return layer.view(_INTEGERS[layer.element_size()])
