"""An engine whose KV cache lies in the stand-in's device memory, and a worker process beside it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvservice.copying.cuda import driver as cuda_driver
from kvservice.copying.cuda.driver import Driver
from kvservice.copying.engine.link import Copies, KVOffer, WorkerLink
from kvservice.copying.message import CopyRow, Direction, MemoryKind, PoolSource
from kvservice.core.segment.copy_runs import RegionLayout
from kvservice.discovery import node_directory
from kvservice.memory.segment import Segment
from kvservice.testing.eventually import eventually
from kvservice.units import NodeId
from tests.gpu.slots import BLOCKS, CELL, HEADS, LAYERS, SIZES, SLOT, TOKENS
from tests.stand_in_driver.build import LIBRARY, ROOT

OFFSET = 4096  # the KV cache does not begin where its allocation begins: torch sub-allocates
EVENTS = 8
EVENT_FLAGS = 2 | 4  # without timing, of two processes
WEDGE_SECONDS = 10.0  # of worker and engine; a busy machine makes a healthy one wait, too


class Count(IntEnum):
    PAGEABLE_COPIES = 0
    MISTAKES = 1
    BATCHES = 2


class Controls:
    """What tests ask of the stand-in, and CUDA does not have."""

    def __init__(self, library: Any) -> None:
        self._library = library
        library.stand_in_count.restype = ctypes.c_uint64
        self._changed: dict[str, int] = {}

    def set(self, name: str, value: int, otherwise: int = 0) -> None:
        """Until the end of the test; then `otherwise` again."""
        self._changed[name] = otherwise
        assert self._library.stand_in_set(name.encode(), ctypes.c_long(value)) == 0, f"no setting {name}"

    def set_back(self) -> None:
        for name, value in self._changed.items():
            self._library.stand_in_set(name.encode(), ctypes.c_long(value))

    def count(self, what: Count) -> int:
        found: int = self._library.stand_in_count(int(what))
        return found


def call(name: str, *arguments: Any) -> None:
    result = getattr(cuda_driver.load(), name)(*arguments)
    if result:
        raise RuntimeError(f"{name}: CUDA error {result}")


def gather(targets: Any, sources: Any, lengths: Any, stream: int) -> None:
    """In place of the Triton kernel."""
    arrays = [np.ascontiguousarray(array, np.uint64) for array in (targets, sources, lengths)]
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
    call("stand_in_gather", *pointers, ctypes.c_size_t(len(lengths)), ctypes.c_void_p(stream))


def layout_of(order: str) -> RegionLayout:
    stride, step = {}, CELL
    for name in reversed(order):
        stride[name] = step
        step *= SIZES[name]
    layers = tuple(layer * stride["l"] for layer in range(LAYERS))
    return RegionLayout(step, BLOCKS, layers, 1, HEADS, TOKENS, CELL, stride["b"], 0, stride["h"], stride["n"])


class Cache:
    """A KV cache in device memory, in this physical order of its dimensions, random bytes."""

    def __init__(self, driver: Driver, order: str = "blhn", seed: int = 0) -> None:
        self.driver, self.order, self.layout = driver, order, layout_of(order)
        self.base = driver.allocate(OFFSET + self.layout.region_bytes)
        self.address = self.base + OFFSET
        self.stream = driver.stream()
        self.put(np.random.default_rng(seed).integers(0, 256, self.layout.region_bytes, np.uint8))

    def put(self, data: npt.NDArray[np.uint8]) -> None:
        self._copy(self.address, data.ctypes.data, data.nbytes)

    def get(self) -> npt.NDArray[np.uint8]:
        """`[block, layer, head, token, byte]`"""
        data = np.empty(self.layout.region_bytes, np.uint8)
        self._copy(data.ctypes.data, self.address, data.nbytes)
        shaped = data.reshape([*(SIZES[name] for name in self.order), CELL])
        return shaped.transpose([*(self.order.index(name) for name in "blhn"), 4])

    def block(self, index: int) -> bytes:
        """As it must be in a slot."""
        return self.get()[index].tobytes()

    def kernel(self, value: int, microseconds: int) -> None:
        """Of the engine, on its stream: runs for so long, and writes all of the cache at its end."""
        size, span = ctypes.c_size_t(self.layout.region_bytes), ctypes.c_uint(microseconds)
        where = (ctypes.c_uint64(self.address), size, ctypes.c_int(value), span, ctypes.c_void_p(self.stream))
        call("stand_in_kernel", *where)

    def free(self) -> None:
        self.driver.destroy_stream(self.stream)
        self.driver.free(self.base)

    @staticmethod
    def _copy(target: int, source: int, byte_count: int) -> None:
        call("cuMemcpy", ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(byte_count))


@contextlib.contextmanager
def cache_of(driver: Driver, order: str = "blhn", seed: int = 0) -> Iterator[Cache]:
    made = Cache(driver, order, seed)
    try:
        yield made
    finally:
        made.free()


class Event:
    """As torch.cuda.Event, as far as an offer uses it."""

    def __init__(self, interprocess: bool = True) -> None:
        self._pointer = ctypes.c_void_p()
        call("cuEventCreate", ctypes.byref(self._pointer), ctypes.c_uint(EVENT_FLAGS))

    def ipc_handle(self) -> bytes:
        exported = (ctypes.c_ubyte * cuda_driver.IPC_HANDLE_BYTES)()
        call("cuIpcGetEventHandle", ctypes.byref(exported), self._pointer)
        return bytes(exported)

    def record(self, stream: int) -> None:
        call("cuEventRecord", self._pointer, ctypes.c_void_p(stream))


class Offer:
    """What CudaOffer does, without torch."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        handle, offset = cache.driver.export(cache.address)
        self._events = [Event() for _ in range(EVENTS)]
        memory = {
            "kind": MemoryKind.CUDA_IPC.value,
            "handle": handle.hex(),
            "offset": offset,
            "bytes": cache.layout.region_bytes,
            "events": [event.ipc_handle().hex() for event in self._events],
        }
        self.offer, self._last = KVOffer(cache.driver.uuid, memory, cache.layout.fields()), 0

    def mark(self) -> int:
        self._last = (self._last + 1) % EVENTS
        self._events[self._last].record(self._cache.stream)
        return self._last


def stand_in_environment(**settings: int) -> dict[str, str]:
    """Of a process whose driver is the stand-in."""
    path = os.pathsep.join(filter(None, [str(LIBRARY.parent), os.environ.get("LD_LIBRARY_PATH")]))
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    wanted = {f"STAND_IN_{name}": str(value) for name, value in settings.items()}
    return {**os.environ, **wanted, "LD_LIBRARY_PATH": path, "PYTHONPATH": search}


@contextlib.contextmanager
def worker(
    plant: str = "", wedge_seconds: float = WEDGE_SECONDS, **settings: int
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """`kvservice copy-worker` on the stand-in, with a planted mistake of `worker.py` or none."""
    with tempfile.TemporaryDirectory(prefix="kvg-") as folder:
        command = [sys.executable, "-m", "tests.stand_in_driver.worker", "copy-worker", "--service", "s", "--node", "n"]
        process = subprocess.Popen(
            [*command, "--device", "0", "--wedge-seconds", str(wedge_seconds)],
            stdout=subprocess.PIPE,
            text=True,
            env={**stand_in_environment(**settings), "STAND_IN_PLANT": plant, "KVSERVICE_RUNTIME_DIR": folder},
        )
        assert process.stdout is not None
        try:
            assert "listens" in process.stdout.readline()
            yield process, node_directory("s", NodeId("n"), Path(folder))
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)
            process.stdout.close()


@contextlib.contextmanager
def linked(
    cache: Cache, directory: Path, made: Segment, wedge_seconds: float = WEDGE_SECONDS
) -> Iterator[tuple[WorkerLink, Callable[[], int]]]:
    offer = Offer(cache)
    link = WorkerLink(offer.offer, wedge_seconds)
    try:
        link.follow(directory, PoolSource(1, str(made.path), made.geometry, made.epoch, SLOT, bytes(16)))
        eventually(lambda: link.is_ready, "the link")
        yield link, offer.mark
    finally:
        if not link._closing:  # by the test
            link.close()


def copy(link: WorkerLink, mark: Callable[[], int], direction: Direction, *rows: CopyRow) -> Copies:
    """Blocks until it has ended."""
    ticket = link.submit(direction, rows)
    assert ticket is not None
    link.flush(mark())
    ticket.synchronize()
    return ticket
