"""Loads that the same step computes on: what may not be believed until the workers have said that they were sound.

Pure state of the scheduler half, on the engine's scheduler thread. The engine counts such blocks as its own from the
moment it schedules them, so another request could find them in the engine's prefix cache before they are checked: it is
made to wait. The step's report ends every wait, whatever it says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from kvservice.connector.cache_groups import Grouping, Table
from kvservice.connector.plan import StepPlan, StepReport, StorePlan
from kvservice.connector.scheduler.loads import Loads
from kvservice.connector.scheduler.ports import SessionPort
from kvservice.connector.scheduler.request import EngineRequest
from kvservice.core.messages import AcquireResult
from kvservice.core.transitions import step
from kvservice.units import AttachmentId, BlockHash


class LayeredState(Enum):
    PLANNED = "planned"  # the engine took the promise up; the step that loads it is not begun
    IN_STEP = "in_step"  # workers load its layers while the engine computes on them
    SOUND = "sound"  # every worker found every byte as promised
    FAILED = "failed"  # some worker did not, or did not say


class LayeredEvent(Enum):
    BEGIN_STEP = "begin_step"
    CONFIRM = "confirm"
    REFUTE = "refute"  # also when the step ended without a report


TRANSITIONS: dict[tuple[LayeredState, LayeredEvent], LayeredState] = {
    (LayeredState.PLANNED, LayeredEvent.BEGIN_STEP): LayeredState.IN_STEP,
    (LayeredState.IN_STEP, LayeredEvent.BEGIN_STEP): LayeredState.IN_STEP,  # the step before ended without a word
    (LayeredState.IN_STEP, LayeredEvent.CONFIRM): LayeredState.SOUND,
    (LayeredState.IN_STEP, LayeredEvent.REFUTE): LayeredState.FAILED,
}


@dataclass(slots=True)
class LayeredLoad:
    request_id: str
    hashes: frozenset[BlockHash]  # the engine's names of what is loaded
    block_ids: tuple[int, ...]  # what is loaded, and what the step computes from it
    state: LayeredState = LayeredState.PLANNED
    store: StorePlan | None = None  # what the request has left to store, when it ended with this step

    def move(self, event: LayeredEvent) -> None:
        self.state = step(TRANSITIONS, self.state, event, f"the layered load of {self.request_id}")


class LayeredLoads(Loads):
    """Loads of which some are layered."""

    def __init__(self, session: SessionPort, grouping: Grouping, counters: Counter[str], *, borrows: bool) -> None:
        super().__init__(session, grouping, counters, borrows=borrows)
        self._offered: set[str] = set()  # requests whose newest promise is a layered load
        self._layered: dict[str, LayeredLoad] = {}  # whose step has not ended, by request

    def offer(self, request_id: str, *, layered: bool) -> None:
        """Note how the newest promise to this request is loaded, if the engine takes it."""
        if layered:
            self._offered.add(request_id)
        else:
            self._offered.discard(request_id)

    def take(self, request: EngineRequest, block_ids: Sequence[int], first: int, end: int) -> None:
        """The engine takes the newest promise: its hashes [first, end). Call it before what may fail: from here on the
        engine counts these blocks as its own, whether their load is planned or not."""
        if request.request_id in self._offered:
            hashes = frozenset(request.hashes[first:end])
            self._layered[request.request_id] = LayeredLoad(request.request_id, hashes, tuple(block_ids[first:]))

    def plan(
        self, request: EngineRequest, attachment: AttachmentId, taken: AcquireResult, table: Table, first: int
    ) -> None:
        super().plan(request, attachment, taken, table, first)
        if request.request_id in self._layered:
            self._planned[-1] = replace(self._planned[-1], layered=True)

    def begin_step(self, plan: StepPlan) -> None:
        super().begin_step(plan)
        self._in_step()

    def unplanned(self, request_id: str) -> None:
        """A step computes on a promise that is not in its plan, because something failed. Drop the load."""
        self._planned = [load for load in self._planned if load.request_id != request_id]
        self._in_step()  # its end will find no report

    def _in_step(self) -> None:
        """All layered loads so far are part of the step that is planned now."""
        for load in self._layered.values():
            load.move(LayeredEvent.BEGIN_STEP)

    def conceals(self, hashes: Sequence[BlockHash] | None) -> bool:
        """Some of these blocks (None: unknown ones), which the engine takes for its own, are not confirmed yet."""
        return any(hashes is None or not load.hashes.isdisjoint(hashes) for load in self._layered.values())

    def is_unconfirmed(self, request_id: str) -> bool:
        return request_id in self._layered

    def keep(self, request_id: str, store: StorePlan) -> None:
        """The request ended with the step that loads: its store goes on only if the load was sound."""
        self._layered[request_id].store = store

    def end_step(self, report: StepReport | None, worker_count: int) -> list[LayeredLoad]:
        """The loads of the step that ended: SOUND when every worker found them so, else FAILED."""
        ended: list[LayeredLoad] = []
        for request_id, load in list(self._layered.items()):
            if load.state is LayeredState.IN_STEP:
                del self._layered[request_id]
                sound = 0 if report is None else report.layered.get(request_id, 0)
                failed = 1 if report is None else report.layered_failed.get(request_id, 0)
                is_sound = sound == worker_count and not failed
                load.move(LayeredEvent.CONFIRM if is_sound else LayeredEvent.REFUTE)
                ended.append(load)
        return ended
