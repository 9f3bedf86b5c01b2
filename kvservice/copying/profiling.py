"""NVTX ranges around load, store, gather and wait, so that a profiler's timeline shows what the copies were for.

They are off unless the process runs under a profiler. Then they are torch's: NVTX on CUDA, roctx on ROCm. Nsight
Systems shows them with `nsys profile --trace=cuda,nvtx`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

log = logging.getLogger("kvservice.copying")

# What Nsight Systems, Nsight Compute, other tools of NVTX, and rocprofv3 set in a process that they watch.
SET_BY_PROFILERS = (
    "NSYS_PROFILING_SESSION_ID",
    "NV_NSIGHT_INJECTION_TRANSPORT_TYPE",
    "NVTX_INJECTION64_PATH",
    "ROCP_TOOL_LIBRARIES",
)
_OFF: AbstractContextManager[None] = contextlib.nullcontext()


def profiled(name: str) -> AbstractContextManager[None]:
    """A range `kvservice NAME` of this thread while the context is entered. Costs a function call while it is off."""
    found = _nvtx()
    return _OFF if found is None else _range(found, name)


@functools.cache
def _nvtx() -> Any:
    """Torch's functions for ranges. None without a profiler, or with a torch that has none."""
    if not any(os.environ.get(name) for name in SET_BY_PROFILERS):
        return None
    try:
        from torch.cuda import nvtx

        nvtx.range_push("kvservice")
        nvtx.range_pop()
    except (ImportError, RuntimeError) as error:  # the CPU build of torch raises RuntimeError
        log.warning("a profiler watches this process, but torch has no ranges for it: %s", error)
        return None
    return nvtx


@contextlib.contextmanager
def _range(nvtx: Any, name: str) -> Iterator[None]:
    nvtx.range_push(f"kvservice {name}")
    try:
        yield
    finally:
        nvtx.range_pop()
