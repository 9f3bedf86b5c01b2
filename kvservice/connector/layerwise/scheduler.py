"""Scheduler half that promises hits as layered loads: their blocks are copied while the step computes the rest.

Such a load is checked only when its step has ended. Until then nothing that was computed on it is stored, and requests
with the same prefix wait. A load that was not sound is taken back, together with what was computed on it.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvservice.connector.cache_groups import Table
from kvservice.connector.layerwise.loads import LayeredLoads, LayeredState
from kvservice.connector.plan import StepReport
from kvservice.connector.scheduler.half import SchedulerHalf
from kvservice.connector.scheduler.ports import BlockIds, Promise, Wait
from kvservice.connector.scheduler.request import EngineRequest
from kvservice.connector.scheduler.store_plan import StorePart
from kvservice.core.messages import Attachment
from kvservice.units import BlockHash, HandoffId


class LayerwiseScheduler(SchedulerHalf):
    """Call `end_layered` with the report of every step, and `unplanned` when a promised load is not in its step."""

    loads_type = LayeredLoads
    _loads: LayeredLoads

    def matched(self, request_id: str, computed_tokens: int, total_tokens: int, now: float) -> Wait | Promise:
        """As SchedulerHalf; a request also waits while its engine's own hit may not be believed yet."""
        self.take_answers()
        if self.must_wait(request_id, computed_tokens):
            return Wait()
        answer = super().matched(request_id, computed_tokens, total_tokens, now)
        if isinstance(answer, Wait):
            return answer
        # A layered load needs something to compute meanwhile.
        hides = min(answer.tokens, total_tokens - computed_tokens - answer.tokens) > 0
        layered = hides and self._can_be_layered(request_id)
        self._loads.offer(request_id, layered=layered)
        return Promise(answer.tokens, layered)

    def _can_be_layered(self, request_id: str) -> bool:
        """A request that is handed off waits for its stores, so its load is not hidden behind computing."""
        can_take_back = self._pins is not None and not self._grouping.window_groups
        return can_take_back and self._requests[request_id].writes is None

    def must_wait(self, request_id: str, computed_tokens: int) -> bool:
        """Whether the engine's own hit of this request may include blocks that are loaded in the step being planned."""
        request = self._requests.get(request_id)
        hit = self._engine_blocks(computed_tokens)
        return hit > 0 and self._loads.conceals(None if request is None else request.hashes[:hit])

    def allocated(self, request_id: str, block_ids: Table, external_tokens: int) -> None:
        request = self._requests.get(request_id)
        if request is not None and external_tokens:
            end = self._engine_blocks(request.local_tokens + external_tokens)
            self._loads.take(request, block_ids, self._engine_blocks(request.local_tokens), end)
        super().allocated(request_id, block_ids, external_tokens)

    def end_layered(self, report: StepReport | None) -> None:
        """A step has ended; no worker reads a slot for its layered loads any more. Call it with every step's report."""
        for load in self._loads.end_step(report, self._worker_count):
            sound = load.state is LayeredState.SOUND
            if not sound and self._pins is not None:
                self._pins.forget(load.block_ids)
            if load.store is not None and sound:
                self._stores.queue(load.store)
            elif load.store is not None:
                self._stores.fail(load.store)
            self.loaded(load.request_id, failed=not sound)

    def unplanned(self, request_id: str, block_ids: Sequence[int]) -> None:
        """A step computes on a promise that is not in its plan, because something failed. Drop the load."""
        self._loads.unplanned(request_id)
        if self._pins is not None:
            self._pins.forget(block_ids)

    def finished(
        self,
        request_id: str,
        hashes: Sequence[BlockHash],
        computed_tokens: int,
        block_ids: Table,
        *,
        store_rest: bool,
    ) -> HandoffId | None:
        self._loads.offer(request_id, layered=False)
        return super().finished(request_id, hashes, computed_tokens, block_ids, store_rest=store_rest)

    def _store_rest(
        self, request: EngineRequest, hashes: Sequence[BlockHash], computed_tokens: int, block_ids: Table
    ) -> None:
        """As SchedulerHalf. The store of a request that ended with its loading step waits for that step's report."""
        if not self._loads.is_unconfirmed(request.request_id):
            super()._store_rest(request, hashes, computed_tokens, block_ids)
        elif (attachment := self._rest_goes_to()) is not None:
            request.hashes = hashes
            store = self._store_of(attachment, request, computed_tokens, block_ids)
            if store is not None:
                self._loads.keep(request.request_id, store)

    def _parts_of(
        self, attachment: Attachment, request: EngineRequest, computed_tokens: int, block_ids: BlockIds
    ) -> list[StorePart]:
        """Nothing of a request whose load is not confirmed, also if planning it failed."""
        if self._loads.is_unconfirmed(request.request_id):
            return []
        return super()._parts_of(attachment, request, computed_tokens, block_ids)

    def _part_from_cache(self, attachment: Attachment, request: EngineRequest, most: int) -> None:
        """Nothing: what the engine holds under a hash may be a layered load that is not confirmed."""
