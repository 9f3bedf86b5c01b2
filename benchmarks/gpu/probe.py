"""Stage probe: checks everything that the product relies on with this machine's driver."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.bindings import constants
from benchmarks.gpu.children import MARK
from benchmarks.gpu.findings import Stage, call, child, said_by, wait_for, words_of
from kvservice.copying.cuda.copies import gather_launcher
from kvservice.copying.cuda.driver import Driver
from kvservice.units import GiB, MiB

STAGE = Stage("probe")
EXPORTED_BYTES = 8 << 20
CAPTURED = ("host register", "event record and query", "copy", "allocate", "the engine's own event")


def imported(driver: Driver, *, kill: bool = False, before: tuple[str, ...] = ()) -> dict[str, Any]:
    """Memory and event of another process, which is started by the command `before`."""
    process = child("exporter", str(EXPORTED_BYTES), before=before)
    assert process.stdout is not None and process.stdin is not None
    try:
        words = process.stdout.readline().split()
        if len(words) != 3:
            raise RuntimeError("the other process said nothing: see the log")
        handle, exported = bytes.fromhex(words[0]), bytes.fromhex(words[2])
        base, again, event = driver.open(handle), driver.open(handle), driver.open_event(exported)
        deadline = time.monotonic() + 5
        while not driver.has_passed(event) and time.monotonic() < deadline:
            time.sleep(0.001)
        found: dict[str, Any] = {
            "offset": int(words[1]),
            "same address when opened twice": base == again,
            "event passes": driver.has_passed(event),
            "bytes": driver.allocation_of(base)[1],
        }
        if kill:
            process.kill()
            process.wait()
            found["event of a killed process"] = words_of(lambda: driver.has_passed(event))
        target, stream = np.zeros(4096, np.uint8), driver.stream()

        def is_read() -> bool:
            driver.copy(target.ctypes.data, base, target.nbytes, stream)
            wait_for(stream)
            return bool((target == MARK).all())

        found["bytes are read"] = words_of(is_read)
        started = time.perf_counter()
        found["close"] = words_of(lambda: (driver.destroy_event(event), driver.close(base), driver.close(base))[0])
        found["close ms"] = round((time.perf_counter() - started) * 1e3, 2)
        return found
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def apart(driver: Driver) -> None:
    """Find out which namespaces an engine and a worker in different containers must share. No answer is a failure."""
    other_shm = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh")
    for what, before in {
        "IPC namespaces": ("unshare", "--ipc"),
        "PID namespaces": ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),  # as a container has one
        "/dev/shm": other_shm,
    }.items():
        STAGE.record(f"IPC over two {what}", words_of(lambda before=before: imported(driver, before=before)))


def shared_memory(size: int) -> mmap.mmap:
    path = Path(f"/dev/shm/kvservice-campaign-{os.getpid()}")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    path.unlink()
    try:
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def pinning(driver: Driver) -> dict[str, Any]:
    """Measure the speed, and how long a call of another thread stalls meanwhile."""
    room = os.statvfs("/dev/shm")
    size, piece = (2 * GiB, 256 * MiB) if room.f_bavail * room.f_frsize > 3 * GiB else (32 * MiB, 16 * MiB)
    memory = shared_memory(size)
    anchor = ctypes.c_char.from_buffer(memory)
    address, seconds, stalls, stop = ctypes.addressof(anchor), [], [], threading.Event()

    def other_calls() -> None:
        driver.bind()
        stream, event = driver.stream(), driver.event()
        while not stop.wait(0.0005):
            started = time.perf_counter()
            driver.record(event, stream)
            stalls.append(time.perf_counter() - started)

    thread = threading.Thread(target=other_calls)
    thread.start()
    try:
        for at in range(0, size, piece):
            started = time.perf_counter()
            driver.pin(address + at, piece)
            seconds.append(time.perf_counter() - started)
    finally:
        stop.set()
        thread.join()
    again = words_of(lambda: driver.pin(address, 4096))
    target, stream = driver.allocate(8192), driver.stream()
    border = words_of(lambda: (driver.copy(target, address + piece - 4096, 8192, stream), wait_for(stream))[0])
    started = time.perf_counter()
    for at in range(0, size, piece):
        driver.unpin(address + at)
    unpinned = time.perf_counter() - started
    del anchor
    memory.close()
    return {
        "GiB": size / GiB,
        "pin GB/s": round(size / sum(seconds) / 1e9, 2),
        "longest piece ms": round(max(seconds) * 1e3, 1),
        "longest other call meanwhile ms": round(max(stalls, default=0.0) * 1e3, 1),
        "unpin GB/s": round(size / max(unpinned, 1e-9) / 1e9, 2),
        "pinned again": again,
        "copy over the border of two pieces": border,
        "RLIMIT_MEMLOCK": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    }


def first_launches(driver: Driver) -> dict[str, float]:
    """The kernel must be compiled once, whatever the number of runs: a later launch that takes long compiles again."""
    started = time.perf_counter()
    gather = gather_launcher(driver)
    found = {"made in s": round(time.perf_counter() - started, 2)}
    if gather is None:
        raise RuntimeError("there is no gather kernel: see the log")
    base, stream = driver.allocate(4 * MiB), driver.stream()
    for count in (1, 2, 3, 4, 16, 1000):
        at = np.arange(count, dtype=np.int64) * 1024
        started = time.perf_counter()
        gather(base + 2 * MiB + at, base + at, np.full(count, 1024, np.int64), stream)
        wait_for(stream)
        found[f"{count} runs, ms"] = round((time.perf_counter() - started) * 1e3, 2)
    return found


def with_torch(driver: Driver, torch: Any) -> None:
    name = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    STAGE.record("torch and the driver name the GPU alike", name == driver.uuid)
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        setting = {variable: "expandable_segments:True"}
        STAGE.attempt(f"{variable}=expandable_segments:True", lambda setting=setting: said_by("expandable", **setting))
    STAGE.attempt("first launches of the gather kernel", lambda: first_launches(driver))

    def pinned_by_torch() -> str:
        host = torch.empty(1 << 20, dtype=torch.uint8)
        result = torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0)
        torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
        return f"{type(result).__name__} {getattr(result, 'value', result)}"

    STAGE.attempt("what torch's cudaHostRegister returns", pinned_by_torch)
    for deed in CAPTURED:
        STAGE.attempt(f"{deed} while a graph is captured", lambda deed=deed: said_by("capture", deed))
    STAGE.attempt("after an illegal address", lambda: said_by("dead_context"))


def main() -> None:
    driver = STAGE.driver()
    query = ["name", "driver_version", "memory.total", "pcie.link.gen.current", "pcie.link.width.current"]
    command = ["nvidia-smi", f"--query-gpu={','.join(query)}", "--format=csv,noheader"]
    said = words_of(lambda: subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip())
    STAGE.record("GPU", said)
    STAGE.record("python", sys.version.split()[0])
    version = ctypes.c_int()
    call("cuDriverGetVersion", ctypes.byref(version))
    STAGE.record("CUDA of the driver", version.value)
    STAGE.record("batched copies", driver.has_batch_copy)
    STAGE.record("constants of cuda-bindings", words_of(constants))
    STAGE.attempt("IPC", lambda: imported(driver))
    STAGE.attempt("IPC, the other process is killed", lambda: imported(driver, kill=True))
    apart(driver)
    own = driver.export(driver.allocate(1 << 20))[0]
    STAGE.record("own handle", words_of(lambda: driver.open(own)))
    STAGE.attempt("pinning /dev/shm", lambda: pinning(driver))
    if "--driver-only" in sys.argv:
        return
    try:
        import torch
    except ImportError as error:
        STAGE.record("torch", f"none: {error}")
        return
    STAGE.record("torch", torch.__version__)
    if torch.cuda.is_available():
        with_torch(driver, torch)


if __name__ == "__main__":
    main()
