"""Stages that run existing tests: `tests/gpu`, a part of it under compute-sanitizer, and the benchmark.

The tests leave out equality of tokens through vLLM: the stage equality stands for it.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.findings import FAILED, ROOT, Stage

COPIES = "tests/gpu/test_copies.py::test_both_copy_engines_give_the_bytes_of_a_plain_copy"
CLOSING = re.compile(r"^\d+ (?:passed|failed|skipped|error).* in [\d.]+s", re.MULTILINE)
FOUND = 9  # exit status of compute-sanitizer when it found errors


def pytest_command(*arguments: str) -> list[str]:
    """Without the project's settings, which name plugins that such a machine may lack."""
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", f"--rootdir={ROOT}", "-o", "pythonpath=."]
    command += ["--import-mode=importlib", "-p", "no:cacheprovider", "-q", "-ra", "--maxfail=20"]
    if importlib.util.find_spec("pytest_timeout") is not None:
        command.append("--timeout=100")
    return [*command, *arguments]


def run(stage: Stage, command: list[str]) -> int:
    """Run it. Its output goes to the log at once, and the last line of pytest is a finding."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
        if line.startswith(("FAILED ", "ERROR ")):
            stage.record(line.split(" - ")[0].strip(), {FAILED: line.strip()[:300]})
    status = process.wait()
    closing = CLOSING.findall("".join(lines))
    stage.record("pytest", closing[-1] if closing else {FAILED: f"status {status}, and pytest said no result"})
    return status


def tests() -> int:
    stage = Stage("tests")
    stage.torch()
    return run(stage, pytest_command("tests/gpu", "--ignore", "tests/gpu/test_output_equality.py"))


def sanitizer() -> int:
    stage = Stage("sanitizer")
    stage.torch()
    found = shutil.which("compute-sanitizer") or next(
        map(str, sorted(Path("/usr/local").glob("cuda*/bin/compute-sanitizer"))), None
    )
    if found is None:
        stage.skip("no compute-sanitizer here")
    tool = [found, "--tool", "memcheck", "--error-exitcode", str(FOUND), "--print-limit", "20"]
    # One layout of each way: the kernel, the batch, one by one; in pytest's process, which is the one that is watched.
    status = run(stage, [*tool, *pytest_command(COPIES, "-k", "lbnh and True")])
    clean = {0: "clean", FOUND: {FAILED: "errors found, see the log"}}
    stage.record("memcheck", clean.get(status, {FAILED: f"status {status}"}))
    return status


def benchmark() -> int:
    stage = Stage("benchmark")
    stage.torch()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "gpu_copies.json")
        status = subprocess.call(
            [sys.executable, "-m", "benchmarks.gpu_copies", "--rounds", "3", "--out", str(out)], cwd=ROOT
        )
        if out.exists():
            for row in json.loads(out.read_text())["figures"]["copies"]:
                stage.record(f"{row['model']}, {row['layout']}, {row['direction']}", row)
    return status


if __name__ == "__main__":
    sys.exit({"tests": tests, "sanitizer": sanitizer, "benchmark": benchmark}[sys.argv[1]]())
