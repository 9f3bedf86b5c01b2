"""Collects the results of a job's blocks, and answers the job once, when it has all of them. Any thread; never blocks
but for a moment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvservice.core.events import BroughtBlock, PullResult
from kvservice.tier.base import ReadCallback, TierRead, TierWrite, WriteCallback, WriteResult

T = TypeVar("T")


class ItemAnswers(Generic[T]):
    """The results of `count` blocks. A job without blocks is answered at once."""

    def __init__(self, count: int, dropped: T, on_done: Callable[[list[T]], None]) -> None:
        """`dropped` is the result of a block that nothing was done for."""
        self._results: list[T | None] = [None] * count
        self._missing = count
        self._dropped = dropped
        self._on_done = on_done
        self._lock = threading.Lock()
        if not count:
            on_done([])

    def put(self, place: int, result: T) -> None:
        """The result of one block. Only the first one counts. `on_done` is called here when none is missing."""
        with self._lock:
            if self._results[place] is not None:
                return
            self._results[place] = result
            self._missing -= 1
            if self._missing:
                return
        self._on_done([self._dropped if result is None else result for result in self._results])

    def drop(self, place: int) -> None:
        self.put(place, self._dropped)

    def drop_all(self) -> None:
        """Nothing was done for any block that has no result yet."""
        for place in range(len(self._results)):
            self.drop(place)


@dataclass(frozen=True, slots=True)
class Written:
    """What became of one block."""

    result: WriteResult
    stored_bytes: int = 0  # as in TierBlock


def write_answers(job: TierWrite, on_done: WriteCallback) -> ItemAnswers[Written]:
    def answer(blocks: list[Written]) -> None:
        on_done(job.job_id, tuple(one.result for one in blocks), tuple(one.stored_bytes for one in blocks))

    return ItemAnswers(len(job.items), Written(WriteResult.FAILED), answer)


def read_answers(job: TierRead, on_done: ReadCallback) -> ItemAnswers[BroughtBlock]:
    dropped = BroughtBlock(PullResult.FAILED)
    return ItemAnswers(len(job.items), dropped, lambda blocks: on_done(job.job_id, tuple(blocks)))
