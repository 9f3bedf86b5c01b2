"""Copy engines: do what descriptors say, between one engine's KV memory and one segment. This file: host memory.

Used by one thread per direction at a time. A copy engine only moves bytes; whether they may be moved is `lanes`' part.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

from kvservice.core.descriptors import Descriptors
from kvservice.memory.segment import Segment
from kvservice.mover.memory import SharedMemory


class CopyEngine(Protocol):
    def load(self, runs: Descriptors) -> None:
        """Segment → engine. The bytes are there when this returns. Raises TransferError."""
        ...

    def store(self, runs: Descriptors) -> None:
        """Engine → segment, like `load`."""
        ...

    def close(self) -> None:
        """Neither memory is touched any more."""
        ...


class HostCopies:
    """memmove, with the interpreter's lock released. Between two engines, `segment` is the memory of the other."""

    def __init__(self, kv: SharedMemory, segment: Segment | SharedMemory) -> None:
        self._kv = kv.address
        self._segment = segment.address

    def load(self, runs: Descriptors) -> None:
        kv, segment = self._kv, self._segment
        for engine, slot, length in _rows(runs):
            ctypes.memmove(kv + engine, segment + slot, length)

    def store(self, runs: Descriptors) -> None:
        kv, segment = self._kv, self._segment
        for engine, slot, length in _rows(runs):
            ctypes.memmove(segment + slot, kv + engine, length)

    def close(self) -> None:
        return


def _rows(runs: Descriptors) -> zip[tuple[int, int, int]]:
    return zip(runs.engine.tolist(), runs.segment.tolist(), runs.lengths.tolist(), strict=True)
