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


# Triton reads these annotations itself and knows no other type than its own. The table is the only argument because
# Triton compiles anew for each alignment of a pointer: its first byte is always aligned, whatever the number of runs.
@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _move_runs(table, block: tl.constexpr) -> None:  # type: ignore[no-untyped-def, unused-ignore]
    """`table`: `[run, 3]` int64, the target's address, the source's address and the number of 4-byte words."""
    row = table + 3 * tl.program_id(0)
    target = tl.load(row).to(tl.pointer_type(tl.int32))
    source = tl.load(row + 1).to(tl.pointer_type(tl.int32))
    count = tl.load(row + 2)
    for start in range(0, count, block):
        at = start + tl.arange(0, block)
        inside = at < count
        tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)


def launcher(device_uuid: str) -> Callable[[Any, Any, Any, int], None]:
    """For the GPU of this UUID. Lengths are bytes, multiples of four, as are all addresses."""
    names = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(torch.cuda.device_count())]
    device = torch.device("cuda", names.index(device_uuid))
    # Torch keeps a pool of memory for each stream that it ever allocated on: tables come from one stream's, whichever
    # engine's stream uses them, or a worker would grow with each engine that comes and goes.
    home = torch.cuda.Stream(device)

    def launch(targets: Any, sources: Any, lengths: Any, stream: int) -> None:
        table = torch.from_numpy(np.stack([targets, sources, lengths // 4], axis=1).astype(np.int64))
        with torch.cuda.device(device):
            with torch.cuda.stream(home):
                here = torch.empty(table.shape, dtype=torch.int64, device=device)
            used_by = torch.cuda.ExternalStream(stream, device=device)
            with torch.cuda.stream(used_by):
                # From pageable memory: the call returns when the table is staged, so it may be dropped here.
                here.copy_(table, non_blocking=True)
                _move_runs[(len(lengths),)](here, block=BLOCK_WORDS)
                here.record_stream(used_by)

    # Compiled now: it takes seconds, in which a copy would look as if it hung.
    scratch = torch.zeros(2, dtype=torch.int32, device=device)
    first = torch.cuda.Stream(device)
    first.wait_stream(torch.cuda.current_stream(device))
    start = np.array([scratch.data_ptr()], dtype=np.int64)
    launch(start, start + 4, np.array([4], dtype=np.int64), first.cuda_stream)
    first.synchronize()
    return launch
