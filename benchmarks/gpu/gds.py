"""Stage gds: does GPUDirect Storage write GPU memory to a file here and read the same bytes back?

The product has no use for it yet: this says whether a tier below the pool could. NVIDIA's library falls back to plain
reads and writes where its kernel module is missing, and the stage says which of the two it was.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.findings import ROOT, Stage, call
from kvservice.copying.cuda.driver import Driver
from kvservice.units import MiB

STAGE = Stage("gds")
MOVED_BYTES = 64 * MiB
NAME = "libcufile.so.0"
KERNEL_MODULE = Path("/proc/driver/nvidia-fs/version")


class _Error(ctypes.Structure):
    """CUfileError_t, which is returned by value."""

    _fields_ = [("file", ctypes.c_int), ("cuda", ctypes.c_int)]


class _Description(ctypes.Structure):
    """CUfileDescr_t of a plain file descriptor."""

    _fields_ = [("kind", ctypes.c_int), ("descriptor", ctypes.c_uint64), ("operations", ctypes.c_void_p)]


def library() -> Any:
    """NVIDIA's library, from the system or from torch's packages. None if it is not here."""
    packages = [path for folder in sys.path for path in Path(folder).glob(f"nvidia/*/lib/{NAME}")]
    for name in (NAME, *map(str, packages)):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _check(what: str, error: _Error) -> None:
    if error.file:
        raise RuntimeError(f"{what}: error {error.file} of GPUDirect Storage, {error.cuda} of CUDA")


def round_trip(gds: Any, driver: Driver, folder: Path) -> dict[str, Any]:
    """GPU memory to a file and back to other GPU memory."""
    os.environ.setdefault("CUFILE_ALLOW_COMPAT_MODE", "true")  # it may then do without its kernel module
    for name in ("cuFileDriverOpen", "cuFileHandleRegister"):
        getattr(gds, name).restype = _Error
    for name in ("cuFileWrite", "cuFileRead"):
        getattr(gds, name).restype = ctypes.c_ssize_t
    _check("cuFileDriverOpen", gds.cuFileDriverOpen())
    source, target = driver.allocate(MOVED_BYTES), driver.allocate(MOVED_BYTES)
    data, back = np.random.default_rng(5).integers(0, 256, MOVED_BYTES, np.uint8), np.zeros(MOVED_BYTES, np.uint8)
    whole = ctypes.c_size_t(MOVED_BYTES)
    call("cuMemcpy", ctypes.c_uint64(source), ctypes.c_uint64(data.ctypes.data), whole)
    with tempfile.NamedTemporaryFile(dir=folder) as named:
        descriptor = os.open(named.name, os.O_RDWR | os.O_DIRECT)
        try:
            handle, described = ctypes.c_void_p(), _Description(1, descriptor, None)
            _check("cuFileHandleRegister", gds.cuFileHandleRegister(ctypes.byref(handle), ctypes.byref(described)))
            seconds = {}
            for name, memory in (("cuFileWrite", source), ("cuFileRead", target)):
                none = ctypes.c_int64(0)
                started = time.perf_counter()
                moved = getattr(gds, name)(handle, ctypes.c_void_p(memory), whole, none, none)
                seconds[name] = time.perf_counter() - started
                if moved != MOVED_BYTES:
                    raise RuntimeError(f"{name} moved {moved} of {MOVED_BYTES} bytes")
            gds.cuFileHandleDeregister(handle)
        finally:
            os.close(descriptor)
    call("cuMemcpy", ctypes.c_uint64(back.ctypes.data), ctypes.c_uint64(target), whole)
    return {
        "same bytes": bool(np.array_equal(data, back)),
        "kernel module": KERNEL_MODULE.read_text().strip()
        if KERNEL_MODULE.exists()
        else "none: plain reads and writes",
        **{f"{name} GB/s": round(MOVED_BYTES / span / 1e9, 2) for name, span in seconds.items()},
    }


def main() -> None:
    driver = STAGE.driver()
    gds = library()
    if gds is None:
        STAGE.skip(f"no GPUDirect Storage: {NAME} is not here")
    STAGE.attempt("GPU memory through a file", lambda: round_trip(gds, driver, ROOT))


if __name__ == "__main__":
    main()
