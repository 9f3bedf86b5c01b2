"""Loads that the same step computes on: what may not be believed until the workers have said that they were sound.

Pure state of the scheduler half, on the engine's scheduler thread. The engine counts such blocks as its own from the
moment it schedules them, so another request could find them in the engine's prefix cache before they are checked: it is
made to wait. The step's report ends every wait, whatever it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvservice.connector.plan import StepReport, StorePlan
from kvservice.units import BlockKey


@dataclass(slots=True)
class LayeredLoad:
    request_id: str
    keys: frozenset[BlockKey]
    block_ids: tuple[int, ...]  # what is loaded, and what the step computes from it
    in_step: bool = False  # a step that loads it was begun
    store: StorePlan | None = None  # what the request has left to store, when it ended with this step


class LayeredLoads:
    def __init__(self, worker_count: int) -> None:
        self._worker_count = worker_count
        self._loads: dict[str, LayeredLoad] = {}

    def begin(self, request_id: str, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> None:
        self._loads[request_id] = LayeredLoad(request_id, frozenset(keys), tuple(block_ids))

    def begin_step(self) -> None:
        """All loads so far are part of the step that is planned now."""
        for load in self._loads.values():
            load.in_step = True

    def conceals(self, keys: Sequence[BlockKey] | None) -> bool:
        """Some of these blocks (None: unknown ones), which the engine takes for its own, are not confirmed yet."""
        return any(keys is None or not load.keys.isdisjoint(keys) for load in self._loads.values())

    def is_open(self, request_id: str) -> bool:
        return request_id in self._loads

    def keep(self, request_id: str, store: StorePlan) -> None:
        """The request ended with the step that loads: its store goes on only if the load was sound."""
        self._loads[request_id].store = store

    def end_step(self, report: StepReport | None) -> list[tuple[LayeredLoad, bool]]:
        """The loads of the step that ended, each with whether every worker found it sound."""
        ended: list[tuple[LayeredLoad, bool]] = []
        for request_id, load in list(self._loads.items()):
            if load.in_step:
                del self._loads[request_id]
                sound = 0 if report is None else report.layered.get(request_id, 0)
                failed = 1 if report is None else report.layered_failed.get(request_id, 0)
                ended.append((load, sound == self._worker_count and not failed))
        return ended
