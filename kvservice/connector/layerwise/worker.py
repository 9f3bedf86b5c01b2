"""Worker half that loads and saves layer by layer: copies of the next layers run while one is computed.

The main thread enters every hook; on CPU one thread of the lane copies, on CUDA a stream does. Loads go before saves.
A load is checked like one of whole blocks, before the first copy and after the last; the last check comes when the
forward has ended, and until `end_layered` has named a request, nothing that its forward computed may be kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kvservice.connector.layerwise.copies import CudaLayers, HostLayers, LayerCopy, runs_of
from kvservice.connector.layerwise.lanes import LayerJob, LayerLane, StreamLane, ThreadLane
from kvservice.connector.options import DeferStores, Verify
from kvservice.connector.plan import CopyEntry, LoadPlan, StepPlan, StorePlan
from kvservice.connector.worker.block_copier import BlockCopier
from kvservice.connector.worker.copier import Copier
from kvservice.connector.worker.half import Copying, WorkerHalf, WritingStore
from kvservice.copying.message import Direction
from kvservice.core.segment.layout import HeadShare
from kvservice.errors import UnsupportedLayout


@dataclass(slots=True)
class _CopyingByLayers(Copying):
    ticket: LayerJob


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
        defer_stores: DeferStores = DeferStores.OFF,
    ) -> None:
        """`layer_names`: the engine's, in the order of the slot. `save`: stores too go layer by layer."""
        super().__init__(block_copier, verify, copier, share, defer_stores=DeferStores.OFF if save else defer_stores)
        self._blocks = block_copier
        self._layer_of = {name: index for index, name in enumerate(layer_names)}
        self._on_gpu = block_copier.device.type == "cuda"
        self._lane: LayerLane = StreamLane(block_copier.device) if self._on_gpu else ThreadLane()
        self._via: LayerCopy | None = None
        self._layered: list[_CopyingByLayers] = []  # of this step
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
            self._attempt(partial(self._lane.begin_loads, [load.ticket for load in self._layered]))
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
            if self._waited < load.ticket.layer_count:
                self._count("load_layers_not_waited_for")  # the forward has read blocks that were not there yet
            elif self._attempt(partial(self._is_sound, load)):
                self._count("loaded_blocks", len(load.plan.entries))
                self._count("loaded_blocks_layerwise", len(load.plan.entries))
                sound.add(load.plan.request_id)
        return sound

    def _start_layered(self, load: LoadPlan) -> _CopyingByLayers | None:
        slots = self._promised_slots(load)
        if slots is None:
            return None
        return _CopyingByLayers(load, slots, self._job(Direction.LOAD, load.entries))

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
        self._save_plan = None
        self._save_up_to(len(self._layer_of))
        self._stores += [WritingStore(store, job) for store, job in self._saving]
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
        self._lane.end_loads()
        self._lane.close()  # before the lock ends: a forward that was cut leaves saves that wait for their copies
        super().close()
