"""What a tier below the memory finds, and what is written for it, by traffic: a simulation that measures no time.

    python -m benchmarks.disk_worth [--trace mooncake_conversation.jsonl] [--processes 2] [--out PATH]

It is `kvservice replay` with disks and object stores: real eviction, admission and directory on simulated nodes. The
memory is a 32nd of the different blocks of each traffic. The first half of the requests warms up, the second half
counts. Made-up traffic comes from seeds; Mooncake's conversation trace is played when the file is there.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.replay import TRACE, WORKLOADS
from benchmarks.report import default_out, print_table, write_report
from kvservice.replay.cluster import Below
from kvservice.replay.study import Plan, ReplayRun, play_all
from kvservice.replay.synthetic import make_trace
from kvservice.replay.trace import Trace, read_trace

MEMORY_SHARE = 32  # of the different blocks, one part fits into the memory
DISKS = (4, 16)  # sizes of the disk, in memories
NODES = 8
MOMENTS = ("evicted", "stored", "reused")


def study(trace: Trace, processes: int, *, nodes: bool) -> dict[str, object]:
    """One traffic: without a tier, with disks, and with each moment to write. With `nodes` also several nodes, and an
    object store that they share."""
    memory = max(trace.unique_count // MEMORY_SHARE, 1)
    count_from = len(trace.requests) // 2
    plan = Plan([memory], count_from=count_from)
    disk = memory * DISKS[0]
    runs = [ReplayRun("default", memory, below=below) for below in (Below(), *(Below(memory * each) for each in DISKS))]
    runs += [ReplayRun("default", memory, below=Below(disk, write)) for write in MOMENTS[1:]]
    if nodes:
        stores = [Below(objects=trace.unique_count, objects_write=write) for write in MOMENTS]
        runs += [ReplayRun("default", memory, NODES, below=below) for below in (Below(), Below(disk), *stores)]
    rows = [
        {
            "nodes": run.nodes,
            "disk_memories": run.below.disk / memory,
            "write": run.below.objects_write if run.below.objects else run.below.disk_write,
            "objects": bool(run.below.objects),
            **{name: round(value, 6) for name, value in figures.items()},
        }
        for run, figures in play_all(trace, plan, processes, runs=runs)
    ]
    names = ("nodes", "disk_memories", "write", "hit_rate", "local_rate", "disk_rate", "drive_writes_a_day")
    print_table([trace.name, *names], [["", *(row.get(name, "") for name in names)] for row in rows])
    return {
        "unique_blocks": trace.unique_count,
        "hours": round(trace.seconds / 3600, 3),
        "memory_blocks": memory,
        "block_bytes": plan.machine.speeds.block_bytes,
        "hit_rate_max": 1 - _new(trace, count_from) / sum(len(each.keys) for each in trace.requests[count_from:]),
        "runs": rows,
    }


def _new(trace: Trace, count_from: int) -> int:
    """Blocks that are asked for the first time in the part that counts."""
    before = {key for request in trace.requests[:count_from] for key in request.keys}
    return len({key for request in trace.requests[count_from:] for key in request.keys} - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=default_out("disk_worth"))
    given = parser.parse_args()
    traffic: dict[str, object] = {
        name: study(make_trace(workload, given.seed, name), given.processes, nodes=False)
        for name, workload in WORKLOADS.items()
    }
    if given.trace.is_file():
        trace = read_trace(given.trace)
        traffic["Mooncake's conversations"] = study(trace, given.processes, nodes=True)
    else:
        print(f"{given.trace} does not exist, so only synthetic traces were played")
    print(write_report("disk_worth", {"seed": given.seed, "traffic": traffic}, given.out))


if __name__ == "__main__":
    main()
