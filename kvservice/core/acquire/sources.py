"""Chooses where missing blocks are fetched from: other nodes, tiers of this node, and shared tiers. Pure.

Each run of consecutive blocks comes from the source that is measured to be the cheapest, in seconds for a block. A
source that was never measured is tried. One that is slower than computing is not used, and the next cheapest is asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvservice.core.acquire.estimate import FetchEstimates
from kvservice.core.messages import Holder
from kvservice.core.tier.rules import is_tier

Holders = Mapping[int, tuple[Holder, ...]]


@dataclass(frozen=True, slots=True)
class ChosenRun:
    """Blocks that are fetched from one holder, and the other holders of all of them."""

    holder: Holder
    alternates: list[Holder]
    indices: list[int]


@dataclass(frozen=True, slots=True)
class Choice:
    """`runs` cover the first `count` wanted blocks. `refused` is the cheapest holder of the next one, which is slower
    than computing it; None when all are covered."""

    runs: list[ChosenRun]
    count: int
    refused: Holder | None


def choose(
    wanted: list[int],
    holders: Holders,
    estimates: FetchEstimates,
    payload_bytes: int,
    recompute_seconds: float,
    remaining_seconds: float,
    run_max: int,
) -> Choice:
    """Where each of the `wanted` indices is fetched from, all of which have holders. A run has at most `run_max`
    blocks. `recompute_seconds` is the engine's time for one block; 0 = not known."""
    runs: list[ChosenRun] = []
    start = 0
    while start < len(wanted):
        candidates = _by_cost(wanted, start, holders, estimates, payload_bytes)
        for holder, end in candidates:
            length, estimate = end - start, estimates.of(holder)
            count = estimate.worthwhile(length, payload_bytes, recompute_seconds, remaining_seconds)
            if count:
                break
        else:
            return Choice(runs, start, candidates[0][0])
        for first in range(start, start + count, run_max):
            indices = wanted[first : min(first + run_max, start + count)]
            others = [h for h in holders[indices[0]] if h != holder and all(h in holders[i] for i in indices)]
            runs.append(ChosenRun(holder, others, indices))
        start += count
        if count < length:
            return Choice(runs, start, holder)
    return Choice(runs, start, None)


def _by_cost(
    wanted: list[int], start: int, holders: Holders, estimates: FetchEstimates, payload_bytes: int
) -> list[tuple[Holder, int]]:
    """(holder, end of its run) for the longest run of a node and for each tier, the cheapest first. Of equally cheap
    ones, among them those that were not measured, nodes come first."""
    first = holders[wanted[start]]
    nodes, tiers = [h for h in first if not is_tier(h.node_id)], [h for h in first if is_tier(h.node_id)]
    found: list[tuple[float, Holder, int]] = []
    for kind in ([nodes] if nodes else []) + [[tier] for tier in tiers]:
        holder, end = longest_run(wanted, start, holders, kind)
        seconds = estimates.of(holder).seconds(end - start, payload_bytes)
        found.append(((seconds or 0.0) / (end - start), holder, end))
    return [(holder, end) for _, holder, end in sorted(found, key=lambda one: one[0])]


def longest_run(wanted: list[int], start: int, holders: Holders, among: Sequence[Holder]) -> tuple[Holder, int]:
    """Which of these holders of `wanted[start]` has the most consecutive wanted blocks, and the end of its run."""
    best: tuple[Holder, int] | None = None
    for holder in among:
        end = start + 1
        while end < len(wanted) and wanted[end] == wanted[end - 1] + 1 and holder in holders[wanted[end]]:
            end += 1
        if best is None or end > best[1]:
            best = (holder, end)
    assert best is not None
    return best


def nodes_are_faster(estimates: FetchEstimates, tiers: Sequence[Holder], count: int, payload_bytes: int) -> bool:
    """Whether some other node was measured to give so many blocks sooner than each of these tiers."""
    ours = [estimates.of(holder).seconds(count, payload_bytes) for holder in tiers]
    theirs = estimates.best_node_seconds(count, payload_bytes)
    return theirs is not None and all(seconds is not None and theirs < seconds for seconds in ours)
