"""Which of the engine's blocks are lent to the reader of a hand-off, and until when. Scheduler side, without I/O.

A lent block is pinned from before the workers hear of the loan until every one of them has said that nobody reads it
any more. The reader needs no word of it: it was promised slots, and its copy worker takes what is lent from here. So a
loan may end at any time: when the reader has taken it (the workers end it themselves), after its lease, when the engine
runs short of blocks, or with the copy worker.

Frozen: loans between engines have not run on the hardware that they are for, GPUs of one node. Nothing new builds on
them until they have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvservice.connector.plan import LendPlan, StepPlan
from kvservice.units import BlockKey

FREE_SHARE_MIN = 0.125  # of the engine's blocks: below, it needs them more than a reader does
REPORT_SECONDS_MAX = 30.0  # a loan that no worker gives back by then keeps no idle engine stepping


class BlockPins(Protocol):
    """The engine's blocks that copies or other engines read: kept from being freed or overwritten, also when their
    request is gone."""

    def pin(self, block_ids: Sequence[int]) -> None: ...

    def unpin(self, block_ids: Sequence[int]) -> None: ...

    def forget(self, block_ids: Sequence[int]) -> None:
        """Their contents are wrong: nobody shall hit them."""
        ...

    def free_share(self) -> float:
        """Free blocks over all blocks."""
        ...


@dataclass(slots=True)
class _BookedLoan:
    block_ids: list[int]
    until: float
    is_recalled: bool = False
    returned_by: set[int] = field(default_factory=set)  # workers


class LoanBook:
    def __init__(self, seconds: float, worker_count: int, counters: Counter[str]) -> None:
        """`seconds` of a loan; 0 = lend nothing."""
        self._seconds = seconds
        self._worker_count = worker_count
        self._counters = counters
        self._pins: BlockPins | None = None
        self._loans: dict[int, _BookedLoan] = {}  # told to the workers
        self._fresh: list[LendPlan] = []  # to be told with the next step
        self._last_id = 0

    def pin_with(self, pins: BlockPins) -> None:
        """Without it nothing is lent."""
        self._pins = pins

    def lend(self, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> None:
        """`block_ids[i]` holds the whole block `keys[i]`, and its request has ended."""
        blocks = tuple(zip(block_ids, keys, strict=False))
        if not self._seconds or self._pins is None or not blocks:
            return
        if self._is_short():
            self._counters["loans_not_made"] += 1
            return
        self._pins.pin([block_id for block_id, _ in blocks])
        self._last_id += 1
        self._fresh.append(LendPlan(self._last_id, blocks))

    def begin_step(self, plan: StepPlan, now: float, *, is_starved: bool) -> None:
        """Fill in what is lent and what is recalled. `is_starved`: a request may be waiting for blocks."""
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
        # Again with each step until the workers have answered: a step may fail before they hear of it.
        plan.recalls = [loan_id for loan_id, loan in self._loans.items() if loan.is_recalled]

    def recall_all(self) -> None:
        """Ask for every block back with the next step; what nobody was told of yet is not lent."""
        for lending in self._fresh:
            assert self._pins is not None
            self._pins.unpin([block_id for block_id, _ in lending.blocks])
        self._fresh = []
        for loan in self._loans.values():
            self._counters["loans_recalled_early"] += not loan.is_recalled
            loan.is_recalled = True

    def returned(self, reports: Iterable[tuple[int, int]]) -> None:
        """(loan, worker): this worker's share of the loan is read by nobody any more."""
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
        """Steps are needed to lend, and to hear of the end of loans."""
        return bool(self._fresh) or any(now < loan.until + REPORT_SECONDS_MAX for loan in self._loans.values())

    def _is_short(self) -> bool:
        return self._pins is not None and self._pins.free_share() < FREE_SHARE_MIN

    def check_invariants(self) -> None:
        for loan in self._loans.values():
            assert len(loan.returned_by) < self._worker_count, "a loan every worker gave back is still open"
