"""Copy engines: do what descriptors say, between one engine's KV memory and one segment. This file: host memory.

Used by one thread per direction at a time. A copy engine only moves bytes; whether they may be moved is `lanes`' part.
"""

from __future__ import annotations

from typing import Protocol

from kvservice.copying.memory import SharedMemory
from kvservice.core.segment.copy_runs import Descriptors
from kvservice.memory.runs import copy_runs
from kvservice.memory.segment import Segment


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
    """By the processor, with the interpreter's lock released. Between two engines, `segment` is the memory of the
    other."""

    def __init__(self, kv: SharedMemory, segment: Segment | SharedMemory) -> None:
        self._kv = kv.address
        self._segment = segment.address

    def load(self, runs: Descriptors) -> None:
        copy_runs(self._kv, self._segment, runs.engine, runs.segment, runs.lengths)

    def store(self, runs: Descriptors) -> None:
        copy_runs(self._segment, self._kv, runs.segment, runs.engine, runs.lengths)

    def close(self) -> None:
        return
