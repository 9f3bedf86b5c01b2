"""Traffic of all sorts, drawn from a seed: to judge a policy on what nobody tuned it to.

A trace mixes one to four sources. What they are, how much each asks for, and every parameter of theirs is drawn anew.
Some sources run all the time, others begin late or end early. All of it is of one tenant.
Pure: the same seed gives the same trace.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvservice.replay.trace import BLOCK_TOKENS, Request, Trace, key_of, trace_of

CHAIN_BLOCKS_MAX = 400  # conversations end there: longer ones would be all of a trace
Prompt = tuple[float, list[int]]  # (when, blocks). Sources do not send them in the order of time.
Source = Callable[["Draw"], Iterator[Prompt]]


@dataclass(slots=True)
class Draw:
    """Chance, the names of new blocks, and the time from 0 to 1 that a source has."""

    noise: random.Random
    names: Iterator[int]
    start: float = 0.0
    end: float = 1.0

    def between(self, low: float, high: float) -> float:
        """Small and large values alike: their logarithm is uniform."""
        return math.exp(self.noise.uniform(math.log(low), math.log(high)))

    def count(self, low: float, high: float) -> int:
        return round(self.between(low, high))

    def blocks(self, mean: float) -> list[int]:
        """New blocks, at least one; their number is exponential."""
        return self.new(1 + int(self.noise.expovariate(1 / mean)))

    def new(self, count: int) -> list[int]:
        return list(itertools.islice(self.names, count))

    def gap(self, mean: float, regularity: float) -> float:
        """Time until the next event: bursty for a regularity below 1, like a clock for a large one."""
        return self.noise.gammavariate(regularity, mean / regularity)

    def arrivals(self, count: float, regularity: float = 1.0) -> Iterator[float]:
        """About `count` points of time."""
        at = self.start
        while (at := at + self.gap((self.end - self.start) / count, regularity)) < self.end:
            yield at


def agents(draw: Draw) -> Iterator[Prompt]:
    """Agents that call tools: many short steps, each a longer prompt, over a few large system prompts."""
    systems = [draw.new(draw.count(2, 40)) for _ in range(draw.count(1, 12))]
    skew, step, steps = draw.noise.uniform(0.3, 2), draw.between(0.5, 5), draw.between(4, 30)
    pause, regularity = draw.between(0.0005, 0.01), draw.between(0.4, 4)
    for begin in draw.arrivals(draw.between(60, 600), draw.between(0.5, 2)):
        chain = [*_popular(draw, systems, skew), *draw.blocks(step)]
        at = begin
        while True:
            yield at, list(chain)
            if draw.noise.random() < 1 / steps or len(chain) > CHAIN_BLOCKS_MAX:
                break
            chain += draw.blocks(step)
            at += draw.gap(pause, regularity)


def chats(draw: Draw) -> Iterator[Prompt]:
    """People: a few turns with pauses, and some come back later to a conversation of theirs."""
    systems = [draw.new(draw.count(1, 12)) for _ in range(draw.count(1, 8))]
    first, turn, turns = draw.between(1, 15), draw.between(0.5, 6), draw.between(1.2, 8)
    pause, regularity = draw.between(0.002, 0.08), draw.between(0.4, 1.5)
    returning, away = draw.noise.choice([0.0, draw.noise.uniform(0.05, 0.5)]), draw.between(0.05, 0.4)
    for begin in draw.arrivals(draw.between(300, 2000)):
        chain = [*_popular(draw, systems, 1.0), *draw.blocks(first)]
        at = begin
        while at < draw.end and len(chain) < CHAIN_BLOCKS_MAX:
            yield at, list(chain)
            if draw.noise.random() < 1 / turns:
                if draw.noise.random() >= returning:
                    break
                at += draw.gap(away, 1.0)
            chain += draw.blocks(turn)
            at += draw.gap(pause, regularity)


def documents(draw: Draw) -> Iterator[Prompt]:
    """Questions about documents, of which some are popular; what is popular may change."""
    low = draw.between(2, 20)
    texts = [draw.new(draw.count(low, low * 8)) for _ in range(draw.count(40, 800))]
    skew, questions = draw.noise.uniform(0.3, 1.3), draw.between(1000, 5000)
    change = draw.noise.choice([2.0, draw.between(0.05, 0.6)])
    changed = draw.start
    for at in draw.arrivals(questions):
        if at - changed > change:
            changed = at
            draw.noise.shuffle(texts)
        yield at, [*_popular(draw, texts, skew), *draw.blocks(0.3)]


def scans(draw: Draw) -> Iterator[Prompt]:
    """Prompts that are never asked again, over a template or over nothing."""
    template = draw.new(draw.noise.choice([0, draw.count(1, 8)]))
    mean = draw.between(2, 40)
    for at in draw.arrivals(draw.between(300, 4000), draw.between(0.3, 3)):
        yield at, template + draw.blocks(mean)


def loops(draw: Draw) -> Iterator[Prompt]:
    """A fixed list of prompts, asked round and round: an evaluation, a monitor, a nightly job."""
    mean = draw.between(1, 25)
    work = [draw.blocks(mean) for _ in range(draw.count(30, 700))]
    rounds, is_shuffled = draw.between(3, 30), draw.noise.random() < 0.3
    step = (draw.end - draw.start) / rounds / len(work)
    at = draw.start
    while at < draw.end:
        if is_shuffled:
            draw.noise.shuffle(work)
        for chain in work:
            at += draw.gap(step, 2.0)
            yield at, chain


def batches(draw: Draw) -> Iterator[Prompt]:
    """Lists of prompts that come fast, some of them a second or a third time."""
    mean, again, speed = draw.between(1, 25), draw.noise.uniform(0.1, 0.7), draw.between(0.0001, 0.001)
    for begin in draw.arrivals(draw.between(4, 40)):
        work = [draw.blocks(mean) for _ in range(draw.count(15, 300))]
        at = begin
        while at < draw.end:
            for chain in work:
                at += draw.gap(speed, 1.0)
                yield at, chain
            if draw.noise.random() > again:
                break
            at += draw.gap(draw.between(0.001, 0.1), 1.0)


SOURCES: dict[str, Source] = {
    "agents": agents,
    "chats": chats,
    "documents": documents,
    "scans": scans,
    "loops": loops,
    "batches": batches,
}


def make_traffic(seed: int, blocks: int = 60_000) -> Trace:
    """About so many blocks in prompts, of sources that follow from the seed."""
    noise = random.Random(seed)
    names = itertools.count()
    kinds = noise.choices(list(SOURCES), k=noise.choice([1, 1, 2, 2, 3, 4]))
    shares = [noise.uniform(0.2, 1.0) for _ in kinds]
    prompts: list[Prompt] = []
    for kind, share in zip(kinds, shares, strict=True):
        draw = Draw(noise, names)
        if len(kinds) > 1 and noise.random() < 0.35:  # not all the time
            draw.start, draw.end = sorted((noise.uniform(0, 0.6), noise.uniform(0.3, 1)))
            draw.end = max(draw.end, draw.start + 0.15)
        prompts += _thinned(list(SOURCES[kind](draw)), int(blocks * share / sum(shares)))
    prompts.sort(key=lambda prompt: prompt[0])
    requests = [
        Request(3600 * at, tuple(key_of(one) for one in chain), len(chain) * BLOCK_TOKENS, BLOCK_TOKENS // 2)
        for at, chain in prompts
    ]
    return trace_of(f"{'+'.join(sorted(kinds))} (seed {seed})", requests)


def _popular(draw: Draw, texts: list[list[int]], skew: float) -> list[int]:
    """One of them; number n is chosen with a weight of 1 / n ** skew."""
    weights = [1 / (1 + index) ** skew for index in range(len(texts))]
    return draw.noise.choices(texts, weights)[0]


def _thinned(prompts: list[Prompt], blocks: int) -> list[Prompt]:
    """The first of them in time, no more than so many blocks, stretched over the time that all took."""
    prompts.sort(key=lambda prompt: prompt[0])
    total = 0
    for count, (at, chain) in enumerate(prompts):
        total += len(chain)
        if total > blocks:
            begin, last = prompts[0][0], prompts[-1][0]
            scale = (last - begin) / max(at - begin, 1e-9)
            return [(begin + (when - begin) * scale, part) for when, part in prompts[: count + 1]]
    return prompts
