"""What the engine must be told if an entry of the connector failed, so that no request waits for ever and nothing is
computed on bytes that never came.

One instance per role; used on the engine's thread. Nothing in here can fail.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvservice.connector.plan import LoadPlan, StepPlan, StepReport


class PlanningFailures:
    """Scheduler role: requests that were promised something and whose load could not be planned."""

    def __init__(self) -> None:
        self._given_up: set[str] = set()  # an entry failed for them, so nothing more is promised to them
        self._unplanned: set[str] = set()  # the engine gave them blocks and waits for a load that nobody planned
        self._layered: dict[str, int] = {}  # promised layer by layer -> blocks of its own that the engine had then
        self._computed_on: dict[str, list[int]] = {}  # blocks that the step being planned computes on

    def has_given_up(self, request_id: str) -> bool:
        return request_id in self._given_up

    def promised(self, request_id: str, engine_blocks: int | None) -> None:
        """Note the newest promise to this request. `engine_blocks` is the engine's own hit if the promise is loaded
        layer by layer, else None. A layered load runs in the step that computes on it, so the engine does not wait for
        it."""
        self._layered.pop(request_id, None)
        if engine_blocks is not None:
            self._layered[request_id] = engine_blocks

    def take_promise(self, request_id: str, block_ids: Iterable[int], external_tokens: int) -> bool:
        """The engine allocated blocks for the request. Returns True if it waits for the load, False if it computes on
        it at once."""
        first = self._layered.pop(request_id, None)
        if first is not None and external_tokens:
            self._computed_on[request_id] = list(block_ids)[first:]
        return first is None

    def give_up(self, request_id: str, *, engine_waits: bool) -> None:
        """Planning the load of this request failed. If the engine waits, the workers tell it that the load failed."""
        self._given_up.add(request_id)
        if engine_waits:
            self._unplanned.add(request_id)

    def complete(self, plan: StepPlan) -> dict[str, list[int]]:
        """Add to the plan the answers for every request whose load is not in it. Returns, by request, the blocks that
        the step computes on without a load: their contents are wrong."""
        plan.loads += [LoadPlan(request_id, ()) for request_id in self._unplanned]
        self._unplanned = set()
        taken, self._computed_on = self._computed_on, {}
        planned = {load.request_id for load in plan.loads}
        missing = {request_id: block_ids for request_id, block_ids in taken.items() if request_id not in planned}
        for block_ids in missing.values():
            plan.invalid_blocks += block_ids
        return missing

    def finished(self, request_id: str) -> None:
        self._given_up.discard(request_id)
        self._layered.pop(request_id, None)


class WorkerFailures:
    """Worker role: parts of a plan that did not get as far as a copy."""

    def __init__(self) -> None:
        self._unstarted: set[str] = set()  # loads that the engine waits for
        self._unstored: set[int] = set()
        self._layered: dict[str, LoadPlan] = {}  # of this step
        self._sound: set[str] = set()  # those of them that were sound

    @property
    def has_layered(self) -> bool:
        return bool(self._layered)

    def begin_loads(self, plan: StepPlan) -> None:
        self._layered = {load.request_id: load for load in plan.loads if load.layered}
        self._unstarted.update(load.request_id for load in plan.loads if not load.layered)

    def loads_started(self, request_ids: Iterable[str]) -> None:
        self._unstarted.difference_update(request_ids)

    def take_unstarted(self) -> set[str]:
        """Loads that failed before they started, so the engine must not wait for them."""
        found, self._unstarted = self._unstarted, set()
        return found

    def end_layers(self, sound: set[str]) -> set[int]:
        """`sound` has the layered loads whose every byte is what was promised. Returns the blocks of the others."""
        self._sound = sound
        failed = [load for request_id, load in self._layered.items() if request_id not in sound]
        return {entry.block_id for load in failed for entry in load.entries}

    def begin_stores(self, plan: StepPlan) -> None:
        self._unstored.update(store.store_id for store in plan.stores)

    def stores_started(self, store_ids: Iterable[int]) -> None:
        self._unstored.difference_update(store_ids)

    def complete(self, report: StepReport | None) -> StepReport | None:
        """The report with everything that failed here added. A plan that nobody reports would block a later
        attachment."""
        if self._unstored:
            report = report or StepReport()
            report.failed.update(dict.fromkeys(self._unstored, 1))
            self._unstored = set()
        if self._layered:
            report = report or StepReport()
            report.layered = dict.fromkeys(self._sound, 1)
            report.layered_failed = dict.fromkeys(self._layered.keys() - self._sound, 1)
            self._layered = {}
        return report
