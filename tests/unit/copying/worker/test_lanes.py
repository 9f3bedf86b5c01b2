"""A lane has two batches of a job under way, and reports a job only when none of them runs."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvservice.copying.message import ROW, CopyJob, CopyOutcome, Direction, Ended
from kvservice.copying.worker.lanes import BATCH_ROWS, CopyLane, Target
from kvservice.core.segment.copy_runs import CopyTemplate, Descriptors, RegionLayout
from kvservice.core.segment.geometry import plan_geometry, slot_index
from kvservice.core.segment.header import SlotHeader
from kvservice.core.segment.layout import SlotLayout
from kvservice.errors import TransferError
from kvservice.memory.segment import Segment
from kvservice.testing.unique import unique_name
from kvservice.units import BlockKey, Generation, MiB, SpanRoute

BLOCKS, CELL = 4 * BATCH_ROWS, 64
SLOT = SlotLayout(1, 1, CELL, 1)
REGION = RegionLayout(BLOCKS * CELL, BLOCKS, (0,), 1, 1, 1, CELL, CELL, 0, CELL, CELL)
KEY = BlockKey(bytes(16))


class Copies:
    """Remembers what was started and waited for. The batch `fails_at` fails when it is waited for."""

    def __init__(self, fails_at: int = -1) -> None:
        self.said: list[str] = []
        self.fails_at = fails_at
        self.started = 0

    def start(self, direction: Direction, runs: Descriptors) -> Any:
        number, self.started = self.started, self.started + 1
        self.said.append(f"start {number}")

        class Started:
            def wait(started) -> None:  # noqa: N805  `self` is the copies
                self.said.append(f"wait {number}")
                if number == self.fails_at:
                    raise TransferError("told to")

        return Started()


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment.create(Path(f"/dev/shm/kvservice-test{unique_name()}-n"), plan_geometry(64 * MiB), "n")
    made.assign_slab(0, SLOT.payload_bytes)
    yield made
    made.close()
    made.unlink()


def outcome_of(segment: Segment, copies: Copies, stale: int | None = None, part: int = 0) -> CopyOutcome:
    """Of a store of all blocks; the slot `stale` is no longer the engine's. The last one goes to this part."""
    rows = np.zeros(BLOCKS, ROW)
    for block in range(BLOCKS):
        slot = slot_index(0, block)
        header = SlotHeader(segment.epoch, Generation(1), KEY, SLOT.payload_bytes, SpanRoute(0), 0, 0)
        segment.write_header(slot, header)
        rows[block] = (block, 0, slot, 3 if block == stale else 1, KEY)
    rows[-1]["part"] = part
    ended: queue.Queue[Ended] = queue.Queue()
    lane = CopyLane("test", ended.put)
    target = Target(segment, segment.epoch, CopyTemplate(REGION, SLOT), copies, None)  # type: ignore[arg-type]
    lane.submit(target, CopyJob(1, Direction.STORE, rows))
    found = ended.get(timeout=30)
    lane.stop()
    return found.outcome


def test_next_batch_starts_before_the_last_one_is_waited_for(segment: Segment) -> None:
    copies = Copies()
    assert outcome_of(segment, copies) is CopyOutcome.COPIED
    assert copies.said == ["start 0", "start 1", "wait 0", "start 2", "wait 1", "start 3", "wait 2", "wait 3"]


def test_job_that_fails_ends_after_all_that_it_started(segment: Segment) -> None:
    copies = Copies(fails_at=0)
    assert outcome_of(segment, copies) is CopyOutcome.FAILED
    assert copies.said == ["start 0", "start 1", "wait 0", "wait 1"]


def test_stale_job_ends_after_all_that_it_started(segment: Segment) -> None:
    copies = Copies()
    assert outcome_of(segment, copies, stale=BATCH_ROWS) is CopyOutcome.STALE
    assert copies.said == ["start 0", "wait 0"]


def test_part_outside_its_slot_is_refused(segment: Segment) -> None:
    """It would be written over the next slot."""
    copies = Copies()
    assert outcome_of(segment, copies, part=SLOT.parts) is CopyOutcome.REFUSED
    assert "start 3" not in copies.said
