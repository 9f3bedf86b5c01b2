"""Copies many runs between two regions of this process's memory in one call, without blocking other threads.

When every layer has a tensor of its own, a run has a few KiB, and one call of Python for each would cost as much as its
bytes. Compiled if the installation had a compiler; otherwise the same with ctypes. A compiled copy from or to memory
that is gone, because its file was cut short, raises OSError; the kernel ends a process that does the same with ctypes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from kvservice.core.segment.copy_runs import Offsets
from kvservice.core.segment.digest import digest_pieces, seeds_of
from kvservice.core.segment.native import SHORT_BYTES, Words, native
from kvservice.units import BlockKey

_native = native


def in_one_pass() -> bool:
    """Whether digests come with copies for nothing; otherwise they are a second pass over the bytes."""
    return _native is not None


def copy_runs(target: int, source: int, targets: Offsets, sources: Offsets, lengths: Offsets) -> None:
    """Copy `lengths[i]` bytes from address `source + sources[i]` to `target + targets[i]`, for each i.

    `targets`, `sources` and `lengths` are contiguous int64 arrays of one size. All runs must be in memory that belongs
    to the caller, and targets must not overlap sources. Blocks until all is copied; other threads run meanwhile.
    Raises ValueError for arrays that do not fit each other, and OSError for memory that is gone.
    """
    if _native is not None:
        _native.copy(target, source, targets, sources, lengths)
        return
    if not targets.size == sources.size == lengths.size or (lengths.size and int(lengths.min()) < 0):
        raise ValueError("targets, sources and lengths are int64 arrays of one size, lengths not negative")
    for to, origin, length in zip(targets.tolist(), sources.tolist(), lengths.tolist(), strict=True):
        ctypes.memmove(target + to, source + origin, length)


def copy_blocks(
    target: int,
    source: int,
    targets: Offsets,
    sources: Offsets,
    lengths: Offsets,
    ends: Offsets,
    keys: Sequence[BlockKey],
) -> Words:
    """Copy runs as `copy_runs` does, and return the digest of each block, as unsigned integers.

    The runs of block i are those from `ends[i - 1]` to `ends[i]`, in the order of its bytes, none of them empty; its
    digest is under `keys[i]`. It is of what was stored, even if somebody writes the source meanwhile.
    """
    seeds = seeds_of(keys)
    digests = np.zeros(len(keys), np.uint64)
    if not len(keys):
        return digests
    if _native is not None and int(np.add.reduceat(lengths, np.concatenate(([0], ends[:-1]))).min()) > SHORT_BYTES:
        _native.copy_blocks(target, source, targets, sources, lengths, ends, seeds, digests)
        return digests
    copy_runs(target, source, targets, sources, lengths)
    begin = 0
    for block, end in enumerate(ends.tolist()):
        pieces = [
            memoryview((ctypes.c_char * length).from_address(target + to)).cast("B")
            for to, length in zip(targets[begin:end].tolist(), lengths[begin:end].tolist(), strict=True)
        ]
        digests[block] = digest_pieces(pieces, int(seeds[block]))
        begin = end
    return digests
