"""The other copy workers of a node. An engine lends them blocks, so that engines of other devices can copy them.

Used by the worker's main thread; each link has a thread of its own. These workers copy nothing for this engine.

Frozen: loans between engines have not run on the hardware that they are for, GPUs of one node. Nothing new builds on
them until they have.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvservice.copying.device import HOST
from kvservice.copying.engine.link import KVOffer, Lent, WorkerLink
from kvservice.copying.message import CopyRow, PoolSource
from kvservice.discovery import find_copy_workers

LOOK_SECONDS = 5.0  # Between two looks for workers; a worker that comes later is used at most this much later.
LINKS_MAX = 16  # More than a node has GPUs. Further workers get no loans.


@dataclass(frozen=True, slots=True)
class SpreadLoan:
    """The same blocks, lent to the engines of several workers."""

    parts: tuple[tuple[WorkerLink, Lent], ...]

    @property
    def is_taken(self) -> bool:
        return any(lent.is_taken for _, lent in self.parts)

    @property
    def is_over(self) -> bool:
        return all(lent.is_over for _, lent in self.parts)

    def recall(self) -> None:
        for link, lent in self.parts:
            link.recall(lent)


def lend(links: Sequence[WorkerLink], rows: Sequence[CopyRow], event: int) -> SpreadLoan | None:
    """Lend through every link that has a worker. None if none has."""
    parts = tuple((link, lent) for link in links if (lent := link.lend(rows, event)) is not None)
    return SpreadLoan(parts) if parts else None


class PeerCopyWorkers:
    def __init__(self, offer: KVOffer) -> None:
        self._offer = offer
        self._links: dict[str, WorkerLink] = {}  # by device
        self._wanted: tuple[Path, PoolSource] | None = None
        self._look_at = 0.0  # monotonic seconds

    def follow(self, directory: Path, pool: PoolSource) -> None:
        """Lend blocks of this pool's layout to the workers registered in this node directory."""
        self._wanted = (directory, pool)
        for link in self._links.values():
            link.follow(directory, pool)
        self._look_at = 0.0
        self.links()

    def leave(self) -> None:
        self._wanted = None
        for link in self._links.values():
            link.leave()

    def links(self) -> list[WorkerLink]:
        """The links to use. Looks for new workers now and then; they take part once their link is ready."""
        now = time.monotonic()
        if self._wanted is not None and now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            for record in find_copy_workers(self._wanted[0]):
                if self._is_peer(record.device) and len(self._links) < LINKS_MAX:
                    link = self._links[record.device] = WorkerLink(self._offer, worker_device=record.device)
                    link.follow(*self._wanted)
        return list(self._links.values())

    def _is_peer(self, device: str) -> bool:
        """Whether the worker of this device can read this engine's memory: only a GPU's worker can read that of a
        GPU."""
        same_kind = device.startswith(HOST) == self._offer.device.startswith(HOST)
        return same_kind and device != self._offer.device and device not in self._links

    def take_counters(self) -> dict[str, int]:
        """As `copy_worker_peer_…`."""
        found: Counter[str] = Counter()
        for link in self._links.values():
            for name, count in link.take_counters().items():
                found[name.replace("copy_worker_", "copy_worker_peer_", 1)] += count
        return dict(found)

    def close(self) -> None:
        """Block until these workers do nothing for this engine any more; bounded."""
        for link in self._links.values():
            link.close()
        self._links.clear()
