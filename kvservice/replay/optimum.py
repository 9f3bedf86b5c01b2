"""The best hit count that any policy could reach: Belady's algorithm, which knows the future and may refuse a new
block. Pure.

Blocks are counted one by one, also when one before them is missing. For prefixes this is therefore an upper bound.
"""

from __future__ import annotations

import heapq

from kvservice.replay.trace import Trace
from kvservice.units import BlockKey

_NEVER = 1 << 62  # The next use of a block that is never used again: later than any place in a trace.


def belady_hits(trace: Trace, capacity: int, count_from: int = 0) -> int:
    """The number of blocks that the requests from `count_from` on would find. O(n log n)."""
    assert capacity > 0
    sequence = [key for request in trace.requests for key in request.keys]
    uncounted = sum(len(request.keys) for request in trace.requests[:count_from])
    next_use = [_NEVER] * len(sequence)
    seen: dict[BlockKey, int] = {}
    for index in range(len(sequence) - 1, -1, -1):
        next_use[index] = seen.get(sequence[index], _NEVER)
        seen[sequence[index]] = index
    held: dict[BlockKey, int] = {}  # when each block is wanted next
    farthest: list[tuple[int, BlockKey]] = []
    hits = 0
    for index, (key, wanted) in enumerate(zip(sequence, next_use, strict=True)):
        if key in held:
            hits += index >= uncounted
            if wanted == _NEVER:
                del held[key]
                continue
        elif wanted == _NEVER:
            continue
        elif len(held) >= capacity:
            while held.get(farthest[0][1]) != -farthest[0][0]:
                heapq.heappop(farthest)
            if -farthest[0][0] <= wanted:
                continue
            del held[heapq.heappop(farthest)[1]]
        held[key] = wanted
        heapq.heappush(farthest, (-wanted, key))
    return hits
