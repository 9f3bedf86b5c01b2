"""Lanes: one ordered queue of copy jobs per direction and engine, each with a thread of its own.

Each batch of blocks is checked against the slots' headers right before it is copied, because a job may have waited: a
slot that is no longer reserved for the engine is never written. Loads are checked again afterwards. The engine checks
too, and a block counts only if both agree.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvservice.copying.copies import CopyEngine, StartedCopies
from kvservice.copying.message import CopyJob, CopyOutcome, Direction, Ended
from kvservice.copying.worker.loans import DirectPath
from kvservice.core.segment.copy_runs import CopyTemplate
from kvservice.core.segment.geometry import index_in_slab, slab_of
from kvservice.core.segment.header_checks import is_as_promised, is_reserved
from kvservice.core.segment.refs import BlockRef
from kvservice.errors import InvalidRequest, KVServiceError
from kvservice.memory.segment import Segment
from kvservice.observe.failpoints import failpoint
from kvservice.units import BlockKey, BootEpoch, Generation, SlotIndex

log = logging.getLogger("kvservice.copying")

# Blocks between two checks of their slots. Few enough to end a stale or stopped job soon, many enough that a batch
# fills the memory's bandwidth.
BATCH_ROWS = 64
# Batches of a job under way at once: while one crosses the bus, the next one is checked and handed to the driver.
BATCHES_UNDER_WAY = 2
Ready: TypeAlias = Callable[[Callable[[], bool]], None]


@dataclass(frozen=True, slots=True)
class Target:
    """Where the copies of one engine go: the segment as promised, and the copy engine."""

    segment: Segment
    epoch: BootEpoch
    template: CopyTemplate
    engine: CopyEngine
    direct: DirectPath


@dataclass(slots=True)
class CopyTally:
    """What was copied for one job."""

    byte_count: int = 0
    borrowed: int = 0  # blocks


@dataclass(slots=True)
class _Batch:
    """Some blocks of a job, under way."""

    rows: npt.NDArray[np.void]
    slots: list[SlotIndex]
    started: StartedCopies | None  # None: all of them came from other engines
    byte_count: int
    borrowed: int = 0


@dataclass(slots=True)
class LaneCounts:
    jobs: int = 0
    blocks: int = 0
    byte_count: int = 0
    stale: int = 0
    failed: int = 0
    borrowed: int = 0  # blocks copied from another engine


class CopyLane:
    """One direction of one engine. `on_ended` is called on the lane's thread, for jobs in the order they came."""

    def __init__(self, name: str, on_ended: Callable[[Ended], None]) -> None:
        self._on_ended = on_ended
        self._jobs: deque[tuple[Target | None, CopyJob, Ready, float]] = deque()  # with the time at which each came
        self._wake = threading.Condition()
        self._stopping = False
        self._active = False
        self._busy_since: float | None = None  # monotonic seconds
        self._ended_at = 0.0  # when the last job ended, in monotonic seconds
        self.counts = LaneCounts()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, target: Target | None, job: CopyJob, ready: Ready = lambda is_wanted: None) -> None:
        """Queue a job. Never blocks. On the lane's thread `ready` is called first, with a function that tells whether
        the job is still wanted; `ready` returns when the engine's memory may be touched."""
        with self._wake:
            self._jobs.append((target, job, ready, time.monotonic()))
            self._wake.notify()

    @property
    def is_idle(self) -> bool:
        return not self._jobs and not self._active

    @property
    def waits_since(self) -> float | None:
        """Since when a batch has not ended or a job was not begun, in monotonic seconds. None if neither. Time spent
        waiting for the engine does not count."""
        if self._active:
            return self._busy_since
        with contextlib.suppress(IndexError):  # it was begun just now
            return max(self._jobs[0][3], self._ended_at)
        return None

    def drain(self) -> None:
        """Block until everything submitted so far has ended."""
        with self._wake:
            self._wake.wait_for(lambda: self.is_idle or self._stopping)

    def stop(self) -> None:
        """Drop the waiting jobs, end the running one after its batch, and block until the thread has ended."""
        with self._wake:
            self._stopping = True
            self._jobs.clear()
            self._wake.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _work(self) -> None:
        while True:
            with self._wake:
                self._wake.notify_all()
                self._wake.wait_for(lambda: self._jobs or self._stopping)
                if self._stopping:
                    return
                target, job, ready, _ = self._jobs.popleft()
                self._active = True
            ended = self._perform(target, job, ready)
            self._busy_since = None
            self._on_ended(ended)
            self._ended_at = time.monotonic()
            self._active = False

    def _perform(self, target: Target | None, job: CopyJob, ready: Ready) -> Ended:
        tally = CopyTally()
        outcome = CopyOutcome.REFUSED
        try:
            if target is not None:
                ready(lambda: not self._stopping)  # waits while the engine computes, which is not a copy that hangs
                self._busy_since = time.monotonic()
                outcome = self._copy(target, job, tally)
                if job.may_borrow:
                    target.direct.job_ended()
        except InvalidRequest as error:
            log.error("refused a copy: %s", error.message)
        except KVServiceError as error:
            log.error("copy failed: %s", error.message)
            outcome = CopyOutcome.FAILED
        except Exception:  # the engine waits for an outcome, whatever went wrong here
            log.exception("copy failed")
            outcome = CopyOutcome.FAILED
        self._count(job, outcome, tally)
        return Ended(job.job_id, outcome, tally.byte_count, tally.borrowed)

    def _copy(self, target: Target, job: CopyJob, tally: CopyTally) -> CopyOutcome:
        under_way: deque[_Batch] = deque()
        try:
            for start in range(0, job.rows.size, BATCH_ROWS):
                rows = job.rows[start : start + BATCH_ROWS]
                if self._stopping:
                    return CopyOutcome.FAILED
                slots = [SlotIndex(slot) for slot in rows["slot"].tolist()]
                _check_range(target, slots, int(rows["part"].max()))
                if not _all_as_promised(target, job.direction, rows, slots):
                    return CopyOutcome.STALE
                failpoint("copy_worker.copy")
                under_way.append(_start(target, job, rows, slots))
                if len(under_way) == BATCHES_UNDER_WAY and not self._finish(target, job, under_way.popleft(), tally):
                    return CopyOutcome.STALE
            while under_way:
                if not self._finish(target, job, under_way.popleft(), tally):
                    return CopyOutcome.STALE
            return CopyOutcome.COPIED
        finally:
            for batch in under_way:  # the outcome is known, but no copy may run after it was reported
                with contextlib.suppress(KVServiceError):
                    if batch.started is not None:
                        batch.started.wait()

    def _finish(self, target: Target, job: CopyJob, batch: _Batch, tally: CopyTally) -> bool:
        """Wait for a batch. Returns whether it counts: what was loaded must have been what was promised until its copy
        ended, also for blocks that came from an engine."""
        if batch.started is not None:
            batch.started.wait()
        self._busy_since = time.monotonic()  # a long job is not a stuck one
        tally.byte_count += batch.byte_count
        tally.borrowed += batch.borrowed
        return job.direction is Direction.STORE or _all_as_promised(target, job.direction, batch.rows, batch.slots)

    def _count(self, job: CopyJob, outcome: CopyOutcome, tally: CopyTally) -> None:
        self.counts.jobs += 1
        self.counts.byte_count += tally.byte_count
        self.counts.borrowed += tally.borrowed if outcome is CopyOutcome.COPIED else 0
        self.counts.blocks += job.rows.size if outcome is CopyOutcome.COPIED else 0
        self.counts.stale += outcome is CopyOutcome.STALE
        self.counts.failed += outcome in (CopyOutcome.FAILED, CopyOutcome.REFUSED)


def _start(target: Target, job: CopyJob, rows: npt.NDArray[np.void], slots: list[SlotIndex]) -> _Batch:
    """Start to copy these blocks. Loads come from engines that lend them; blocks that they do not lend, or took back
    meanwhile, come from the slots."""
    blocks = rows["block"].astype(np.int64)
    from_slots, byte_count, borrowed = slots, 0, 0
    if job.direction is Direction.LOAD and job.may_borrow and target.template.parts == 1:  # a key names one block then
        lent, byte_count = target.direct.copy([key.tobytes() for key in rows["key"]], blocks.tolist())
        rest = [index for index, done in enumerate(lent) if not done]
        blocks, from_slots, borrowed = blocks[rest], [slots[index] for index in rest], sum(lent)
        parts = rows["part"][rest]
    else:
        parts = rows["part"]
    if not from_slots:
        return _Batch(rows, slots, None, byte_count, borrowed)
    runs = target.template.expand(blocks, _offsets(target, from_slots, parts))
    started = target.engine.start(job.direction, runs)
    return _Batch(rows, slots, started, byte_count + runs.byte_count, borrowed)


def _offsets(target: Target, slots: list[SlotIndex], parts: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
    payloads = target.segment.geometry.payload_offsets(slots, target.template.payload_bytes)
    return payloads + parts.astype(np.int64) * target.template.part_bytes


def _check_range(target: Target, slots: Iterable[SlotIndex], last_part: int) -> None:
    """Raises InvalidRequest for a slot outside the segment, where a header would be another slot's payload, and for a
    part outside its slot."""
    if last_part >= target.template.parts:
        raise InvalidRequest(f"part {last_part} is not in a slot of {target.template.parts} blocks")
    geometry = target.segment.geometry
    per_slab = geometry.slots_per_slab(target.template.payload_bytes)
    for slot in slots:
        if slab_of(slot) >= geometry.slab_count or index_in_slab(slot) >= per_slab:
            raise InvalidRequest(f"slot {slot} is not in the segment")


def _all_as_promised(target: Target, direction: Direction, rows: npt.NDArray[np.void], slots: list[SlotIndex]) -> bool:
    segment, epoch = target.segment, target.epoch
    if segment.current_epoch() != epoch:
        return False
    generations, keys = rows["generation"].tolist(), [BlockKey(key.tobytes()) for key in rows["key"]]
    size = target.template.payload_bytes
    for slot, generation, key in dict.fromkeys(zip(slots, generations, keys, strict=True)):  # each slot once
        header, ref = segment.header_bytes(slot), BlockRef(slot, Generation(generation))
        if direction is Direction.LOAD:
            is_right = is_as_promised(header, epoch, ref, key, size)
        else:
            is_right = is_reserved(header, epoch, ref, size)
        if not is_right:
            return False
    return True
