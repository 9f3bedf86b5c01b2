"""The worker half of a simulated engine: copies between slots and blocks, with the checks of the real one."""

from __future__ import annotations

from collections.abc import Callable

from kvservice.connector.plan import CopyEntry, LoadPlan, PoolInfo, StepPlan, StepReport, StorePlan
from kvservice.core.segment.digest import digest_payload
from kvservice.core.segment.header import SlotHeader
from kvservice.core.segment.header_checks import is_as_promised, is_reserved
from kvservice.testing.sim.parts import EngineParts
from kvservice.testing.sim.world import Violation
from kvservice.units import BootEpoch

COPY_SECONDS = 0.02  # the longest that one copy takes: some steps, so that things happen meanwhile


class SimWorker:
    """Copies between slots and the engine's blocks, half by half. It survives its scheduler for a moment."""

    def __init__(self, engine: EngineParts) -> None:
        self._engine = engine
        self.alive = True
        self.busy = 0  # plans that it was given and has not finished
        self.late_seconds = 0.0  # seconds that it pauses before the next store
        self.on_late: Callable[[], None] | None = None  # called once, when it pauses
        self.report = StepReport()
        self.loaded: set[str] = set()
        self.failed: set[str] = set()

    def die(self) -> None:
        """It dies with its host: nothing of it writes any more."""
        self.alive = False
        self.busy = 0
        self._let_go()

    def scheduler_died(self) -> None:
        """The scheduler died: finish what is under way, holding the lock, then end."""
        if not self.busy:
            self._let_go()

    def _ended(self) -> None:
        self.busy -= 1
        if not self._engine.alive:
            self.scheduler_died()

    def _hold(self, epoch: BootEpoch) -> bool:
        """Hold the lock as memory.liveness.hold does, while the worker lives."""
        memory, engine_id = self._engine.node.memory, self._engine.spec.engine_id
        if memory.epoch != epoch or engine_id in memory.claimed:
            return False
        memory.writers.add(engine_id)
        return True

    def _let_go(self) -> None:
        self._engine.node.memory.writers.discard(self._engine.spec.engine_id)

    def run(self, plan: StepPlan) -> None:
        pool = plan.pool
        for load in plan.loads:
            self._load(load, pool)
        for store in plan.stores:
            self._store(store, pool)

    def _load(self, load: LoadPlan, pool: PoolInfo | None) -> None:
        memory, world = self._engine.node.memory, self._engine.world
        good = pool is not None and bool(load.entries)
        size = self._engine.spec.layout.payload_bytes
        if pool is not None:
            for entry in load.entries:
                if not is_as_promised(memory.header_bytes(entry.ref.slot), pool.epoch, entry.ref, entry.key, size):
                    self.report.suspects.add(entry.ref)
                    good = False
        if not good or pool is None:
            self._end_load(load, False)
            return
        headers = [memory.header_bytes(entry.ref.slot) for entry in load.entries]
        self.busy += 1

        def copy(half: int) -> None:
            for entry in load.entries:
                self._engine.write_block(entry.block_id, half, memory.read(entry.ref.slot, size))

        def end() -> None:
            if not self.alive:
                return
            self._ended()
            sound = True
            for entry, before in zip(load.entries, headers, strict=True):
                header = memory.read_header(entry.ref.slot)
                if (
                    memory.header_bytes(entry.ref.slot) != before
                    or header is None
                    or (self._engine.verifies_loads and not self._is_genuine(entry, header))
                ):
                    sound = False
                    self.report.suspects.add(entry.ref)
            self._end_load(load, sound)

        world.at(COPY_SECONDS * world.random.random(), copy, 0)
        world.at(COPY_SECONDS, copy, 1)
        world.at(COPY_SECONDS + 0.001, end)

    def _is_genuine(self, entry: CopyEntry, header: SlotHeader) -> bool:
        return digest_payload(self._engine.read_block(entry.block_id), entry.key) == header.digest

    def _end_load(self, load: LoadPlan, good: bool) -> None:
        self.loaded.add(load.request_id)
        if good:
            self._engine.check_loaded(load)
        else:
            self.failed.add(load.request_id)
            self._engine.world.counters["loads_failed"] += 1

    def _store(self, store: StorePlan, pool: PoolInfo | None) -> None:
        self.busy += 1
        late, self.late_seconds = self.late_seconds, 0.0
        if late:
            call, self.on_late = self.on_late, None
            if call is not None:
                self._engine.world.at(0.0, call)
            self._engine.world.at(late, self._begin_store, store, pool)
        else:
            self._begin_store(store, pool)

    def _begin_store(self, store: StorePlan, pool: PoolInfo | None) -> None:
        if not self.alive:
            return
        memory, world = self._engine.node.memory, self._engine.world
        good = pool is not None and self._hold(pool.epoch)
        if pool is not None:
            for entry in store.entries:
                good &= is_reserved(
                    memory.header_bytes(entry.ref.slot), pool.epoch, entry.ref, pool.layout.payload_bytes
                )
        if not good or pool is None:
            self.report.failed[store.store_id] = 1
            self._ended()
            return

        def copy(half: int) -> None:
            for entry in store.entries if self.alive else ():
                header = memory.header_bytes(entry.ref.slot)
                if not is_reserved(header, pool.epoch, entry.ref, pool.layout.payload_bytes):
                    raise Violation(f"slot {entry.ref.slot:#x} was taken back while {self._engine.name} writes it")
                memory.write_half(entry.ref.slot, half, self._engine.read_block(entry.block_id))

        def end() -> None:
            if not self.alive:
                return
            self._ended()
            self.report.stored[store.store_id] = 1
            world.counters["blocks_stored"] += len(store.entries)

        delay = self._engine.copy_delay
        world.at(delay + COPY_SECONDS * world.random.random(), copy, 0)
        world.at(delay + COPY_SECONDS, copy, 1)
        world.at(delay + COPY_SECONDS + 0.001, end)
        if self._engine.on_store is not None:
            call, self._engine.on_store = self._engine.on_store, None
            world.at(0.0, call)
