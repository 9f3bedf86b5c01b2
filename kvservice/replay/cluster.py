"""N simulated nodes with one engine each: decides where a prompt goes and what of it is found there. Pure.

Prefills of an engine run one after the other at a fixed speed. Engines have no cache of their own, so every hit is the
service's. Time comes from the trace, and decisions take no time.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvservice.core.messages import HolderRun
from kvservice.core.store.eviction import EvictionPolicy
from kvservice.replay.node import Hits, ReplayDirectory, ReplayNode
from kvservice.replay.tiers import ReplayTier
from kvservice.replay.trace import BLOCK_TOKENS, Request, Trace
from kvservice.serve.load import LoadBook
from kvservice.serve.routing import Candidate, PeerLink, Prompt, Speeds, blocks_of, decide

ROUTINGS = ("round-robin", "kv-aware")
# A request that is decoding slows others by this share of a prefill. Batched decoding costs little beside a prefill.
DECODING_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Machine:
    """One node. The defaults fit an 8B model (128 KiB of KV a token) on one accelerator with 100 Gbit/s."""

    prefill_tokens_per_second: float = 8000.0
    token_bytes: int = 128 << 10
    load_bytes_per_second: float = 20e9
    link: PeerLink = field(default_factory=lambda: PeerLink(11e9, 0.002))
    disk_bytes_per_second: float = 3e9
    objects: PeerLink = field(default_factory=lambda: PeerLink(1e9, 0.05))
    answer_tokens_per_second: float = 40.0

    @property
    def speeds(self) -> Speeds:
        block_bytes = self.token_bytes * BLOCK_TOKENS
        return Speeds(1 / self.prefill_tokens_per_second, block_bytes, self.load_bytes_per_second, self.link)


@dataclass(frozen=True, slots=True)
class Below:
    """The tiers below the memory of a run, in blocks; 0 = there is none."""

    disk: int = 0  # of all nodes together
    disk_write: str = "evicted"
    objects: int = 0
    objects_write: str = "evicted"


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """The result for the requests that were counted. Counts are blocks; times are modelled."""

    asked: int
    local_hits: int
    remote_hits: int
    evicted: int
    busiest_share: float  # prompt blocks of the busiest node divided by the mean
    first_token_seconds: float  # mean
    disk_hits: int
    objects_hits: int
    disk_written: int
    objects_written: int

    @property
    def hit_rate(self) -> float:
        return (self.local_hits + self.remote_hits + self.disk_hits + self.objects_hits) / self.asked


@dataclass(slots=True)
class _Engine:
    node: ReplayNode
    busy_until: float = 0.0
    in_flight: int = 0
    served: int = 0  # blocks of the requests that were counted


def _shares(whole: int, parts: int) -> list[int]:
    return [whole // parts + (i < whole % parts) for i in range(parts)]


class Cluster:
    """The nodes of one run. With `pooled` False each node works alone, and the router knows nothing of what they
    hold."""

    def __init__(
        self,
        node_count: int,
        capacity: int,
        make_policy: Callable[[], EvictionPolicy],
        *,
        pooled: bool = True,
        routing: str = "round-robin",
        machine: Machine | None = None,
        seed: int = 1,
        below: Below | None = None,
    ) -> None:
        """`capacity` is the number of blocks of all nodes together, at least one each; so is that of the disks."""
        assert routing in ROUTINGS and 0 < node_count <= capacity
        assert pooled or routing == "round-robin", "routing by holdings needs the directory"
        self._directory = ReplayDirectory() if pooled else None
        below = below or Below()
        shares, disks = _shares(capacity, node_count), _shares(below.disk, node_count)
        self._disks = [ReplayTier("disk", share, make_policy(), below.disk_write) if share else None for share in disks]
        self._objects = (
            ReplayTier("objects", below.objects, make_policy(), below.objects_write) if below.objects else None
        )
        self.engines = [
            _Engine(ReplayNode(f"n{i}", share, make_policy(), self._directory, disk, self._objects))
            for i, (share, disk) in enumerate(zip(shares, self._disks, strict=True))
        ]
        self._routing = routing
        self._machine = machine or Machine()
        self._speeds = self._machine.speeds
        self._book = LoadBook()
        self._noise = random.Random(seed)
        self._turn = 0
        self._ends: list[tuple[float, int, int]] = []  # (when, request, engine)

    def play(self, trace: Trace, count_from: int = 0, show: Callable[[int], None] | None = None) -> ReplayOutcome:
        """Play all requests in order. Those before `count_from` only warm the nodes up. `show` gets the number of
        requests done."""
        found: Counter[str] = Counter()
        waited = 0.0
        before: Counter[str] = Counter()
        for number, request in enumerate(trace.requests):
            if number == count_from:
                before = self._totals()
            self._end_until(request.at)
            place = self._choose(request, number)
            hits, seconds = self._serve(request, number, place)
            if number >= count_from:
                found.update(asked=len(request.keys), **hits._asdict())
                waited += seconds
                self.engines[place].served += len(request.keys)
            if show is not None and number % 200 == 0:
                show(number)
        served = [engine.served for engine in self.engines]
        grown = self._totals()
        grown.subtract(before)
        return ReplayOutcome(
            found["asked"],
            found["local"],
            found["remote"],
            grown["evicted"],
            max(served) * len(served) / sum(served),
            waited / (len(trace.requests) - count_from),
            found["disk"],
            found["objects"],
            grown["disk_written"],
            grown["objects_written"],
        )

    def _totals(self) -> Counter[str]:
        """Blocks that were evicted from memory and written into tiers so far."""
        nodes = [engine.node.counted() for engine in self.engines]
        return Counter(
            evicted=sum(node.get(f"evicted_{kind}", 0) for node in nodes for kind in ("primary", "secondary")),
            disk_written=sum(disk.counters["written"] for disk in self._disks if disk is not None),
            objects_written=self._objects.counters["written"] if self._objects is not None else 0,
        )

    def _end_until(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            at, number, place = heapq.heappop(self._ends)
            self.engines[place].in_flight -= 1
            self._book.completed(str(number), self.engines[place].node.holder.node_id, at)

    def _choose(self, request: Request, number: int) -> int:
        if self._routing == "round-robin" or len(self.engines) == 1:
            self._turn += 1
            return self._turn % len(self.engines)
        now = request.at
        count = blocks_of(request.tokens, BLOCK_TOKENS, len(request.keys))
        candidates = [
            Candidate(
                engine.node.holder.node_id,
                self._book.wait(engine.node.holder.node_id, engine.in_flight, now).seconds(
                    self._book.request_seconds, DECODING_SHARE
                ),
                self._speeds,
                engine.node.holder.node_id,
                runs=runs,
            )
            for runs in [self._runs(request, count)]
            for engine in self.engines
        ]
        decision = decide(
            Prompt(request.tokens, BLOCK_TOKENS, count), candidates, [self._noise.random() for _ in candidates]
        )
        chosen = decision.best.replica
        self._book.decided(str(number), chosen, decision.best.work_seconds, now)
        self._book.routed(str(number), chosen, now)
        return next(i for i, engine in enumerate(self.engines) if engine.node.holder.node_id == chosen)

    def _runs(self, request: Request, count: int) -> tuple[HolderRun, ...]:
        assert self._directory is not None
        return tuple(self._directory.directory.resolve(request.keys[:count], request.at))

    def _serve(self, request: Request, number: int, place: int) -> tuple[Hits, float]:
        """Returns what was found, and the seconds to the first token."""
        engine, machine, now = self.engines[place], self._machine, request.at
        hits = engine.node.serve(request.keys, now)
        block_bytes = self._speeds.block_bytes
        moved = sum(hits) * block_bytes / machine.load_bytes_per_second
        moved += hits.disk * block_bytes / machine.disk_bytes_per_second
        for count, link in ((hits.remote, machine.link), (hits.objects, machine.objects)):
            if count:
                moved += link.overhead_seconds + count * block_bytes / link.bytes_per_second
        # The last token is always computed.
        tokens = max(request.tokens - sum(hits) * BLOCK_TOKENS, 1)
        first = max(now, engine.busy_until) + moved + tokens / machine.prefill_tokens_per_second
        engine.busy_until = first
        engine.in_flight += 1
        last = first + request.answer_tokens / machine.answer_tokens_per_second
        heapq.heappush(self._ends, (last, number, place))
        return hits, first - now

    def check_invariants(self) -> None:
        for engine in self.engines:
            engine.node.check_invariants()
