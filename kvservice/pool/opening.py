"""Opens the memory of a pool on a thread, because reserving it takes seconds."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from pathlib import Path

from kvservice.core.block.marks import MARK_SECONDS
from kvservice.core.segment.geometry import Geometry
from kvservice.memory.liveness import has_writers
from kvservice.memory.segment import Segment

log = logging.getLogger("kvservice.pool")


async def open_segment(path: Path | None, directory: Path, geometry: Geometry, node_id: str, epoch: int) -> Segment:
    """The segment at `path`, with a boot epoch of at least `epoch`. Without a path: unnamed memory in `directory`.

    Raises what Segment.create raises. Leaves nothing behind when it is cancelled, and reserves no more memory.
    """
    given_up = threading.Event()

    def make() -> Segment:
        if path is None:
            return Segment.nameless(directory, geometry, node_id, is_given_up=given_up.is_set)
        segment = Segment.create(path, geometry, node_id, epoch_floor=epoch, is_given_up=given_up.is_set)
        # Nobody may know any more what was cleared since.
        is_old = segment.used_at < time.time() - MARK_SECONDS
        if not is_old and (not segment.existed or not has_writers(segment) or segment.is_understood()):
            return segment
        # It is not known which slots engines still write. They keep the old memory, so they write into no new block.
        log.warning("old_segment_replaced" if is_old else "damaged_segment_replaced", extra={"path": str(path)})
        segment.retire()
        segment.unlink()
        segment.close()
        return Segment.create(path, geometry, node_id, epoch_floor=segment.epoch + 1, is_given_up=given_up.is_set)

    # A future and no task: a loop that ends cancels its tasks, and nobody would see what the thread has made.
    making = asyncio.get_running_loop().run_in_executor(None, make)
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        given_up.set()
        making.add_done_callback(_discard)  # the thread may have made it already, and only this callback sees it
        raise


def _discard(making: asyncio.Future[Segment]) -> None:
    if not making.cancelled() and making.exception() is None:
        close_new(making.result())


def close_new(segment: Segment) -> None:
    """Close the segment after a start that failed. Remove it, unless it has blocks of an earlier boot."""
    segment.close()
    if not segment.existed:
        segment.unlink()
