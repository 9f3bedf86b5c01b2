"""When block copies run: at once, or on a CUDA stream of their own while the engine computes.

Owned by one worker and used from its main thread only. Decides no contents: the copier knows what is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from kvservice.errors import UnsupportedLayout


class Ticket(Protocol):
    """Copies that were started; `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """They have all ended."""
        ...

    def synchronize(self) -> None:
        """Wait until they have."""
        ...


class Mover(Protocol):
    def adopt(self, memory: torch.Tensor) -> None:
        """Copies will run between the engine and this host memory, until `release`."""
        ...

    def release(self) -> None:
        """The memory is about to be unmapped; no copy is under way."""
        ...

    def run(self, copy: Callable[[], None]) -> Ticket:
        """Do or start what `copy` copies, after everything that the engine has started so far."""
        ...


class _Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class InlineMover:
    """Copies end before `run` returns: for KV tensors in host memory."""

    def adopt(self, memory: torch.Tensor) -> None:
        return

    def release(self) -> None:
        return

    def run(self, copy: Callable[[], None]) -> Ticket:
        copy()
        return _Done()


class CudaMover:
    """Copies run on a stream of their own. They start when the forwards launched so far have ended, so a block is never
    copied before it is written, nor overwritten while an earlier forward reads it; the next forward does not wait.

    Has not run on a GPU yet.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pinned: torch.Tensor | None = None

    def adopt(self, memory: torch.Tensor) -> None:
        # Without pinning every copy would go through a bounce buffer and hold up the calling thread.
        error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(error) != 0:
            raise UnsupportedLayout(f"cannot pin the pool's memory for the GPU: CUDA error {error}")
        self._pinned = memory

    def release(self) -> None:
        if self._pinned is not None:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.data_ptr())
            self._pinned = None

    def run(self, copy: Callable[[], None]) -> Ticket:
        computed = torch.cuda.Event()
        computed.record(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(computed)
            copy()
            copied = torch.cuda.Event()
            copied.record(self._stream)
        return copied  # type: ignore[no-any-return]


def mover_for(device: torch.device) -> Mover:
    return CudaMover(device) if device.type == "cuda" else InlineMover()
