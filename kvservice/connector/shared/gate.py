"""The gate before shared pages: an engine shares nothing until its own K and V of a prompt agree with the model's.

Scheduler's half: it picks the first prompt that is long enough, sends it to the workers with the step that has computed
it, and hears what they found. Until then, and for ever if they disagree, the engine runs as without a cache. The rule
keeps out what no fingerprint can know: another order of bytes, another rotation, another kernel's rounding. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

from kvservice.connector.plan import ProbePlan
from kvservice.core.block.pages import PAGE_TOKENS

PROBE_PAGES_MIN, PROBE_PAGES_MAX = 2, 16  # of a prompt: 32 tokens show a wrong rotation, and 256 are quickly computed
AGREES, DIFFERS = "share_probe_agrees", "share_probe_differs"  # counted by each worker


class GateState(Enum):
    WAITING = "waiting"  # for a prompt that is long enough
    ASKED = "asked"
    OPEN = "open"
    SHUT = "shut"


class ShareGate:
    def __init__(self, worker_count: int) -> None:
        self._worker_count = worker_count
        self._agreed = 0
        self.state = GateState.WAITING

    @property
    def is_open(self) -> bool:
        return self.state is GateState.OPEN

    @property
    def is_waiting(self) -> bool:
        return self.state is GateState.WAITING

    def probe(self, token_ids: Sequence[int], computed: int, block_ids: Sequence[int]) -> ProbePlan | None:
        """The prompt for the workers to look at, once: all its blocks are computed by this engine when the step ends.

        Args:
            computed: tokens that are computed when the step ends.
            block_ids: the engine's blocks of these tokens.
        """
        pages = min(computed, len(token_ids)) // PAGE_TOKENS
        if self.state is not GateState.WAITING or pages < PROBE_PAGES_MIN:
            return None
        self.state = GateState.ASKED
        tokens = token_ids[: min(pages, PROBE_PAGES_MAX) * PAGE_TOKENS]
        return ProbePlan(tuple(tokens), tuple(block_ids))

    def reported(self, counters: Mapping[str, int]) -> None:
        """Note what workers counted: it opens when all of them agree, and never once one does not."""
        self._agreed += counters.get(AGREES, 0)
        if counters.get(DIFFERS, 0):
            self.state = GateState.SHUT
        elif self.state is GateState.ASKED and self._agreed >= self._worker_count:
            self.state = GateState.OPEN
