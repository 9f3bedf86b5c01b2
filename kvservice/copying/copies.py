"""Copy engines: copy what descriptors describe between one engine's KV memory and one segment. Here: host memory.

One thread per direction uses a copy engine at a time. A copy engine only moves bytes; `lanes` decides whether it may.
"""

from __future__ import annotations

from typing import Protocol

from kvservice.copying.memory import SharedMemory
from kvservice.copying.message import Direction
from kvservice.core.segment.copy_runs import Descriptors
from kvservice.memory.runs import copy_runs
from kvservice.memory.segment import Segment


class StartedCopies(Protocol):
    def wait(self) -> None:
        """Block until the bytes have arrived. Raises TransferError; nothing is copied any more then either."""
        ...


class CopyEngine(Protocol):
    def start(self, direction: Direction, runs: Descriptors) -> StartedCopies:
        """Start copies. Those of one direction end in the order in which they were started, and several may be under
        way. Wait for each of them. Raises TransferError, and then nothing of it runs on."""
        ...

    def load(self, runs: Descriptors) -> None:
        """Copy segment → engine. Blocks until the bytes have arrived. Raises TransferError."""
        ...

    def close(self) -> None:
        """Release both memories. The copy engine touches neither any more."""
        ...


class AlreadyEnded:
    """Copies that had ended when they were started."""

    def wait(self) -> None:
        return


class HostCopies:
    """Copies with the CPU, while the interpreter's lock is released. For copies between two engines, `segment` is the
    memory of the other engine."""

    def __init__(self, kv: SharedMemory, segment: Segment | SharedMemory) -> None:
        self._kv = kv.address
        self._segment = segment.address

    def start(self, direction: Direction, runs: Descriptors) -> AlreadyEnded:
        if direction is Direction.LOAD:
            self.load(runs)
        else:
            self.store(runs)
        return AlreadyEnded()

    def load(self, runs: Descriptors) -> None:
        copy_runs(self._kv, self._segment, runs.engine, runs.segment, runs.lengths)

    def store(self, runs: Descriptors) -> None:
        copy_runs(self._segment, self._kv, runs.segment, runs.engine, runs.lengths)

    def close(self) -> None:
        return
