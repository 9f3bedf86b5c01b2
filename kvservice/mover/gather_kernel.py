"""Moves many small runs within a GPU's memory with one launch: Triton, on a stream of the driver's. Has not run on a
GPU yet. Only imported where Triton is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

BLOCK_WORDS = 1024


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _move_runs(targets: Any, sources: Any, words: Any, block: tl.constexpr) -> None:
    run = tl.program_id(0)
    target = tl.load(targets + run).to(tl.pointer_type(tl.int32))
    source = tl.load(sources + run).to(tl.pointer_type(tl.int32))
    count = tl.load(words + run)
    for start in range(0, count, block):
        at = start + tl.arange(0, block)
        inside = at < count
        tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)


def launcher(device_uuid: str) -> Callable[[Any, Any, Any, int], None]:
    """For the GPU of this UUID. Lengths are bytes, multiples of four, as are all addresses."""
    names = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(torch.cuda.device_count())]
    device = torch.device("cuda", names.index(device_uuid))

    def launch(targets: Any, sources: Any, lengths: Any, stream: int) -> None:
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.ExternalStream(stream, device=device)):
            table = torch.from_numpy(np.stack([targets, sources, lengths // 4]).astype(np.int64))
            # From pageable memory: the call returns when the table is staged, so it may be dropped here.
            here = table.to(device, non_blocking=True)
            _move_runs[(len(lengths),)](here[0], here[1], here[2], block=BLOCK_WORDS)
            here.record_stream(torch.cuda.current_stream(device))

    # Compiled now: it takes seconds, in which a copy would look as if it hung.
    scratch = torch.zeros(2, dtype=torch.int32, device=device)
    first = torch.cuda.Stream(device)
    start = np.array([scratch.data_ptr()], dtype=np.int64)
    launch(start, start + 4, np.array([4], dtype=np.int64), first.cuda_stream)
    first.synchronize()
    return launch
