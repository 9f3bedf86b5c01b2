"""Pins a segment for a GPU, piece by piece in a thread of its own, because pinning hundreds of GiB takes minutes.

Copies work meanwhile. Those whose bytes are all pinned run asynchronously and at full speed; others go through the
driver's own buffers. A piece ends where a slab ends, so no slot lies in two pieces.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

from kvservice.core.segment.geometry import Geometry
from kvservice.units import MiB

log = logging.getLogger("kvservice.copying")

# Pinned by one call. Other calls of the process wait as long: 129 ms for 256 MiB on an H200, so about 32 ms for this.
PIECE_BYTES = 64 * MiB


class Pinning:
    """The pinning of one segment. `pin(address, bytes)` and `unpin(address)` are the driver's calls; `start` runs first
    on the thread."""

    def __init__(
        self,
        address: int,
        geometry: Geometry,
        pin: Callable[[int, int], None],
        unpin: Callable[[int], None],
        start: Callable[[], None] = lambda: None,
    ) -> None:
        self._address = address
        self._total = geometry.segment_bytes
        self._pieces = list(pieces(geometry))
        self._pin, self._unpin, self._start = pin, unpin, start
        self._pinned: list[int] = []  # addresses of pieces
        self.unpin_failures = 0  # pieces that could not be unpinned, because the context is unusable
        self._until = 0  # bytes from the start of the segment that are pinned
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="kvservice-pinning", daemon=True)
        self._thread.start()

    @property
    def share(self) -> float:
        """The share of the segment that is pinned, 0 to 1."""
        return self._until / self._total

    def covers(self, end: int) -> bool:
        """Whether everything before this offset of the segment is pinned."""
        return end <= self._until

    def undo(self) -> None:
        """Stop, and unpin everything. Blocks: hundreds of GiB take half a minute. No copy may be under way. Never
        raises."""
        self._stopping.set()
        self._thread.join()
        self._until = 0
        for address in self._pinned:
            try:
                self._start()
                self._unpin(address)
            except Exception as error:  # noqa: BLE001  see `_work`; the end of the process unpins what is left
                self.unpin_failures += 1
                log.warning("a piece of the pool's memory could not be unpinned: %s", error)
        self._pinned.clear()

    def _work(self) -> None:
        try:
            self._start()
            for offset, size in self._pieces:
                if self._stopping.is_set():
                    return
                self._pin(self._address + offset, size)
                self._pinned.append(self._address + offset)
                self._until = offset + size
        except Exception as error:  # noqa: BLE001  torch's binding has errors of its own; copies work unpinned
            log.error(
                "the pool's memory stays unpinned from %d of %d MiB on, so copies there are slower: %s",
                self._until // MiB,
                self._total // MiB,
                error,
            )


class PinningOnUse:
    """Pins the pool once copies have run in this process for `patience` seconds without a pause as long as that.

    The engine's process is the fallback of a copy worker, which has pinned the pool already. Pinning it twice costs
    minutes of the kernel's time, and page tables.
    """

    def __init__(
        self, begin: Callable[[], Pinning], patience: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._begin = begin
        self._patience = patience
        self._clock = clock
        self._used_since = self._used_last = float("-inf")
        self._pinning: Pinning | None = None

    def used(self) -> None:
        """Note that a copy is about to run. Does not block."""
        now = self._clock()
        if now - self._used_last > self._patience:  # a copy worker did the copies meanwhile
            self._used_since = now
        self._used_last = now
        if self._pinning is None and now - self._used_since >= self._patience:
            self._pinning = self._begin()

    def covers(self, end: int) -> bool:
        """Whether everything before this offset of the segment is pinned."""
        return self._pinning is not None and self._pinning.covers(end)

    def undo(self) -> None:
        """Undo the pinning. Blocks as `Pinning.undo` does."""
        if self._pinning is not None:
            self._pinning.undo()
            self._pinning = None


def pieces(geometry: Geometry, piece_bytes: int = PIECE_BYTES) -> Iterator[tuple[int, int]]:
    """The pieces of the segment as (offset, bytes), in order. Each ends with a slab."""
    start, slabs_each = 0, max(piece_bytes // geometry.slab_bytes, 1)
    for slab in range(0, geometry.slab_count, slabs_each):
        end = geometry.slab_offset(min(slab + slabs_each, geometry.slab_count))
        yield start, end - start
        start = end
