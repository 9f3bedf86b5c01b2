"""What the conversations of `make demo-serve` hit, without the cache, with it, and with the KV-aware router.

    python -m benchmarks.serve_demo [--out PATH]

Runs the demo as a user does: three Ray Serve apps of two vLLM replicas on two nodes of this machine, one app after the
other, the same conversations through the OpenAI API. Hit rates are shares of the prompt tokens that vLLM's answers call
cached; the first turn of a conversation is new to every app and counts too. Takes a quarter of an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, print_table, write_report

HEADS = ("hit_rate", "recomputed_tokens", "first_token_p50_seconds", "first_token_p90_seconds", "seconds")


def figures_of(played: dict[str, Any]) -> dict[str, Any]:
    """The figures of the demo's own JSON: what each app did, without its single turns."""
    apps = {
        row["app"]: {name: value for name, value in row.items() if name not in ("app", "turns")}
        for row in played["apps"]
    }
    return {"workload": played["workload"], "apps": apps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "examples.demo", "serve", "--out", folder], cwd=ROOT, check=True)
        figures = figures_of(json.loads((Path(folder) / "demo-serve.json").read_text()))
    print_table(["app", *HEADS], [[name, *(found[head] for head in HEADS)] for name, found in figures["apps"].items()])
    print("written", write_report("serve_demo", figures, options.out))


if __name__ == "__main__":
    main()
