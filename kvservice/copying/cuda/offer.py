"""An engine's KV memory on a GPU as it is offered to the copy worker of that GPU.

There is one handle for the whole allocation, whatever tensors lie in it, and a ring of events shared by the two
processes. Each message of copies names the event that the engine recorded before it, and the worker touches nothing
before that event has passed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvservice.copying.cuda.driver import Driver
from kvservice.copying.engine.link import KVOffer
from kvservice.copying.message import MemoryKind
from kvservice.core.segment.copy_runs import RegionLayout
from kvservice.errors import UnsupportedLayout

# Events in the ring. One is recorded again after this many messages; a worker that is further behind waits for a later
# event, which is safe.
EVENTS = 64


class CudaOffer:
    """Make it on the engine's main thread, whose current device must be that of the tensors. `offer` is what a link
    sends."""

    def __init__(self, tensor: torch.Tensor, layout: Callable[[int, int], RegionLayout]) -> None:
        """`tensor` lies in the storage that all layers share, on a GPU. `layout(address, bytes)` describes them there.
        Raises UnsupportedLayout, with the reason, if the memory cannot be shared."""
        storage = tensor.untyped_storage()
        self._device = tensor.device
        driver = Driver.of_device(f"GPU-{torch.cuda.get_device_properties(self._device).uuid}")
        driver.bind()
        handle, offset = driver.export(storage.data_ptr())
        self._events = [torch.cuda.Event(interprocess=True) for _ in range(EVENTS)]
        try:
            with torch.cuda.device(self._device):
                handles = [event.ipc_handle().hex() for event in self._events]
        except RuntimeError as error:
            raise UnsupportedLayout(f"this GPU's events cannot be shared with a copy worker: {error}") from error
        self._last = 0
        memory = {
            "kind": MemoryKind.CUDA_IPC.value,
            "handle": handle.hex(),
            "offset": offset,
            "bytes": storage.nbytes(),
            "events": handles,
        }
        fields = layout(storage.data_ptr(), storage.nbytes()).fields()
        self.offer = KVOffer(driver.uuid, memory, fields)

    def mark(self) -> int:
        """Record how far the engine is. Returns the number of the event for the message. Does not block."""
        self._last = (self._last + 1) % EVENTS
        self._events[self._last].record(torch.cuda.current_stream(self._device))
        return self._last
