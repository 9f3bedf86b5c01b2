"""Goes through the requests of one of vLLM's steps that may have filled a block, for the scheduler half.

It reads what vLLM hands over and imports nothing of it. Used on the scheduler's thread.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvservice.connector.cache_groups import Grouping, Table
from kvservice.connector.plan import StepPlan
from kvservice.connector.scheduler.due import DueRing
from kvservice.connector.scheduler.half import SchedulerHalf
from kvservice.connector.scheduler.ports import BlockIds
from kvservice.connector.vllm.draft_layers import HashesBehind

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvservice.connector.vllm.events import StoredEvents
    from kvservice.connector.vllm.sharing import SharedRequests
    from kvservice.connector.vllm.state_tables import StateTables


class RequestBlocks:
    """Which blocks of a request are whole, and what names them."""

    def __init__(self, pages: SharedRequests | None = None, ahead: int = 0, drafted_tokens: int | None = None) -> None:
        """`ahead` is how many tokens behind a block must be computed, too: those of a block with draft layers. With
        `drafted_tokens` drafts have KV in the blocks, unless a request of the step is longer than that."""
        self.pages = pages
        self._ahead = ahead
        self._drafted_tokens = drafted_tokens

    @property
    def are_named_by_vllm(self) -> bool:
        """Whether vLLM's own cache has a block under the hash that names it here."""
        return self.pages is None and not self._ahead

    def hashes(self, request: Request) -> Sequence[Any]:
        """The hashes that name its blocks so far. The list grows."""
        if self.pages is not None:
            return self.pages.hashes(request)
        return HashesBehind(request.block_hashes) if self._ahead else request.block_hashes

    def keep_out(self, scheduler: SchedulerHalf, output: SchedulerOutput, live: Mapping[str, Request]) -> None:
        """Have nothing stored that may lack the right KV of drafts: what a request got from vLLM's own cache, which
        does not tell apart blocks of equal tokens with other tokens behind them, and what is computed without drafts.
        """
        if self._drafted_tokens is None:
            return
        begins = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        fresh = {*begins, *output.scheduled_cached_reqs.resumed_req_ids}
        tokens_of, longest = output.num_scheduled_tokens, 0
        for request_id, count in tokens_of.items():
            if (request := live.get(request_id)) is not None:
                begin = begins.get(request_id, request.num_computed_tokens)
                longest = max(longest, begin + count)
                if request_id in fresh:
                    scheduler.keep_out(request_id, begin)
        if longest > self._drafted_tokens:
            scheduler.counters["steps_without_drafts"] += 1
            for request_id in tokens_of:
                scheduler.keep_out(request_id, sys.maxsize)

    def whole(self, computed_tokens: int) -> int:
        """How many of its computed tokens count."""
        return max(computed_tokens - self._ahead, 0)


class StepWalk:
    def __init__(
        self,
        live: Mapping[str, Request],
        block_tokens: int,
        grouping: Grouping,
        *,
        is_named: Callable[[Request], bool] = lambda _: True,
        events: StoredEvents | None = None,
        states: StateTables | None = None,
        blocks: RequestBlocks | None = None,
    ) -> None:
        """`live` are the engine's requests. `block_tokens` are those of a position. Of a request that is not `is_named`
        nothing is stored in this step."""
        self._live = live
        self._due = DueRing(block_tokens)
        self._grouping = grouping
        self._is_named = is_named
        self._events = events
        self._states = states
        self._blocks = blocks or RequestBlocks()
        self._pages = self._blocks.pages
        self._shown: list[str] = []  # requests of the step being planned

    def plan_stores(self, scheduler: SchedulerHalf, plan: StepPlan, output: SchedulerOutput) -> None:
        """Have the scheduler half plan the stores of the step. Costs what the step changes, not what it computes, but
        for a look at each request's length with drafts."""
        preempted = output.preempted_req_ids or ()
        for request_id in preempted:
            self._due.forget(request_id)
        behind = self._shown = []
        self._blocks.keep_out(scheduler, output, self._live)
        try:
            behind = scheduler.plan_stores(plan, self._scheduled(plan, output), preempted)
        finally:  # when it fails, all of this step are due again
            self._due.look_next(behind)

    def ended(self, request_id: str) -> None:
        """The request has ended."""
        self._due.forget(request_id)

    def _scheduled(self, plan: StepPlan, output: SchedulerOutput) -> Iterable[tuple[str, Any, int, BlockIds]]:
        """(request id, block hashes, computed tokens that count at the end of this step, block ids) of those due."""
        state = output.kv_connector_block_state
        if state is None:
            return

        def block_ids(request_id: str) -> Table:
            return self._grouping.table(state.get_block_ids(request_id))

        begins = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        fresh = (*begins, *output.scheduled_cached_reqs.resumed_req_ids)
        tokens = output.num_scheduled_tokens
        probes = self._pages is not None and self._pages.gate.is_waiting
        self._shown += self._due.begin_step(tokens, output.total_num_scheduled_tokens, tokens if probes else fresh)
        named: dict[int, bool] = {}  # by vLLM's number of the adapter
        for request_id in self._shown:
            request = self._live.get(request_id)
            if request is None:
                continue
            if self._events is not None:
                self._events.note(request)
            # vLLM counts the step's tokens to the request once it has asked for this plan.
            begin = begins.get(request_id, request.num_computed_tokens)
            end = begin + tokens[request_id]
            whole = self._blocks.whole(end)
            self._due.look_again(request_id, whole)
            adapter = 0 if request.lora_request is None else request.lora_request.lora_int_id
            if adapter not in named:  # one look at its files a step
                named[adapter] = self._is_named(request)
            if not named[adapter]:
                continue
            ids: BlockIds = functools.partial(block_ids, request_id)
            if probes:
                assert self._pages is not None
                self._pages.probe(plan, request, end, ids())
            if self._states is not None:
                ids = self._states.of_step(state, request_id, ids, begin, end)
            yield request_id, self._blocks.hashes(request), whole, ids
