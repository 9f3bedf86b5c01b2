"""What faults cost: how long a dead node is still named, memory stays stranded, a directory takes to come back, …

    python -m benchmarks.reliability [--only NAME ...] [--rounds 20] [--out PATH]

Each figure has its goal beside it. Real processes on this machine, on loopback; what is timed includes the start of
Python, where a process has to come back. `dead_service` and `verification` compare within one run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.local_bandwidth import stored
from benchmarks.report import ROOT, default_out, percentile, print_table, write_report
from kvservice.auth.tenants import Tenant, Tenants, dump_tenants, hash_token, new_secret, new_token
from kvservice.auth.token import Token
from kvservice.client.shard import ShardClient
from kvservice.connector.options import Verify
from kvservice.core.directory.announce import Announcer
from kvservice.core.messages import Holder
from kvservice.core.segment.layout import SlotLayout
from kvservice.errors import KVServiceError
from kvservice.lookup.announce_pump import AnnouncePump
from kvservice.private_files import write_private
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually_async
from kvservice.units import BlockKey, BootEpoch, GiB, MiB, NodeId
from tests.integration.engine import LAYOUT, Engine, attached, chain
from tests.integration.loader import Loader
from tests.integration.test_two_nodes import leave
from tests.vllm.replica import Replica


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    figure: float
    unit: str
    goal: float | None  # None: what others are to be compared with
    at_least: bool = False  # else at most

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        return self.figure >= self.goal if self.at_least else self.figure <= self.goal

    def cells(self) -> tuple[object, ...]:
        if self.goal is None:
            return self.what, self.figure, self.unit, "-", "-"
        sign = ">=" if self.at_least else "<="
        return self.what, self.figure, self.unit, f"{sign} {self.goal}", "yes" if self.met else "NO"


def until(condition: Callable[[], bool], seconds: float = 60.0, pause: float = 0.005) -> float:
    """Seconds until it holds."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > seconds:
            raise SystemExit(f"not within {seconds} s")
        time.sleep(pause)
    return time.monotonic() - started


async def dead_node(options: argparse.Namespace) -> list[Row]:
    """kill -9 of a shard until no lookup partition names it."""
    seconds = []
    with LocalCluster(nodes=2) as cluster:
        for number in range(options.rounds):
            engine = await attached(cluster.socket("n0"))
            keys = chain(number, 8)
            await engine.store(keys)
            cluster.wait_until_known(keys)
            cluster.kill("n0")
            seconds.append(until(lambda keys=keys: cluster.known(keys) == 0))
            engine.let_go()
            await engine.pool.close()
            cluster.start_shard("n0")
    return [
        Row("dead node hidden from lookup, p50", percentile(seconds, 0.5), "s", 3.0),
        Row(f"dead node hidden from lookup, worst of {len(seconds)}", max(seconds), "s", 3.0),
    ]


async def _hold(socket: str) -> None:
    """In a process of its own: blocks leased and slots reserved, until it is killed."""
    engine = await Engine.attach(ShardClient(socket))
    keys = chain(1, 32)
    await engine.store(keys)
    await engine.acquire(keys)
    await engine.pool.reserve(engine.id, 32)
    print("holds", flush=True)
    await asyncio.sleep(600)


async def stranded(options: argparse.Namespace) -> list[Row]:
    """kill -9, or SIGSTOP, of an engine until all that it held is free."""
    rows = []
    with LocalCluster(nodes=1, lookup_partitions=1) as cluster:
        # What a paused engine was writing stays its own: it could wake up and go on.
        for what, number, kinds in (
            ("died", signal.SIGKILL, ("leased", "writing", "quarantined")),
            ("is paused, leases only", signal.SIGSTOP, ("leased",)),
        ):
            seconds = [_freed(cluster, number, kinds) for _ in range(max(options.rounds // 6, 2))]
            worst = f"memory free again after a client {what}, worst of {len(seconds)}"
            rows.append(Row(worst, max(seconds), "s", 11.0))
    return rows


def _freed(cluster: LocalCluster, number: signal.Signals, kinds: tuple[str, ...]) -> float:
    command = [sys.executable, "-m", "benchmarks.reliability", "--hold", cluster.socket("n0")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"holds\n"
        holder.send_signal(number)

        def is_free() -> bool:
            books = cluster.accounting("n0")
            return books.leases == 0 and not any(books.slots[kind] for kind in kinds)

        seconds = until(is_free, pause=0.02)
        holder.kill()
    return seconds


async def rebuild(options: argparse.Namespace) -> list[Row]:
    """kill -9 of the only lookup partition until a new one knows a million blocks again, process start included."""
    nodes, each = 4, options.blocks // 4
    with LocalCluster(nodes=0, lookup_partitions=1) as cluster:
        pumps = [_pump(cluster.lookup_addresses, number, each) for number in range(nodes)]
        running = [asyncio.ensure_future(pump.run()) for pump in pumps]
        await _known(cluster, nodes * each)
        cluster.kill("lookup0")
        started = time.monotonic()
        starting = asyncio.ensure_future(asyncio.to_thread(cluster.start_lookup, 0))
        await starting
        answering = time.monotonic() - started
        await _known(cluster, nodes * each)
        seconds = time.monotonic() - started
        for pump, task in zip(pumps, running, strict=True):
            await pump.stop(leaving=False)
            await task
    return [
        Row(f"lookup partition with {nodes * each} blocks rebuilt", seconds, "s", 5.0),
        Row("of which until its process answers", answering, "s", 5.0),
    ]


def _pump(addresses: list[str], number: int, count: int) -> AnnouncePump:
    draw = random.Random(number)
    keys = [BlockKey(draw.randbytes(16)) for _ in range(count)]
    holder = Holder(NodeId(f"fake{number}"), f"127.0.0.1:{9000 + number}", BootEpoch(1))
    announcer = Announcer(len(addresses), lambda: ((key, int.from_bytes(key[:4], "big")) for key in keys))
    return AnnouncePump(announcer, addresses, lambda: holder, 1.0, lambda: None)


async def _known(cluster: LocalCluster, count: int) -> None:
    async def are_known() -> bool:
        return await asyncio.to_thread(cluster.directory_size) >= count

    await eventually_async(are_known, f"{count} blocks in the directory", 180)


async def adoption(options: argparse.Namespace) -> list[Row]:
    """kill -9 of a full shard until the next one serves its blocks."""
    with LocalCluster(nodes=1, lookup_partitions=1, pool_bytes=options.pool) as cluster:
        engine = await attached(cluster.socket("n0"))
        for number in range(int(0.9 * options.pool / LAYOUT.payload_bytes / 128)):
            await engine.store(chain(1000 + number, 128))
        sealed = cluster.accounting("n0").slots["sealed"]
        held = sealed * LAYOUT.payload_bytes
        cluster.kill("n0")
        engine.let_go()
        await engine.pool.close()
        started = time.monotonic()
        cluster.start_shard("n0")
        seconds = time.monotonic() - started
        books = cluster.accounting("n0")
    return [
        Row("blocks lost when a shard is killed", sealed - books.slots["sealed"], "blocks", 0),
        Row(f"killed shard serves {held / GiB:.2f} GiB again, start of Python included", seconds, "s", 15.0),
        Row("per GiB", seconds / (held / GiB), "s", 15.0),
    ]


class Load:
    """Requests to every shard while parts come and go. Failed is one that raises anything but the typed errors that an
    engine takes for a miss, that is late, or that was given a wrong byte."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._sockets = [cluster.socket(node) for node in cluster.nodes]
        self._keys = [chain(500 + number, 16) for number in range(40)]
        self.requests = self.misses = self.failed = 0
        self._over = asyncio.Event()

    async def run(self) -> None:
        await asyncio.gather(*(self._ask(socket) for socket in self._sockets for _ in range(2)))

    def end(self) -> None:
        self._over.set()

    async def _ask(self, socket: str) -> None:
        engine: Engine | None = None
        while not self._over.is_set():
            keys = random.choice(self._keys)
            self.requests += 1
            started = time.monotonic()
            try:
                if engine is None or engine.lost:
                    engine = await Engine.attach(ShardClient(socket))
                result = await engine.read_all(keys, timeout=1.0)
                self.misses += not result.blocks
                if len(result.blocks) < len(keys):
                    await engine.store(keys, start=len(result.blocks))
            except KVServiceError:
                self.misses += 1
                engine = None
                await asyncio.sleep(0.1)
            except Exception as error:  # noqa: BLE001  whatever it is, it is what this counts
                print(f"failed: {error!r}", flush=True)
                self.failed += 1
            self.failed += time.monotonic() - started > 13.0  # an attach may take ten seconds
            await asyncio.sleep(0.02)


async def restarts(options: argparse.Namespace) -> list[Row]:
    """Drains, and restarts of every part one after the other, under load."""
    with LocalCluster(nodes=3, lease_seconds=4.0, drain_seconds=5.0) as cluster:
        load = Load(cluster)
        running = asyncio.ensure_future(load.run())
        await asyncio.sleep(5)
        for node in cluster.nodes:
            await asyncio.to_thread(cluster.kill, node, signal.SIGTERM)  # drains first
            await asyncio.to_thread(cluster.start_shard, node)
            await asyncio.sleep(3)
        for index in range(2):
            await asyncio.to_thread(cluster.kill, f"lookup{index}", signal.SIGTERM)
            await asyncio.to_thread(cluster.start_lookup, index)
            await asyncio.sleep(3)
        load.end()
        await running
        balanced = all(cluster.accounting(node).balanced for node in cluster.nodes)
    return [
        Row(f"requests failed of {load.requests} while every part is restarted", load.failed, "requests", 0),
        Row("of them answered without blocks", load.misses / load.requests, "share", 1.0),
        Row("shards whose books do not balance", 0 if balanced else 1, "shards", 0),
    ]


async def verification(options: argparse.Namespace) -> list[Row]:
    """Loads of one node's blocks through the connector's worker, at each setting of `verify_load`. Its tensors are
    memory of the host, so the copy makes each digest: `sampled` and `full` check all of them, `off` checks none."""
    layout = SlotLayout(layer_count=16, kv_head_count=4, cell_bytes=16 * 1024, block_tokens=16)  # 1 MiB a block
    bandwidth: dict[Verify, list[float]] = {verify: [] for verify in Verify}
    with LocalCluster(nodes=1, lookup_partitions=1, pool_bytes=256 * MiB) as cluster:
        client = ShardClient(cluster.socket("n0"))
        engine, blocks = await stored(client, layout, 64)
        loaders = {verify: Loader(engine.segment, layout, len(blocks), verify) for verify in Verify}
        for _ in range(options.rounds + 1):
            for verify, loader in loaders.items():
                started = time.perf_counter()
                assert all(loader.load(blocks))
                bandwidth[verify].append(len(blocks) * layout.payload_bytes / (time.perf_counter() - started))
        for loader in loaders.values():
            loader.close()
        await leave(engine)
    best = {verify: percentile(found[1:], 0.5) for verify, found in bandwidth.items()}  # the first touches the memory
    return [
        Row(
            f"loads with verify_load {verify.value} to those without",
            best[verify] / best[Verify.OFF],
            "ratio",
            0.95,
            at_least=True,
        )
        for verify in (Verify.SAMPLED, Verify.FULL)
    ]


async def dead_service(options: argparse.Namespace) -> list[Row]:
    """A real engine whose shard was killed, against one without the connector: short prompts, one at a time."""
    settings: dict[str, Any] = {"max_model_len": 1024, "max_num_batched_tokens": 256}
    with tempfile.TemporaryDirectory() as logs, LocalCluster(nodes=1, lookup_partitions=1) as cluster:
        extra = {"mode": "service", "socket": cluster.socket("n0")}
        engines = {
            "without": Replica(options.model, None, Path(logs) / "without.log", **settings),
            "dead": Replica(options.model, extra, Path(logs) / "dead.log", **settings),
        }
        try:
            for engine in engines.values():
                engine.ready().ask("Warm up", 2)
            cluster.kill("n0")
            await asyncio.sleep(2)
            seconds: dict[str, list[float]] = {name: [] for name in ("without", "dead", "again")}
            for number in range(10 * options.rounds):
                text = " ".join(f"{number}{random.random():.6f}" for _ in range(6))
                for name, engine in (("without", "without"), ("dead", "dead"), ("again", "without")):
                    seconds[name].append(engines[engine].ask(f"{name} {text}", 1)["seconds"])
        finally:
            for engine in engines.values():
                engine.close()
    one, two, dead = (sorted(seconds[name]) for name in ("without", "again", "dead"))
    worst = percentile(dead, 0.99) - max(percentile(one, 0.99), percentile(two, 0.99))
    print(f"noise of p99: {1000 * abs(percentile(one, 0.99) - percentile(two, 0.99)):.2f} ms", flush=True)
    middle = percentile(dead, 0.5) - (percentile(one, 0.5) + percentile(two, 0.5)) / 2
    return [
        Row("dead service costs a request, p50", 1000 * middle, "ms", 5.0),
        Row("dead service costs a request, p99", 1000 * worst, "ms", 5.0),
        Row("throughput with a dead service", (sum(one) + sum(two)) / 2 / sum(dead), "ratio", 0.98, at_least=True),
    ]


async def _flood(socket: str) -> None:
    """An engine that asks for as much as it can, until it is killed: whole prompts, known and unknown, and slots."""
    engine = await attached(socket)
    known, unknown = chain(9000, 512), chain(9001, 512)
    await engine.store(known)
    numbers = itertools.count()

    async def one() -> None:
        while True:
            with contextlib.suppress(KVServiceError):  # refused at its limits, which is the point
                found = await engine.acquire(known, timeout=1.0)
                await engine.pool.release(engine.id, [found.lease_id])
                await engine.acquire(known[: next(numbers) % 500] + unknown, timeout=1.0)
                refs = await engine.pool.reserve(engine.id, 16)
                await engine.pool.abort(engine.id, refs)

    await asyncio.gather(*(one() for _ in range(16)))


def _start_flood(socket: str, token: Path) -> subprocess.Popen[bytes]:
    """Behind everybody else where processors are few: what is measured is the shard's time, not the machine's."""
    words = ["nice", "-n", "19", sys.executable, "-m", "benchmarks.reliability", "--flood", socket]
    return subprocess.Popen(words, env={**os.environ, "KVSERVICE_TOKEN_FILE": str(token)})


async def flood(options: argparse.Namespace) -> list[Row]:
    """One tenant's requests, of 64 blocks each, while another one asks for as much as it can; in turns. A flood at
    another shard takes nothing but the processor, so it says what is this machine's of a ratio."""
    where = (None, "n0", "n1")  # the shard with the flood; the tenant is at n0
    seconds: dict[str | None, list[float]] = {node: [] for node in where}
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        tokens = {name: new_token() for name in ("quiet", "loud")}
        limits = {"quiet": {}, "loud": {"quota": "50%", "in_flight": 64}}
        rows = [Tenant(name, (hash_token(tokens[name]),), new_secret(), **limits[name]) for name in tokens]
        tenants, loud_token = Path(folder) / "tenants.toml", Path(folder) / "token"
        write_private(tenants, dump_tenants(Tenants(rows, new_secret())).encode())
        write_private(loud_token, tokens["loud"].encode())
        environment = {"KVSERVICE_TENANTS_FILE": str(tenants)}
        with LocalCluster(nodes=2, lookup_partitions=1, pool_bytes=256 * MiB, environment=environment) as cluster:
            keys = chain(8000, 64)
            engine = await Engine.attach(ShardClient(cluster.socket("n0"), Token(tokens["quiet"])))
            await engine.store(keys)
            for number in range(options.rounds):
                node = where[number % len(where)]
                process = None if node is None else _start_flood(cluster.socket(node), loud_token)
                await asyncio.sleep(0.5 if node is None else 3.0)
                for _ in range(200):
                    started = time.perf_counter()
                    found = await engine.acquire(keys, timeout=1.0)
                    seconds[node].append(time.perf_counter() - started)
                    failed += len(found.blocks) < len(keys)
                    await engine.pool.release(engine.id, [found.lease_id])
                    await asyncio.sleep(0.005)
                if process is not None:
                    assert process.poll() is None, "the flood ended by itself"
                    process.kill()
                    process.wait()
            await leave(engine)
    p50, p99 = ({node: percentile(found, part) for node, found in seconds.items()} for part in (0.5, 0.99))
    for name, node in (("alone", None), ("flooded", "n0"), ("flood at another shard", "n1")):
        print(f"{name}: {1000 * p50[node]:.2f} / {1000 * p99[node]:.2f} ms", flush=True)
    return [
        Row("a tenant's requests that another's flood makes miss", failed, "requests", 0),
        Row("its p50 to that without the flood", p50["n0"] / p50[None], "ratio", 1.2),
        Row("its p99 to that without the flood", p99["n0"] / p99[None], "ratio", 1.2),
        Row("its p50 with the flood at another shard", p50["n1"] / p50[None], "ratio", None),
        Row("its p99 with the flood at another shard", p99["n1"] / p99[None], "ratio", None),
    ]


SECTIONS = (dead_node, stranded, rebuild, adoption, restarts, verification, dead_service, flood)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[section.__name__ for section in SECTIONS])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks of the directory that is rebuilt")
    parser.add_argument("--pool", type=int, default=GiB, help="pool bytes of the shard whose blocks are adopted")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "SmolLM2-135M-Instruct")
    parser.add_argument("--hold", help=argparse.SUPPRESS)
    parser.add_argument("--flood", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=default_out("reliability"))
    options = parser.parse_args()
    if options.hold or options.flood:
        asyncio.run(_hold(options.hold) if options.hold else _flood(options.flood))
        return 0
    rows: list[Row] = []
    for section in SECTIONS:
        if not options.only or section.__name__ in options.only:
            print(f"== {section.__name__}: {section.__doc__}", flush=True)
            rows += asyncio.run(section(options))
    print_table(("what", "figure", "unit", "goal", "met"), [row.cells() for row in rows])
    found = {r.what: {"figure": r.figure, "unit": r.unit, "goal": r.goal, "met": r.met} for r in rows}
    print(f"written to {write_report('reliability', found, options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
