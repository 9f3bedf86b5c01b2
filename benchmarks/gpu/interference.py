"""Stage interference: what copies cost an engine.

A decode-like graph of small kernels and a large matrix product run alone and beside copies: by copy engine and by
kernel, in the same process and from another one, which is a worker's place.

`--loop WAY --handle … --offset …` is that other process; `--try WAY …` runs each for a moment on memory of its own.
"""

from __future__ import annotations

import argparse
import mmap
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.gpu.findings import ROOT, Stage, unsigned, wait_for
from kvservice.copying.cuda.copies import gather_launcher
from kvservice.copying.cuda.driver import ORDER_ANY, ORDER_STREAM, Driver
from kvservice.units import KiB

STAGE = Stage("interference")
WAYS = ("load", "store", "kernel and store")
RUN, RUNS, SECONDS = 64 * KiB, 1024, 2.5
SPAN = 2 * RUN * RUNS  # device memory that runs are scattered in
PIECES = 32  # of a run, for the kernel: 2 KiB each
WIDTH, DEPTH, LARGE = 4096, 32, 8192


class CopyLoop:
    """Copies scattered runs between pinned host memory and device memory, again and again."""

    def __init__(self, driver: Driver, base: int, way: str) -> None:
        self.driver, self.base, self.way = driver, base, way
        driver.bind()
        self.map = mmap.mmap(-1, RUN * RUNS)
        self.host = np.frombuffer(self.map, np.uint8)
        self.host[:] = 3
        driver.pin(self.host.ctypes.data, self.host.nbytes)
        self.stream, self.staging = driver.stream(), driver.allocate(RUN * RUNS)
        self.gather = gather_launcher(driver) if way.startswith("kernel") else None
        if way.startswith("kernel") and self.gather is None:
            raise RuntimeError("there is no gather kernel: see the log")
        self.byte_count, self.seconds = 0, 0.0

    def run(self, is_wanted: Callable[[], bool]) -> None:
        self.driver.bind()
        random, started = np.random.default_rng(2), time.perf_counter()
        while is_wanted():
            device = self.base + random.permutation(2 * RUNS)[:RUNS] * RUN
            self._once(device, self.host.ctypes.data + np.arange(RUNS) * RUN)
            wait_for(self.stream)
            self.byte_count += RUN * RUNS
        self.seconds = time.perf_counter() - started

    def _once(self, device: Any, host: Any) -> None:
        to, come_from, sizes = unsigned(device, host, np.full(RUNS, RUN))
        if self.way == "load":
            self.driver.copy_batch(to, come_from, sizes, ORDER_ANY, self.stream)
        elif self.way == "store":
            self.driver.copy_batch(come_from, to, sizes, ORDER_STREAM, self.stream)
        else:
            assert self.gather is not None
            piece = RUN // PIECES
            parts = (device[:, None] + np.arange(PIECES) * piece).reshape(-1)
            inside = self.staging + np.arange(RUNS * PIECES) * piece
            self.gather(inside, parts, np.full(RUNS * PIECES, piece, np.int64), self.stream)
            self.driver.copy(self.host.ctypes.data, self.staging, RUN * RUNS, self.stream)

    def close(self) -> None:
        self.driver.bind()
        self.driver.unpin(self.host.ctypes.data)  # before it is unmapped: its address is used again
        self.driver.destroy_stream(self.stream)
        self.driver.free(self.staging)

    @property
    def speed(self) -> float:
        """GB/s"""
        return round(self.byte_count / max(self.seconds, 1e-9) / 1e9, 2)


class Engine:
    """A captured graph of small products, as in decoding, and a large product, as in a prefill."""

    def __init__(self, torch: Any, *, has_priority: bool) -> None:
        self.torch = torch
        self.stream = torch.cuda.Stream(priority=-1 if has_priority else 0)
        with torch.cuda.stream(self.stream):
            kind = {"device": "cuda", "dtype": torch.bfloat16}
            self.large = torch.randn(LARGE, LARGE, **kind)
            self.weights = [torch.randn(WIDTH, WIDTH, **kind) / 48 for _ in range(DEPTH)]
            self.x = torch.randn(16, WIDTH, **kind)
            for _ in range(3):
                self.y = self.layers()
                self.large @ self.large
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.y = self.layers()

    def layers(self) -> Any:
        y = self.x
        for weight in self.weights:
            y = self.torch.nn.functional.silu(y @ weight)
        return y

    def measure(self) -> dict[str, float]:
        steps, products, until = [], [], time.perf_counter() + SECONDS
        with self.torch.cuda.stream(self.stream):
            while time.perf_counter() < until:
                begun, stepped, multiplied = (self.torch.cuda.Event(enable_timing=True) for _ in range(3))
                begun.record()
                self.graph.replay()
                stepped.record()
                self.large @ self.large
                multiplied.record()
                multiplied.synchronize()
                steps.append(begun.elapsed_time(stepped))
                products.append(stepped.elapsed_time(multiplied))
        return {
            "step ms p50": round(float(np.percentile(steps, 50)), 3),
            "step ms p99": round(float(np.percentile(steps, 99)), 3),
            "TFLOP/s": round(2 * LARGE**3 / float(np.median(products)) / 1e9, 1),
            "steps": len(steps),
        }


@contextmanager
def copying_here(driver: Driver, base: int, way: str) -> Iterator[Callable[[], float]]:
    loop, stop = CopyLoop(driver, base, way), threading.Event()
    thread = threading.Thread(target=loop.run, args=(lambda: not stop.is_set(),))
    thread.start()

    def end() -> float:
        stop.set()
        thread.join()
        return loop.speed

    try:
        yield end
    finally:
        end()
        loop.close()


@contextmanager
def copying_elsewhere(handle: bytes, offset: int, way: str) -> Iterator[Callable[[], float]]:
    command = [sys.executable, "-m", "benchmarks.gpu.interference", "--loop", way]
    process = subprocess.Popen(
        [*command, "--handle", handle.hex(), "--offset", str(offset)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def end() -> float:
        stdin.write("stop\n")
        stdin.flush()
        return float(stdout.readline() or 0)

    try:
        if stdout.readline() != "ready\n":
            raise RuntimeError("the other process did not begin: see the log")
        yield end
    finally:
        process.kill()
        process.wait()
        stdin.close()
        stdout.close()


def beside(engine: Engine, copying: Any) -> dict[str, float]:
    with copying as end:
        time.sleep(0.2)
        found = engine.measure()
        return {**found, "copies GB/s": end()}


def loop_process(way: str, base: int, driver: Driver) -> None:
    loop, stop = CopyLoop(driver, base, way), threading.Event()
    print("ready", flush=True)
    threading.Thread(target=lambda: (sys.stdin.readline(), stop.set()), daemon=True).start()
    loop.run(lambda: not stop.is_set())
    print(loop.speed, flush=True)


def tried(driver: Driver, way: str) -> dict[str, Any]:
    base = driver.allocate(SPAN)
    loop, rounds = CopyLoop(driver, base, way), iter([True, True, False])
    loop.run(lambda: next(rounds))
    loop.close()
    return {"bytes": loop.byte_count}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--try", dest="tried", choices=WAYS, nargs="+")
    parser.add_argument("--loop", choices=WAYS)
    parser.add_argument("--handle", default="")
    parser.add_argument("--offset", type=int, default=0)
    given = parser.parse_args()
    if given.loop:
        driver = STAGE.driver()
        loop_process(given.loop, driver.open(bytes.fromhex(given.handle)) + given.offset, driver)
        return
    if given.tried:
        for way in given.tried:
            STAGE.record(way, tried(STAGE.driver(), way))
        return
    torch, driver = STAGE.torch(), STAGE.driver()
    blocks = torch.zeros(SPAN, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    base = blocks.data_ptr()
    exported = driver.export(base)
    for has_priority in (False, True):
        name = f"engine of {'high' if has_priority else 'default'} priority"
        engine = Engine(torch, has_priority=has_priority)
        STAGE.attempt(f"{name}, alone", engine.measure)
        for way in WAYS:
            here = f"{name}, beside {way} in the same process"
            STAGE.attempt(here, lambda engine=engine, way=way: beside(engine, copying_here(driver, base, way)))
            there = f"{name}, beside {way} in another process"
            STAGE.attempt(there, lambda engine=engine, way=way: beside(engine, copying_elsewhere(*exported, way)))
        STAGE.attempt(f"{name}, alone again", engine.measure)
        del engine
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
