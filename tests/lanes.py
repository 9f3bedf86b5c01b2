"""`python -m tests.lanes [pytest's options]`: the whole suite, in lanes that run one after the other or side by side.

About half of the time of the tests without an engine is waiting, for a lease to end, for Ray to restart an actor: so
those with and without Ray run together. Engines and the simulator compute all the time, and what computes beside an
engine starves its heartbeats: they run alone. What is left behind is looked for once, at the end of all.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

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
    with tempfile.TemporaryFile() as output:
        beside = subprocess.Popen(_command(RAY, options), env=environment, cwd=ROOT, stdout=output, stderr=output)
        try:
            codes[FAST] = subprocess.call(_command(FAST, options), env=environment, cwd=ROOT)
            codes[RAY] = beside.wait()
        finally:
            beside.terminate()
        output.seek(0)
        sys.stdout.flush()
        sys.stdout.buffer.write(output.read())
        sys.stdout.flush()
    for lane in (ENGINES, SIMULATOR):
        if pytest.ExitCode.INTERRUPTED not in codes.values():  # Ctrl-C reaches each pytest by itself
            codes[lane] = subprocess.call(_command(lane, options), env=environment, cwd=ROOT)
    left = left_behind(before, environment[SESSION_VARIABLE])
    if left:
        print("the tests left behind:\n  " + "\n  ".join(left))
    good = (pytest.ExitCode.OK, NOTHING_SELECTED)
    for lane in LANES:
        code = codes.get(lane)
        print(f"{'left out' if code is None else 'passed' if code in good else f'FAILED ({code})'}: {lane}")
    print(f"took {time.monotonic() - started:.0f} s")
    return 1 if left or any(codes.get(lane) not in good for lane in LANES) else 0


def _command(lane: str, options: list[str]) -> list[str]:
    return [sys.executable, "-m", "pytest", "-m", lane, "--durations=15", *options, "tests"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
