"""What a copy worker needs of its device: import an engine's KV memory, use a segment, copy between the two.

`HostDevice` serves CPU engines, whose KV cache is a memfd. `cuda.device.CudaDevice` serves the engines of one GPU.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvservice.copying.copies import CopyEngine, HostCopies
from kvservice.copying.memory import SharedMemory
from kvservice.copying.message import MemoryKind, number
from kvservice.core.segment.copy_runs import RegionLayout
from kvservice.core.segment.geometry import Geometry
from kvservice.errors import InvalidRequest, SegmentError
from kvservice.memory.segment import ENGINE_AHEAD_BYTES, Segment
from kvservice.units import BootEpoch

HOST = "cpu"


class KVMemory(Protocol):
    """An engine's KV memory, imported into this process."""

    def close(self) -> None:
        """Idempotent."""
        ...

    def wait_for(self, event: int, is_wanted: Callable[[], bool]) -> None:
        """Block until copies may touch the memory, which is when the engine's work before this event has ended.

        Raises TransferError as soon as `is_wanted` returns False, because an engine that is gone ends no work.
        """
        ...


class Device(Protocol):
    """The device of a worker; there is one. Called from the threads of its sessions."""

    name: str  # "cpu" or the GPU's UUID

    def import_kv(self, memory: dict[str, Any], descriptors: Sequence[int], layout: RegionLayout) -> KVMemory:
        """Import an engine's memory. Takes the descriptors over. Raises InvalidRequest, SegmentError or
        UnsupportedLayout with the reason."""
        ...

    def adopt(self, segment: Segment) -> Callable[[], None]:
        """Prepare for copies to and from this segment, without blocking. Returns a function that undoes it."""
        ...

    def copies(self, kv: KVMemory, segment: Segment) -> CopyEngine: ...

    def direct(self, target: KVMemory, source: KVMemory) -> CopyEngine:
        """A copy engine whose `load` copies from `source`, the memory of another engine, into `target`. It has no
        `store`."""
        ...

    def state(self) -> dict[str, Any]:
        """The state for status output: progress of pinning, kind of copy engine."""
        ...

    @property
    def lost(self) -> str:
        """Why no copy of this process can succeed any more; "" while copies can."""
        ...


class HostKV:
    def __init__(self, shared: SharedMemory) -> None:
        self.shared = shared

    def close(self) -> None:
        self.shared.close()

    def wait_for(self, event: int, is_wanted: Callable[[], bool]) -> None:
        return  # a CPU engine asks for copies between two steps, when it does not compute


class HostDevice:
    name = HOST

    def import_kv(self, memory: dict[str, Any], descriptors: Sequence[int], layout: RegionLayout) -> HostKV:
        try:
            if memory.get("kind") != MemoryKind.MEMFD.value or len(descriptors) != 1:
                raise InvalidRequest("a copy worker for CPU engines needs one memfd")
            size = max(number(memory, "bytes"), layout.region_bytes)
        except InvalidRequest:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        return HostKV(SharedMemory(descriptors[0], size))

    def adopt(self, segment: Segment) -> Callable[[], None]:
        return lambda: None

    def copies(self, kv: KVMemory, segment: Segment) -> CopyEngine:
        assert isinstance(kv, HostKV)
        return HostCopies(kv.shared, segment)

    def direct(self, target: KVMemory, source: KVMemory) -> CopyEngine:
        assert isinstance(target, HostKV) and isinstance(source, HostKV)
        return HostCopies(target.shared, source.shared)

    def state(self) -> dict[str, Any]:
        return {"device": self.name, "copies": "memmove"}

    @property
    def lost(self) -> str:
        return ""


@dataclass(slots=True)
class _Mapped:
    segment: Segment
    undo: Callable[[], None]
    users: int = 0


class Segments:
    """The segments that this process has mapped, each once, however many engines use it. Thread-safe."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._mapped: dict[tuple[str, Geometry, BootEpoch], _Mapped] = {}
        self._lock = threading.Lock()

    def take(self, path: str, geometry: Geometry, epoch: BootEpoch) -> Segment:
        """Map the segment, or share its mapping. Return it with `give`. Raises SegmentError if the file is not this
        boot's segment."""
        key = (path, geometry, epoch)
        with self._lock:
            if key not in self._mapped:
                segment = Segment.attach(Path(path), geometry)
                try:
                    if segment.current_epoch() != epoch:
                        raise SegmentError(f"{path} belongs to another boot of its shard, not to {epoch}")
                    segment.map_ahead(ENGINE_AHEAD_BYTES)
                    self._mapped[key] = _Mapped(segment, self._device.adopt(segment))
                except BaseException:
                    segment.close()
                    raise
            self._mapped[key].users += 1
            return self._mapped[key].segment

    def give(self, segment: Segment) -> None:
        """Return a segment; the caller copies nothing any more. Does not block: preparations are undone in a thread of
        their own. Unpinning hundreds of GiB takes half a minute, and no engine may wait that long for an answer."""
        with self._lock:
            key = (str(segment.path), segment.geometry, segment.epoch)
            mapped = self._mapped[key]
            mapped.users -= 1
            if mapped.users:
                return
            del self._mapped[key]
        try:
            threading.Thread(target=_unmap, args=(mapped,), name="kvservice-copy-unmap", daemon=True).start()
        except RuntimeError:  # the system has no thread left, and nobody else would ever unmap it
            _unmap(mapped)


def _unmap(mapped: _Mapped) -> None:
    mapped.undo()
    mapped.segment.close()
