"""The way from an engine to the shard of its node: pairs of acquire and release, and floods beside a polite engine.

    python -m benchmarks.engine_path [--before CHECKOUT] [--rounds 5] [--seconds 2] [--out PATH]

With --before the same is measured in another checkout of the project, which has its C modules, in rounds that
alternate. Each round is a process; a figure is the best of all rounds, and a ratio is that of two such figures, because
the ratio within one round is small also where the machine happened to be slow without a flood. Every acquire is of
blocks that are all here.

Each flood runs a second time at another shard of the machine. That one takes nothing from the polite engine's shard but
the processor, so it says how much of a ratio is this machine's and how much is the shard's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from kvservice.client.shard import ShardClient
from kvservice.core.messages import AcquireRequest
from kvservice.errors import KVServiceError
from kvservice.testing.cluster import LocalCluster
from kvservice.units import MiB
from tests.integration.engine import Engine, attached, chain, spec

ROOT = Path(__file__).resolve().parent.parent
KEYS, CALLERS = 128, 16
PACE_SECONDS = 0.001  # between two pairs of the paced measurement
POLITE_KEYS, POLITE_SECONDS, POLITE_CALLS = 64, 0.005, 200
FLOODS = {"short": 72, "long": 1000}  # blocks of a call; the short flood asks for 48 to 96
STARTED_SECONDS = 60.0  # for a cluster or a flood to serve
SETTLE_SECONDS = 1.5  # from the start of a flood until it asks for all it can


def at(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def pair(engine: Engine, request: AcquireRequest) -> float:
    """Seconds of an acquire. The lease is released after it."""
    began = time.perf_counter()
    found = await engine.pool.acquire(engine.id, request)
    took = time.perf_counter() - began
    assert len(found.blocks) == len(request.keys), "not all blocks are here"
    await engine.pool.release(engine.id, [found.lease_id])
    return took


async def pairs_a_second(engine: Engine, request: AcquireRequest, callers: int, seconds: float) -> float:
    count, began = itertools.count(), time.perf_counter()

    async def caller() -> None:
        while time.perf_counter() - began < seconds:
            await pair(engine, request)
            next(count)

    await asyncio.gather(*(caller() for _ in range(callers)))
    return next(count) / (time.perf_counter() - began)


async def paced(engine: Engine, request: AcquireRequest, seconds: float) -> list[float]:
    """Seconds of pairs that begin at a steady pace, whether those before have ended or not. A shard that does not keep
    up refuses some in the end: such a pair counts with what it has waited. A thread sets the pace, because the loop's
    own timers are a millisecond late."""
    took: list[float] = []
    tasks: list[asyncio.Task[None]] = []
    loop = asyncio.get_running_loop()

    async def one(due: float) -> None:
        with contextlib.suppress(KVServiceError):
            await pair(engine, request)
        took.append(time.perf_counter() - due)

    def set_pace() -> None:
        began = time.perf_counter()
        for number in range(int(seconds / PACE_SECONDS)):
            due = began + number * PACE_SECONDS
            time.sleep(max(due - time.perf_counter(), 0.0))
            loop.call_soon_threadsafe(lambda due=due: tasks.append(loop.create_task(one(due))))

    await asyncio.to_thread(set_pace)
    await asyncio.gather(*tasks)
    return took


async def polite(socket: str) -> list[float]:
    """Seconds of each acquire of an engine that asks now and then."""
    engine, keys = await attached(socket, spec()), chain(8000, POLITE_KEYS)
    await engine.store(keys)
    request, took = AcquireRequest(tuple(keys), 0, 5.0), []
    for _ in range(POLITE_CALLS):
        took.append(await pair(engine, request))
        await asyncio.sleep(POLITE_SECONDS)
    engine.let_go()
    await engine.pool.close()
    return took


async def flood(socket: str, blocks: int) -> None:
    """Ask for all that this engine can, until it is killed: promises, misses, reservations."""
    engine = await Engine.attach(ShardClient(socket), spec())
    known, unknown, numbers = chain(9000, blocks), chain(9001, blocks), itertools.count()
    for start in range(0, blocks, 100):
        await engine.store(known[: start + 100], start)
    print("ready", flush=True)

    async def one() -> None:
        while True:
            with contextlib.suppress(KVServiceError):
                found = await engine.acquire(known, timeout=1.0)
                await engine.pool.release(engine.id, [found.lease_id])
                share = blocks if blocks > 500 else blocks * 2 // 3 + next(numbers) % (blocks * 2 // 3)
                found = await engine.acquire((*known[: share // 2], *unknown)[:share], timeout=1.0)
                await engine.pool.release(engine.id, [found.lease_id] if found.lease_id else [])
                await engine.pool.abort(engine.id, await engine.pool.reserve(engine.id, 16))

    await asyncio.gather(*(one() for _ in range(CALLERS)))


async def measured(socket: str, seconds: float) -> dict[str, float]:
    """One round of everything without a flood."""
    engine, keys = await attached(socket, spec()), chain(5, KEYS)
    await engine.store(keys)
    request = AcquireRequest(tuple(keys), 0, 5.0)
    alone = [await pair(engine, request) for _ in range(300)]
    steady = await paced(engine, request, seconds)
    found = {
        "acquire_p50_ms": 1e3 * at(alone, 0.5),
        "paced_p50_ms": 1e3 * at(steady, 0.5),
        "paced_p99_ms": 1e3 * at(steady, 0.99),
        "pairs_1": await pairs_a_second(engine, request, 1, seconds),
        "pairs_16": await pairs_a_second(engine, request, CALLERS, seconds),
    }
    engine.let_go()
    await engine.pool.close()
    return found


# -- processes ----


def program(*words: str) -> list[str]:
    """This program, with the modules of that checkout (-P: and with none that lies beside it)."""
    return [sys.executable, "-P", str(Path(__file__).resolve()), *words]


def environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree)}


def output(tree: Path, *words: str) -> str:
    return subprocess.run(
        program(*words), env=environment(tree), cwd=tree, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


@contextlib.contextmanager
def running(tree: Path, *words: str) -> Iterator[str]:
    """A process of this program, which has said a line. Ends it afterwards."""
    process = subprocess.Popen(
        program(*words), env=environment(tree), cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        said = process.stdout.readline().strip()
        assert said, f"{' '.join(words)} ended"
        yield said
        assert process.poll() is None, f"{' '.join(words)} ended by itself"
    finally:
        if words[0] == "flood":
            process.kill()
        process.stdin.close()
        process.wait(STARTED_SECONDS)


def one_round(tree: Path, socket: str, other: str, seconds: float) -> dict[str, float]:
    """`socket` is that of the shard to measure, `other` that of a shard which nobody else asks."""
    found: dict[str, float] = json.loads(output(tree, "measure", socket, str(seconds)))
    alone = json.loads(output(tree, "polite", socket))
    found["polite_p50_ms"] = 1e3 * at(alone, 0.5)
    for name, blocks in FLOODS.items():
        for where, flooded_socket in (("flood", socket), ("flood_elsewhere", other)):
            with running(tree, "flood", flooded_socket, str(blocks)):
                time.sleep(SETTLE_SECONDS)
                took = json.loads(output(tree, "polite", socket))
            found[f"{name}_{where}_p50_ms"] = 1e3 * at(took, 0.5)
            found[f"{name}_{where}_p99_ms"] = 1e3 * at(took, 0.99)
    return found


def best(rows: list[dict[str, float]]) -> dict[str, float]:
    """More pairs are better; of everything else, less is."""
    found = {name: (max if name.startswith("pairs") else min)(row[name] for row in rows) for name in rows[0]}
    flooded = [name.removesuffix("_p50_ms") for name in found if "flood" in name and name.endswith("_p50_ms")]
    return found | {f"{name}_ratio": found[f"{name}_p50_ms"] / found["polite_p50_ms"] for name in flooded}


def compare(options: argparse.Namespace) -> None:
    from benchmarks.report import print_table, write_report

    with contextlib.ExitStack() as stack:
        trees = {"now": ROOT} | ({} if options.before is None else {"before": options.before.resolve()})
        sockets = {name: stack.enter_context(running(tree, "serve")) for name, tree in trees.items()}
        others = {name: stack.enter_context(running(tree, "serve")) for name, tree in trees.items()}
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
        for _ in range(options.rounds):
            for name, tree in trees.items():
                rows[name].append(one_round(tree, sockets[name], others[name], options.seconds))
    figures: dict[str, object] = {name: best(found) for name, found in rows.items()}
    columns = list(rows)
    table = [[name, *(f"{best(rows[column])[name]:.3g}" for column in columns)] for name in best(rows["now"])]
    print_table(["", *columns], table)
    if options.before:
        now, before = best(rows["now"]), best(rows["before"])
        figures["pairs_16_ratio"] = now["pairs_16"] / before["pairs_16"]
        print(f"pairs with {CALLERS} callers: {figures['pairs_16_ratio']:.1f} times those before")
    write_report("engine_path", figures, options.out)


def serve() -> None:
    with LocalCluster(nodes=1, lookup_partitions=1, pool_bytes=256 * MiB, transport="shm") as cluster:
        print(cluster.socket("n0"), flush=True)
        sys.stdin.read()


def main() -> None:
    match sys.argv[1:]:
        case ["serve"]:
            serve()
        case ["measure", socket, seconds]:
            print(json.dumps(asyncio.run(measured(socket, float(seconds)))))
        case ["polite", socket]:
            print(json.dumps(asyncio.run(polite(socket))))
        case ["flood", socket, blocks]:
            asyncio.run(flood(socket, int(blocks)))
        case _:
            parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
            parser.add_argument("--before", type=Path, help="another checkout, to measure in the same run")
            parser.add_argument("--rounds", type=int, default=5)
            parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement of a rate")
            parser.add_argument("--out", type=Path)
            compare(parser.parse_args())


if __name__ == "__main__":
    main()
