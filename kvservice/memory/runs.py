"""Copies many runs between two regions of this process's memory in one call, without blocking other threads.

When every layer has a tensor of its own, a run has a few KiB, and one call of Python for each would cost as much as its
bytes. Compiled if the installation had a compiler; otherwise the same with ctypes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Offsets = npt.NDArray[np.int64]
_compiled: Callable[[int, int, Offsets, Offsets, Offsets], None] | None
try:
    from kvservice.memory._runs import copy
except ImportError:  # there was no compiler at the installation
    _compiled = None
else:
    _compiled = copy


def copy_runs(target: int, source: int, targets: Offsets, sources: Offsets, lengths: Offsets) -> None:
    """Copy `lengths[i]` bytes from address `source + sources[i]` to `target + targets[i]`, for each i.

    `targets`, `sources` and `lengths` are contiguous int64 arrays of one size. All runs must be in memory that belongs
    to the caller, and targets must not overlap sources. Blocks until all is copied; other threads run meanwhile.
    Raises ValueError for arrays that do not fit each other.
    """
    if _compiled is not None:
        _compiled(target, source, targets, sources, lengths)
        return
    if not targets.size == sources.size == lengths.size or (lengths.size and int(lengths.min()) < 0):
        raise ValueError("targets, sources and lengths are int64 arrays of one size, lengths not negative")
    for to, origin, length in zip(targets.tolist(), sources.tolist(), lengths.tolist(), strict=True):
        ctypes.memmove(target + to, source + origin, length)
