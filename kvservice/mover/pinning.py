"""Pins a segment for a GPU, piece by piece on a thread of its own, because pinning hundreds of GiB takes minutes.

Copies work meanwhile: those whose bytes are all pinned go asynchronously and at full speed, others through the
driver's own buffers. A piece ends where a slab ends, so that no slot lies in two pieces.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

from kvservice.core.geometry import Geometry
from kvservice.errors import KVServiceError
from kvservice.units import MiB

log = logging.getLogger("kvservice.mover")

PIECE_BYTES = 256 * MiB


class Pinning:
    """`pin(address, bytes)` and `unpin(address)` are the driver's; `start` runs first on the thread."""

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
        self._pinned: list[int] = []  # addresses
        self._until = 0  # bytes from the start of the segment
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="kvservice-pinning", daemon=True)
        self._thread.start()

    @property
    def share(self) -> float:
        """Of the segment that is pinned, 0 to 1."""
        return self._until / self._total

    def covers(self, end: int) -> bool:
        """Everything before this offset of the segment is pinned."""
        return end <= self._until

    def undo(self) -> None:
        """Stop and unpin all. Blocks for the piece under way. No copy may be."""
        self._stopping.set()
        self._thread.join()
        self._start()
        self._until = 0
        for address in self._pinned:
            self._unpin(address)
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
        except KVServiceError as error:
            log.error(
                "the pool's memory stays unpinned from %d of %d MiB on, copies there are slower: %s",
                self._until // MiB, self._total // MiB, error.message,
            )  # fmt: skip


def pieces(geometry: Geometry, piece_bytes: int = PIECE_BYTES) -> Iterator[tuple[int, int]]:
    """(offset, bytes) from the start of the segment to its end, each ending with a slab."""
    start, slabs_each = 0, max(piece_bytes // geometry.slab_bytes, 1)
    for slab in range(0, geometry.slab_count, slabs_each):
        end = geometry.slab_offset(min(slab + slabs_each, geometry.slab_count))
        yield start, end - start
        start = end
