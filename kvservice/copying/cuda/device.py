"""The GPU of a copy worker: imports engines' KV memory by CUDA IPC, pins segments, makes copy engines.

The exporter's memory cannot be freed while it is open here, so a session closes it as soon as its engine is gone.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvservice.copying.copies import CopyEngine
from kvservice.copying.cuda.copies import CudaCopies, DirectCopies, gather_launcher
from kvservice.copying.cuda.driver import IPC_HANDLE_BYTES, Driver
from kvservice.copying.cuda.pinning import Pinning
from kvservice.copying.device import KVMemory
from kvservice.copying.message import MemoryKind, number, text
from kvservice.core.segment.copy_runs import RegionLayout
from kvservice.errors import InvalidRequest, SegmentError, TransferError
from kvservice.memory.segment import Segment

# Events that one engine may offer; engines offer 64 (offer.EVENTS). More are refused, because each takes driver memory.
EVENTS_MAX = 1024
# Between two looks at an engine's event. Short beside a step of an engine, which takes milliseconds.
POLL_SECONDS = 50e-6


class CudaKV:
    """One engine's KV memory, opened in this process, and the events that say how far the engine is."""

    def __init__(self, driver: Driver, base: int, offset: int, events: list[int]) -> None:
        self._driver = driver
        self._base = base
        self._events = events
        self.address = base + offset
        self._closed = False

    def wait_for(self, event: int, is_wanted: Callable[[], bool]) -> None:
        if event >= len(self._events):
            raise InvalidRequest(f"the engine has no event {event}")
        self._driver.bind()
        while not self._driver.has_passed(self._events[event]):
            if not is_wanted():
                raise TransferError("the engine is gone")
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(TransferError):  # the engine is gone: there may be nothing left to close
            self._driver.bind()
            for event in self._events:
                self._driver.destroy_event(event)
        with contextlib.suppress(TransferError):
            self._driver.close(self._base)


class CudaDevice:
    """One GPU. Thread-safe: each call binds the context to its thread."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.name = driver.uuid
        self._pinnings: dict[int, Pinning] = {}  # by the segment's address
        self._unpin_failures = 0
        self._gather = gather_launcher(driver)

    @classmethod
    def find(cls, name: str) -> CudaDevice:
        """The GPU with this UUID or index. Raises Unavailable."""
        return cls(Driver.of_device(name))

    def import_kv(self, memory: dict[str, Any], descriptors: Sequence[int], layout: RegionLayout) -> CudaKV:
        for descriptor in descriptors:
            os.close(descriptor)
        if memory.get("kind") != MemoryKind.CUDA_IPC.value:
            raise InvalidRequest("a copy worker for a GPU needs memory with a CUDA IPC handle")
        handles = memory.get("events")
        if not isinstance(handles, list) or len(handles) > EVENTS_MAX:
            raise InvalidRequest("events must be a list of handles")
        offset, size = number(memory, "offset"), max(number(memory, "bytes"), layout.region_bytes)
        self._driver.bind()
        base, events = self._driver.open(_handle(text(memory, "handle"))), []
        try:
            _, available = self._driver.allocation_of(base)
            if offset + size > available:
                raise SegmentError(f"the engine's allocation has {available} bytes, but {offset + size} were promised")
            for handle in handles:
                events.append(self._driver.open_event(_handle(str(handle))))
        except BaseException:
            CudaKV(self._driver, base, offset, events).close()  # suppresses its own error, which would hide this one
            raise
        return CudaKV(self._driver, base, offset, events)

    def adopt(self, segment: Segment) -> Callable[[], None]:
        driver = self._driver
        pinning = Pinning(segment.address, segment.geometry, driver.pin, driver.unpin, driver.bind)
        self._pinnings[segment.address] = pinning

        def undo() -> None:
            try:
                pinning.undo()
            finally:
                self._pinnings.pop(segment.address, None)
                self._unpin_failures += pinning.unpin_failures

        return undo

    def copies(self, kv: KVMemory, segment: Segment) -> CopyEngine:
        assert isinstance(kv, CudaKV)
        return CudaCopies(self._driver, kv.address, segment.address, self._pinnings[segment.address], self._gather)

    def direct(self, target: KVMemory, source: KVMemory) -> CopyEngine:
        assert isinstance(target, CudaKV) and isinstance(source, CudaKV)
        return DirectCopies(self._driver, target.address, source.address, self._gather)

    def state(self) -> dict[str, Any]:
        shares = [pinning.share for pinning in list(self._pinnings.values())]
        return {
            "device": self.name,
            "copies": "cuMemcpyBatchAsync" if self._driver.has_batch_copy else "cuMemcpyAsync",
            "gather": self._gather is not None,
            "pinned_share": min(shares, default=0.0),
            "unpin_failures": self._unpin_failures,
        }

    @property
    def lost(self) -> str:
        return self._driver.fatal


def _handle(digits: str) -> bytes:
    try:
        data = bytes.fromhex(digits)
    except ValueError as error:
        raise InvalidRequest("an IPC handle is not hexadecimal") from error
    if len(data) != IPC_HANDLE_BYTES:
        raise InvalidRequest(f"an IPC handle of {len(data)} bytes")
    return data
