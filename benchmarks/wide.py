"""What a simulated node costs, and whether it does more the more nodes there are: 50, 200 and 1,000 in the simulator.

    python -m benchmarks.wide [--nodes 50 200 1000] [--seed 1] [--out PATH]

One schedule of faults for each number of nodes, in a process of its own: the production core, pool and announcements on
simulated time, network and memory (kvservice/testing/sim). Turns are calls of event loops; they are counted, so no
other load changes them. Exits with 1 when a promise was broken.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.report import default_out, print_table, write_report
from kvservice.cli.progress import Progress
from kvservice.testing.sim.run import run_schedule
from kvservice.testing.sim.schedule import make_wide_schedule


def play(seed: int, nodes: int) -> dict[str, Any]:
    schedule = make_wide_schedule(seed, nodes)
    begun = time.process_time()
    outcome = run_schedule(schedule)
    seconds = time.process_time() - begun
    counts = outcome.counters
    return {
        "nodes": nodes,
        "lookup_partitions": schedule.lookups,
        "requests": len(schedule.asks),
        "faults": len(schedule.faults),
        "virtual_seconds": round(outcome.virtual_seconds, 1),
        "cpu_seconds": round(seconds, 1),
        "memory_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "turns": counts["turns"],
        "turns_per_node_and_second": round(counts["turns"] / nodes / outcome.virtual_seconds, 1),
        "blocks_stored": counts["blocks_stored"],
        "blocks_pulled": counts["blocks_pulled"],
        "violation": outcome.violation,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[50, 200, 1000])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=default_out("wide"))
    options = parser.parse_args()
    rows = []
    with Progress("playing") as progress:
        for nodes in options.nodes:
            progress.update(f"{nodes} nodes")
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                rows.append(process.submit(play, options.seed, nodes).result())
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    print(f"written to {write_report('wide', {'seed': options.seed, 'runs': rows}, options.out)}")
    return 1 if any(row["violation"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
