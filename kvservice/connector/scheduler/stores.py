"""Stores of computed blocks into the pool, from the plan of a step to Seal or Abort. No I/O except through the session.

Every slot that is taken is sealed or given back exactly once. A block is sealed when all workers have copied their part
of it; the engine's blocks are pinned until then. Used on the scheduler's thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import takewhile

from kvservice.connector.cache_groups import Grouping
from kvservice.connector.plan import StepPlan, StepReport, StorePlan
from kvservice.connector.scheduler.handoff import WriterHandoffs
from kvservice.connector.scheduler.known_keys import KnownKeys
from kvservice.connector.scheduler.loan_book import BlockPins
from kvservice.connector.scheduler.ports import SessionPort, StoredBlock
from kvservice.connector.scheduler.request import EngineRequest
from kvservice.connector.scheduler.store_plan import GiveBack, OpenStore, PlannedStore, StorePart, plan_store
from kvservice.connector.scheduler.told import ToldBlocks
from kvservice.core.segment.refs import BlockRef
from kvservice.observe import tracing
from kvservice.units import AttachmentId, BlockHash, BootEpoch, HandoffId

IN_FLIGHT_MAX = 4096  # Blocks. Beyond it stores are put off, so that copies do not pin the engine's whole cache.
# Seconds. A store that no worker has reported by then no longer keeps an idle engine stepping.
REPORT_SECONDS_MAX = 30.0


class Stores:
    def __init__(
        self,
        session: SessionPort,
        grouping: Grouping,
        known: KnownKeys,
        handoffs: WriterHandoffs,
        worker_count: int,
        counters: Counter[str],
        *,
        remember: bool,
    ) -> None:
        """With `remember`, what is sent to be sealed is kept for `take_told`."""
        self._session = session
        self._grouping = grouping
        self._known = known
        self._handoffs = handoffs
        self._worker_count = worker_count
        self._counters = counters
        self._told = ToldBlocks() if remember else None
        self._pins: BlockPins | None = None
        self._queued: list[StorePlan] = []  # of requests that ended; for the next step
        self._open: dict[int, OpenStore] = {}
        self._in_flight = 0  # blocks of all of them
        self._is_gathering, self._change = False, 0  # of what is expected
        self._last_id = 0
        self._boot: BootEpoch | None = None
        self._step_began = 0.0

    def pin_with(self, pins: BlockPins) -> None:
        self._pins = pins

    # -- expected stores ----

    def expect(self, request: EngineRequest, count: int) -> None:
        """The request will want `count` more slots soon (negative: fewer), but never fewer than none."""
        change = max(count, -request.expected)
        request.expected += change
        if self._is_gathering:
            self._change += change
        else:
            self._session.expect(change)

    def expect_new(self, request: EngineRequest, count: int) -> None:
        """The request has got `count` more keys. What is known to be in the pool needs no slots: the pool would evict
        for a burst of prompts that it has."""
        if count == len(request.keys) and request.writes is None:  # named for the first time, or anew
            request.known_blocks = sum(1 for _ in takewhile(self._known.__contains__, request.keys))
            count -= request.known_blocks
        self.expect(request, count)

    def found(self, request: EngineRequest, stored: int) -> None:
        """This many of its leading blocks are in the pool: known ones may be gone, and others be there."""
        self.expect(request, request.expected_from - stored)
        request.stored, request.known_blocks = stored, 0

    def follow(self, boot: BootEpoch, requests: Iterable[EngineRequest]) -> None:
        """Of a pool that has started anew, nothing is known to be there: what these requests have is stored again."""
        if self._boot not in (None, boot):
            for request in requests:
                self.found(request, request.kept_out)
        self._boot = boot

    def gather(self) -> None:
        """Tell the session of what is expected until the end of the next `plan` as one change: most of it is taken at
        once."""
        self._is_gathering = True

    def _settle(self) -> None:
        self._is_gathering, change, self._change = False, self._change, 0
        if change:
            self._session.expect(change)

    # -- plans ----

    def begin_step(self, plan: StepPlan, now: float) -> None:
        """Put the stores of requests that ended into the step."""
        plan.stores, self._queued = self._queued, []
        self._step_began = now

    def plan(self, attachment: AttachmentId, parts: Sequence[StorePart]) -> list[StorePlan]:
        """Take slots for the full blocks of these requests that are not in the pool, and plan their copies: in one
        store, but for hand-offs, whose readers wait. Blocks that find no slot are tried again in the next step."""
        groups = [[part] for part in parts if part.request.writes is not None]
        groups.append([part for part in parts if part.request.writes is None])
        try:
            plans = [self._plan(attachment, group) for group in groups]
        finally:
            self._settle()
        return [plan for plan in plans if plan is not None]

    def _plan(self, attachment: AttachmentId, parts: Sequence[StorePart]) -> StorePlan | None:
        if not parts:
            return None
        first = parts[0].request
        # Whether a known block was evicted since is noticed only by asking. A hand-off from an engine that never asks
        # therefore stores everything: a duplicate costs a copy, but a gap costs the reader the whole rest.
        known = self._known if first.writes is None or first.ask_number else ()
        for store in self._open.values():  # what is known may be one that is still copied
            self._belongs_to(store, first.writes)
        take_slots = partial(self._session.take_slots, attachment)
        planned = plan_store(self._grouping, parts, known, IN_FLIGHT_MAX - self._in_flight, take_slots)
        if planned.unused:
            self._session.abort(attachment, planned.unused)
        blocks: list[StoredBlock] = []
        for part in parts:
            request = part.request
            if part.done > request.stored:
                self.expect(request, min(request.expected_from - part.done, 0))
                request.stored = part.done
            for position in part.positions if self._told is not None else ():
                blocks += [StoredBlock(*named) for named in self._grouping.named(part.hashes, position)]
        traced = (it for it in parts if it.found and it.request.trace)
        spans = [tracing.begin("store", it.request.trace, blocks=it.found) for it in traced]
        return self.open(attachment, planned, blocks, first.writes, spans=spans)

    def take_slots(self, attachment: AttachmentId, count: int) -> list[BlockRef]:
        """At most `count` slots for blocks of group 0, and none while too many copies are under way. `open` takes
        them."""
        room = IN_FLIGHT_MAX - self._in_flight
        return self._session.take_slots(attachment, min(count, room)) if room > 0 else []

    def open(
        self,
        attachment: AttachmentId,
        planned: PlannedStore,
        blocks: Sequence[StoredBlock],
        handoff: HandoffId | None = None,
        give_back: GiveBack | None = None,
        spans: Sequence[tracing.Span] = (),
    ) -> StorePlan | None:
        """Pin the blocks of a planned store and wait for its reports. `give_back` unpins them instead of the engine's
        pins. Returns None if there is nothing to copy."""
        if planned.put_off:
            self._counters["store_blocks_put_off"] += planned.put_off
        if not planned.items:
            return None
        self._known.learn(item.key for item in planned.items)
        self._last_id += 1
        read = list(dict.fromkeys(entry.block_id for entry in planned.entries))  # a block may fill several slots
        if self._pins is not None:
            self._pins.pin(read)
        store = OpenStore(
            attachment, planned.items, list(blocks), read, self._step_began, set(), Counter(), give_back, spans
        )
        self._open[self._last_id] = store
        self._in_flight += len(store.items)
        self._belongs_to(store, handoff)
        self._counters["store_blocks_planned"] += len(planned.items)
        return StorePlan(self._last_id, tuple(planned.entries))

    def _belongs_to(self, store: OpenStore, handoff: HandoffId | None) -> None:
        if handoff is not None and handoff not in store.handoffs:
            store.handoffs.add(handoff)
            self._handoffs.store_begun(handoff)

    def queue(self, store: StorePlan) -> None:
        """Copy this store with the next step; its request has ended."""
        self._queued.append(store)

    # -- reports ----

    def reported(self, report: StepReport) -> None:
        """Note that some workers are done with some stores."""
        for outcome, counts in (("stored", report.stored), ("failed", report.failed)):
            for store_id, count in counts.items():
                store = self._open.get(store_id)
                if store is not None:
                    store.reports[outcome] += count
                    self._finish(store_id, store)

    def fail(self, store: StorePlan) -> None:
        """No worker will copy this store: give its slots back."""
        self.reported(StepReport(failed={store.store_id: self._worker_count}))

    def _finish(self, store_id: int, store: OpenStore) -> None:
        if store.reports.total() < self._worker_count:
            return
        del self._open[store_id]
        self._in_flight -= len(store.items)
        if store.give_back is not None:
            store.give_back(store.block_ids)
        elif self._pins is not None:
            self._pins.unpin(store.block_ids)
        for span in store.spans:
            span.end(failed=bool(store.reports["failed"]) or store.is_void)
        if store.reports["failed"] or store.is_void:
            self._counters["store_blocks_void" if store.is_void else "store_blocks_failed"] += len(store.items)
            self._known.forget(item.key for item in store.items)
            self._session.abort(store.attachment, [item.ref for item in store.items])
        else:
            if self._told is not None:
                self._told.sent(store.items, store.blocks, self._step_began)
            self._session.seal(store.attachment, store.items)
        for handoff in store.handoffs:
            self._handoffs.store_ended(handoff)

    def void(self, requests: Iterable[EngineRequest] = ()) -> None:
        """The engine's blocks may not hold what their names say: what is being copied is given back when its copies
        end, and not sealed. What these requests compute from now on is stored again."""
        for store in self._open.values():
            store.is_void = True
            self._known.forget(item.key for item in store.items)
        for request in requests:
            self.found(request, request.kept_out)
            request.computed_blocks = 0

    def reset(self) -> None:
        """The engine's weights changed: nothing is sealed or followed that was stored before."""
        self.void()
        for store in self._open.values():
            store.handoffs.clear()
        if self._told is not None:
            self._told.reset()

    def take_told(self) -> tuple[list[BlockHash], list[StoredBlock]]:
        """What is to be told since the last call: first the blocks that have left the pool, as far as anybody knows,
        then those that are in it. Empty unless `remember`."""
        return ([], []) if self._told is None else self._told.take(self._session.news())

    # -- state ----

    @property
    def is_empty(self) -> bool:
        """Whether nothing is queued and no worker copies anything."""
        return not self._open and not self._queued

    @property
    def is_told(self) -> bool:
        """Whether all that is sent to be sealed has been told of, or nobody is told."""
        return self._told is None or self._told.is_empty

    @property
    def is_quiet(self) -> bool:
        """Whether no worker can write a slot any more."""
        return not self._open

    def is_pending(self, now: float) -> bool:
        """Whether steps are needed, to start copies, to learn how they ended, or to tell of them."""
        if self._queued or (self._told is not None and self._told.is_pending(now)):
            return True
        return any(now - it.planned_at < REPORT_SECONDS_MAX for it in self._open.values())

    def check_invariants(self) -> None:
        assert self._in_flight == sum(len(store.items) for store in self._open.values())
        for store in self._open.values():
            assert store.reports.total() < self._worker_count, "a store every worker reported is still open"
