"""The example of a trace prints the tree of one real remote hit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.processes
def test_one_trace_leads_from_the_engine_to_the_peer() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.trace"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [(len(line) - len(line.lstrip()), *line.split()[:1], line) for line in done.stdout.splitlines()]
    assert [(depth, name) for depth, name, _ in rows] == [
        (0, "acquire"),
        (2, "Engine/Acquire"),
        (4, "resolve"),
        (4, "locate"),
        (6, "PeerService/Locate"),
        (4, "fetch"),
        (4, "PeerService/ReleaseLocated"),
    ]
    lines = {name: line for _, name, line in rows}
    assert "kvservice-engine" in lines["acquire"] and "fetched_blocks=32 miss=none" in lines["acquire"]
    assert "kvservice-shard n1" in lines["fetch"] and "verified=32" in lines["fetch"]
    assert "kvservice-shard n0" in lines["PeerService/Locate"]
