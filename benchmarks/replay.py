"""What the cache finds of real and made-up traces: against plain LRU and Belady's optimum, alone and pooled.

    python -m benchmarks.replay [--trace mooncake_conversation.jsonl] [--processes 2] [--out PATH]

The module is that of `kvservice replay`, and so are the figures: real eviction, directory and routing on simulated
nodes. The first half of each trace warms the nodes up, the second half counts. Made-up traces come from seeds and are
always played; Mooncake's conversation trace is when the file is there, and only then is something drawn.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.report import default_out, picture_out, print_table, write_report
from kvservice.cli.replay import draw
from kvservice.replay.study import Plan, default_capacities, play_all, report
from kvservice.replay.synthetic import Workload, make_trace
from kvservice.replay.trace import Trace, read_trace

POLICIES = ("default", "lru", "s3-fifo", "belady")
TRACE = Path("mooncake_conversation.jsonl")
WORKLOADS = {
    "conversations": Workload(),
    "conversations and scans": Workload(scan_rate=0.5),
    "short visits, popular system prompts": Workload(
        conversations_rate=2.0, turns_mean=1.3, first_blocks_mean=3.0, system_prompts=64, system_blocks=8
    ),
    "nothing comes back": Workload(conversations_rate=0.01, scan_rate=1.0),
}


def study(
    trace: Trace, nodes: int, processes: int, policies: tuple[str, ...] = POLICIES, on_nodes: str = "default"
) -> dict[str, object]:
    plan = Plan(default_capacities(trace), policies, nodes, on_nodes, len(trace.requests) // 2)
    found = play_all(trace, plan, processes)
    rates = {(run.label, run.capacity): figures["hit_rate"] for run, figures in found}
    labels = dict.fromkeys(run.label for run, _ in found)
    rows = [[label, *(f"{rates.get((label, c), 0.0):.3f}" for c in plan.capacities)] for label in labels]
    print_table([trace.name, *map(str, plan.capacities)], rows)
    return report(trace, plan, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=default_out("replay"))
    given = parser.parse_args()
    figures: dict[str, object] = {"seed": given.seed}
    for name, workload in WORKLOADS.items():
        made = make_trace(workload, given.seed, name)
        figures[name] = study(made, 1, given.processes, ("default", "lru", "belady"))
    if given.trace.is_file():
        trace = read_trace(given.trace)
        found = study(trace, given.nodes, given.processes)
        figures[trace.name] = found
        draw(found, picture_out(given.out))
        # The same nodes under LRU: what the policy is worth where blocks are copied from node to node.
        figures[f"{trace.name}, nodes with lru"] = study(trace, given.nodes, given.processes, (), "lru")
    else:
        print(f"{given.trace} does not exist, so only synthetic traces were played")
    print(write_report("replay", figures, given.out))


if __name__ == "__main__":
    main()
