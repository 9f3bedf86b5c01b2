"""How long a start takes: a segment's memory, a shard that takes up what an earlier one left, an engine that attaches.

    python -m benchmarks.startup [--segment-gib 8] [--pool-gib 4] [--attaches 200] [--out PATH]

A segment's memory is reserved page by page when it is made, so that it cannot run out later. Per 100 GB: what is
measured, multiplied. Adoption verifies the digest of every block; the start of Python is in it.
"""

from __future__ import annotations

import argparse
import asyncio
import time
import uuid
from pathlib import Path

from benchmarks.reliability import adoption
from benchmarks.report import default_out, percentile, print_table, write_report
from kvservice.core.segment.geometry import plan_geometry
from kvservice.memory.segment import Segment, segment_path
from kvservice.testing.cluster import LocalCluster
from kvservice.units import GiB, MiB, NodeId
from tests.integration.engine import attached

ROUNDS = 3


def segment_seconds(size: int) -> float:
    """Seconds until a segment of this size exists with all of its memory reserved."""
    path = segment_path(f"startup{uuid.uuid4().hex[:6]}", NodeId("n"))
    geometry = plan_geometry(size)
    started = time.perf_counter()
    segment = Segment.create(path, geometry, "n")
    seconds = time.perf_counter() - started
    segment.unlink()
    segment.close()
    return seconds


async def attach_seconds(count: int) -> list[float]:
    """Do what an engine does before its first lookup: attach, map the segment, take the liveness lock."""
    found = []
    with LocalCluster(nodes=1, lookup_partitions=1, pool_bytes=256 * MiB) as cluster:
        for _ in range(count):
            started = time.perf_counter()
            engine = await attached(cluster.socket("n0"))
            found.append(time.perf_counter() - started)
            engine.let_go()
            await engine.pool.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--segment-gib", type=float, default=8.0)
    parser.add_argument("--pool-gib", type=float, default=4.0, help="pool of the shard that adopts blocks, in GiB")
    parser.add_argument("--attaches", type=int, default=200)
    parser.add_argument("--out", type=Path, default=default_out("startup"))
    options = parser.parse_args()
    size = int(options.segment_gib * GiB)
    reserved = percentile([segment_seconds(size) for _ in range(ROUNDS)], 0.5)
    options.pool = int(options.pool_gib * GiB)
    adopted = {row.what: row.figure for row in asyncio.run(adoption(options))}
    attaches = asyncio.run(attach_seconds(options.attaches))
    figures = {
        "segment_seconds_per_100_gb": reserved / size * 100e9,
        "adoption_seconds_per_gib": adopted["per GiB"],
        "adoption": adopted,
        "attach_p50_ms": 1e3 * percentile(attaches, 0.5),
        "attach_p99_ms": 1e3 * percentile(attaches, 0.99),
    }
    print_table(["", ""], [[name, value] for name, value in figures.items() if isinstance(value, float)])
    print(write_report("startup", {"segment_gib": options.segment_gib, **figures}, options.out))


if __name__ == "__main__":
    main()
