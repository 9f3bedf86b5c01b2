"""What the stages of the campaign share: findings that are written at once, and a driver, or the reason for none.

A finding is one line of JSON in the file that GPU_FINDINGS names, so that a stage that is killed has said
what it found until then.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from kvservice.copying.cuda import driver as cuda_driver
from kvservice.copying.cuda.driver import Driver
from kvservice.errors import KVServiceError

VARIABLE = "GPU_FINDINGS"  # not KVSERVICE_…: the service that a stage starts would take it for a setting
SKIPPED = 77  # exit status
SKIP = "skipped"  # the finding that says why
FAILED = "failed"
ROOT = Path(__file__).resolve().parents[2]


class Stage:
    def __init__(self, name: str) -> None:
        self.name = name

    def record(self, what: str, value: object) -> None:
        line = json.dumps({"stage": self.name, "what": what, "value": value})
        if path := os.environ.get(VARIABLE):
            with Path(path).open("a") as file:
                file.write(line + "\n")
        print(f"{self.name}: {what} = {value}", flush=True)

    def attempt(self, what: str, work: Callable[[], Any]) -> Any:
        """Record what the work returns. A failure is a finding too, and the next work still runs."""
        try:
            value = work()
        except Exception as error:  # noqa: BLE001  this is where what a machine can do is found out
            value = {FAILED: f"{type(error).__name__}: {str(error)[:400]}"}
        self.record(what, value)
        return value

    def skip(self, why: str) -> NoReturn:
        self.record(SKIP, why)
        sys.exit(SKIPPED)

    def driver(self) -> Driver:
        """The driver of the first GPU, bound to this thread. Skips the stage if there is none."""
        try:
            found = Driver.of_device("0")
        except KVServiceError as error:
            self.skip(error.message)
        found.bind()
        return found

    def torch(self) -> Any:
        self.driver()
        try:
            import torch
        except ImportError as error:
            self.skip(f"no torch: {error}")
        if not torch.cuda.is_available():
            self.skip("torch sees no GPU: is it the CUDA build?")
        return torch


def words_of(work: Callable[[], Any]) -> Any:
    """What the work returns, or how it fails. For findings of several parts."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001  see `attempt`
        return f"{type(error).__name__}: {str(error)[:200]}"


def call(name: str, *arguments: Any) -> None:
    result = getattr(cuda_driver.load(), name)(*arguments)
    if result:
        raise RuntimeError(f"{name}: CUDA error {result}")


def wait_for(stream: int) -> None:
    call("cuStreamSynchronize", ctypes.c_void_p(stream))


def batch(driver: Driver, to: Any, come_from: Any, sizes: Any, order: int, stream: int, flags: int = 0) -> None:
    """Like `Driver.copy_batch`, with flags that the product does not set."""
    if not flags:
        driver.copy_batch(to, come_from, sizes, order, stream)
        return
    attributes = cuda_driver._Attributes(source_order=order, flags=flags)
    first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
    result = driver._batch(
        to.ctypes.data,
        come_from.ctypes.data,
        sizes.ctypes.data,
        len(sizes),
        ctypes.addressof(attributes),
        ctypes.addressof(first),
        1,
        ctypes.addressof(failed),
        stream,
    )
    if result:
        raise RuntimeError(f"cuMemcpyBatchAsync with flags {flags}: CUDA error {result}")


def unsigned(*arrays: Any) -> list[Any]:
    """As the driver takes them."""
    return [np.ascontiguousarray(array, np.uint64) for array in arrays]


def median_seconds(work: Callable[[], object], rounds: int = 7, limit: float = 6.0) -> float:
    """After two rounds that do not count. Fewer than `rounds` once `limit` seconds are over."""
    taken: list[float] = []
    begun = time.perf_counter()
    for index in range(rounds + 2):
        started = time.perf_counter()
        work()
        if index >= 2:
            taken.append(time.perf_counter() - started)
        if taken and time.perf_counter() - begun > limit:
            break
    return statistics.median(taken)


def child(name: str, *arguments: str, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """A program of `children`, started by the command `before`."""
    command = [*before, sys.executable, "-m", "benchmarks.gpu.children", name, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def said_by(name: str, *arguments: str, seconds: float = 60.0, **environment: str) -> str:
    """What a program of `children` prints, in one line: its output, or the end of its errors."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.children", name, *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    said = done.stdout.strip() or f"status {done.returncode}: {done.stderr.strip()[-300:]}"
    return said.replace("\n", "; ")
