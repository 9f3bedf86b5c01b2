"""The first token of `make demo`: from what another node computed, at the first contact of two nodes, and from here.

    python -m benchmarks.remote_hit [--rounds 5] [--out PATH]

Runs the demo as a user does. Nodes, shards and engines are new in each round, so the remote hit is the first one of
that pair of nodes. About 185 MiB cross a network between two namespaces. The same prompt again, with the engine
emptied, is a hit in the node's own pool. Seconds; `best` is the round with the least difference.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, default_out, print_table, write_report

REMOTE, WARM = "B", "B, engine emptied"  # what the demo calls its replica


def round_of(demo: dict[str, Any]) -> dict[str, float]:
    """The figures of one run of the demo, of its own JSON. Raises KeyError if the run did not hit."""
    rows = {row["replica"]: row for row in demo["rows"] if row["question"] == 1}
    remote, warm = rows[REMOTE], rows[WARM]
    if not remote["remote_tokens"] or not warm["pool_tokens"]:
        raise KeyError("no remote hit, or no hit in the pool")
    first, again = remote["first_token_seconds"], warm["first_token_seconds"]
    return {"remote_seconds": first, "warm_seconds": again, "over_warm_seconds": first - again}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=default_out("remote_hit"))
    options = parser.parse_args()
    rounds: list[dict[str, float]] = []
    command = [sys.executable, "-m", "examples.demo", "remote-hit", "--out"]
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([*command, folder], cwd=ROOT, check=True)
            rounds.append(round_of(json.loads((Path(folder) / "demo.json").read_text())))
    print_table([*rounds[0]], [[*each.values()] for each in rounds])
    best = min(rounds, key=lambda each: each["over_warm_seconds"])
    print("written", write_report("remote_hit", {"best": best, "rounds": rounds}, options.out))


if __name__ == "__main__":
    main()
