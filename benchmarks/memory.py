"""What a block costs in the memory of each process, and what a process takes without one.

    python -m benchmarks.memory [--blocks 100000] [--out PATH]

A shard, a lookup partition, a copy worker and a proxy run as processes; blocks of 4 KiB are stored in the shard without
bytes, so that the pool is small. The heap (anonymous memory) is read when half of the blocks are stored and when all
are: the difference is what a block costs, without what comes once. The supervisor is only imported, because Ray starts
it. What is not a process of its own, an embedded pool and what an engine's scheduler knows, is made in a process that
does nothing else. MiB from /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.report import print_table, write_report

CHAIN_BLOCKS = 512
BLOCK_BYTES = 4096
SETTLE_SECONDS = 3.0  # announcements wait for more to come
# What bounds the blocks that each part has books of; the constants stand in docs/design/bounds.md too.
BOUNDS = {
    "shard": "the slots of its pool",
    "lookup partition": "KEY_COUNT_MAX keys of all nodes",
    "copy worker": "keeps no book of blocks",
    "proxy": "keeps no book of blocks",
    "supervisor": "keeps no book of blocks",
    "embedded pool": "the slots of its pool",
    "engine: what is known to be stored": "KNOWN_KEYS_MAX",
    "engine: names of blocks near eviction": "NAMES_MAX, with `offload: evicting`",
    "engine: what its events have told": "KNOWN_KEYS_MAX, with KV events",
}
PROXY = """
import asyncio
from kvservice.proxy.server import serve
from kvservice.proxy.settings import ProxySettings
asyncio.run(serve(ProxySettings((), ("http://127.0.0.1:9",), port=0)))
"""
SUPERVISOR = "import kvservice.actors.supervisor, time; time.sleep(600)"


def memory(pid: int | str) -> dict[str, float]:
    """MiB of a process: all of it, and its heap."""
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    heap, files = (int(rows[name].split()[0]) / 1024 for name in ("RssAnon", "RssFile"))
    return {"own_mib": heap + files, "heap_mib": heap}


def names(first: int, count: int) -> list[bytes]:
    """Keys as they come: digests, each an object of its own."""
    return [
        hashlib.blake2b(number.to_bytes(8, "big"), digest_size=16).digest() for number in range(first, first + count)
    ]


# -- tables that are made in a process of their own ----


def embedded_pool(blocks: int) -> Any:
    from benchmarks.garbage import fill

    return fill(blocks, 1)


def known_keys(blocks: int) -> Any:
    from kvservice.connector.scheduler.known_keys import KnownKeys

    known = KnownKeys()
    known.learn(names(0, blocks))  # type: ignore[arg-type]
    return known


def near_eviction(blocks: int) -> Any:
    from kvservice.connector.scheduler.near_eviction import NearEviction
    from kvservice.connector.scheduler.request import EngineRequest

    near: Any = NearEviction(None, None, 1)  # type: ignore[arg-type]
    for first in range(0, blocks, CHAIN_BLOCKS):
        request = EngineRequest("r", names(first, CHAIN_BLOCKS))  # type: ignore[arg-type]
        near.note(request, [key * 2 for key in request.keys], CHAIN_BLOCKS)
    return near


def told(blocks: int) -> Any:
    return {key: [key * 2] for key in names(0, blocks)}  # as Stores keeps them


TABLES: dict[str, Callable[[int], Any]] = {
    "embedded pool": embedded_pool,
    "engine: what is known to be stored": known_keys,
    "engine: names of blocks near eviction": near_eviction,
    "engine: what its events have told": told,
}


def table(name: str, blocks: int) -> dict[str, float]:
    TABLES[name](4 * CHAIN_BLOCKS)  # imports
    empty = memory("self")
    half = TABLES[name](blocks // 2)
    gc.collect()
    between = memory("self")
    whole = TABLES[name](blocks)
    gc.collect()
    full = memory("self")
    assert half is not whole
    made = full["heap_mib"] - between["heap_mib"]
    return {**empty, "full_heap_mib": empty["heap_mib"] + made, "bytes_per_block": made * 2**20 / blocks}


# -- processes ----


async def store(socket: str, first: int, count: int) -> None:
    """Blocks in chains, as an engine stores them, without their bytes: memory is what counts."""
    from kvservice.core.block.keys import span_route
    from kvservice.core.messages import SealItem
    from tests.integration.engine import attached

    engine = await attached(socket)
    for number in range(first, first + count, CHAIN_BLOCKS):
        keys: list[Any] = names(number, CHAIN_BLOCKS)
        refs = await engine.pool.reserve(engine.id, CHAIN_BLOCKS)
        items = [
            SealItem(ref, key, keys[i - 1] if i else None, i, span_route(keys, i))
            for i, (ref, key) in enumerate(zip(refs, keys, strict=True))
        ]
        await engine.pool.seal(engine.id, items)
    engine.let_go()
    await engine.pool.close()


def processes(blocks: int) -> dict[str, dict[str, float]]:
    from kvservice.core.segment.layout import SlotLayout
    from kvservice.testing.cluster import LocalCluster
    from kvservice.units import MiB
    from tests.integration import engine

    engine.LAYOUT = SlotLayout(1, 1, BLOCK_BYTES // 16, 16)
    room = int(1.3 * blocks * (BLOCK_BYTES + 64)) + 64 * MiB
    with LocalCluster(nodes=1, lookup_partitions=1, pool_bytes=room, transport="shm") as cluster:
        cluster.start_copy_worker("n0")
        others = [subprocess.Popen([sys.executable, "-c", code]) for code in (PROXY, SUPERVISOR)]
        try:
            pids = {
                "shard": cluster.pid("n0"),
                "lookup partition": cluster.pid("lookup0"),
                "copy worker": cluster.pid("copy-worker-n0"),
                "proxy": others[0].pid,
                "supervisor": others[1].pid,
            }
            time.sleep(5 * SETTLE_SECONDS)  # imports
            stages = [{name: memory(pid) for name, pid in pids.items()}]
            half = blocks // 2 // CHAIN_BLOCKS * CHAIN_BLOCKS
            for first in (0, half):
                asyncio.run(store(cluster.socket("n0"), first, half))
                cluster.wait_until_announced("n0", 120)
                time.sleep(SETTLE_SECONDS)
                stages.append({name: memory(pid) for name, pid in pids.items()})
            assert cluster.directory_size() == 2 * half
        finally:
            for process in others:
                process.kill()
                process.wait()
    empty, between, full = stages
    return {
        name: {
            **empty[name],
            "full_heap_mib": full[name]["heap_mib"],
            "bytes_per_block": (full[name]["heap_mib"] - between[name]["heap_mib"]) * 2**20 / half,
        }
        for name in pids
    }


def markdown(figures: dict[str, Any]) -> str:
    """The table of the docs."""
    lines = [
        "| part | empty, MiB | its heap, MiB | heap with all blocks, MiB | bytes a block | blocks are bounded by |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in figures["parts"].items():
        cells = [f"{row[what]:,.0f}" for what in ("own_mib", "heap_mib", "full_heap_mib", "bytes_per_block")]
        lines.append(f"| {name} | {' | '.join(cells)} | {row['bound']} |")
    lines += [
        "",
        f"{figures['blocks']:,} blocks; the pool itself and the mirror are shared memory and left out. The shard has "
        "`transport: shm`; NIXL\ntakes about 20 MiB more (`first_contact.json`).",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.table:
        print(json.dumps(table(options.table, options.blocks)))
        return
    parts: dict[str, Any] = processes(options.blocks)
    for name in TABLES:
        command = [sys.executable, "-m", "benchmarks.memory", "--table", name, "--blocks", str(options.blocks)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        parts[name] = json.loads(done.stdout)
    figures = {"blocks": options.blocks, "parts": {name: {**row, "bound": BOUNDS[name]} for name, row in parts.items()}}
    names_of = ("own_mib", "heap_mib", "full_heap_mib", "bytes_per_block")
    print_table(["part", *names_of], [[name, *(row[each] for each in names_of)] for name, row in parts.items()])
    print("written", write_report("memory", figures, options.out))


if __name__ == "__main__":
    main()
