"""How long a lookup takes, against the empty gRPC round trip of the same run, and how long a rebuild takes.

    python -m benchmarks.lookup_latency [--keys 10000000] [--out PATH]

Lookup partitions run as processes of their own, this one is the client. The directory holds `--keys` blocks in chains
of 2,048; every measured lookup asks for another, randomly chosen, chain, so nothing is warm by repetition. The floor is
a Resolve call without keys on the same channel; the pure cost of the directory comes from one in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc

from benchmarks.mirror_reads import CHAIN_KEYS, SIZES, cpu_seconds, make_chain, measure_mirror
from benchmarks.report import default_out, percentile, print_table, write_report
from kvservice.core.block.keys import pack_keys, span_route
from kvservice.core.directory.announce import Announcer
from kvservice.core.directory.directory import Directory
from kvservice.core.messages import Holder
from kvservice.lookup.announce_pump import AnnouncePump
from kvservice.lookup.client import LookupClient
from kvservice.testing.eventually import eventually_async
from kvservice.units import BlockKey, BootEpoch, NodeId, SpanRoute
from kvservice.wire.serving import CHANNEL_OPTIONS
from kvservice.wire.v1 import lookup_pb2, lookup_pb2_grpc

NODE = Holder(NodeId("bench"), "127.0.0.1:1", BootEpoch(1))
TIMEOUT_SECONDS = 5.0
THROUGHPUT_SECONDS = 3.0
REBUILD_SECONDS_MAX = 300.0

Inventory = list[tuple[BlockKey, SpanRoute]]


@contextmanager
def lookup_partitions(count: int) -> Iterator[tuple[list[str], list[int]]]:
    """Addresses and process ids of `count` lookup partitions, each in a process of its own."""
    processes: list[subprocess.Popen[str]] = []
    addresses: list[str] = []
    try:
        for partition in range(count):
            arguments = ["lookup", "--port", "0", "--partition", str(partition), "--lookup-partitions", str(count)]
            command = [sys.executable, "-m", "kvservice", *arguments]
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "KVSERVICE_ALLOW_PLAINTEXT": "1"},  # over TCP, as between machines
            )
            processes.append(process)
            assert process.stdout is not None
            addresses.append(process.stdout.readline().split()[-1])
        yield addresses, [process.pid for process in processes]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.communicate(timeout=30)


def make_chains(key_count: int) -> list[list[BlockKey]]:
    return [make_chain(number) for number in range(max(1, key_count // CHAIN_KEYS))]


async def time_calls(call: Callable[[], Awaitable[object]], count: int) -> dict[str, float]:
    samples: list[float] = []
    for _ in range(count):
        begun = time.perf_counter()
        await call()
        samples.append((time.perf_counter() - begun) * 1e3)
    return {"p50_ms": percentile(samples, 0.5), "p99_ms": percentile(samples, 0.99), "calls": len(samples)}


async def time_lookups(client: LookupClient, chains: list[list[BlockKey]], size: int, count: int) -> dict[str, float]:
    """A new random prompt for each call. One that is longer than a chain is made of several chains."""
    noise = random.Random(2)
    prompts: list[list[BlockKey]] = []
    for _ in range(count):
        parts = [noise.choice(chains) for _ in range(-(-size // CHAIN_KEYS))]
        prompts.append([key for part in parts for key in part][:size])
    waiting = iter(prompts)

    async def ask() -> None:
        answer = await client.resolve(next(waiting), 0, TIMEOUT_SECONDS)
        assert answer.complete
        assert sum(run.count for run in answer.runs) == size, "every key is known"

    return await time_calls(ask, count)


async def keys_at(address: str) -> int:
    """How many keys a lookup partition has; 0 while it does not answer."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = lookup_pb2_grpc.LookupServiceStub(channel)
        try:
            reply = await stub.LookupStats(lookup_pb2.LookupStatsRequest(), timeout=TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError:
            return 0
        return int(reply.key_count)


async def wait_until_known(addresses: Sequence[str], key_count: int) -> None:
    async def are_known() -> bool:
        return sum(await asyncio.gather(*map(keys_at, addresses))) >= key_count

    await eventually_async(are_known, f"{key_count} keys at the lookup service", REBUILD_SECONDS_MAX)


async def measure_service(
    partitions: int, inventory: Inventory, chains: list[list[BlockKey]], calls: int
) -> dict[str, object]:
    with lookup_partitions(partitions) as (addresses, pids):
        client = LookupClient(addresses)
        announcer = Announcer(partitions, lambda: inventory)
        pump = AnnouncePump(announcer, addresses, lambda: NODE, 1.0, lambda: None)
        await client.members(TIMEOUT_SECONDS)  # connects
        begun = time.perf_counter()
        running = asyncio.create_task(pump.run())
        await wait_until_known(addresses, len(inventory))
        rebuild_seconds = time.perf_counter() - begun
        async with grpc.aio.insecure_channel(addresses[0], options=CHANNEL_OPTIONS) as channel:
            stub = lookup_pb2_grpc.LookupServiceStub(channel)
            empty = lookup_pb2.ResolveRequest()
            await time_calls(lambda: stub.Resolve(empty, timeout=TIMEOUT_SECONDS), 100)
            floor = await time_calls(lambda: stub.Resolve(empty, timeout=TIMEOUT_SECONDS), calls)
        await time_lookups(client, chains, 64, 50)
        lookups = {str(size): await time_lookups(client, chains, size, calls) for size in SIZES}
        throughput = await measure_throughput(client, chains, pids)
        mirror = await asyncio.to_thread(measure_mirror, addresses, len(inventory), calls)
        await pump.stop(leaving=True)
        await asyncio.gather(running, return_exceptions=True)
        await client.close()
    return {
        "floor": floor,
        "rebuild_seconds": rebuild_seconds,
        "resolve_by_keys": lookups,
        "mirror": mirror,
        **throughput,
    }


async def measure_throughput(client: LookupClient, chains: list[list[BlockKey]], pids: list[int]) -> dict[str, object]:
    """Keys a second of the lookup partitions' processors, with the largest requests."""
    noise = random.Random(4)
    prompts = [[key for _ in range(4) for key in noise.choice(chains)] for _ in range(20)]
    used, answered, deadline = sum(map(cpu_seconds, pids)), 0, time.monotonic() + THROUGHPUT_SECONDS

    async def ask() -> None:
        nonlocal answered
        while time.monotonic() < deadline:
            answer = await client.resolve(noise.choice(prompts), 0, TIMEOUT_SECONDS)
            answered += sum(run.count for run in answer.runs)

    await asyncio.gather(*[ask() for _ in range(4)])
    return {"resolved_keys_per_cpu_second": round(answered / (sum(map(cpu_seconds, pids)) - used))}


def measure_directory(inventory: Inventory, chains: list[list[BlockKey]]) -> dict[str, object]:
    """Measure one resolve inside the lookup partition, without gRPC: parse the keys and build the runs."""
    directory = Directory()
    keys = [key for key, _ in inventory]
    resident = _resident_bytes()
    begun = time.perf_counter()
    for sequence, start in enumerate(range(0, len(keys), 16_384), 1):
        directory.apply(NODE, sequence, pack_keys(keys[start : start + 16_384]), full_begin=sequence == 1, now=0.0)
    load_seconds = time.perf_counter() - begun
    bytes_per_key = (_resident_bytes() - resident) / len(keys)
    noise = random.Random(3)
    resolve_us: dict[str, dict[str, float]] = {}
    for size in (64, 512, 2048):
        samples: list[float] = []
        for _ in range(300):
            packed = pack_keys(noise.choice(chains)[:size])
            begun = time.perf_counter()
            directory.resolve(packed, 0.0)
            samples.append((time.perf_counter() - begun) * 1e6)
        resolve_us[str(size)] = {"p50_us": percentile(samples, 0.5), "p99_us": percentile(samples, 0.99)}
    ingest = round(len(keys) / load_seconds)
    return {
        "load_seconds": load_seconds,
        "ingested_keys_per_second": ingest,
        "bytes_per_key": round(bytes_per_key, 1),
        "resolve_by_keys": resolve_us,
    }


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def print_figures(figures: dict[str, dict[str, object]]) -> None:
    rows: list[list[object]] = []
    for name, measured in figures.items():
        if not isinstance(floor := measured.get("floor"), dict):
            continue
        rows.append([f"{name}: empty call", floor["p50_ms"], floor["p99_ms"]])
        lookups = measured["resolve_by_keys"]
        assert isinstance(lookups, dict)
        rows += [[f"{name}: {size} keys", figure["p50_ms"], figure["p99_ms"]] for size, figure in lookups.items()]
        rows.append([f"{name}: rebuild, s", measured["rebuild_seconds"], ""])
    print_table(["", "p50 ms", "p99 ms"], rows)
    reads: list[list[object]] = []
    for name, measured in figures.items():
        if not isinstance(mirror := measured.get("mirror"), dict):
            continue
        for readers in ("one_reader", "eight_readers"):
            reads += [
                [f"{name}: {readers}, {size} keys", figure["p50_us"], figure["p99_us"]]
                for size, figure in mirror[readers].items()
            ]
        reads.append(
            [f"{name}: bytes a key, keys fed a second", mirror["bytes_per_key"], mirror["fed_keys_per_second"]]
        )
        reads.append([f"{name}: gRPC keys a processor second", measured["resolved_keys_per_cpu_second"], ""])
    print_table(["mirror", "p50 µs", "p99 µs"], reads)
    inside = figures["index"]["resolve_by_keys"]
    assert isinstance(inside, dict)
    print_table(
        ["directory alone", "p50 µs", "p99 µs"], [[f"{n} keys", f["p50_us"], f["p99_us"]] for n, f in inside.items()]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=1_000_000, help="blocks that the directory knows")
    parser.add_argument("--calls", type=int, default=1_000, help="measured calls per size")
    parser.add_argument(
        "--partitions", type=int, nargs="+", default=[1, 2], help="numbers of lookup partitions to measure"
    )
    parser.add_argument("--out", type=Path, default=default_out("lookup_latency"))
    given = parser.parse_args()
    chains = make_chains(given.keys)
    inventory = [(key, span_route(chain, position)) for chain in chains for position, key in enumerate(chain)]
    gc.freeze()
    figures: dict[str, dict[str, object]] = {}
    for partitions in given.partitions:
        name = f"{partitions} partition{'s' if partitions > 1 else ''}"
        figures[name] = asyncio.run(measure_service(partitions, inventory, chains, given.calls))
    figures["index"] = measure_directory(inventory, chains)
    print_figures(figures)
    print(write_report("lookup_latency", {"known_keys": len(inventory), **figures}, given.out))


if __name__ == "__main__":
    main()
