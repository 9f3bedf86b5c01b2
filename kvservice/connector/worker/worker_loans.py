"""The worker half's loans: lends what the plan says through its copier, and reports when nobody reads it any more.

Used by the worker's main thread. A loan that was never made, for whatever reason, is reported like one that is over.

Frozen: loans between engines have not run on the hardware that they are for, GPUs of one node. Nothing new builds on
them until they have.
"""

from __future__ import annotations

import logging
import os

from kvservice.connector.plan import LendPlan, StepPlan, StepReport
from kvservice.connector.worker.copier import Copier, LentBlocks

log = logging.getLogger("kvservice.connector")


class WorkerLoans:
    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        # several workers report one loan, and one worker may report it twice
        self._worker = int.from_bytes(os.urandom(8), "big")
        self._loans: dict[int, LentBlocks] = {}
        self._over: set[int] = set()

    def follow(self, plan: StepPlan) -> None:
        """Lend and recall as planned. Does not block or raise."""
        for lending in plan.lends:
            self._lend(lending)
        for loan_id in plan.recalls:
            loan = self._loans.get(loan_id)
            if loan is None:
                self._over.add(loan_id)
            else:
                loan.recall()

    def _lend(self, lending: LendPlan) -> None:
        loan: LentBlocks | None = None
        try:
            loan = self._copier.lend(lending.blocks)
        except Exception:  # the engine goes on, because a loan is only a shortcut
            log.warning("blocks of a hand-off were not lent", exc_info=True)
        if loan is None:
            self._over.add(lending.loan_id)
        else:
            self._loans[lending.loan_id] = loan

    def recall_all(self) -> None:
        for loan in self._loans.values():
            loan.recall()

    def report(self, report: StepReport) -> None:
        """Add the loans that ended since the last call. Recall those that a reader has taken."""
        for loan_id, loan in list(self._loans.items()):
            if loan.is_over:
                del self._loans[loan_id]
                self._over.add(loan_id)
            elif loan.is_taken:
                loan.recall()
        if self._over:
            report.returned |= {(loan_id, self._worker) for loan_id in self._over}
            self._over = set()
