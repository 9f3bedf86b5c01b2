"""Stage copies: GB/s of every way to copy scattered runs, beside one large copy of the same bytes.

`--small` moves little, to try the stage where nothing can be measured.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.children import OFFSET
from benchmarks.gpu.findings import Stage, batch, child, median_seconds, unsigned, wait_for
from benchmarks.gpu.probe import shared_memory
from kvservice.copying.cuda import driver as cuda_driver
from kvservice.copying.cuda.copies import Gather, gather_launcher
from kvservice.copying.cuda.driver import ORDER_ANY, ORDER_STREAM, Driver
from kvservice.units import GiB, KiB, MiB

STAGE = Stage("copies")
RUN_BYTES = tuple(size * KiB for size in (4, 16, 64, 256, 1024, 2048))
LISTED_MAX = 4096  # runs of a loop in Python
OVERLAP = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
LOOP = """
#include <stddef.h>
#include <stdint.h>
typedef int (*Copy)(uint64_t, uint64_t, size_t, void *);
int loop(Copy copy, const uint64_t *to, const uint64_t *from, const size_t *sizes, size_t count, void *stream) {
    int result = 0;
    for (size_t i = 0; i < count && !result; i++) result = copy(to[i], from[i], sizes[i], stream);
    return result;
}
"""


class Bench:
    """Pinned memory of /dev/shm, as a segment is; device memory twice as large, here and in another process."""

    def __init__(self, driver: Driver, *, small: bool) -> None:
        self.driver = driver
        self.byte_count = 16 * MiB if small else GiB
        self.moved = 4 * MiB if small else 256 * MiB  # of scattered runs
        self.runs_max = 256 if small else 16_384
        self.rounds = 1 if small else 7
        self.run_bytes = RUN_BYTES[:3:2] if small else RUN_BYTES
        self.map = shared_memory(self.byte_count)
        self.host = np.frombuffer(self.map, np.uint8)
        self.host[:] = np.random.default_rng(0).integers(0, 256, self.byte_count, np.uint8)
        driver.pin(self.host.ctypes.data, self.host.nbytes)
        self.device = driver.allocate(2 * self.byte_count)
        self.stream, self.back = driver.stream(), driver.stream()
        self.gather = _gather(driver)
        self.loop = _loop()
        self.other = child("exporter", str(2 * self.byte_count + OFFSET))
        assert self.other.stdout is not None
        self.theirs = driver.open(bytes.fromhex(self.other.stdout.readline().split()[0]))

    def measure(self, name: str, byte_count: int, submit: Callable[[], object], runs: int = 1) -> float:
        """Measure GB/s, 0 if the copy fails, and how long the calling thread is busy."""
        handed: list[float] = []

        def work() -> None:
            started = time.perf_counter()
            submit()
            handed.append(time.perf_counter() - started)
            wait_for(self.stream)

        def figures() -> dict[str, float]:
            seconds = median_seconds(work, self.rounds)
            busy = sorted(handed)[len(handed) // 2]
            return {"GB/s": round(byte_count / seconds / 1e9, 2), "submit ms": round(busy * 1e3, 3), "runs": runs}

        found = STAGE.attempt(name, figures)
        return float(found.get("GB/s", 0))

    def close(self) -> None:
        self.driver.close(self.theirs)
        self.driver.unpin(self.host.ctypes.data)
        self.other.kill()
        self.other.wait()
        assert self.other.stdin is not None and self.other.stdout is not None
        self.other.stdin.close()
        self.other.stdout.close()


def _gather(driver: Driver) -> Gather | None:
    made = gather_launcher(driver)
    STAGE.record("gather kernel", made is not None)
    return made


def _loop() -> Any:
    """A compiled loop over copies, without the interpreter between them. None if there is no compiler."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "loop.c"), Path(folder, "loop.so")
        source.write_text(LOOP)
        try:
            subprocess.run(["cc", "-O2", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            STAGE.record("loop in C", f"no compiler: {error}")
            return None
        return ctypes.CDLL(str(library))


def limits(bench: Bench) -> dict[str, float]:
    """One large copy in each direction, to compare scattered runs with."""
    driver, stream, size = bench.driver, bench.stream, bench.byte_count
    host, device = bench.host.ctypes.data, bench.device
    found = {
        "load": bench.measure("one copy, host to device", size, lambda: driver.copy(device, host, size, stream)),
        "store": bench.measure("one copy, device to host", size, lambda: driver.copy(host, device, size, stream)),
        "direct": bench.measure(
            "one copy, device to device", size, lambda: driver.copy(device + size, device, size, stream)
        ),
    }
    half = size // 2

    def both() -> None:
        driver.copy(device, host, half, stream)
        driver.copy(host + half, device + size, half, bench.back)
        wait_for(bench.back)

    bench.measure("both directions at once, sum", size, both)
    pageable = np.ones(size, np.uint8)  # not registered: the driver copies it through a buffer of its own
    address = pageable.ctypes.data
    bench.measure("one copy, pageable host to device", size, lambda: driver.copy(device, address, size, stream))
    bench.measure("one copy, device to pageable host", size, lambda: driver.copy(address, device, size, stream))
    bench.measure(
        "one copy, host to another process's device memory", size, lambda: driver.copy(bench.theirs, host, size, stream)
    )
    return found


def ways(bench: Bench, name: str, to: Any, come_from: Any, sizes: Any, order: int) -> None:
    driver, stream = bench.driver, bench.stream
    to, come_from, sizes = unsigned(to, come_from, sizes)
    found: dict[str, Callable[[], object]] = {}
    if driver.has_batch_copy:
        found["batch"] = lambda: batch(driver, to, come_from, sizes, order, stream)
        found["batch, overlap flag"] = lambda: batch(driver, to, come_from, sizes, order, stream, OVERLAP)
        if order == ORDER_ANY:
            found["batch, stream order"] = lambda: batch(driver, to, come_from, sizes, ORDER_STREAM, stream)
    if bench.loop is not None:
        copy = ctypes.cast(cuda_driver.load().cuMemcpyAsync, ctypes.c_void_p)
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (to, come_from, sizes)]
        rest = (ctypes.c_size_t(len(sizes)), ctypes.c_void_p(stream))

        def in_c() -> None:
            if result := bench.loop.loop(copy, *pointers, *rest):
                raise RuntimeError(f"cuMemcpyAsync: CUDA error {result}")

        found["loop in C"] = in_c
    if len(sizes) <= LISTED_MAX:
        listed = list(zip(to.tolist(), come_from.tolist(), sizes.tolist(), strict=True))
        found["loop in Python"] = lambda: [driver.copy(a, b, size, stream) for a, b, size in listed]
    for way, submit in found.items():
        bench.measure(f"{name}, {way}", int(sizes.sum()), submit, len(sizes))


def gathered(bench: Bench, name: str, device: Any, sizes: Any, *, is_load: bool) -> None:
    """The kernel and one large copy, which is how the product copies small runs."""
    assert bench.gather is not None
    driver, stream, total, gather = bench.driver, bench.stream, int(sizes.sum()), bench.gather
    host, staging = bench.host.ctypes.data, bench.device + bench.byte_count
    inside = staging + np.concatenate([[0], np.cumsum(sizes)[:-1]])

    def submit() -> None:
        if is_load:
            driver.copy(staging, host, total, stream)
            gather(device, inside, sizes, stream)
        else:
            gather(inside, device, sizes, stream)
            driver.copy(host, staging, total, stream)

    bench.measure(f"{name}, gather kernel and one copy", total, submit, len(sizes))


def scattered(bench: Bench, size: int) -> None:
    random, all_runs = np.random.default_rng(1), bench.byte_count // size
    count = min(bench.moved // size, bench.runs_max)
    sizes = np.full(count, size, np.int64)
    at_device, at_host = random.permutation(all_runs)[:count] * size, random.permutation(all_runs)[:count] * size
    label = f"{size // KiB} KiB runs"
    device, host = bench.device + at_device, bench.host.ctypes.data + at_host
    ways(bench, f"load {label}", device, host, sizes, ORDER_ANY)
    ways(bench, f"store {label}", host, device, sizes, ORDER_STREAM)
    ways(bench, f"direct {label}", device + bench.byte_count, device, sizes, ORDER_STREAM)
    if bench.driver.has_batch_copy:
        arrays = unsigned(bench.theirs + at_device, host, sizes)
        bench.measure(
            f"load {label}, batch to another process's memory",
            int(sizes.sum()),
            lambda: batch(bench.driver, *arrays, ORDER_ANY, bench.stream),
            count,
        )
    if (gather := bench.gather) is not None:
        gathered(bench, f"load {label}", device, sizes, is_load=True)
        gathered(bench, f"store {label}", device, sizes, is_load=False)
        bench.measure(
            f"direct {label}, gather kernel",
            int(sizes.sum()),
            lambda: gather(device + bench.byte_count, device, sizes, bench.stream),
            count,
        )


def round_trip(bench: Bench) -> bool:
    """Check that scattered runs are the same after a load and a store."""
    count, size = 64, 64 * KiB
    sizes = np.full(count, size)
    before = bench.host[: count * size].copy()
    spread = bench.device + np.random.default_rng(3).permutation(bench.byte_count // size)[:count] * size
    to, come_from, lengths = unsigned(spread, bench.host.ctypes.data + np.arange(count) * size, sizes)
    batch(bench.driver, to, come_from, lengths, ORDER_ANY, bench.stream)
    wait_for(bench.stream)
    bench.host[: before.size] = 0
    batch(bench.driver, come_from, to, lengths, ORDER_STREAM, bench.stream)
    wait_for(bench.stream)
    return bool(np.array_equal(before, bench.host[: before.size]))


def main() -> None:
    bench = Bench(STAGE.driver(), small="--small" in sys.argv)
    STAGE.record("limits", limits(bench))
    for size in bench.run_bytes:
        scattered(bench, size)
    if bench.driver.has_batch_copy:
        STAGE.attempt("bytes come back as they were", lambda: round_trip(bench))
    bench.close()


if __name__ == "__main__":
    main()
