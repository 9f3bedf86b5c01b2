"""Performs what the core asks of the tiers below the pool."""

from __future__ import annotations

from collections.abc import Callable

from kvservice.core import actions as act
from kvservice.core import events as ev


class PoolTiers:
    """`report` takes the answers, from any thread."""

    def __init__(self, report: Callable[[ev.Event], None]) -> None:
        self._report = report

    def perform(self, action: act.TierWork) -> None:
        """Begin the work. A tier that is not there has no blocks and takes none."""
        match action:
            case act.WriteDown(job, _, items):
                self._report(ev.WrittenDown(job, (False,) * len(items)))
            case act.BringBack(job, _, items):
                self._report(ev.Pulled(job, (ev.PullResult.FAILED,) * len(items)))
            case act.Probe(op, tier):
                self._report(ev.Probed(op, tier, 0))
            case act.Erase():
                pass
