"""`python -m tests.lanes [pytest's options]`: the whole suite, in lanes that run one after the other or side by side.

More than half of the time of the tests without an engine is waiting, for a lease to end, for Ray to restart an actor:
so those with and without Ray run together. Engines come after them, alone: what computes beside an engine starves its
heartbeats. The simulator computes all the while in what the others leave of the processors, behind everybody else. What
is left behind is looked for once, at the end of all.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import IO

import pytest

from tests.conftest import SESSION_VARIABLE, left_behind, segments

ROOT = Path(__file__).parent.parent
# Every test is in one of them: tests/tidy/test_lanes.py counts.
FAST = "not ray and not vllm and not netns and not sim"
RAY = "(ray or netns) and not vllm and not sim"
ENGINES = "vllm and not sim"
SIMULATOR = "sim"
LANES = (FAST, RAY, ENGINES, SIMULATOR)
NOTHING_SELECTED = pytest.ExitCode.NO_TESTS_COLLECTED  # e.g. by -k


def main(options: list[str]) -> int:
    before = segments()
    environment = {**os.environ, SESSION_VARIABLE: uuid.uuid4().hex}
    started = time.monotonic()
    codes: dict[str, int] = {}
    with tempfile.TemporaryFile() as said_by_ray, tempfile.TemporaryFile() as said_by_simulator:
        simulator = _started(SIMULATOR, options, environment, said_by_simulator, behind_all=True)
        ray = _started(RAY, options, environment, said_by_ray)
        try:
            codes[FAST] = subprocess.call(_command(FAST, options), env=environment, cwd=ROOT)
            codes[RAY] = ray.wait()
            _print(said_by_ray)
            if pytest.ExitCode.INTERRUPTED not in codes.values():  # Ctrl-C reaches each pytest by itself
                codes[ENGINES] = subprocess.call(_command(ENGINES, options), env=environment, cwd=ROOT)
            codes[SIMULATOR] = simulator.wait()
            _print(said_by_simulator)
        finally:
            ray.terminate()
            simulator.terminate()
    left = left_behind(before, environment[SESSION_VARIABLE])
    if left:
        print("the tests left behind:\n  " + "\n  ".join(left))
    good = (pytest.ExitCode.OK, NOTHING_SELECTED)
    for lane in LANES:
        code = codes.get(lane)
        print(f"{'left out' if code is None else 'passed' if code in good else f'FAILED ({code})'}: {lane}")
    print(f"took {time.monotonic() - started:.0f} s")
    return 1 if left or any(codes.get(lane) not in good for lane in LANES) else 0


def _print(output: IO[bytes]) -> None:
    output.seek(0)
    sys.stdout.flush()
    sys.stdout.buffer.write(output.read())
    sys.stdout.flush()


def _started(
    lane: str, options: list[str], environment: dict[str, str], output: IO[bytes], *, behind_all: bool = False
) -> subprocess.Popen[bytes]:
    """`behind_all`: it gets the time that nobody else wants, and only that."""
    command = ["chrt", "--idle", "0"] if behind_all and shutil.which("chrt") else []
    return subprocess.Popen(
        [*command, *_command(lane, options)], env=environment, cwd=ROOT, stdout=output, stderr=output
    )


def _command(lane: str, options: list[str]) -> list[str]:
    return [sys.executable, "-m", "pytest", "-m", lane, "--durations=15", *options, "tests"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
