"""Plays a demo as `make` does, in a process of its own, and looks at what it leaves."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class DemoRun:
    said: str
    code: int
    left: list[str]  # in its runtime directory and in /dev/shm


def run_demo(name: str, *arguments: str, seconds: float, runtime_files: str = "*") -> DemoRun:
    """Blocks until it has ended; raises TimeoutExpired after so many seconds. `runtime_files`: which files it must not
    leave in its runtime directory."""
    before = {path.name for path in SHARED_MEMORY.glob("kvservice-demo-*")}
    with tempfile.TemporaryDirectory(prefix="kvd-") as runtime:
        done = subprocess.run(
            [sys.executable, "-m", "examples.demo", name, *arguments],
            cwd=ROOT,
            env={**os.environ, "KVSERVICE_RUNTIME_DIR": runtime, "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        left = [str(path) for path in Path(runtime).rglob(runtime_files) if not path.is_dir()]
    left += [path.name for path in SHARED_MEMORY.glob("kvservice-demo-*") if path.name not in before]
    return DemoRun(done.stdout + done.stderr, done.returncode, left)
