"""`python -m tests.lanes [pytest's options]`: the whole suite, in lanes that run one after the other and side by side.

About half of the time is waiting, for a lease to end, for Ray to restart an actor, for an engine of one thread. So two
rows of lanes run at once: the tests that need neither Ray nor an engine and then those with engines; beside them those
with Ray and then the simulator, which takes what processor time the others leave. The second row's output is shown when
all have ended. What is left behind is looked for once, at the end of all.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
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
LANES = (FAST, ENGINES, RAY, SIMULATOR)
NOTHING_SELECTED = pytest.ExitCode.NO_TESTS_COLLECTED  # e.g. by -k


class Row:
    """Lanes one after the other. Ctrl-C reaches each pytest itself; the lanes after it are then left out."""

    def __init__(self, lanes: Sequence[str], options: list[str], environment: dict[str, str]) -> None:
        self.codes: dict[str, int] = {}
        self._lanes = lanes
        self._options = options
        self._environment = environment
        self._ended = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, output: IO[bytes] | None = None) -> None:
        for lane in self._lanes:
            if self._ended.is_set():
                return
            command = [sys.executable, "-m", "pytest", "-m", lane, *self._options, "tests"]
            self._process = subprocess.Popen(command, env=self._environment, cwd=ROOT, stdout=output, stderr=output)
            self.codes[lane] = self._process.wait()
            if self.codes[lane] == pytest.ExitCode.INTERRUPTED:
                return

    def end(self) -> None:
        self._ended.set()
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()


def main(options: list[str]) -> int:
    before = segments()
    environment = {**os.environ, SESSION_VARIABLE: uuid.uuid4().hex}
    started = time.monotonic()
    shown, beside = Row((FAST, ENGINES), options, environment), Row((RAY, SIMULATOR), options, environment)
    with tempfile.TemporaryFile() as output:
        thread = threading.Thread(target=beside.run, args=(output,))
        thread.start()
        try:
            shown.run()
            thread.join()
        finally:
            for row in (shown, beside):
                row.end()
            thread.join()
            output.seek(0)
            sys.stdout.flush()
            sys.stdout.buffer.write(output.read())
            sys.stdout.flush()
    codes = {**shown.codes, **beside.codes}
    left = left_behind(before, environment[SESSION_VARIABLE])
    if left:
        print("the tests left behind:\n  " + "\n  ".join(left))
    good = (pytest.ExitCode.OK, NOTHING_SELECTED)
    for lane in LANES:
        code = codes.get(lane)
        print(f"{'left out' if code is None else 'passed' if code in good else f'FAILED ({code})'}: {lane}")
    print(f"took {time.monotonic() - started:.0f} s")
    return 1 if left or any(codes.get(lane) not in good for lane in LANES) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
