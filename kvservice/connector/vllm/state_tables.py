"""Of a model that keeps states (Mamba, linear attention): what of a request's block table can be stored.

Position p of such a table is the state after p + 1 blocks, if a step ended there. vLLM overwrites, moves and frees the
others as it goes on, so they are hidden here. Written for vLLM 0.32 and its mode `align`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvservice.connector.cache_groups import Grouping, SeveralGroups, Table, state_positions
from kvservice.connector.scheduler.ports import BlockIds

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import KVConnectorBlockState


class StateTables:
    def __init__(self, grouping: SeveralGroups) -> None:
        self._grouping = grouping

    @classmethod
    def of(cls, grouping: Grouping) -> StateTables | None:
        """None for a model without states."""
        return cls(grouping) if isinstance(grouping, SeveralGroups) and grouping.has_states else None

    def of_step(
        self, state: KVConnectorBlockState, request_id: str, block_ids: BlockIds, begin: int, end: int
    ) -> BlockIds:
        """The table as it can be stored when a step has computed tokens `begin` to `end`. vLLM may offer a state that
        it keeps within the step, as (group, block id, tokens)."""
        offers = [tokens for _, _, tokens in state.boundary_state_offloads.get(request_id, ())]
        positions = state_positions(begin, end, self._grouping.block_tokens, offers)
        return partial(self._only_at, positions, block_ids)

    def _only_at(self, positions: set[int], block_ids: BlockIds) -> Table:
        return self._grouping.only_states_at(block_ids(), positions)

    def at_end(self, table: Table) -> Table:
        """The table of a request that has ended. Its states were stored in the steps that ended at them."""
        return self._grouping.only_states_at(table, frozenset())
