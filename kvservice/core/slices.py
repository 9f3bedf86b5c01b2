"""Long calls are done in slices, so that others have their turns in between. Pure; a part of ShardState.

A call may name thousands of blocks, and nothing interrupts one event. So the work of a long call is a generator that
yields between its slices. After each slice but the last the core emits NextTurn, and the performer sends GoOn
when it is that caller's turn again. What the work holds meanwhile stands in the records of the part that it belongs to
and never in the generator alone: invariants, cancellations and the end of an attachment see it there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

from kvservice.core.actions import Action, NextTurn

Work = Generator[None, float, None]  # each further slice is sent its `now`


@dataclass(frozen=True, slots=True)
class SliceSizes:
    """How much is done in one slice. Simulated shards have smaller slices, because their calls are small."""

    blocks: int = 128  # pinned or unpinned: 30 µs
    slots: int = 32  # reserved, each with an eviction, or begun to be sealed: 0.2 ms


DEFAULT_SLICES = SliceSizes()


class Slices:
    """The work of every call that has slices left, by the call."""

    def __init__(self, sizes: SliceSizes, emit: Callable[[Action], None]) -> None:
        self.sizes = sizes
        self._emit = emit
        self._open: dict[int, Work] = {}

    def begin(self, op: int, work: Work) -> None:
        """Do the first slice of this call's work now. What it raises is the caller's."""
        assert op not in self._open, "a call is at work twice"
        for _ in work:
            self._open[op] = work
            self._emit(NextTurn(op))
            return

    def go_on(self, op: int, now: float) -> None:
        """Do the next slice. Ignored when the call has ended: then nothing is left to do."""
        if self._step(op, now):
            self._emit(NextTurn(op))

    def finish(self, op: int, now: float) -> None:
        """Do all that is left now. A NextTurn that is on its way is ignored."""
        while self._step(op, now):
            pass

    def _step(self, op: int, now: float) -> bool:
        """Whether there is another slice after this one."""
        work = self._open.get(op)
        if work is None:
            return False
        try:
            work.send(now)
        except StopIteration:
            if self._open.get(op) is work:
                del self._open[op]
        return self._open.get(op) is work

    def drop(self, op: int) -> None:
        """Nobody wants the rest of this work."""
        self._open.pop(op, None)

    def __contains__(self, op: int) -> bool:
        return op in self._open
