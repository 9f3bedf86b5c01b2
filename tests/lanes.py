"""`python -m tests.lanes [--all] [pytest's options]`: the suite, in lanes that run side by side or one after the other.

More than half of the time of the tests without an engine is waiting, for a lease to end or for Ray to restart an actor,
so three lanes run together: what computes, what starts processes of the service, and what starts Ray. Ray's is short,
so a second lane of processes of the service begins when it has ended. Engines come after them, alone, because what
computes beside an engine starves its heartbeats. The simulator computes all the while in the time that nobody else
wants. Leftovers are looked for once, at the end of all lanes.

Without `--all`, tests marked `slow` are left out and the simulator plays fewer schedules: that is the gate, of at most
20 minutes on two cores.

A test that failed beside the others is run once more when all lanes have ended, alone. What passes then is named at the
end and does not fail the run: two cores that are shared by three lanes can stop a process for seconds. More than
`AGAIN_MOST` such tests fail the run, and so does a failure that time cannot explain (`may_run_again`).

Each lane leaves its report in build/tests. If all tests were asked for, what the page `conformance` relies on must be
among those that passed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from kvservice.testing.unique import SESSION_VARIABLE
from scripts.reference.conformance import AGAIN, not_shown, outcomes
from tests.conftest import left_behind, segments

ROOT = Path(__file__).parent.parent
REPORTS = ROOT / "build" / "tests"
GATE_SCHEDULES = "1400"  # of the simulator; `make sim` and `--all` play all of them
# Tests of one run. One that fails can make those fail that share its processes; more than that are a change at fault.
AGAIN_MOST = 8
# These compute, and no other lane can change what they find. Most of them play drawn cases, so a second run that passes
# shows nothing.
COMPUTING = ("conformance", "fuzz", "golden", "property", "sim")
# What kvservice promises may not fail once in a thousand runs either.
PROMISE = re.compile(r"byte|wrong|torn|damaged|foreign|token|equal|same")


@dataclass(frozen=True, slots=True)
class Lane:
    """Tests that run in one pytest. `folders` keeps collection short: importing vLLM to run nothing takes 10 s."""

    name: str
    markers: str
    folders: tuple[str, ...]
    command: tuple[str, ...] = ()  # put before pytest's

    def start(
        self, options: list[str], environment: dict[str, str], output: IO[bytes] | None
    ) -> subprocess.Popen[bytes]:
        before = self.command if self.command and shutil.which(self.command[0]) else ()
        command = [*before, *self._pytest(".xml", "--durations=15", *options)]
        return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=output, stderr=output)

    def run_again(self, options: list[str], environment: dict[str, str]) -> int:
        """Run what failed once more. Blocks. Returns pytest's exit code."""
        command = self._pytest(AGAIN, "--last-failed", *options)
        return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode

    def failed(self) -> list[str]:
        """The tests that failed when the lane last ran."""
        path = self._cache_folder / "v" / "cache" / "lastfailed"
        return sorted(json.loads(path.read_text())) if path.exists() else []

    def _pytest(self, report_ends: str, *options: str) -> list[str]:
        asked = ["-m", self.markers, f"--junitxml={REPORTS / self.name}{report_ends}"]
        folders = [f"tests/{name}" for name in self.folders]
        return [sys.executable, "-m", "pytest", *asked, "-o", f"cache_dir={self._cache_folder}", *options, *folders]

    @property
    def _cache_folder(self) -> Path:
        return REPORTS / f"{self.name}.cache"  # one each: lanes that run together would overwrite each other's


NO_CLUSTER = "not ray and not vllm and not sglang and not netns and not sim"
# Every test is in exactly one of them: tests/tidy/test_lanes.py counts.
UNITS = Lane(
    "units",
    NO_CLUSTER,
    ("conformance", "contract", "fuzz", "golden", "gpu", "packaging", "property", "serve", "tidy", "unit"),
    ("nice", "-n", "3"),
)
SERVICE = Lane("service", NO_CLUSTER, ("browser", "integration", "journeys"))
FAULTS = Lane("faults", NO_CLUSTER, ("faults", "helm", "stand_in_driver"))
RAY = Lane(
    "ray",
    "(ray or netns) and not vllm and not sglang and not sim",
    ("faults", "helm", "journeys", "netns", "ray", "serve"),
)
SIMULATOR = Lane("simulator", "sim", ("sim",), ("chrt", "--idle", "0"))
ENGINES = Lane(
    "engines",
    "(vllm or sglang) and not sim",
    ("faults", "gpu", "journeys", "netns", "packaging", "ray", "serve", "sglang", "vllm"),
)
LANES = (UNITS, SERVICE, FAULTS, RAY, SIMULATOR, ENGINES)
GOOD = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)  # nothing is selected e.g. by -k


def may_run_again(test: str) -> bool:
    """Whether a failure of the test can come from a busy machine. `test`: as pytest names it."""
    path, _, name = test.partition("::")
    return bool(name) and path.split("/")[1] not in COMPUTING and not PROMISE.search(name.partition("[")[0])


def steady(codes: dict[str, int], options: list[str], environment: dict[str, str]) -> list[str]:
    """Run what failed once more, alone, where that is allowed. Blocks. Sets the codes of the lanes that pass now, and
    returns the tests that passed only then."""
    failed = {lane: lane.failed() for lane in LANES if codes.get(lane.name) == pytest.ExitCode.TESTS_FAILED}
    tests = [test for each in failed.values() for test in each]
    if not 0 < len(tests) <= AGAIN_MOST or not all(map(may_run_again, tests)):
        return []
    passed: list[str] = []
    for lane, names in failed.items():
        print(f"==== once more, alone: {', '.join(names)}", flush=True)
        codes[lane.name] = lane.run_again(options, environment)
        passed += sorted(set(names) - set(lane.failed()))
    return passed


def main(options: list[str]) -> int:
    environment = {**os.environ, SESSION_VARIABLE: uuid.uuid4().hex}
    lanes = LANES
    left_out: tuple[str, ...] = ()  # marks
    if "--all" in options:
        options = [option for option in options if option != "--all"]
    else:
        environment.setdefault("KVSERVICE_TEST_SIM_SCHEDULES", GATE_SCHEDULES)
        left_out = ("slow",)
        lanes = tuple(Lane(lane.name, f"({lane.markers}) and not slow", lane.folders, lane.command) for lane in LANES)
    units, service, faults, ray, simulator, engines = lanes
    shutil.rmtree(REPORTS, ignore_errors=True)
    before = segments()
    started = time.monotonic()
    codes: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        said = {lane.name: Path(folder, lane.name) for lane in lanes}
        running: dict[str, subprocess.Popen[bytes]] = {}

        def start(lane: Lane) -> None:
            with said[lane.name].open("wb") as output:
                running[lane.name] = lane.start(options, environment, output)

        def finish(lane: Lane) -> None:
            codes[lane.name] = running[lane.name].wait()
            sys.stdout.write(f"==== lane {lane.name}, after {time.monotonic() - started:.0f} s\n")
            sys.stdout.flush()
            sys.stdout.buffer.write(said[lane.name].read_bytes())
            sys.stdout.flush()

        try:
            for lane in (simulator, ray, units, service):
                start(lane)
            finish(ray)
            start(faults)
            for lane in (units, service, faults):
                finish(lane)
            if pytest.ExitCode.INTERRUPTED not in codes.values():  # Ctrl-C reaches each pytest by itself
                start(engines)
                finish(engines)
            finish(simulator)
        finally:
            for process in running.values():
                process.terminate()
    unsteady = [] if pytest.ExitCode.INTERRUPTED in codes.values() else steady(codes, options, environment)
    left = left_behind(before, environment[SESSION_VARIABLE])
    if left:
        print("the tests left behind:\n  " + "\n  ".join(left))
    missing = [] if options else not_shown(outcomes(REPORTS), left_out)
    if missing:
        print("the page conformance relies on tests that show nothing in this build:\n  " + "\n  ".join(missing))
    for lane in lanes:
        code = codes.get(lane.name)
        print(f"{'left out' if code is None else 'passed' if code in GOOD else f'FAILED ({code})'}: {lane.name}")
    if unsteady:
        print("failed beside other tests and passed alone; please make them steady:\n  " + "\n  ".join(unsteady))
    print(f"took {time.monotonic() - started:.0f} s")
    return 1 if left or missing or any(codes.get(lane.name) not in GOOD for lane in lanes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
