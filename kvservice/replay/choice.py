"""Compares the shard's decision to fetch or recompute with an oracle that knows both costs. Pure.

Every block that an earlier prompt had lies on one peer. The real times of a fetch and of a prefill vary around the
given means: a link drifts and is congested now and then, and an engine is slowed by its other requests. The decision is
that of `estimate`, which knows its past fetches and what the engine last reported. The oracle knows the future.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from kvservice.core.acquire.estimate import FetchEstimate
from kvservice.replay.trace import BLOCK_TOKENS, Trace
from kvservice.units import BlockKey

SPEED_WEIGHT = 0.2  # Weight of an engine's newest prefill in its average speed. The same as in the connector.
# The connector's default deadline of a fetch. It is shorter if computing the whole prompt takes less.
DEADLINE_SECONDS = 5.0
DRIFT = 0.9  # Share of a link's deviation that is left at the next request: congestion lasts for about ten requests.
# Standard deviation of the logarithm of a link's speed: two thirds of the requests meet it within about 30 % of the
# mean.
LINK_SPREAD = 0.3
# Standard deviation of an engine's speed: prefills vary less than links.
ENGINE_SPREAD = 0.15
CONGESTED_SHARE = 0.05  # Share of the requests that meet the link at a quarter of its speed.


@dataclass(frozen=True, slots=True)
class Choices:
    """The sums over all requests that had something to fetch. Seconds are those of fetching and computing their
    prefixes."""

    decisions: int
    differ: int  # the oracle would have fetched another number of blocks
    seconds: float
    oracle_seconds: float
    always_seconds: float  # if everything had been fetched
    never_seconds: float  # if nothing had been fetched

    @property
    def differ_share(self) -> float:
        return self.differ / max(self.decisions, 1)

    @property
    def lost_share(self) -> float:
        """How much longer the decisions took than the oracle's, as a share of the oracle's time."""
        return self.seconds / self.oracle_seconds - 1 if self.oracle_seconds else 0.0


def known_prefixes(trace: Trace) -> list[tuple[int, int]]:
    """For each request whose prefix is known: how many blocks of it earlier requests had, and how many it has in
    all."""
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
    """Play all prefixes once, through one link. The same seed gives the same link and engine at every speed."""
    noise = random.Random(seed)
    estimate = FetchEstimate()
    reported = 0.0  # seconds a block, as the engine last reported
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

        # Blocks that miss the deadline are computed after it, and waiting for them was wasted.
        costs = [
            (min(overhead + blocks * per_fetched, deadline) if blocks else 0.0)
            + (count - min(blocks, fits)) * per_computed
            for blocks in (fetched, ideal, count, 0)
        ]
        differ += fetched != ideal
        took, best, always, never = (a + b for a, b in zip((took, best, always, never), costs, strict=True))
    return Choices(len(prefixes), differ, took, best, always, never)
