"""Loads of promised blocks into the engine, from the plan of a step to the last report of the workers. Without I/O.

Every load holds one lease from its planning until all workers are done with it, or until nobody will copy it any more.
The lease then ends exactly once. Used on the scheduler's thread.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from kvservice.connector.cache_groups import Grouping, Table, load_entries
from kvservice.connector.plan import CopyEntry, LoadPlan, StepPlan
from kvservice.connector.scheduler.ports import SessionPort
from kvservice.connector.scheduler.request import EngineRequest
from kvservice.core.messages import AcquireResult
from kvservice.observe import tracing
from kvservice.units import AttachmentId, LeaseId


class Loads:
    def __init__(self, session: SessionPort, grouping: Grouping, counters: Counter[str], *, borrows: bool) -> None:
        """With `borrows`, a load that waited for its writer may use blocks that the writer's engine lends."""
        self._session = session
        self._grouping = grouping
        self._counters = counters
        self._borrows = borrows
        self._planned: list[LoadPlan] = []  # for the next step
        self._leases: dict[str, list[tuple[AttachmentId, LeaseId]]] = {}  # by request
        self._spans: dict[str, tracing.Span] = {}  # by request

    def plan(
        self, request: EngineRequest, attachment: AttachmentId, taken: AcquireResult, table: Table, first: int
    ) -> None:
        """Copy the blocks of `taken`, which begin at the request's `skip`, into the engine's blocks from number `first`
        on with the next step. Takes over the lease of `taken`."""
        count = request.skip + len(taken.blocks) - first // self._grouping.stride
        entries = load_entries(self._grouping, request.chains, taken, table, first, request.skip)
        borrows = self._borrows and request.waits_for_writer
        self._planned.append(LoadPlan(request.request_id, tuple(entries), borrows))
        self._leases[request.request_id] = [(attachment, taken.lease_id)]
        request.fetched_blocks = min(taken.fetched_count, count)
        request.loaded_blocks = max(request.loaded_blocks, count)
        self._spans[request.request_id] = tracing.begin(
            "load", request.trace, blocks=count, fetched_blocks=request.fetched_blocks
        )
        self._counters["loads_planned"] += 1
        self._counters["load_blocks"] += count
        self._counters["load_blocks_remote"] += request.fetched_blocks

    def extend(self, request_id: str, entry: CopyEntry, attachment: AttachmentId, lease_id: LeaseId) -> None:
        """The load that was planned last, of this request, also copies this block. Takes over its lease."""
        last = self._planned[-1]
        assert last.request_id == request_id, "the tail of another request"
        self._planned[-1] = replace(last, entries=(*last.entries, entry))
        self._leases[request_id].append((attachment, lease_id))
        self._counters["load_tails"] += 1

    def begin_step(self, plan: StepPlan) -> None:
        """Put the planned loads into the step."""
        plan.loads, self._planned = self._planned, []

    def done(self, request_id: str) -> None:
        """No worker copies for this request any more: end its lease. May be called again."""
        leases = self._leases.pop(request_id, None)
        if leases is not None:
            self._spans.pop(request_id).end()
        for attachment, lease_id in leases or ():
            if lease_id:
                self._session.release(attachment, lease_id)

    def is_open(self, request_id: str) -> bool:
        return request_id in self._leases
