"""What a pool's runtime is made of, as far as it cares: the memory of the slots, and the reader of peers' blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from kvservice.core.geometry import Geometry
from kvservice.core.header import SlotHeader
from kvservice.transfer.puller import DoneCallback, PullJob, QuiescedCallback
from kvservice.units import BootEpoch, SlotIndex


class MemoryPort(Protocol):
    """A segment in its present boot. memory.segment.Segment is one."""

    path: Path
    geometry: Geometry
    epoch: BootEpoch

    def write_header(self, slot: SlotIndex, header: SlotHeader) -> None: ...

    def clear_header(self, slot: SlotIndex) -> None: ...

    def assign_slab(self, slab: int, payload_bytes: int) -> None: ...

    def payload(self, slot: SlotIndex, payload_bytes: int) -> memoryview: ...

    def scan(self) -> Iterable[tuple[SlotIndex, int, SlotHeader]]: ...

    def close(self) -> None: ...

    def unlink(self) -> None: ...


class PullerPort(Protocol):
    """Verified reads. transfer.puller.Puller is one."""

    counters: Counter[str]

    @property
    def name(self) -> str: ...

    def describe(self) -> bytes: ...

    def submit(self, job: PullJob, on_done: DoneCallback, on_quiesced: QuiescedCallback) -> None: ...

    def close(self) -> None: ...
