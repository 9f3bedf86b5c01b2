"""What the in-process copier asks of `torch.cuda`, answered by the stand-in driver; and KV tensors in its memory.

The tensors show where blocks lie. Their bytes cannot be touched, as those of a GPU cannot be by the processor.
"""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.gpu.slots import CELL, SIZES
from tests.stand_in_driver.engine import Cache, Event, call


class FakeEvent(Event):
    """As torch.cuda.Event."""

    def __init__(self) -> None:
        super().__init__()
        self._stream: Any = None

    def record(self, stream: Any) -> None:
        self._stream = stream
        super().record(stream.cuda_stream)

    def query(self) -> bool:
        driver: Any = FakeStream.driver
        return bool(driver.has_passed(self._pointer.value))

    def synchronize(self) -> None:
        self._stream.synchronize()


class FakeStream:
    """As torch.cuda.Stream."""

    driver: Any = None

    def __init__(self, device: object = None, pointer: int | None = None) -> None:
        self.cuda_stream = self.driver.stream() if pointer is None else pointer

    def wait_event(self, event: FakeEvent) -> None:
        call("cuStreamWaitEvent", ctypes.c_void_p(self.cuda_stream), event._pointer, ctypes.c_uint(0))

    def synchronize(self) -> None:
        call("cuStreamSynchronize", ctypes.c_void_p(self.cuda_stream))


def install(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the end of the test `torch.cuda` is the stand-in's GPU, whose current stream is that of this cache."""
    driver = cache.driver
    FakeStream.driver = driver
    name = SimpleNamespace(uuid=driver.uuid.removeprefix("GPU-"))
    cudart = SimpleNamespace(
        cudaHostRegister=lambda address, size, _: driver.pin(address, size) or 0,
        cudaHostUnregister=lambda address: driver.unpin(address) or 0,
    )
    answers = {
        "Stream": FakeStream,
        "Event": FakeEvent,
        "stream": lambda _: contextlib.nullcontext(),
        "current_stream": lambda _: FakeStream(pointer=cache.stream),
        "get_device_properties": lambda _: name,
        "set_device": lambda _: driver.bind(),
        "cudart": lambda: cudart,
    }
    for attribute, answer in answers.items():
        monkeypatch.setattr(torch.cuda, attribute, answer)


def tensors(cache: Cache) -> list[torch.Tensor]:
    """Its layers, `[block, head, token, byte]`."""
    memory = (ctypes.c_uint8 * cache.layout.region_bytes).from_address(cache.address)
    whole = torch.frombuffer(memory, dtype=torch.uint8).view([*(SIZES[name] for name in cache.order), CELL])
    return list(whole.permute([*(cache.order.index(name) for name in "lbhn"), 4]).unbind(0))
