"""What the cache finds of real and made-up traces: against LRU, S3-FIFO and Belady's optimum, alone and on many nodes.

    python -m benchmarks.replay [--trace mooncake_conversation.jsonl] [--nodes 2 8 32] [--processes 2] [--out PATH]

The module is that of `kvservice replay`, and so are the figures: real eviction, directory and routing on simulated
nodes. The first half of each trace warms the nodes up, the second half counts. Made-up traces come from seeds and are
always played; Mooncake's conversation trace is when the file is there, and only then is something drawn.

Many nodes have the room of the one pool together. They are played with the default policy and with LRU, because blocks
are copied from node to node there, and an eviction can take the last copy.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.report import default_out, picture_out, print_table, write_report
from kvservice.cli.replay import draw_plot
from kvservice.replay.study import Plan, default_capacities, play_all, report
from kvservice.replay.synthetic import Workload, make_trace
from kvservice.replay.trace import Trace, read_trace

POLICIES = ("default", "lru", "s3-fifo", "belady")
ON_NODES = ("default", "lru")
DRAWN_NODES = 8  # on the right of the picture
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
    trace: Trace, processes: int, policies: tuple[str, ...] = POLICIES, nodes: int = 1, on_nodes: str = "default"
) -> dict[str, Any]:
    plan = Plan(default_capacities(trace), policies, nodes, on_nodes, len(trace.requests) // 2)
    found = play_all(trace, plan, processes)
    rates = {(run.label, run.capacity): figures["hit_rate"] for run, figures in found}
    labels = dict.fromkeys(run.label for run, _ in found)
    rows = [[label, *(f"{rates.get((label, c), 0.0):.3f}" for c in plan.capacities)] for label in labels]
    print_table([f"{trace.name}, {on_nodes}", *map(str, plan.capacities)], rows)
    return report(trace, plan, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=default_out("replay"))
    given = parser.parse_args()
    made_up = {
        name: study(make_trace(workload, given.seed, name), given.processes, ("default", "lru", "belady"))
        for name, workload in WORKLOADS.items()
    }
    figures: dict[str, Any] = {"seed": given.seed, "made_up": made_up}
    if given.trace.is_file():
        trace = read_trace(given.trace)
        alone = study(trace, given.processes)
        on_nodes = {
            str(nodes): {policy: study(trace, given.processes, (), nodes, policy) for policy in ON_NODES}
            for nodes in given.nodes
        }
        figures |= {"trace": alone, "nodes": on_nodes}
        drawn = on_nodes.get(str(DRAWN_NODES), {}).get("default", {"runs": []})
        draw_plot({**alone, "runs": alone["runs"] + drawn["runs"]}, picture_out(given.out))
    else:
        print(f"{given.trace} does not exist, so only made-up traces were played")
    print(write_report("replay", figures, given.out))


if __name__ == "__main__":
    main()
