"""`python -m benchmarks.gpu --part 1` and `--part 2`: all that is to be found out on a machine with a GPU, in two parts
of nine minutes at most. `make gpu PART=1` is the same.

Each stage is a process with a time limit of its own. It ends with one line that says how it went, and why if it failed.
A stage that fails, hangs or is skipped does not stop the others. Findings and the log are written as they come.

Needs torch, triton, numpy, xxhash, transformers and pytest; neither vLLM nor a network, and the project need not be
installed. Exit status: 0 when every stage that ran was fine, 1 when one was not, 77 when there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu.findings import FAILED, ROOT, SKIP, SKIPPED, VARIABLE
from benchmarks.gpu.summary import table
from benchmarks.report import RESULTS, write_report
from kvservice.copying.cuda import driver as cuda_driver
from kvservice.errors import Unavailable

PART_SECONDS = 535.0
LEAST_SECONDS = 20.0  # less than this is not worth beginning a stage


@dataclass(frozen=True, slots=True)
class Planned:
    name: str
    seconds: float  # at most
    arguments: tuple[str, ...]  # of python


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return ("-m", f"benchmarks.gpu.{name}", *arguments)


PARTS = {
    1: (
        Planned("probe", 120, _module("probe")),
        Planned("nixl", 95, _module("nixl")),
        Planned("copies", 170, _module("copies")),
        Planned("interference", 150, _module("interference")),
    ),
    2: (
        Planned("tests", 220, _module("suite", "tests")),
        Planned("benchmark", 130, _module("suite", "benchmark")),
        Planned("equality", 85, _module("equality")),
        Planned("sanitizer", 100, _module("suite", "sanitizer")),
    ),
}
assert all(sum(stage.seconds for stage in stages) <= PART_SECONDS for stages in PARTS.values())


class Campaign:
    def __init__(self, part: int, out: Path) -> None:
        self.part, self.out = part, out
        self.deadline = time.monotonic() + PART_SECONDS
        out.mkdir(parents=True, exist_ok=True)
        self.log: IO[str] = (out / f"part{part}.log").open("w")
        self.lines = out / f"part{part}.jsonl"
        self.lines.write_text("")
        self.statuses: dict[str, int] = {}
        self.ends: dict[str, str] = {}

    def run(self, stage: Planned) -> None:
        allowed = min(stage.seconds, self.deadline - time.monotonic())
        if allowed < LEAST_SECONDS:
            self._end(stage, SKIPPED, "skipped: no time is left in this part")
            return
        started = time.monotonic()
        status, is_late = self._process(stage, allowed)
        self._end(stage, status, self._how(stage, status, is_late, time.monotonic() - started, allowed))

    def _process(self, stage: Planned, allowed: float) -> tuple[int, bool]:
        """Run a stage. Returns (exit status, whether it was killed). Everything that the stage started ends with it."""
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        more = {VARIABLE: str(self.lines), "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
        self.log.write(f"== {stage.name}, at most {allowed:.0f} s ==\n")
        self.log.flush()
        process = subprocess.Popen(
            [sys.executable, *stage.arguments],
            stdout=self.log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, **more},
            start_new_session=True,
        )
        try:
            return process.wait(allowed), False
        except subprocess.TimeoutExpired:
            return 1, True
        finally:
            _end_session(process)

    def _how(self, stage: Planned, status: int, is_late: bool, took: float, allowed: float) -> str:
        found = self.findings().get(stage.name, {})
        if is_late:
            return f"failed: it was not done after {allowed:.0f} s; {len(found)} findings until then"
        if status == SKIPPED:
            return f"skipped: {found.get(SKIP, 'without a reason')}"
        broken = [name for name, value in found.items() if isinstance(value, dict) and FAILED in value]
        if status:
            return f"failed after {took:.0f} s: {found[broken[-1]][FAILED] if broken else self._last_line()}"
        if broken:
            return (
                f"failed after {took:.0f} s: {len(broken)} of {len(found)} findings, the first is {broken[0]!r}: "
                + (str(found[broken[0]][FAILED]))
            )
        return f"ok after {took:.0f} s, {len(found)} findings"

    def _end(self, stage: Planned, status: int, how: str) -> None:
        line = " ".join(how.split())[:300]
        self.statuses[stage.name] = 1 if line.startswith("failed") else status
        self.ends[stage.name] = line
        print(f"{stage.name}: {line}", flush=True)

    def _last_line(self) -> str:
        self.log.flush()
        lines = Path(self.log.name).read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def findings(self) -> dict[str, dict[str, Any]]:
        """The findings by stage and subject. A stage that was killed may have left half a line."""
        found: dict[str, dict[str, Any]] = {}
        for line in self.lines.read_text().splitlines():
            try:
                one = json.loads(line)
            except json.JSONDecodeError:
                continue
            found.setdefault(one["stage"], {})[one["what"]] = one["value"]
        return found

    def write(self) -> None:
        found = self.findings()
        path = write_report(f"gpu/part{self.part}", {"stages": self.ends, **found}, self.out / f"part{self.part}.json")
        text = table(self.ends, found)
        (self.out / f"part{self.part}.txt").write_text(text)
        print(f"\n{text}\nwritten to {path} and beside it")

    def close(self) -> None:
        self.log.close()
        self.lines.unlink()


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill everything that the stage left running, then the stage itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the number belongs to the group as long as a process is in it
    process.wait()


def missing() -> str:
    """Why there is no GPU; "" if there is one."""
    try:
        return "" if cuda_driver.visible() else "the driver knows no GPU"
    except Unavailable as error:
        return error.message


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=sorted(PARTS), required=True)
    parser.add_argument("--stages", nargs="+", help="run only these stages of the part")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu", help="a folder")
    given = parser.parse_args(arguments)
    stages = [stage for stage in PARTS[given.part] if given.stages is None or stage.name in given.stages]
    if not stages:
        parser.error(f"part {given.part} has the stages {', '.join(stage.name for stage in PARTS[given.part])}")
    campaign = Campaign(given.part, given.out)
    try:
        for stage in stages:
            campaign.run(stage)
        if why := missing():
            print(f"no GPU here, nothing was measured: {why}")
            return SKIPPED
        campaign.write()
    finally:
        campaign.close()
    return int(any(status not in (0, SKIPPED) for status in campaign.statuses.values()))


if __name__ == "__main__":
    sys.exit(main())
