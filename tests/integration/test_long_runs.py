"""The short forms of `make bench-scale` and `make soak`: everything restarts, and everything fails, under load."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from kvservice.testing.eventually import eventually
from tests.interruptible import interruptible

pytestmark = [pytest.mark.slow, pytest.mark.processes]
ROOT = Path(__file__).parent.parent.parent
# All parts restart in seven seconds, so each engine asks twice a second.
SMALL = ("--shards=4", "--lookups=2", "--engines=8", "--processes=2", "--pool-mib=32", "--seconds=10", "--rate=2")


def command(name: str, *options: str) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.{name}", *options]


def figures_of(name: str, out: Path, *options: str) -> dict[str, Any]:
    done = subprocess.run(
        command(name, *options, "--out", str(out)), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    found: dict[str, Any] = json.loads(out.read_text())["figures"]
    return found


@pytest.mark.timeout(900)
def test_a_rolling_restart_under_load_loses_nothing(tmp_path: Path) -> None:
    figures = figures_of("scale", tmp_path / "scale.json", *SMALL)
    assert [row["part"] for row in figures["restarts"]] == ["lookup0", "lookup1", "n0", "n1", "n2", "n3"]
    kept = [row["seconds_to_end"] for row in figures["restarts"] if row.get("way") == "memory kept"]
    assert max(kept) < 10.0, f"readers that come anew held up the end of a shard: {kept} s"
    assert figures["requests_during_the_restart"] > 50, "there was no load"
    assert figures["blocks_compared"] >= figures["corpus_blocks"]
    assert figures["wrong"] == figures["lost"] == figures["failed"] == []


@pytest.mark.timeout(1200)
def test_minutes_of_faults_leave_right_bytes_and_books(tmp_path: Path) -> None:
    figures = figures_of(
        "soak", tmp_path / "soak.json", "--minutes", "5", "--fault-seconds", "10", "--quiet-seconds", "90"
    )
    faults = {name for name, count in figures["counts"].items() if name.startswith("fault: ") and count}
    assert len(faults) >= 5, faults
    assert len(figures["quiet_points"]) >= 3
    assert figures["wrong"] == [] and figures["grew"] == []
    assert figures["counts"]["blocks_compared"] > 1000


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["scale", "soak"])
def test_an_interrupted_run_leaves_nothing_behind(name: str) -> None:
    """The session's own look for processes and files in /dev/shm comes after it."""
    options = SMALL if name == "scale" else ()
    with tempfile.TemporaryDirectory(prefix="k", dir="/tmp") as folder:  # short, for the paths of sockets
        with subprocess.Popen(
            interruptible(command(name, *options, "--out", f"{folder}/out.json")),
            cwd=ROOT,
            env={**os.environ, "TMPDIR": folder},
            start_new_session=True,
        ) as program:
            eventually(lambda: list(Path(folder).glob("kvs-*/*.log")), "processes of the run")
            os.killpg(program.pid, signal.SIGINT)
            assert program.wait(60) == 130
        assert not list(Path(folder).iterdir())
