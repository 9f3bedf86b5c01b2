"""Half an hour of storing, evicting, reading and failing: is memory flat, and does every book balance every second?

    python -m benchmarks.soak [--minutes 30] [--rate 6] [--seed 1] [--out PATH]

Three shards and two lookup partitions as processes, two engines a shard (in this process), pools so small that they
evict all the time. Once a minute one part of node n0, n1 or of lookup partition 0 is killed, stopped for some seconds
or drained by SIGTERM, and comes back; n2 and lookup partition 1 are left alone, so that their memory can be followed
for the whole time. Of every promise some blocks are compared. Exits with 1 when a byte was wrong, a book did not
balance, a call took longer than it may, or memory grew.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil

from benchmarks.report import default_out, percentile, print_table, write_report
from kvservice.client.shard import ShardClient
from kvservice.errors import KVServiceError
from kvservice.testing.cluster import LocalCluster
from kvservice.units import BlockKey, MiB
from tests.integration.engine import Engine, chain

ENGINES = 2  # a shard
CHAINS, BLOCKS = 400, 24  # 600 MiB of blocks for pools of 64 MiB
COMPARED = 4  # blocks a request: making the right bytes costs more than all the rest
READ_SECONDS = 1.0
LATE_SECONDS = 2.0
FAULT_SECONDS = 60.0
UNTOUCHED = ("n2", "lookup1")
GROWTH_MIB_MAX = 16.0  # between the second and the last third


@dataclass
class Seen:
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    resident: dict[str, list[tuple[float, float, int]]] = field(default_factory=dict)  # (seconds, MiB, descriptors)


class Soak:
    def __init__(self, cluster: LocalCluster, options: argparse.Namespace) -> None:
        self._cluster = cluster
        self._options = options
        self._random = random.Random(options.seed)
        self._keys = [chain(seed, BLOCKS) for seed in range(CHAINS)]
        self._sockets = {node: cluster.socket(node) for node in cluster.nodes}
        self._started = time.monotonic()
        self.seen = Seen()

    async def run(self) -> None:
        end = self._started + 60 * self._options.minutes
        engines = [self._engine(node, end) for node in self._cluster.nodes for _ in range(ENGINES)]
        await asyncio.gather(*engines, self._faults(end), self._watch(end))

    def _draw(self) -> tuple[BlockKey, ...]:
        """Some are asked for much more often than others."""
        return self._keys[min(int(self._random.paretovariate(0.6)) - 1, CHAINS - 1)]

    async def _engine(self, node: str, end: float) -> None:
        pause = 1 / self._options.rate
        while time.monotonic() < end:
            client = ShardClient(self._sockets[node])
            try:
                engine = await Engine.attach(client)
            except KVServiceError:
                self.seen.counts["attach_failed"] += 1
                await client.close()
                await asyncio.sleep(0.5)
                continue
            try:
                while time.monotonic() < end and not engine.lost:
                    await self._request(engine)
                    await asyncio.sleep(pause * self._random.uniform(0.5, 1.5))
            except KVServiceError as error:
                self.seen.counts[f"lost: {type(error).__name__}"] += 1
            except AssertionError as error:
                self.seen.wrong.append(f"{node}: {error}")
            finally:
                engine.let_go()
                await client.close()

    async def _request(self, engine: Engine) -> None:
        keys = self._draw()
        started = time.monotonic()
        try:
            result = await engine.acquire(keys, timeout=READ_SECONDS)
        finally:
            self.seen.seconds.append(time.monotonic() - started)
        promised = list(zip(result.blocks, keys, strict=False))
        good = [engine.read(*block) for block in self._random.sample(promised, min(COMPARED, len(promised)))]
        self.seen.counts["blocks_promised"] += len(promised)
        self.seen.counts["blocks_fetched"] += result.fetched_count
        self.seen.counts["blocks_compared"] += sum(good)
        self.seen.counts["blocks_gone_before_they_were_read"] += len(good) - sum(good)
        self.seen.counts[f"miss: {result.miss.value}"] += 1
        if result.lease_id:
            await engine.pool.release(engine.id, [result.lease_id])
        if len(result.blocks) < len(keys):
            statuses = await engine.store(keys, start=len(result.blocks))
            self.seen.counts["blocks_stored"] += len(statuses)

    async def _faults(self, end: float) -> None:
        faults = [
            ("kill n0", lambda: self._restart("n0", signal.SIGKILL)),
            ("stop n1", lambda: self._pause("n1")),
            ("kill lookup0", lambda: self._restart("lookup0", signal.SIGKILL)),
            ("drain n1", lambda: self._restart("n1", signal.SIGTERM)),
            ("stop lookup0", lambda: self._pause("lookup0")),
        ]
        while time.monotonic() + FAULT_SECONDS < end:
            await asyncio.sleep(FAULT_SECONDS)
            name, fault = faults[self._random.randrange(len(faults))]
            self.seen.counts[f"fault: {name}"] += 1
            await asyncio.to_thread(fault)

    def _restart(self, name: str, number: int) -> None:
        self._cluster.kill(name, number)
        time.sleep(self._random.uniform(0.5, 4.0))
        if name.startswith("lookup"):
            self._cluster.start_lookup(int(name.removeprefix("lookup")))
        else:
            self._cluster.start_shard(name)

    def _pause(self, name: str) -> None:
        self._cluster.kill(name, signal.SIGSTOP)
        time.sleep(self._random.uniform(1.0, 8.0))
        self._cluster.kill(name, signal.SIGCONT)

    async def _watch(self, end: float) -> None:
        """Check once a second the books of every shard that answers, and memory."""
        while time.monotonic() < end:
            await asyncio.sleep(1.0)
            for node in self._cluster.nodes:
                try:
                    books = await asyncio.to_thread(self._cluster.accounting, node)
                except (grpc.RpcError, IndexError):
                    continue  # being killed, stopped or restarted
                self.seen.counts["books_looked_at"] += 1
                if not books.balanced:
                    self.seen.wrong.append(f"{node}: {books.violation}")
            for name in UNTOUCHED:
                process = psutil.Process(self._cluster.pid(name))
                sample = (time.monotonic() - self._started, process.memory_info().rss / MiB, process.num_fds())
                self.seen.resident.setdefault(name, []).append(sample)

    def figures(self) -> dict[str, Any]:
        seen = self.seen
        memory = {}
        for name, samples in seen.resident.items():
            third = max(len(samples) // 3, 1)
            middle, last = samples[third : 2 * third] or samples, samples[2 * third :] or samples
            means = [sum(mib for _, mib, _ in part) / len(part) for part in (middle, last)]
            memory[name] = {
                "first_mib": samples[0][1],
                "middle_third_mib": means[0],
                "last_third_mib": means[1],
                "growth_mib": means[1] - means[0],
                "most_mib": max(mib for _, mib, _ in samples),
                "descriptors_first": samples[0][2],
                "descriptors_last": samples[-1][2],
            }
        late = sum(one > READ_SECONDS + LATE_SECONDS for one in seen.seconds)
        return {
            "minutes": (time.monotonic() - self._started) / 60,
            "requests": len(seen.seconds),
            "request_seconds": {f"p{p}": percentile(seen.seconds, p / 100) for p in (50, 99, 100)},
            "later_than_allowed": late,
            "wrong": seen.wrong,
            "counts": dict(sorted(seen.counts.items())),
            "memory": memory,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=6.0, help="requests per second of each of the six engines")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=default_out("soak"))
    options = parser.parse_args()
    with LocalCluster(nodes=3, pool_bytes=64 * MiB, lease_seconds=4.0, drain_seconds=3.0) as cluster:
        soak = Soak(cluster, options)
        asyncio.run(soak.run())
        figures = soak.figures()
    print_table(("what", "figure"), sorted(figures["counts"].items()))
    print_table(
        ("memory of", "first", "middle third", "last third", "growth MiB"),
        [
            (n, m["first_mib"], m["middle_third_mib"], m["last_third_mib"], m["growth_mib"])
            for n, m in figures["memory"].items()
        ],
    )
    print(f"{figures['requests']} requests, {figures['later_than_allowed']} late, wrong: {figures['wrong']}")
    print(f"written to {write_report('soak', figures, options.out)}")
    grew = [name for name, row in figures["memory"].items() if row["growth_mib"] > GROWTH_MIB_MAX]
    return 1 if figures["wrong"] or figures["later_than_allowed"] or grew else 0


if __name__ == "__main__":
    sys.exit(main())
