"""Worker half: copies blocks between the engine's KV tensors and the pool's slots, and reports what it did.

Runs on the worker's main thread, between two forwards. It touches only slots that it was told to, and checks the header
before and after every copy: a slot that is not what was promised is a failed load, never a wrong block. A copier
decides when copies run; nothing is reported before they have ended.
"""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from kvservice.connector.options import DeferStores, Verify
from kvservice.connector.plan import CopyEntry, LoadPlan, PoolInfo, StepPlan, StepReport, StorePlan
from kvservice.connector.worker.block_copier import BlockCopiers
from kvservice.connector.worker.copier import Copier, Ticket, in_process_copier
from kvservice.connector.worker.worker_loans import WorkerLoans
from kvservice.copying.message import Direction
from kvservice.core.segment.digest import digest_payload
from kvservice.core.segment.digest_sample import DigestSample
from kvservice.core.segment.header import DIGEST_WORD
from kvservice.core.segment.header_checks import HeaderRows, are_as_promised, is_as_promised, is_reserved
from kvservice.core.segment.layout import HeadShare
from kvservice.core.segment.refs import BlockRef
from kvservice.errors import KVServiceError, Unavailable
from kvservice.memory.liveness import LivenessLock, hold
from kvservice.memory.segment import ENGINE_AHEAD_BYTES, Segment
from kvservice.units import SlotIndex

log = logging.getLogger("kvservice.connector")

T = TypeVar("T")
MAP_AGAIN_SECONDS = 5.0  # after a failure to map the pool, which may be one for a moment: no free descriptor


@dataclass(frozen=True, slots=True)
class PromisedSlots:
    """The slots of a load."""

    entries: Sequence[CopyEntry]  # one of each
    slots: Sequence[SlotIndex]
    headers: HeaderRows  # as they were before the copies


@dataclass(slots=True)
class Copying:
    """A load under way."""

    plan: LoadPlan
    slots: PromisedSlots
    ticket: Ticket


@dataclass(slots=True)
class WritingStore:
    plan: StorePlan
    ticket: Ticket


def one_of_each_slot(entries: Sequence[CopyEntry]) -> Sequence[CopyEntry]:
    """An entry of each slot, in their order. A slot may hold several blocks of the engine, one behind the other."""
    refs = [entry.ref for entry in entries]
    if not any(map(operator.eq, refs, refs[1:])):
        return entries
    return [entry for entry, ref, behind in zip(entries, refs, [*refs[1:], None], strict=True) if ref != behind]


class WorkerHalf:
    """Copies for one worker. `start_loads` and `store` start copies; `take_loaded` and `take_report` return what has
    ended since."""

    def __init__(
        self,
        block_copiers: BlockCopiers,
        verify: Verify,
        copier: Copier | None = None,
        share: HeadShare | None = None,
        *,
        defer_stores: DeferStores = DeferStores.OFF,
    ) -> None:
        """`share` names the ranks with which this one takes turns in writing; None if it alone holds its heads."""
        self._share = share
        self._block_copiers = block_copiers
        self._verify = verify
        self._sample = DigestSample(verify.value)  # of blocks whose digest does not come with the copy
        self._copier = copier or in_process_copier(block_copiers)
        is_auto = defer_stores is DeferStores.AUTO
        self._defers = defer_stores is DeferStores.ON or (is_auto and self._copier.is_inline)
        self._deferred: list[StorePlan] = []  # of the step before
        self._lent = WorkerLoans(self._copier)
        self._pool: PoolInfo | None = None
        self._tried: PoolInfo | None = None  # mapped, or not to be mapped before `_map_again_at`
        self._map_again_at = math.inf
        self._segment: Segment | None = None
        self._lock: LivenessLock | None = None
        self._loads: list[Copying] = []  # under way
        self._stores: list[WritingStore] = []
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._report = StepReport()
        self._verified = 0  # slots, since the last report
        self._unexpected = 0

    def start_loads(self, plan: StepPlan) -> set[str]:
        """Start the plan's loads, behind the stores that the step before deferred. Returns the requests of the loads;
        `take_loaded` will name each of them once."""
        self._follow_pool(plan)
        self._start_stores(self._take_deferred())
        self._lent.follow(plan)
        for load in plan.loads:
            started = self._attempt(partial(self._start_load, load))
            if started is None:
                self._end_load(load, done=False)
            else:
                self._loads.append(started)
        self._attempt(self._copier.flush)
        self._poll_loads()
        return {load.request_id for load in plan.loads}

    def store(self, plan: StepPlan) -> set[int]:
        """Start the plan's stores, or keep them for the next step if stores are deferred: then the tokens of this step
        are sampled and sent first. Returns their ids; some later report will name each of them once."""
        if self._defers:
            self._start_stores(self._take_deferred())  # of a step whose `start_loads` failed: each store is answered
            self._deferred += plan.stores
        else:
            self._start_stores(plan.stores)
        return {store.store_id for store in plan.stores}

    def _start_stores(self, stores: Sequence[StorePlan]) -> None:
        if not stores:
            return
        for store in stores:
            started = self._attempt(partial(self._start_store, store))
            if started is None:
                self._report.failed[store.store_id] = 1
            else:
                self._stores.append(started)
        self._attempt(self._copier.flush)

    def _take_deferred(self) -> list[StorePlan]:
        deferred, self._deferred = self._deferred, []
        return deferred

    def take_loaded(self) -> tuple[set[str], set[str]]:
        """(requests whose load ended, those of them whose load failed) since the last call."""
        self._poll_loads()
        loaded, failed = self._loaded, self._failed
        self._loaded, self._failed = set(), set()
        return loaded, failed

    def take_report(self) -> StepReport | None:
        """What was stored since the last call; None if there is nothing to report."""
        self._poll_stores()
        self._lent.report(self._report)
        for name, count in self._copier.take_counters().items():
            self._count(name, count)
        if self._verified:
            self._count("load_verified_blocks", self._verified)
            self._verified = 0
        report, self._report = self._report, StepReport()
        return None if report == StepReport() else report

    def close(self) -> None:
        """The engine ends. Blocks until the copies under way have ended. Deferred ones are dropped: nobody is left to
        seal them."""
        self._unmap()
        self._copier.close()

    # -- inside ----

    def _start_load(self, load: LoadPlan) -> Copying | None:
        slots = self._promised_slots(load)
        if slots is None:
            return None
        # Digests are of what lies in slots, so blocks that come from an engine cannot be checked.
        may_borrow = load.may_borrow and self._verify is not Verify.FULL
        return Copying(load, slots, self._copier.run(Direction.LOAD, load.entries, may_borrow=may_borrow))

    def _start_store(self, store: StorePlan) -> WritingStore | None:
        if not self._may_write(store):
            return None
        return WritingStore(store, self._copier.run(Direction.STORE, self._to_write(store)))

    def _attempt(self, step: Callable[[], T | None]) -> T | None:
        """Run a step. None also if it raised: one plan that fails must not leave another one, already started, without
        an answer."""
        try:
            return step()
        except Exception as error:  # the engine waits for an answer about each plan
            if not self._unexpected:
                log.exception("a copy failed")
            self._unexpected += 1
            self._count(f"copy_raised_{type(error).__name__}")
            return None

    def _unmap(self) -> None:
        """Unmap the pool. Blocks until the copies under way have ended; their outcome is still reported."""
        for ticket in [load.ticket for load in self._loads] + [store.ticket for store in self._stores]:
            ticket.synchronize()
        self._poll_loads()
        self._poll_stores()
        if self._segment is not None:
            self._lent.recall_all()
            self._copier.release()
            self._block_copiers.unbind()
            self._segment.close()
            self._segment = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _follow_pool(self, plan: StepPlan) -> None:
        """Map the pool's memory if it is new, because the shard of this node may have been restarted. Unmap it if its
        boot has ended or another one has begun, because a new segment may need the room."""
        segment, pool = self._segment, self._pool
        if segment is not None and pool is not None and segment.current_epoch() != pool.epoch:
            self._pool = None
            self._unmap()
        if plan.pool is None or (plan.pool == self._tried and time.monotonic() < self._map_again_at):
            return
        self._unmap()
        self._pool, self._tried, self._map_again_at = None, plan.pool, math.inf
        try:
            self._segment = Segment.attach(Path(plan.pool.segment_path), plan.pool.geometry)
            self._lock = hold(self._segment, plan.pool.engine_id, plan.pool.epoch)
            self._segment.map_ahead(ENGINE_AHEAD_BYTES)
            self._copier.adopt(self._block_copiers.bind(self._segment.buffer, plan.pool.layout), plan.pool)
        except Unavailable:  # for a moment only: the next plan tries again
            self._tried = None
            self._count("map_refused")
            self._unmap()
            return
        except (KVServiceError, OSError, RuntimeError) as error:  # the last for a thread that cannot be started
            log.error("cannot map the pool's memory: %s", error)
            self._count("map_failed")
            self._map_again_at = time.monotonic() + MAP_AGAIN_SECONDS
            self._unmap()
            return
        self._pool = plan.pool

    def _promised_slots(self, load: LoadPlan) -> PromisedSlots | None:
        """The slots with their headers. None unless every slot holds what was promised; the engine then computes the
        whole promise again."""
        segment, pool = self._segment, self._pool
        if segment is None or pool is None:
            self._count("load_unmapped")
            return None
        if not load.entries:
            self._count("load_unplanned")  # something went wrong before, and the engine waits for this load
            return None
        entries = one_of_each_slot(load.entries)
        _, refs, keys, groups, *_ = zip(*entries, strict=True)  # by column: a loop over the entries costs more
        slots, _ = zip(*refs, strict=True)
        size_of = {group: self._block_copiers.of(group).payload_bytes for group in set(groups)}
        sizes = [size_of[group] for group in groups]
        with contextlib.suppress(IndexError):  # a slot outside of the segment, which the search finds
            headers = segment.header_rows(slots)
            if are_as_promised(headers, pool.epoch, refs, keys, sizes):
                return PromisedSlots(entries, slots, headers)
        self._count("load_stale")
        for entry, size in zip(entries, sizes, strict=True):
            if not is_as_promised(segment.header_bytes(entry.ref.slot), pool.epoch, entry.ref, entry.key, size):
                self._report.suspects.add(entry.ref)
        return None

    def _poll_loads(self) -> None:
        under_way, self._loads = self._loads, []
        for load in under_way:
            if load.ticket.query():
                self._end_load(load.plan, load.ticket.borrowed, done=bool(self._attempt(partial(self._is_sound, load))))
            else:
                self._loads.append(load)

    def _is_sound(self, load: Copying) -> bool:
        """Whether the slots did not change while they were copied, and hold what was sealed."""
        segment = self._segment
        assert segment is not None
        if not load.ticket.succeeded():
            self._count("load_copy_failed")
            return False
        entries, before = load.slots.entries, load.slots.headers
        slots = load.slots.slots
        changed = (segment.header_rows(slots) != before).any(axis=1)
        if changed.any():
            self._count("load_overwritten")
            self._report.suspects.update(entries[place].ref for place in changed.nonzero()[0])
            return False
        if self._verify is Verify.OFF:
            return True
        came, wanted = load.ticket.digests, before[:, DIGEST_WORD].tolist()
        if list(map(came.get, slots)) == wanted:
            self._verified += len(slots)
            return True
        damaged: list[BlockRef] = []
        for entry, slot, digest in zip(entries, slots, wanted, strict=True):
            found = came.get(slot)
            if found is None and self._sample.has_next():
                size = self._block_copiers.of(entry.engine_group).payload_bytes
                found = digest_payload(segment.payload(slot, size), entry.key)
            if found is not None:
                self._verified += 1
                if found != digest:
                    damaged.append(entry.ref)
        if damaged:
            self._count("load_corrupt")
            self._report.suspects.update(damaged)
        return not damaged

    def _end_load(self, load: LoadPlan, borrowed: int = 0, *, done: bool) -> None:
        self._loaded.add(load.request_id)
        if done:
            self._count("loaded_blocks", len(load.entries))
            self._count("loaded_blocks_engine", borrowed)
            self._count("loaded_blocks_slot", len(load.entries) - borrowed)
        else:
            self._failed.add(load.request_id)

    def _may_write(self, store: StorePlan) -> bool:
        """Whether every slot is still reserved for this engine, by this boot of the pool."""
        segment, pool = self._segment, self._pool
        if segment is None or pool is None:
            self._count("store_unmapped", len(store.entries))
            return False
        if segment.current_epoch() != pool.epoch:
            self._count("store_stale", len(store.entries))
            return False
        for entry in one_of_each_slot(store.entries):
            header = segment.header_bytes(entry.ref.slot)
            if not is_reserved(header, pool.epoch, entry.ref, self._block_copiers.of(entry.engine_group).payload_bytes):
                self._count("store_stale")
                return False
        return True

    def _to_write(self, store: StorePlan) -> list[CopyEntry]:
        """The entries that this rank writes. Every rank with the same heads reports every store, but only one of them
        writes each block."""
        return [entry for entry in store.entries if self._share is None or self._share.writes(entry.ref.slot)]

    def _poll_stores(self) -> None:
        under_way, self._stores = self._stores, []
        for store in under_way:
            if not store.ticket.query():
                self._stores.append(store)
            elif store.ticket.succeeded() and self._attempt(partial(self._blank, store.plan)):
                self._report.stored[store.plan.store_id] = 1
                self._count("copied_blocks", len(self._to_write(store.plan)))
            else:
                self._report.failed[store.plan.store_id] = 1
                self._count("store_copy_failed", len(store.plan.entries))

    def _blank(self, store: StorePlan) -> bool:
        """Leave nothing of others behind a partial tail, now that its whole block is copied. False: it cannot be told
        which bytes those are, or the pool's boot has ended, so that the block must not be stored."""
        pool = self._pool
        for entry in [entry for entry in self._to_write(store) if entry.tokens]:
            own = self._block_copiers.of(entry.engine_group)
            if pool is None or not own.blank(
                pool.geometry.payload_offset(entry.ref.slot, own.payload_bytes), entry.tokens
            ):
                self._count("store_tail_not_blanked")
                return False
        return True

    def _count(self, name: str, count: int = 1) -> None:
        counters: Counter[str] | dict[str, int] = self._report.counters
        counters[name] = counters.get(name, 0) + count
