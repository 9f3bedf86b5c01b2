"""Worker half: copies blocks between the engine's KV tensors and the pool's slots, and says what it did.

Runs on the worker's main thread, between two forwards. It only ever touches slots it was told to, and checks the
header around every copy: a slot that is not what was promised is a failed load, never a wrong block.
"""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

from kvservice.connector.copier import BlockCopier
from kvservice.connector.options import Verify
from kvservice.connector.plan import CopyEntry, LoadPlan, PoolInfo, StepPlan, StepReport, StorePlan
from kvservice.core.digest import digest_payload
from kvservice.core.header import SlotHeader
from kvservice.errors import KVServiceError
from kvservice.memory.liveness import LivenessLock, hold
from kvservice.memory.segment import Segment

log = logging.getLogger("kvservice.connector")

SAMPLE_ONE_IN = 16  # loaded blocks per digest check under Verify.SAMPLED


class WorkerHalf:
    """`start_loads` and `store` copy before they return; results wait until they are taken."""

    def __init__(self, copier: BlockCopier, verify: Verify) -> None:
        self._copier = copier
        self._verify = verify
        self._pool: PoolInfo | None = None
        self._tried: PoolInfo | None = None  # mapped, or found impossible to map
        self._segment: Segment | None = None
        self._lock: LivenessLock | None = None
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._report = StepReport()
        self._load_count = 0

    def start_loads(self, plan: StepPlan) -> None:
        self._follow_pool(plan)
        for load in plan.loads:
            self._loaded.add(load.request_id)
            if not self._load(load):
                self._failed.add(load.request_id)

    def store(self, plan: StepPlan) -> set[int]:
        """Returns the ids of the plan's stores, whose outcome is in the next report."""
        for store in plan.stores:
            done = self._store(store)
            counts = self._report.stored if done else self._report.failed
            counts[store.store_id] = 1
        return {store.store_id for store in plan.stores}

    def take_loaded(self) -> tuple[set[str], set[str]]:
        """(requests whose load ended, those of them whose load failed) since the last call."""
        loaded, failed = self._loaded, self._failed
        self._loaded, self._failed = set(), set()
        return loaded, failed

    def take_report(self) -> StepReport | None:
        """What was stored since the last call; None when there is nothing to say."""
        report, self._report = self._report, StepReport()
        return report if report.stored or report.failed or report.counters else None

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # -- inside ----

    def _follow_pool(self, plan: StepPlan) -> None:
        """Map the pool's memory when it is new; the shard of this node may have been restarted."""
        if plan.pool is None or plan.pool == self._tried:
            return
        self.close()
        self._pool, self._tried = None, plan.pool
        try:
            if plan.pool.liveness_path:
                self._lock = hold(Path(plan.pool.liveness_path))
            self._segment = Segment.attach(Path(plan.pool.segment_path), plan.pool.geometry)
            self._copier.bind(self._segment.buffer, plan.pool.layout)
        except (KVServiceError, OSError) as error:
            log.error("cannot map the pool's memory: %s", error)
            self._count("map_failed")
            self.close()
            return
        self._pool = plan.pool

    def _load(self, load: LoadPlan) -> bool:
        if self._segment is None or self._pool is None:
            self._count("load_unmapped")
            return False
        for entry in load.entries:
            if not self._load_block(self._segment, self._pool, entry):
                return False  # all or nothing: the engine computes the request's whole promise again
        self._count("loaded_blocks", len(load.entries))
        return True

    def _load_block(self, segment: Segment, pool: PoolInfo, entry: CopyEntry) -> bool:
        before = segment.read_header(entry.ref.slot)
        if not self._is_promised(before, pool, entry):
            self._count("load_stale")
            return False
        self._copier.load(self._payload_offset(pool, entry), entry.block_id)
        if segment.read_header(entry.ref.slot) != before:
            self._count("load_overwritten")
            return False
        self._load_count += 1
        sampled = self._verify is Verify.SAMPLED and self._load_count % SAMPLE_ONE_IN == 0
        if sampled or self._verify is Verify.FULL:
            assert before is not None
            self._count("load_verified_blocks")
            if digest_payload(segment.payload(entry.ref.slot, before.length), entry.key) != before.digest:
                self._count("load_corrupt")
                return False
        return True

    def _store(self, store: StorePlan) -> bool:
        segment, pool = self._segment, self._pool
        if segment is None or pool is None:
            self._count("store_unmapped", len(store.entries))
            return False
        if segment.current_epoch() != pool.epoch:
            self._count("store_stale", len(store.entries))
            return False
        for entry in store.entries:
            header = segment.read_header(entry.ref.slot)
            if header is None or header.generation != entry.ref.generation or header.epoch != pool.epoch:
                self._count("store_stale")
                return False
            self._copier.store(entry.block_id, self._payload_offset(pool, entry))
        self._count("copied_blocks", len(store.entries))
        return True

    @staticmethod
    def _is_promised(header: SlotHeader | None, pool: PoolInfo, entry: CopyEntry) -> bool:
        return header is not None and (header.epoch, header.generation, header.key) == (
            pool.epoch,
            entry.ref.generation,
            entry.key,
        )

    @staticmethod
    def _payload_offset(pool: PoolInfo, entry: CopyEntry) -> int:
        return pool.geometry.payload_offset(entry.ref.slot, pool.layout.payload_bytes)

    def _count(self, name: str, count: int = 1) -> None:
        counters: Counter[str] | dict[str, int] = self._report.counters
        counters[name] = counters.get(name, 0) + count
