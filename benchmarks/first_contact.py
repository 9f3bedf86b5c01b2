"""The first remote hit of a shard that has just started, and how long shards and the service take to start.

    python -m benchmarks.first_contact [--samples 5] [--blocks 128] [--kib 1024] [--up 5] [--before CHECKOUT]

Node n0 is a process that holds two prompts. Each sample is a fresh process with node n1 in it, whose engine asks for
the one prompt, then for the other, then for that one again. Ways, in turns: `cold` neither meets peers nor maps pages
ahead, as before there was either; `met` and `mapped` do the one or the other; `ready` is the product. Each way waits
until what it does ahead is done. Then a shard of its own process is started again and again, and `kvservice up` on
this machine; with `--before`, also those of another checkout of the project, in alternating rounds. `--up 0` leaves
that out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, default_out, print_table, write_report
from kvservice.client.shard import ShardClient
from kvservice.config import ServiceConfig
from kvservice.core.segment.layout import SlotLayout
from kvservice.memory.segment import Segment
from kvservice.pool.runtime_ports import PoolConfig
from kvservice.shard import server as shard_server
from kvservice.shard.server_config import ShardServerConfig
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually_async
from kvservice.transfer.nixl import nixl_available
from kvservice.units import GiB, KiB, MiB, NodeId
from tests.integration import engine as test_engine

WAYS = ("cold", "met", "mapped", "ready")
HITS = ("first", "second", "local")
READY_SECONDS = 60.0
ACQUIRE_SECONDS = 20.0
Row = dict[str, float]


def use(kib: int) -> None:
    """Blocks of this size in the tests' engine."""
    test_engine.LAYOUT = SlotLayout(4, 2, kib * KiB // 8, 16)
    test_engine.content.__defaults__ = (test_engine.LAYOUT.payload_bytes,)


# -- one sample, in a process of its own ----


async def read(given: dict[str, Any]) -> Row:
    way = str(given["way"])
    if way in ("cold", "mapped"):
        shard_server.PoolConfig = partial(PoolConfig, meet_peers=0)  # type: ignore[misc,assignment]
    if way in ("cold", "met"):
        Segment.map_ahead = lambda self, bytes_max=None: None  # type: ignore[method-assign,assignment,return-value]
    settings = ServiceConfig(
        service=given["service"], pool_bytes=given["pool"], transport=given["transport"], runtime_dir=given["root"]
    )
    server = shard_server.ShardServer(ShardServerConfig(settings, NodeId("n1"), tuple(given["lookups"])))
    began = time.perf_counter()
    await server.start()
    row = {"start": time.perf_counter() - began}
    engine = await test_engine.Engine.attach(ShardClient(server._files.socket), test_engine.spec())
    keys, others = (test_engine.chain(seed, given["blocks"]) for seed in (1, 2))

    async def is_ready() -> bool:
        assert server._directory is not None
        for chain in (keys, others):
            answer = await server._directory.lookup.resolve(chain, 0, 1.0, NodeId("n1"))
            if sum(run.count for run in answer.runs) < len(chain):
                return False
        return way in ("cold", "mapped") or server.pool.stats().counters.get("peers_met", 0) > 0

    await eventually_async(is_ready, f"way {way} to be ready", READY_SECONDS)
    if way in ("mapped", "ready"):
        await asyncio.to_thread(server.pool._segment.map_ahead().wait, READY_SECONDS)  # type: ignore[attr-defined]
    await asyncio.sleep(0.2)
    for name, chain in zip(HITS, (keys, others, others), strict=True):
        began = time.perf_counter()
        result = await engine.acquire(chain, timeout=ACQUIRE_SECONDS)
        row[name] = time.perf_counter() - began
        if (len(result.blocks), result.fetched_count) != (len(chain), 0 if name == "local" else len(chain)):
            raise SystemExit(f"{name} hit of {len(result.blocks)} blocks, {result.miss}")
    engine.let_go()
    await engine.pool.close()
    await server.stop()
    return row


# -- the rounds ----


async def hits(options: argparse.Namespace, transport: str) -> dict[str, dict[str, float]]:
    size = options.blocks * options.kib * KiB
    pool = max(GiB, 3 * size + 128 * MiB)
    rows: dict[str, list[Row]] = defaultdict(list)
    with LocalCluster(nodes=1, lookup_partitions=1, pool_bytes=pool, transport=transport) as cluster:
        writer = await test_engine.Engine.attach(ShardClient(cluster.socket("n0")), test_engine.spec())
        for seed in (1, 2):
            keys = test_engine.chain(seed, options.blocks)
            for start in range(0, options.blocks, 64):
                await writer.store(keys[: start + 64], start)
            cluster.wait_until_known(keys)
        given = {
            "service": cluster.service,
            "pool": pool,
            "lookups": cluster.lookup_addresses,
            "blocks": options.blocks,
        }
        given |= {"root": str(cluster.root), "kib": options.kib, "transport": transport}
        for _ in range(options.samples):
            for way in WAYS:
                rows[way].append(sample({**given, "way": way}))
        writer.let_go()
        await writer.pool.close()
    return {way: summary(found) for way, found in rows.items()}


def sample(given: dict[str, Any]) -> Row:
    command = [sys.executable, "-m", "benchmarks.first_contact", "--read", json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    lines = [line[1:] for line in done.stdout.splitlines() if line.startswith("@")]
    if not lines:
        raise SystemExit(f"{given['way']} by {given['transport']}: {done.stderr[:3000]}")
    row: Row = json.loads(lines[0])
    return row


def summary(rows: list[Row]) -> dict[str, float]:
    found = {}
    for name in HITS:
        found[f"{name}_ms"] = round(1e3 * statistics.median(row[name] for row in rows), 2)
        found[f"{name}_ms_best"] = round(1e3 * min(row[name] for row in rows), 2)
    return found


def memory_of(pid: int) -> dict[str, float]:
    """MiB of heap and libraries; the pool is not in it."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    heap, libraries = (int(lines[name].split()[0]) / 1024 for name in ("RssAnon", "RssFile"))
    return {"heap_mib": round(heap, 1), "libraries_mib": round(libraries, 1), "rss_mib": round(heap + libraries, 1)}


def commands(before: Path | None) -> dict[str, dict[str, str]]:
    """By name of the tree: the environment in which its commands run. With bytecode, as where a wheel is installed:
    without it each process compiles what it imports."""
    trees = {"now": ROOT, **({} if before is None else {"before": before})}
    theirs = ("KVSERVICE_", "RAY_", "PYTHONDONTWRITEBYTECODE")
    mine = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
    return {name: {**mine, "PYTHONPATH": str(tree)} for name, tree in trees.items()}


def kvservice(*words: str) -> list[str]:
    return [sys.executable, "-m", "kvservice", *words]


def shard_start(environment: dict[str, str], transport: str) -> tuple[float, dict[str, float]]:
    """Seconds from the start of a shard's process until it serves, and its memory then."""
    service = f"fc{uuid.uuid4().hex[:6]}"
    with tempfile.TemporaryDirectory() as root:
        own = {**environment, "KVSERVICE_SERVICE": service, "KVSERVICE_RUNTIME_DIR": root}
        began = time.perf_counter()
        process = subprocess.Popen(
            kvservice("shard", "--node", "n", "--pool-bytes=256MiB", f"--transport={transport}"),
            env=own,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=root,
        )
        try:
            assert process.stdout is not None
            while "serves peers" not in (line := process.stdout.readline()):
                if not line:
                    raise SystemExit("a shard did not start")
            seconds = time.perf_counter() - began
            return seconds, memory_of(process.pid)
        finally:
            process.terminate()
            process.wait(30)


def up_seconds(environment: dict[str, str]) -> float:
    """Seconds of `kvservice up` without a Ray cluster, which it starts; it is taken down again."""
    service = f"fc{uuid.uuid4().hex[:6]}"
    with tempfile.TemporaryDirectory() as root:
        own = {**environment, "KVSERVICE_SERVICE": service, "KVSERVICE_RUNTIME_DIR": root}
        began = time.perf_counter()
        done = subprocess.run(kvservice("up", "--pool-bytes=256MiB"), env=own, capture_output=True, text=True, cwd=root)
        seconds = time.perf_counter() - began
        subprocess.run(kvservice("down"), env=own, capture_output=True, cwd=root)
        if done.returncode:
            raise SystemExit(f"kvservice up: {done.stderr[-2000:]}")
    return seconds


def starts(options: argparse.Namespace, transports: Sequence[str]) -> dict[str, Any]:
    """By tree: its shards by transport, and its `up`. What compiles the bytecode is not counted."""
    trees = commands(options.before)
    shards: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in trees}
    memory: dict[str, dict[str, dict[str, float]]] = {name: {} for name in trees}
    ups: dict[str, list[float]] = defaultdict(list)
    for number in range(1 + options.samples):
        for name, environment in trees.items():
            for transport in transports:
                seconds, memory[name][transport] = shard_start(environment, transport)
                if number:
                    shards[name][transport].append(seconds)
    for _ in range(options.up):
        for name, environment in trees.items():
            ups[name].append(up_seconds(environment))
    return {
        name: {
            **{way: {**_seconds(shards[name][way]), **memory[name][way]} for way in transports},
            **({"up": _seconds(ups[name])} if ups[name] else {}),
        }
        for name in trees
    }


def _seconds(samples: Sequence[float]) -> dict[str, float]:
    return {"seconds": round(statistics.median(samples), 3), "seconds_best": round(min(samples), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=128)
    parser.add_argument("--kib", type=int, default=1024, help="size of a block")
    parser.add_argument("--up", type=int, default=5, help="rounds of `kvservice up`")
    parser.add_argument("--before", type=Path, help="another checkout of the project, for the starts")
    parser.add_argument("--out", type=Path, default=default_out("first_contact"))
    parser.add_argument("--read", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        given = json.loads(options.read)
        use(given["kib"])
        print("@" + json.dumps(asyncio.run(read(given))), flush=True)
        return
    use(options.kib)
    transports = ["shm", *(["nixl"] if nixl_available() else [])]
    figures: dict[str, Any] = {transport: asyncio.run(hits(options, transport)) for transport in transports}
    names = [f"{name}_ms{suffix}" for name in HITS for suffix in ("", "_best")]
    rows = [
        [f"{transport}, {way}", *(figures[transport][way][n] for n in names)]
        for transport in transports
        for way in WAYS
    ]
    print_table([f"{options.blocks} blocks of {options.kib} KiB", *names], rows)
    for transport in transports:
        ways = figures[transport]
        ways["first_cold_to_ready"] = round(ways["cold"]["first_ms_best"] / ways["ready"]["first_ms_best"], 2)
    figures["starts"] = starts(options, transports)
    started = [(tree, what, found) for tree, kinds in figures["starts"].items() for what, found in kinds.items()]
    names = list(started[0][2])
    print_table(
        ["tree", "start of", *names], [[tree, what, *(f.get(n, "") for n in names)] for tree, what, f in started]
    )
    about = {"blocks": options.blocks, "kib": options.kib, "samples": options.samples}
    print(write_report("first_contact", {**about, **figures}, options.out))


if __name__ == "__main__":
    main()
