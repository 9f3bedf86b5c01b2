"""Which of the engine's blocks are lent to the reader of a hand-off, and until when. Scheduler side, without I/O.

A lent block is pinned from before the workers hear of the loan until every worker has said that nobody reads it any
more. The reader need not know of the loan: it was promised slots, and its copy worker uses lent blocks where it can. So
a loan may end at any time: when the reader has taken the blocks (the workers end it themselves), after its time, when
the engine runs short of blocks, or with the copy worker.

Frozen: loans between engines have not run on the hardware that they are for, GPUs of one node. Nothing new builds on
them until they have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvservice.connector.cache_groups import NOWHERE
from kvservice.connector.plan import LendPlan, StepPlan
from kvservice.units import BlockKey

# Free blocks as a share of the engine's blocks. With fewer, the engine needs the lent blocks more than a reader does,
# so they are recalled.
FREE_SHARE_MIN = 0.125
# Seconds. A loan that no worker has given back by then no longer keeps an idle engine stepping.
REPORT_SECONDS_MAX = 30.0


class BlockPins(Protocol):
    """Pins on the engine's blocks that copies or other engines read. A pinned block is neither freed nor overwritten,
    even if its request is gone."""

    def pin(self, block_ids: Sequence[int]) -> None: ...

    def unpin(self, block_ids: Sequence[int]) -> None: ...

    def forget(self, block_ids: Sequence[int]) -> None:
        """Make the engine's own cache forget these blocks, because their contents are wrong."""
        ...

    def free_share(self) -> float:
        """Free blocks divided by all blocks."""
        ...


@dataclass(slots=True)
class _BookedLoan:
    block_ids: list[int]
    until: float
    is_recalled: bool = False
    returned_by: set[int] = field(default_factory=set)  # workers


class LoanBook:
    def __init__(self, seconds: float, worker_count: int, counters: Counter[str]) -> None:
        """`seconds` is the length of a loan; 0 means that nothing is lent."""
        self._seconds = seconds
        self._worker_count = worker_count
        self._counters = counters
        self._pins: BlockPins | None = None
        self._loans: dict[int, _BookedLoan] = {}  # those that the workers know
        self._fresh: list[LendPlan] = []  # those that the workers are told with the next step
        self._last_id = 0

    def pin_with(self, pins: BlockPins) -> None:
        """Give it the engine's pins. Without them nothing is lent."""
        self._pins = pins

    def lend(self, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> None:
        """Lend blocks: `block_ids[i]` holds the whole block `keys[i]`, and its request has ended. One that a window has
        left is NOWHERE."""
        blocks = tuple(pair for pair in zip(block_ids, keys, strict=False) if pair[0] != NOWHERE)
        if not self._seconds or self._pins is None or not blocks:
            return
        if self._is_short():
            self._counters["loans_not_made"] += 1
            return
        self._pins.pin([block_id for block_id, _ in blocks])
        self._last_id += 1
        self._fresh.append(LendPlan(self._last_id, blocks))

    def begin_step(self, plan: StepPlan, now: float, *, is_starved: bool) -> None:
        """Fill in what is lent and what is recalled. `is_starved` means that a request may be waiting for blocks."""
        if not self._fresh and not self._loans:
            return
        for lending in self._fresh:
            self._loans[lending.loan_id] = _BookedLoan(
                [block_id for block_id, _ in lending.blocks], now + self._seconds
            )
            self._counters["loan_blocks"] += len(lending.blocks)
        plan.lends, self._fresh = self._fresh, []
        if is_starved or self._is_short():
            self.recall_all()
        for loan in self._loans.values():
            loan.is_recalled = loan.is_recalled or loan.until <= now
        # Repeat it with each step until the workers have answered, because a step may fail before they see it.
        plan.recalls = [loan_id for loan_id, loan in self._loans.items() if loan.is_recalled]

    def recall_all(self) -> None:
        """Recall every block with the next step. Blocks that no worker was told of are not lent."""
        for lending in self._fresh:
            assert self._pins is not None
            self._pins.unpin([block_id for block_id, _ in lending.blocks])
        self._fresh = []
        for loan in self._loans.values():
            self._counters["loans_recalled_early"] += not loan.is_recalled
            loan.is_recalled = True

    def returned(self, reports: Iterable[tuple[int, int]]) -> None:
        """Note (loan, worker) pairs: nobody reads this worker's share of the loan any more."""
        for loan_id, worker in reports:
            loan = self._loans.get(loan_id)
            if loan is None:
                continue
            loan.returned_by.add(worker)
            if len(loan.returned_by) == self._worker_count:
                del self._loans[loan_id]
                assert self._pins is not None
                self._pins.unpin(loan.block_ids)
                self._counters["loan_blocks_returned"] += len(loan.block_ids)

    @property
    def is_empty(self) -> bool:
        return not self._loans and not self._fresh

    def is_pending(self, now: float) -> bool:
        """Whether steps are needed, to lend blocks or to learn of the end of loans."""
        return bool(self._fresh) or any(now < loan.until + REPORT_SECONDS_MAX for loan in self._loans.values())

    def _is_short(self) -> bool:
        return self._pins is not None and self._pins.free_share() < FREE_SHARE_MIN

    def check_invariants(self) -> None:
        for loan in self._loans.values():
            assert len(loan.returned_by) < self._worker_count, "a loan every worker gave back is still open"
