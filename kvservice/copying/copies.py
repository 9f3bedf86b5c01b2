"""Copy engines: copy what descriptors describe between one engine's KV memory and one segment. Here: host memory.

One thread per direction uses a copy engine at a time. A copy engine only moves bytes; `lanes` decides whether it may.
"""

from __future__ import annotations

from typing import Protocol

from kvservice.copying.memory import SharedMemory
from kvservice.core.segment.copy_runs import Descriptors
from kvservice.memory.runs import copy_runs
from kvservice.memory.segment import Segment


class CopyEngine(Protocol):
    def load(self, runs: Descriptors) -> None:
        """Copy segment → engine. Blocks until the bytes have arrived. Raises TransferError."""
        ...

    def store(self, runs: Descriptors) -> None:
        """Copy engine → segment. Blocks and raises as `load` does."""
        ...

    def close(self) -> None:
        """Release both memories. The copy engine touches neither any more."""
        ...


class HostCopies:
    """Copies with the CPU, while the interpreter's lock is released. For copies between two engines, `segment` is the
    memory of the other engine."""

    def __init__(self, kv: SharedMemory, segment: Segment | SharedMemory) -> None:
        self._kv = kv.address
        self._segment = segment.address

    def load(self, runs: Descriptors) -> None:
        copy_runs(self._kv, self._segment, runs.engine, runs.segment, runs.lengths)

    def store(self, runs: Descriptors) -> None:
        copy_runs(self._segment, self._kv, runs.segment, runs.engine, runs.lengths)

    def close(self) -> None:
        return
