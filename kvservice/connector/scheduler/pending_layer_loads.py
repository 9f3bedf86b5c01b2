"""Loads that the same step computes on: what may not be believed until the workers have said that they were sound.

Pure state of the scheduler half, on the engine's scheduler thread. The engine counts such blocks as its own from the
moment it schedules them, so another request could find them in the engine's prefix cache before they are checked: it is
made to wait. The step's report ends every wait, whatever it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvservice.connector.plan import StepReport, StorePlan
from kvservice.core.transitions import step
from kvservice.units import BlockKey


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
    keys: frozenset[BlockKey]
    block_ids: tuple[int, ...]  # what is loaded, and what the step computes from it
    state: LayeredState = LayeredState.PLANNED
    store: StorePlan | None = None  # what the request has left to store, when it ended with this step

    def move(self, event: LayeredEvent) -> None:
        self.state = step(TRANSITIONS, self.state, event, f"the layered load of {self.request_id}")


class LayeredLoads:
    def __init__(self, worker_count: int) -> None:
        self._worker_count = worker_count
        self._loads: dict[str, LayeredLoad] = {}

    def begin(self, request_id: str, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> None:
        self._loads[request_id] = LayeredLoad(request_id, frozenset(keys), tuple(block_ids))

    def begin_step(self) -> None:
        """All loads so far are part of the step that is planned now."""
        for load in self._loads.values():
            load.move(LayeredEvent.BEGIN_STEP)

    def conceals(self, keys: Sequence[BlockKey] | None) -> bool:
        """Some of these blocks (None: unknown ones), which the engine takes for its own, are not confirmed yet."""
        return any(keys is None or not load.keys.isdisjoint(keys) for load in self._loads.values())

    def is_open(self, request_id: str) -> bool:
        return request_id in self._loads

    def keep(self, request_id: str, store: StorePlan) -> None:
        """The request ended with the step that loads: its store goes on only if the load was sound."""
        self._loads[request_id].store = store

    def end_step(self, report: StepReport | None) -> list[LayeredLoad]:
        """The loads of the step that ended: SOUND when every worker found them so, else FAILED."""
        ended: list[LayeredLoad] = []
        for request_id, load in list(self._loads.items()):
            if load.state is LayeredState.IN_STEP:
                del self._loads[request_id]
                sound = 0 if report is None else report.layered.get(request_id, 0)
                failed = 1 if report is None else report.layered_failed.get(request_id, 0)
                is_sound = sound == self._worker_count and not failed
                load.move(LayeredEvent.CONFIRM if is_sound else LayeredEvent.REFUTE)
                ended.append(load)
        return ended
