"""Moves many small runs within a GPU's memory with one launch of a Triton kernel, on a stream of the driver's.

Imported only where Triton is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from kvservice.core.segment.copy_runs import cut_runs
from kvservice.units import KiB

# Words that one program copies at a time: 4 KiB, a power of two as Triton wants it.
BLOCK_WORDS = 1024
# What one program copies at most. Longer runs are cut, so that a few of them keep all multiprocessors busy. A program
# for less than a few blocks of words would take longer to start than to run.
PIECE_BYTES = 64 * KiB
WIDE_BYTES = 16  # The widest load and store of a thread. Runs that are all aligned to it are moved in such words.


# Triton reads these annotations itself and knows only its own types. The table is the only argument, because Triton
# compiles again for each alignment of a pointer, and the first byte of a table is always aligned, however many runs it
# has.
@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _move_runs(table, block: tl.constexpr, wide: tl.constexpr) -> None:  # type: ignore[no-untyped-def, unused-ignore]
    """Copy one run per program. `table` is `(runs, 3)` int64: target address, source address, number of 4-byte words.
    `wide` promises that addresses and lengths are multiples of 16 bytes."""
    row = table + 3 * tl.program_id(0)
    target = tl.load(row).to(tl.pointer_type(tl.int32))
    source = tl.load(row + 1).to(tl.pointer_type(tl.int32))
    count = tl.load(row + 2)
    if wide:
        target, source, count = tl.multiple_of(target, 16), tl.multiple_of(source, 16), tl.multiple_of(count, 4)
    for start in range(0, count, block):
        at = start + tl.arange(0, block)
        inside = at < count
        tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)


def launcher(device_uuid: str) -> Callable[[Any, Any, Any, int], None]:
    """A function that launches the kernel on the GPU with this UUID; takes seconds, because it compiles the kernel.

    Its arguments are targets, sources and lengths, each `(runs,)` integers, and a stream. Lengths are in bytes. Lengths
    and addresses are multiples of four.
    """
    names = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(torch.cuda.device_count())]
    device = torch.device("cuda", names.index(device_uuid))
    # Torch keeps a pool of memory for each stream that it ever allocated on. All tables come from the pool of one
    # stream, whichever engine's stream uses them; otherwise a worker would grow with each engine that comes and goes.
    home = torch.cuda.Stream(device)

    def launch(targets: Any, sources: Any, lengths: Any, stream: int) -> None:
        targets, sources, lengths = cut_runs(targets, sources, lengths, PIECE_BYTES)
        wide = not np.any((targets | sources | lengths) % WIDE_BYTES)
        table = torch.from_numpy(np.stack([targets, sources, lengths // 4], axis=1).astype(np.int64))
        with torch.cuda.device(device):
            with torch.cuda.stream(home):
                here = torch.empty(table.shape, dtype=torch.int64, device=device)
            used_by = torch.cuda.ExternalStream(stream, device=device)
            with torch.cuda.stream(used_by):
                # The source is pageable memory: the call returns when the table is staged, so the table may be dropped
                # here.
                here.copy_(table, non_blocking=True)
                _move_runs[(len(lengths),)](here, block=BLOCK_WORDS, wide=wide)
                here.record_stream(used_by)

    # Compile now. It takes seconds, and the first copy would otherwise look as if it hung.
    scratch = torch.zeros(2 * WIDE_BYTES, dtype=torch.uint8, device=device)
    first = torch.cuda.Stream(device)
    first.wait_stream(torch.cuda.current_stream(device))
    start = np.array([scratch.data_ptr()], dtype=np.int64)
    for size in (4, WIDE_BYTES):
        launch(start, start + WIDE_BYTES, np.array([size], dtype=np.int64), first.cuda_stream)
    first.synchronize()
    return launch
