"""Many shards and engines on one machine: what an operation and an announced key cost, memory, and a rolling restart.

    python -m benchmarks.scale [--shards 32] [--lookups 3] [--engines 64] [--processes 4] [--seconds 60] [--out PATH]

Shards and lookup partitions are processes with small pools. Engines are coroutines in a few processes, each with the
session that connectors use (benchmarks/crowd_engine.py); every byte that they are promised is compared.

1. The engines store a corpus that fills a part of the pools, and rest: what processes cost by being there.
2. `new`: every prompt is new, so all of it is announced. `local`: prompts that the engine itself has stored. `any`:
   prompts of the corpus, which most often another node has. Processor time of each kind of process by what it did.
3. Under load, every lookup partition and every shard is restarted, one after the other. Even shards leave as an
   operator tells them: what they hold is handed over. Odd ones keep their memory over the restart (`--keep-blocks`).
4. Every block of the corpus is asked for, each by an engine of another node.

Exits with 1 when a byte was wrong, a request hangs, a block of the corpus was lost, or books do not balance.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import psutil

from benchmarks.crowd import Crowd, CrowdTally
from benchmarks.crowd_engine import Traffic
from benchmarks.report import default_out, percentile, print_table, write_report
from kvservice.cli.progress import Progress
from kvservice.core.drain.sender import DrainPhase
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually_async
from kvservice.units import KiB, MiB
from kvservice.wire.leaving import decode_progress
from kvservice.wire.v1 import shard_pb2, shard_pb2_grpc

BLOCKS, BLOCK_BYTES = 24, 16 * KiB  # of a prompt
SLAB_BYTES = MiB
CORPUS_SHARE = 0.3  # of all pools. A rolling restart must have room for what a node hands over, and for new prompts.
# Of requests during the restart, and of them in all, to the corpus: each shard is written to, and nothing is evicted.
NEW_SHARE, NEW_PROMPTS_SHARE = 0.05, 0.3
KINDS = ("shard", "lookup partition", "process of engines")
REST_SECONDS = 15.0  # before what processes cost by being there is measured: mirrors and policies still catch up
DRAIN_SECONDS = 20.0
KNOWN_SECONDS = 60.0  # for a restarted part to be known, and to know, what there is
QUIET_SECONDS = 60.0  # for leases and slots of the last requests to be given back


@dataclass
class Phase:
    """What happened between two readings of the processes' clocks."""

    name: str
    wall: float = 0.0
    cpu: dict[str, float] = field(default_factory=dict)  # seconds, by kind
    tally: CrowdTally = field(default_factory=CrowdTally)
    announced: int = 0  # more keys in the directory than before


def kind_of(name: str) -> str:
    return KINDS[2] if name.startswith("engines") else KINDS[1] if name.startswith("lookup") else KINDS[0]


class Scale:
    def __init__(self, cluster: LocalCluster, crowd: Crowd, options: argparse.Namespace, prompts: int) -> None:
        self._cluster, self._crowd, self._options = cluster, crowd, options
        self._corpus = prompts
        self.phases: list[Phase] = []
        self.memory: dict[str, Any] = {}
        self.restarts: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self.evicted: Counter[str] = Counter()  # since the shards started, those of boots that have ended too

    async def run(self, say: Callable[..., None]) -> None:
        options, crowd, corpus = self._options, self._crowd, self._corpus
        walk = Traffic(prompts=corpus, stores="all", timeout=5.0)
        await crowd.walk(walk, 0, lambda done: say(f"storing prompt {done} of {corpus}", done, corpus))
        await self._known(corpus * BLOCKS)
        say("letting the service rest")
        await asyncio.sleep(REST_SECONDS)
        await self._measure("rest", Traffic(prompts=corpus), say)
        new = Traffic(options.new_rate, corpus, new_share=1.0, stores="all")
        await self._measure("new", new, say)
        await self._measure("local", Traffic(options.local_rate, corpus, own=True), say)
        await self._measure("any", Traffic(options.rate, corpus), say)
        self.memory = self._memory()
        crowd.take()
        # What the corpus loses is not stored again, so that the last walk sees it.
        few = max(1, int(NEW_PROMPTS_SHARE * corpus / options.engines))
        crowd.play(Traffic(options.rate, corpus, new_share=NEW_SHARE, new_prompts=few, stores="new"))
        begun = time.monotonic()
        await self._restart_all(say)
        self.phases.append(Phase("restart", time.monotonic() - begun, tally=crowd.take()))
        await self._known(corpus * BLOCKS)
        await crowd.wait_until_attached()
        last = Traffic(prompts=corpus, stores="none", timeout=10.0)
        await crowd.walk(last, 1, lambda done: say(f"asking for prompt {done} of {corpus}", done, corpus))
        self.phases.append(Phase("after", tally=crowd.take()))
        crowd.play(Traffic(prompts=corpus))
        for node in self._cluster.nodes:
            await asyncio.to_thread(self._count_evicted, node)
        await self._books_balance(say)

    # -- costs ----

    async def _measure(self, name: str, traffic: Traffic, say: Callable[..., None]) -> None:
        await self._settle()
        self._crowd.take()
        phase = Phase(name)
        keys, cpu, begun = await asyncio.to_thread(self._cluster.directory_size), self._cpu(), time.monotonic()
        self._crowd.play(traffic)
        while (gone := time.monotonic() - begun) < self._options.seconds:
            say(f"phase {name}", gone, self._options.seconds)
            await asyncio.sleep(0.5)
            self._crowd.check()
        self._crowd.play(Traffic(prompts=self._corpus))
        await self._settle()
        phase.wall, after = time.monotonic() - begun, self._cpu()
        for process, seconds in after.items():
            kind = kind_of(process)
            phase.cpu[kind] = phase.cpu.get(kind, 0.0) + seconds - cpu.get(process, 0.0)
        phase.tally = self._crowd.take()
        phase.announced = await asyncio.to_thread(self._cluster.directory_size) - keys
        self.phases.append(phase)

    async def _settle(self) -> None:
        self._crowd.play(Traffic(prompts=self._corpus))
        await eventually_async(lambda: self._crowd.is_resting, "engines that rest", QUIET_SECONDS)
        await asyncio.sleep(2.0)  # announcements wait for more to come, and seals for digests

    def _pids(self) -> dict[str, int]:
        lookups = [f"lookup{index}" for index in range(len(self._cluster.lookup_addresses))]
        parts = {name: self._cluster.pid(name) for name in (*self._cluster.nodes, *lookups)}
        return parts | self._crowd.pids()

    def _cpu(self) -> dict[str, float]:
        times = {name: psutil.Process(pid).cpu_times() for name, pid in self._pids().items()}
        return {name: found.user + found.system for name, found in times.items()}

    def _memory(self) -> dict[str, Any]:
        """MiB of each kind of process. What processes share, such as code, counts in parts (PSS); the pool is apart."""
        rows: dict[str, list[tuple[float, float, float]]] = {}
        for name, pid in self._pids().items():
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
            kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
            private = (kib["Pss_Anon"] + kib["Pss_File"]) / 1024
            rows.setdefault(kind_of(name), []).append((private, kib["Pss_Shmem"] / 1024, kib["Rss"] / 1024))
        return {
            kind: {
                "processes": len(found),
                "pss_without_the_pool_mib": {"median": median(row[0] for row in found), "most": max(found)[0]},
                "pss_of_the_pool_mib": {"median": median(row[1] for row in found)},
                "rss_mib": {"median": median(row[2] for row in found)},
            }
            for kind, found in rows.items()
        }

    # -- the rolling restart ----

    async def _restart_all(self, say: Callable[..., None]) -> None:
        lookups = [f"lookup{index}" for index in range(len(self._cluster.lookup_addresses))]
        parts = [*lookups, *self._cluster.nodes]
        for done, name in enumerate(parts):
            say(f"restarting {name}, {done} of {len(parts)}", done, len(parts))
            begun = time.monotonic()
            row: dict[str, Any] = {"part": name}
            if name in self._cluster.nodes:
                await asyncio.to_thread(self._count_evicted, name)
            if name.startswith("lookup"):
                await self._end(name)
                await asyncio.to_thread(self._cluster.start_lookup, int(name.removeprefix("lookup")))
            elif name in self._cluster.keeping:
                row["seconds_to_end"] = await self._end(name)
                await asyncio.to_thread(self._cluster.start_shard, name)
                counters = (await asyncio.to_thread(self._cluster.stats, name)).counters
                row |= {"way": "memory kept", "blocks": counters.get("blocks_adopted", 0)}
            else:
                row |= {"way": "handed over"} | await self._drain(name)
                await asyncio.to_thread(self._cluster.start_shard, name)
            row["seconds"] = round(time.monotonic() - begun, 2)
            await self._known(self._corpus * BLOCKS)
            row["seconds_until_all_is_known"] = round(time.monotonic() - begun, 2)
            self.restarts.append(row)
            self._crowd.check()

    def _count_evicted(self, node: str) -> None:
        counters = self._cluster.stats(node).counters
        self.evicted.update({kind: counters.get(f"evicted_{kind}", 0) for kind in ("primary", "secondary")})

    async def _end(self, name: str) -> float:
        """SIGTERM, and wait: a shard that keeps its memory waits for its readers. Returns the seconds it took."""
        begun = time.monotonic()
        os.kill(self._cluster.pid(name), signal.SIGTERM)
        await asyncio.to_thread(self._cluster.exit_code, name, 2 * DRAIN_SECONDS)
        took = round(time.monotonic() - begun, 2)
        if took > DRAIN_SECONDS:
            self.failed.append(f"{name} took {took} s to end: something was held until its patience was over")
        return took

    async def _drain(self, node: str) -> dict[str, Any]:
        """As `kvservice drain --node` does."""
        request = shard_pb2.DrainRequest(timeout_seconds=DRAIN_SECONDS, handover=True, exit=True)

        def ask() -> Any:
            with self._cluster.channel(self._cluster.record(node).peer_address) as channel:
                return decode_progress(shard_pb2_grpc.AdminServiceStub(channel).Drain(request, timeout=5))

        progress = await asyncio.to_thread(ask)
        while progress.phase is not DrainPhase.GONE:
            await asyncio.sleep(0.2)
            try:
                progress = await asyncio.to_thread(ask)
            except (grpc.RpcError, IndexError):  # it ended between two questions
                break
        await asyncio.to_thread(self._cluster.exit_code, node, 2 * DRAIN_SECONDS)
        if progress.blocks_lost > 0:
            self.failed.append(f"{node} left, and {progress.blocks_lost} blocks were lost: {progress.note}")
        return {
            "blocks": progress.blocks_total,
            "handed": progress.blocks_handed,
            "elsewhere": progress.blocks_elsewhere,
        }

    async def _known(self, keys: int) -> None:
        """Wait until the directory knows so many blocks, which are no fewer than those of the corpus."""
        seen: object = "nothing was asked"

        async def enough() -> bool:
            nonlocal seen
            await asyncio.sleep(0.3)  # it takes time of those that it waits for
            try:
                seen = sizes = await asyncio.to_thread(self._cluster.directory_sizes)
            except grpc.RpcError as error:
                seen = error
                return False
            return sum(sizes) >= keys

        await eventually_async(
            enough, f"{keys} keys in the directory", KNOWN_SECONDS, detail=lambda: f"last seen, by partition: {seen}"
        )

    async def _books_balance(self, say: Callable[..., None]) -> None:
        """At rest a shard holds for engines exactly what they hold, and nothing is leased."""
        until = time.monotonic() + QUIET_SECONDS
        while True:
            say("waiting for the books to balance")
            wrong = await asyncio.to_thread(self._unbalanced)
            if not wrong or time.monotonic() > until:
                break
            await asyncio.sleep(1.0)
        self.failed += wrong

    def _unbalanced(self) -> list[str]:
        found = [] if self._crowd.is_resting else ["engines do not rest"]
        for node in self._cluster.nodes:
            books, held = self._cluster.accounting(node), self._crowd.held(node)
            if not books.balanced:
                found.append(f"{node}: {books.violation}")
            if books.leases or books.slots["writing"] != held:
                found.append(f"{node}: {books.leases} leases, {books.slots['writing']} slots for engines with {held}")
        return found

    # -- figures ----

    def figures(self) -> dict[str, Any]:
        by_name = {phase.name: phase for phase in self.phases}
        rest, new, local, read = (by_name[name] for name in ("rest", "new", "local", "any"))
        idle = {kind: rest.cpu[kind] / rest.wall for kind in KINDS}
        tallies = [phase.tally for phase in self.phases]
        counts = sum((tally.counts for tally in tallies), Counter[str]())
        restarting = by_name["restart"].tally
        return {
            "shards": len(self._cluster.nodes),
            "lookup_partitions": len(self._cluster.lookup_addresses),
            "engines": self._options.engines,
            "blocks_per_request": BLOCKS,
            "corpus_blocks": self._corpus * BLOCKS,
            "cpu_microseconds": {
                "idle_per_process_and_second": {
                    kind: 1e6 * idle[kind] / self.memory[kind]["processes"] for kind in KINDS
                },
                "per_request_local": self._costs(local, idle, local.tally.counts["requests"]),
                "per_block_fetched": self._costs(read, idle, read.tally.counts["blocks_fetched"]),
                "per_block_stored": self._costs(new, idle, new.tally.counts["blocks_stored"]),
                "per_announced_key": self._costs(new, idle, new.announced),
            },
            "memory": self.memory,
            "phases": [
                {
                    "name": phase.name,
                    "seconds": round(phase.wall, 1),
                    "cpu_seconds": {kind: round(value, 2) for kind, value in phase.cpu.items()},
                    "announced_keys": phase.announced,
                    "request_seconds": seconds_of(phase.tally),
                    "longest_lag_of_engines_seconds": phase.tally.lag,
                    "counts": dict(sorted(phase.tally.counts.items())),
                }
                for phase in self.phases
            ],
            "restarts": self.restarts,
            "evicted_copies": dict(self.evicted),
            "requests_during_the_restart": restarting.counts["requests"],
            "requests_that_hang": counts["requests_that_hang"],
            "blocks_compared": counts["blocks_compared"],
            "wrong": [line for tally in tallies for line in tally.wrong],
            "lost": by_name["after"].tally.missing,
            "failed": self.failed,
        }

    def _costs(self, phase: Phase, idle: dict[str, float], count: int) -> dict[str, float]:
        """Microseconds of a core for each of `count`, by kind of process, beyond what it costs at rest."""
        return {kind: 1e6 * (phase.cpu[kind] - idle[kind] * phase.wall) / max(count, 1) for kind in KINDS}


def seconds_of(tally: CrowdTally) -> dict[str, float]:
    return {f"p{p}": round(percentile(tally.seconds, p / 100), 4) for p in (50, 99, 100)} if tally.seconds else {}


def start(cluster: LocalCluster, say: Callable[..., None]) -> None:
    """As the cluster's own start, with progress. Some at a time, since each start takes seconds of a core."""
    for index in range(len(cluster.lookup_addresses)):
        say(f"starting lookup partition {index}")
        cluster.start_lookup(index)
    for first in range(0, len(cluster.nodes), 4):
        nodes = cluster.nodes[first : first + 4]
        say(f"starting shard {first} of {len(cluster.nodes)}", first, len(cluster.nodes))
        for node in nodes:
            cluster.start_shard(node, wait=False)
        for node in nodes:
            cluster.wait_for_shard(node)


async def measure(cluster: LocalCluster, options: argparse.Namespace, say: Callable[..., None]) -> dict[str, Any]:
    prompts = int(CORPUS_SHARE * options.shards * options.pool_mib * MiB / (BLOCKS * BLOCK_BYTES))
    crowd = Crowd(
        cluster.service,
        cluster.root,
        cluster.nodes,
        engines=options.engines,
        processes=min(options.processes, options.engines),
        blocks=BLOCKS,
        block_bytes=BLOCK_BYTES,
    )
    async with crowd:
        say(f"attaching {options.engines} engines")
        await crowd.wait_until_attached()
        scale = Scale(cluster, crowd, options, prompts)
        await scale.run(say)
        return scale.figures()


def show(figures: dict[str, Any]) -> None:
    costs, memory = figures["cpu_microseconds"], figures["memory"]
    print_table(
        ("µs of a core", *KINDS),
        [
            (name.replace("_", " "), *(f"{row[kind]:.0f}" if kind in row else "" for kind in KINDS))
            for name, row in costs.items()
        ],
    )
    print_table(
        ("memory, MiB", "processes", "PSS without the pool", "most", "pool", "RSS"),
        [
            (
                kind,
                row["processes"],
                *(f"{row['pss_without_the_pool_mib'][which]:.0f}" for which in ("median", "most")),
                f"{row['pss_of_the_pool_mib']['median']:.0f}",
                f"{row['rss_mib']['median']:.0f}",
            )
            for kind, row in memory.items()
        ],
    )
    print_table(
        ("phase", "seconds", "requests", "p50", "p99", "longest", "promised", "fetched", "stored"),
        [
            (
                phase["name"],
                phase["seconds"],
                phase["counts"].get("requests", 0),
                *(phase["request_seconds"].get(p, math.nan) for p in ("p50", "p99", "p100")),
                *(phase["counts"].get(f"blocks_{what}", 0) for what in ("promised", "fetched", "stored")),
            )
            for phase in figures["phases"]
        ],
    )
    for line in [*figures["wrong"], *figures["lost"], *figures["failed"]][:20]:
        print(line)
    print(
        f"{len(figures['restarts'])} restarts, {figures['requests_during_the_restart']} requests meanwhile, "
        f"{figures['requests_that_hang']} hang; {figures['blocks_compared']} blocks compared, "
        f"{len(figures['wrong'])} wrong; of {figures['corpus_blocks']} blocks of the corpus those of "
        f"{len(figures['lost'])} prompts lost; {figures['evicted_copies'].get('primary', 0)} primary copies evicted"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=32)
    parser.add_argument("--lookups", type=int, default=3, help="lookup partitions")
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--processes", type=int, default=4, help="processes that the engines share")
    parser.add_argument("--pool-mib", type=int, default=32, help="pool of each shard")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each phase")
    parser.add_argument("--rate", type=float, default=0.25, help="requests a second of each engine for what is there")
    parser.add_argument(
        "--local-rate", type=float, default=2.0, help="the same for what its own node has, which takes milliseconds"
    )
    parser.add_argument(
        "--new-rate", type=float, default=0.1, help="the same for new prompts, so that nothing is evicted"
    )
    parser.add_argument("--out", type=Path, default=default_out("scale"))
    options = parser.parse_args()
    cluster = LocalCluster(
        options.shards,
        options.lookups,
        pool_bytes=options.pool_mib * MiB,
        slab_bytes=SLAB_BYTES,
        drain_seconds=DRAIN_SECONDS,
        keep_segment=[f"n{index}" for index in range(1, options.shards, 2)],
    )
    with ExitStack() as stack, Progress("scale") as progress:
        stack.callback(cluster.__exit__, None, None, None)
        try:
            cluster.root.mkdir(mode=0o700)
            start(cluster, progress.update)
            figures = asyncio.run(measure(cluster, options, progress.update))
        except KeyboardInterrupt:
            progress.update("ending what runs")
            print("interrupted: nothing was written", file=sys.stderr)
            return 130
    show(figures)
    print(f"written to {write_report('scale', figures, options.out)}")
    return 1 if figures["wrong"] or figures["lost"] or figures["failed"] or figures["requests_that_hang"] else 0


if __name__ == "__main__":
    sys.exit(main())
