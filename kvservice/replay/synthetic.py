"""Traces made from a seed: conversations over shared system prompts, and prompts that are never repeated. Pure."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

from kvservice.replay.trace import BLOCK_TOKENS, Request, Trace, key_of, trace_of


@dataclass(frozen=True, slots=True)
class Workload:
    """What to make. Rates are per second and lengths are in blocks. A "mean" is the mean of an exponential
    distribution."""

    seconds: float = 1800.0
    conversations_rate: float = 0.5
    turns_mean: float = 4.0
    think_seconds_mean: float = 60.0
    first_blocks_mean: float = 8.0
    turn_blocks_mean: float = 3.0
    system_prompts: int = 8  # the first one is the most popular
    system_blocks: int = 4
    scan_rate: float = 0.0  # prompts that are never repeated
    scan_blocks_mean: float = 30.0
    chain_blocks_max: int = 512


def make_trace(workload: Workload, seed: int, name: str = "synthetic") -> Trace:
    """Make a trace. The same seed gives the same trace."""
    noise = random.Random(seed)
    identity = workload.system_prompts * workload.system_blocks
    # (when, order, chain so far); an empty chain is a prompt that is never repeated
    events: list[tuple[float, int, list[int]]] = []
    order = 0
    for rate, starts_with_system in ((workload.conversations_rate, True), (workload.scan_rate, False)):
        at = 0.0
        while rate > 0 and (at := at + noise.expovariate(rate)) < workload.seconds:
            chain: list[int] = []
            if starts_with_system:
                prompt = min(int(noise.expovariate(0.7)), workload.system_prompts - 1)
                chain = list(range(prompt * workload.system_blocks, (prompt + 1) * workload.system_blocks))
            order += 1
            events.append((at, order, chain))
    heapq.heapify(events)
    requests: list[Request] = []
    while events:
        at, _, chain = heapq.heappop(events)
        is_scan = not chain
        is_first = len(chain) == workload.system_blocks
        mean = workload.first_blocks_mean if is_first else workload.turn_blocks_mean
        new = 1 + int(noise.expovariate(1 / (workload.scan_blocks_mean if is_scan else mean)))
        chain = [*chain, *range(identity, identity + new)][: workload.chain_blocks_max]
        identity += new
        keys = tuple(key_of(one) for one in chain)
        requests.append(Request(at, keys, len(chain) * BLOCK_TOKENS, BLOCK_TOKENS // 2))
        again = at + noise.expovariate(1 / workload.think_seconds_mean)
        if not is_scan and again < workload.seconds and noise.random() > 1 / workload.turns_mean:
            order += 1
            heapq.heappush(events, (again, order, chain))
    return trace_of(name, requests)
