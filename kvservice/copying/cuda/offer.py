"""An engine's KV memory on a GPU as it is offered to the worker of that GPU. Has not run on a GPU yet.

One handle for the whole allocation, whatever tensors lie in it, and a ring of events between the processes: each
message of copies names the event that the engine recorded before it, and the worker touches nothing before that passed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvservice.copying.cuda.driver import Driver
from kvservice.copying.engine.link import KVOffer
from kvservice.copying.message import MemoryKind
from kvservice.core.segment.copy_runs import RegionLayout
from kvservice.errors import UnsupportedLayout

EVENTS = 64  # an event is recorded again after so many messages: a worker that far behind waits for a later one


class CudaOffer:
    """Made on the engine's main thread, whose current device is the tensors'. `offer` is what a link sends."""

    def __init__(self, tensor: torch.Tensor, layout: Callable[[int, int], RegionLayout]) -> None:
        """`tensor` lies in the storage of all layers; `layout(address, bytes)` describes them there. Raises
        UnsupportedLayout when it cannot be shared and says why."""
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
        """Record how far the engine is. Returns the event's number for the message. Does not block."""
        self._last = (self._last + 1) % EVENTS
        self._events[self._last].record(torch.cuda.current_stream(self._device))
        return self._last
