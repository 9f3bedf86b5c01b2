"""Fetch or recompute: the shard's decision, from what it has measured, against an oracle that knows both costs. Pure.

Every block of a prompt that some earlier prompt had lies on one peer. What a fetch and a prefill really take varies
around the given means: a link drifts and is congested now and then, an engine is slowed by what else it decodes. The
decision is `estimate`'s, which sees what it fetched and what the engine last reported; the oracle sees the future.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from kvservice.core.acquire.estimate import FetchEstimate
from kvservice.replay.trace import BLOCK_TOKENS, Trace
from kvservice.units import BlockKey

SPEED_WEIGHT = 0.2  # of an engine's newest prefill in its average, as the connector has it
DEADLINE_SECONDS = 5.0  # the connector's default; less where computing the whole prompt takes less
DRIFT = 0.9  # how much of a link's deviation is left at the next request
LINK_SPREAD = 0.3  # of the logarithm of a link's speed
ENGINE_SPREAD = 0.15
CONGESTED_SHARE = 0.05  # of the requests meet a link at a quarter of its speed


@dataclass(frozen=True, slots=True)
class Choices:
    """`decisions` are requests with something to fetch; seconds are those of fetching and computing their prefixes."""

    decisions: int
    differ: int  # the oracle would have fetched another number of blocks
    seconds: float
    oracle_seconds: float
    always_seconds: float  # had everything been fetched
    never_seconds: float  # had nothing been fetched

    @property
    def differ_share(self) -> float:
        return self.differ / max(self.decisions, 1)

    @property
    def lost_share(self) -> float:
        """Time over the oracle's."""
        return self.seconds / self.oracle_seconds - 1 if self.oracle_seconds else 0.0


def known_prefixes(trace: Trace) -> list[tuple[int, int]]:
    """Of each request with any, how many blocks of its prefix earlier requests had, and how many it has."""
    seen: set[BlockKey] = set()
    found: list[tuple[int, int]] = []
    for request in trace.requests:
        count = next((i for i, key in enumerate(request.keys) if key not in seen), len(request.keys))
        if count:
            found.append((count, len(request.keys)))
        seen.update(request.keys)
    return found


def compare_choices(
    prefixes: list[tuple[int, int]],
    bytes_per_second: float,
    overhead_seconds: float,
    block_bytes: int,
    prefill_tokens_per_second: float,
    seed: int = 1,
) -> Choices:
    """One pass over all prefixes, through one link. The same seed meets the same link and engine at each speed."""
    noise = random.Random(seed)
    estimate = FetchEstimate()
    reported = 0.0  # seconds a block, as the engine last said
    deviation = 0.0
    differ = 0
    took = best = always = never = 0.0
    for count, length in prefixes:
        deviation = DRIFT * deviation + math.sqrt(1 - DRIFT**2) * noise.gauss(0, LINK_SPREAD)
        congestion = 4.0 if noise.random() < CONGESTED_SHARE else 1.0
        per_fetched = block_bytes / bytes_per_second * math.exp(deviation) * congestion
        overhead = overhead_seconds * math.exp(noise.gauss(0, LINK_SPREAD))
        per_computed = BLOCK_TOKENS / prefill_tokens_per_second * math.exp(noise.gauss(0, ENGINE_SPREAD))
        deadline = min(DEADLINE_SECONDS, reported * length) if reported else DEADLINE_SECONDS
        fetched = estimate.worthwhile(count, block_bytes, reported, deadline)
        if fetched:
            estimate.observe_overhead(overhead)
            estimate.observe_pull(fetched * block_bytes, fetched * per_fetched)
        reported = per_computed if not reported else reported + SPEED_WEIGHT * (per_computed - reported)
        fits = min(count, int(max(deadline - overhead, 0.0) / per_fetched))
        ideal = fits if fits and overhead + fits * per_fetched < fits * per_computed else 0

        # What does not fit the deadline is computed after it, and the wait for it was in vain.
        costs = [
            (min(overhead + blocks * per_fetched, deadline) if blocks else 0.0)
            + (count - min(blocks, fits)) * per_computed
            for blocks in (fetched, ideal, count, 0)
        ]
        differ += fetched != ideal
        took, best, always, never = (a + b for a, b in zip((took, best, always, never), costs, strict=True))
    return Choices(len(prefixes), differ, took, best, always, never)
