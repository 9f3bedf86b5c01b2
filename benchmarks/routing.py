"""What routing by holdings is worth: hit rate and time to the first token under four ways to choose a replica.

    python -m benchmarks.routing [--replicas 8] [--out PATH]

A simulation: arrivals, engines and links are modelled with the costs given on the command line; the choice is made by
the code that runs in production (kvservice.serve.routing and load), in two routers that do not know of each
other. Conversations share a few system prompts and grow turn by turn. The same seeded workload for each way:

    round_robin      one after the other
    power_of_two     the shorter queue of two random replicas, Serve's default
    prefix_affinity  by a hash of the conversation: all its turns on one replica
    kv_aware         by cost
"""

from __future__ import annotations

import argparse
import heapq
import random
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import default_out, percentile, print_table, write_report
from kvservice.core.messages import Holder, HolderRun
from kvservice.serve.load import LoadBook, SentPrefixes
from kvservice.serve.routing import Candidate, PeerLink, Prompt, Speeds, blocks_of, decide
from kvservice.units import BlockHash, BootEpoch, NodeId

BLOCK_TOKENS = 16
ROUTERS = 2
COLUMNS = ("hit_rate", "fetched_rate", "ttft_p50_ms", "ttft_p99_ms", "ttft_mean_ms", "busiest_over_mean")
POLICIES = ("round_robin", "power_of_two", "prefix_affinity", "kv_aware")


@dataclass(frozen=True, slots=True)
class Model:
    """Costs and sizes of the modelled cluster."""

    replicas: int
    tokens_per_second: float
    block_bytes: int
    load_bytes_per_second: float
    link: PeerLink
    engine_blocks: int
    pool_blocks: int
    step_seconds: float  # of decoding, per token
    answer_tokens: int

    @property
    def speeds(self) -> Speeds:
        return Speeds(1 / self.tokens_per_second, self.block_bytes, self.load_bytes_per_second, self.link)


@dataclass(frozen=True, slots=True)
class Request:
    at: float
    conversation: int
    tokens: int
    hashes: tuple[BlockHash, ...]


@dataclass(slots=True)
class Replica:
    """An engine with its own cache, beside its node's pool. Prefills run one after the other."""

    name: str
    node: NodeId
    engine: OrderedDict[BlockHash, None] = field(default_factory=OrderedDict)
    pool: OrderedDict[BlockHash, None] = field(default_factory=OrderedDict)
    busy_until: float = 0.0
    in_flight: int = 0


def remember(cache: OrderedDict[BlockHash, None], hashes: tuple[BlockHash, ...], blocks_max: int) -> None:
    for block_hash in reversed(hashes):  # leaves go first
        cache.pop(block_hash, None)
        cache[block_hash] = None
    while len(cache) > blocks_max:
        cache.popitem(last=False)


def leading(cache: OrderedDict[BlockHash, None], hashes: tuple[BlockHash, ...]) -> int:
    return next((index for index, block_hash in enumerate(hashes) if block_hash not in cache), len(hashes))


def workload(noise: random.Random, rate: float, seconds: float, users: int, turns: int, fan_out: int) -> list[Request]:
    """Poisson arrivals of turns; a user whose conversation ended begins another one. With `fan_out`, every tenth turn
    is so many requests at once, as agents send them: the same conversation with different last questions."""
    conversations: dict[int, tuple[int, int, int, int]] = {}  # user -> (id, system prompt, turn, tokens)
    found: list[Request] = []
    at, next_id = 0.0, 0
    while at < seconds:
        at += noise.expovariate(rate)
        user = noise.randrange(users)
        identity, system, turn, tokens = conversations.get(user, (0, 0, turns, 0))
        if turn >= turns:
            identity, system, turn = next_id, min(int(noise.expovariate(0.7)), 5), 0
            tokens, next_id = 1500 + 300 * system, next_id + 1
        tokens += noise.randint(100, 600)
        shared = (1500 + 300 * system) // BLOCK_TOKENS
        names = [f"s{system}/{i}" if i < shared else f"c{identity}/{i}" for i in range(tokens // BLOCK_TOKENS)]
        hashes = tuple(BlockHash(name.encode()) for name in names)
        found.append(Request(at, identity, tokens, hashes))
        for other in range(fan_out - 1 if noise.random() < 0.1 else 0):
            own = tuple(BlockHash(f"f{identity}/{turn}/{other}/{i}".encode()) for i in range(8))
            found.append(Request(at, identity, tokens, (*hashes[:-8], *own)))
        conversations[user] = (identity, system, turn + 1, tokens + noise.randint(50, 300))
    return found


class Cluster:
    def __init__(self, model: Model, policy: str, noise: random.Random) -> None:
        self.model = model
        self.noise = noise
        self.replicas = [Replica(f"r{i}", NodeId(f"n{i}")) for i in range(model.replicas)]
        self.choose: Callable[[Request, int], Replica] = getattr(self, policy)
        self.books = [LoadBook() for _ in range(ROUTERS)]
        self.sent = [SentPrefixes(model.engine_blocks, 3600.0) for _ in range(ROUTERS)]
        self.turn = 0
        self.predicted = 0
        self.reasons: Counter[str] = Counter()

    def round_robin(self, request: Request, number: int) -> Replica:
        self.turn += 1
        return self.replicas[self.turn % len(self.replicas)]

    def power_of_two(self, request: Request, number: int) -> Replica:
        return min(self.noise.sample(self.replicas, 2), key=lambda replica: replica.in_flight)

    def prefix_affinity(self, request: Request, number: int) -> Replica:
        return self.replicas[zlib.crc32(str(request.conversation).encode()) % len(self.replicas)]

    def kv_aware(self, request: Request, number: int) -> Replica:
        router = number % ROUTERS
        book, sent, now = self.books[router], self.sent[router], request.at
        count = blocks_of(request.tokens, BLOCK_TOKENS, len(request.hashes))
        runs = self.runs(request.hashes[:count])
        candidates = [
            Candidate(
                replica.name,
                book.wait(replica.name, replica.in_flight, now).seconds(book.request_seconds, 0.02),
                self.model.speeds,
                replica.node,
                sent.leading(replica.name, request.hashes[:count], now),
                runs,
            )
            for replica in self.replicas
        ]
        draws = [self.noise.random() for _ in candidates]
        decision = decide(Prompt(request.tokens, BLOCK_TOKENS, count), candidates, draws)
        chosen = next(replica for replica in self.replicas if replica.name == decision.best.replica)
        book.decided(str(number), chosen.name, decision.best.work_seconds, now)
        book.routed(str(number), chosen.name, now)
        sent.remember(chosen.name, request.hashes, now)
        self.predicted += decision.best.hit_blocks
        self.reasons[decision.reason.value] += 1
        return chosen

    def runs(self, hashes: tuple[BlockHash, ...]) -> tuple[HolderRun, ...]:
        """The answer that the lookup service would give."""
        found: list[HolderRun] = []
        holders = [(leading(r.pool, hashes), Holder(r.node, f"{r.node}:1", BootEpoch(1))) for r in self.replicas]
        ends = sorted({end for end, _ in holders if end})
        start = 0
        for end in ends:
            found.append(HolderRun(start, end - start, tuple(h for held, h in holders if held >= end)))
            start = end
        return tuple(found)

    def serve(self, request: Request, replica: Replica) -> tuple[float, float, dict[str, int]]:
        """(first token at, last token at, blocks by where they came from)."""
        model = self.model
        count = blocks_of(request.tokens, BLOCK_TOKENS, len(request.hashes))
        hashes = request.hashes[:count]
        engine = leading(replica.engine, hashes)
        runs = self.runs(hashes)
        # What the engine and its shard really do: the same cuts, with what is really there.
        best = decide(
            Prompt(request.tokens, BLOCK_TOKENS, count),
            [Candidate(replica.name, 0.0, model.speeds, replica.node, engine, runs)],
            [0.0],
        ).best
        slowed = 1 + 0.01 * replica.in_flight  # decoding requests share the steps
        first = max(request.at, replica.busy_until) + best.work_seconds * slowed
        replica.busy_until = first
        remember(replica.engine, request.hashes, model.engine_blocks)
        remember(replica.pool, request.hashes, model.pool_blocks)
        where = {"engine": best.engine_blocks, "node": best.node_blocks, "fetched": best.fetched_blocks}
        return first, first + model.answer_tokens * model.step_seconds, {**where, "asked": count}


def simulate(model: Model, policy: str, requests: list[Request], seed: int) -> dict[str, object]:
    cluster = Cluster(model, policy, random.Random(seed))
    ends: list[tuple[float, int, Replica]] = []
    waits: list[float] = []
    blocks: Counter[str] = Counter()
    share: Counter[str] = Counter()
    for number, request in enumerate(requests):
        while ends and ends[0][0] <= request.at:
            at, ended, replica = heapq.heappop(ends)
            replica.in_flight -= 1
            cluster.books[ended % ROUTERS].completed(str(ended), replica.name, at)
        chosen = cluster.choose(request, number)
        first, last, where = cluster.serve(request, chosen)
        chosen.in_flight += 1
        share[chosen.name] += 1
        heapq.heappush(ends, (last, number, chosen))
        waits.append(first - request.at)
        blocks.update(where)
    asked = blocks["asked"]
    hits = blocks["engine"] + blocks["node"] + blocks["fetched"]
    figures: dict[str, object] = {
        "hit_rate": hits / asked,
        "engine_rate": blocks["engine"] / asked,
        "node_rate": blocks["node"] / asked,
        "fetched_rate": blocks["fetched"] / asked,
        "ttft_p50_ms": percentile(waits, 0.5) * 1e3,
        "ttft_p99_ms": percentile(waits, 0.99) * 1e3,
        "ttft_mean_ms": sum(waits) / len(waits) * 1e3,
        "busiest_over_mean": max(share.values()) * model.replicas / len(requests),
        "least_over_mean": min(share[r.name] for r in cluster.replicas) * model.replicas / len(requests),
    }
    if policy == "kv_aware":
        figures |= {"predicted_hit_rate": cluster.predicted / asked, "reasons": dict(cluster.reasons)}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=120.0, help="seconds of simulated time")
    parser.add_argument("--rate", type=float, default=24.0, help="requests per second, of all users together")
    parser.add_argument("--users", type=int, default=400)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--fan-out", type=int, default=10, help="requests that an agent sends at once")
    parser.add_argument("--tokens-per-second", type=float, default=8000.0, help="prefill speed of one replica")
    parser.add_argument("--block-kib", type=int, default=2048, help="size of a block of 16 tokens")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=default_out("routing"))
    given = parser.parse_args()
    links = {"25 GB/s": 25e9, "1.25 GB/s": 1.25e9}
    figures: dict[str, object] = {}
    rows: list[list[object]] = []
    for kind, fan_out in {"chat": 1, "agents": given.fan_out}.items():
        rate = given.rate / (1 + 0.1 * (fan_out - 1))
        noise = random.Random(given.seed)
        requests = workload(noise, rate, given.seconds, given.users, given.turns, fan_out)
        figures[f"{kind} requests"] = len(requests)
        for link, bandwidth in links.items():
            model = Model(
                given.replicas,
                given.tokens_per_second,
                given.block_kib << 10,
                50e9,
                PeerLink(bandwidth, 0.002),
                engine_blocks=4096,
                pool_blocks=16_384,
                step_seconds=0.02,
                answer_tokens=150,
            )
            found = {policy: simulate(model, policy, requests, given.seed) for policy in POLICIES}
            figures[f"{kind}, {link}"] = found
            rows += [[f"{kind}, {link}: {policy}", *[found[policy][key] for key in COLUMNS]] for policy in POLICIES]
    print_table(["", "hits", "fetched", "TTFT p50 ms", "p99 ms", "mean ms", "busiest/mean"], rows)
    print(write_report("routing", {"seed": given.seed, **figures}, given.out))


if __name__ == "__main__":
    main()
