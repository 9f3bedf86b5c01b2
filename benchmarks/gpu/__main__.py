"""`python -m benchmarks.gpu --part 1` and `--part 2`: all that is to be found out on a machine with a GPU, in two parts
of nine minutes at most. `make gpu PART=1` is the same.

Each stage is a process with a time limit of its own. It ends with one line that says how it went, and why if it failed.
A stage that fails, hangs or is skipped does not stop the others. Findings and the log are written as they come.

Needs torch, triton, numpy, xxhash, transformers and pytest; neither vLLM nor a network, and the project need not be
installed. What else a machine lacks is taken from .whl, where `make gpu-carry` has put it. The project's C modules are
compiled in place first, if there is a C compiler.

`--driver stand-in` needs no GPU: the stages that only call the driver run on one that stands in for CUDA's, and the
others are skipped. Exit status: 0 when every stage that ran was fine, also if all were skipped, and 1 when one was not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu.findings import FAILED, ROOT, SKIP, SKIPPED, VARIABLE
from benchmarks.gpu.summary import page, table
from benchmarks.report import RESULTS, write_report
from kvservice.copying.cuda import driver as cuda_driver
from kvservice.errors import Unavailable

PART_SECONDS = 520.0  # of nine minutes; installing what was carried takes some seconds before
LEAST_SECONDS = 20.0  # less than this is not worth beginning a stage


WHEELS = ROOT / ".whl"
CUDA, STAND_IN = "cuda", "stand-in"


@dataclass(frozen=True, slots=True)
class Planned:
    name: str
    seconds: float  # at most, and besides what earlier stages left of theirs
    arguments: tuple[str, ...]  # of python
    on_stand_in: tuple[str, ...] | None = None  # likewise, if calls of the driver are all that it needs


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return ("-m", f"benchmarks.gpu.{name}", *arguments)


PARTS = {
    1: (
        Planned("probe", 100, _module("probe"), _module("probe", "--driver-only")),
        Planned("nixl", 70, _module("nixl")),
        Planned("gds", 20, _module("gds")),
        Planned("copies", 185, _module("copies"), _module("copies", "--small")),
        Planned("interference", 145, _module("interference"), _module("interference", "--try", "load", "store")),
    ),
    2: (
        Planned("engine", 115, _module("engine")),
        Planned("first_token", 75, _module("first_token")),
        Planned("equality", 55, _module("equality")),
        Planned("sanitizer", 60, _module("suite", "sanitizer")),
        Planned("benchmark", 75, _module("suite", "benchmark")),
        Planned("tests", 140, _module("suite", "tests")),
    ),
}
assert all(sum(stage.seconds for stage in stages) <= PART_SECONDS for stages in PARTS.values())


class Campaign:
    def __init__(
        self,
        part: int,
        out: Path,
        driver: str = CUDA,
        environment: dict[str, str] | None = None,
        seconds: float = PART_SECONDS,
    ) -> None:
        """`environment` is what the stages get besides this process's, `seconds` how long all of them may take."""
        self.part, self.out, self.driver = part, out, driver
        self.environment = environment or {}
        self.deadline = time.monotonic() + seconds
        out.mkdir(parents=True, exist_ok=True)
        self.log: IO[str] = (out / f"part{part}.log").open("w")
        self.lines = out / f"part{part}.jsonl"
        self.lines.write_text("")
        self.statuses: dict[str, int] = {}
        self.ends: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    def run(self, stage: Planned, spare: float = 0.0) -> None:
        """Run a stage, which may take `spare` seconds more than planned."""
        arguments = stage.arguments if self.driver == CUDA else stage.on_stand_in
        if arguments is None:
            self._end(stage, SKIPPED, "skipped: it needs a GPU, not only its driver's calls")
            return
        allowed = min(stage.seconds + spare, self.deadline - time.monotonic())
        if allowed < LEAST_SECONDS:
            self._end(stage, SKIPPED, "skipped: no time is left in this part")
            return
        started = time.monotonic()
        status, is_late = self._process(stage.name, arguments, allowed)
        self.seconds[stage.name] = took = time.monotonic() - started
        self._end(stage, status, self._how(stage, status, is_late, took, allowed))

    def _process(self, name: str, arguments: Sequence[str], allowed: float) -> tuple[int, bool]:
        """Run a stage. Returns (exit status, whether it was killed). Everything that the stage started ends with it."""
        environment = {**os.environ, **self.environment}
        paths = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
        more = {VARIABLE: str(self.lines), "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
        self.log.write(f"== {name}, at most {allowed:.0f} s ==\n")
        self.log.flush()
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=self.log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**environment, **more},
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

    @property
    def skipped(self) -> int:
        return sum(line.startswith("skipped") for line in self.ends.values())

    def write(self) -> None:
        """Write the JSON of this part, and the page of all parts that are in the folder."""
        found = self.findings()
        stages = {
            name: {"how": how.split()[0].strip(":"), "line": how, "seconds": round(self.seconds.get(name, 0.0), 1)}
            for name, how in self.ends.items()
        }
        figures = {
            "driver": self.driver,
            "part": self.part,
            "skipped": self.skipped,
            "stages": stages,
            "findings": found,
        }
        path = write_report(f"gpu/part{self.part}", figures, self.out / f"part{self.part}.json")
        (self.out / "page.md").write_text(page(self.out))
        print(f"\n{table(self.ends, found)}\nwritten to {path} and {self.out / 'page.md'}")

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


@contextlib.contextmanager
def carried() -> Iterator[dict[str, str]]:
    """An environment in which stages find the packages of .whl, installed for as long as the campaign runs."""
    wheels = sorted(map(str, WHEELS.glob("*.whl")))
    if not wheels:
        yield {}
        return
    quiet = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory(prefix="kvservice-wheels-") as folder:
        command = [sys.executable, "-m", "pip", "install", *quiet, "--target", folder, *wheels]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"the wheels in {WHEELS.name} are not for this Python: {done.stderr.strip()[-200:]}", flush=True)
        paths = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        yield {} if done.returncode else {"PYTHONPATH": paths}


def compile_modules() -> None:
    """Compile the C modules of the project in place. Without them the stages run too, but their copies are slower."""
    command = [sys.executable, "-c", "from setuptools import setup; setup()", "--quiet", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        print(f"the C modules were not compiled: {done.stderr.strip()[-200:]}", flush=True)


def stand_in() -> dict[str, str]:
    """The environment of a process whose driver is the stand-in; compiles that. Raises CalledProcessError."""
    from tests.stand_in_driver.build import build

    library = build()
    paths = os.pathsep.join(filter(None, [str(library.parent), os.environ.get("LD_LIBRARY_PATH")]))
    return {"LD_LIBRARY_PATH": paths, "STAND_IN_DELAY_US": "10"}


def run_part(campaign: Campaign, stages: Sequence[Planned]) -> bool:
    """Run these stages of its part. Returns whether all that ran were fine."""
    try:
        spare = 0.0
        for stage in stages:
            campaign.run(stage, spare)
            spare += stage.seconds - campaign.seconds.get(stage.name, 0.0)
        campaign.write()
    finally:
        campaign.close()
    return all(status in (0, SKIPPED) for status in campaign.statuses.values())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=sorted(PARTS), help="default with the stand-in: both")
    parser.add_argument("--driver", choices=(CUDA, STAND_IN), default=CUDA)
    parser.add_argument("--stages", nargs="+", help="run only these stages of the part")
    parser.add_argument(
        "--seconds", type=float, default=PART_SECONDS, help="how long a part may take; default %(default)s"
    )
    parser.add_argument(
        "--out", type=Path, help="a folder; default benchmarks/results/gpu, or build/gpu for the stand-in"
    )
    given = parser.parse_args(arguments)
    if given.part is None and given.driver == CUDA:
        parser.error("--part 1, then --part 2; or --driver stand-in, which needs no GPU")
    parts = sorted(PARTS) if given.part is None else [given.part]
    wanted = {
        part: [stage for stage in PARTS[part] if given.stages is None or stage.name in given.stages] for part in parts
    }
    if not any(wanted.values()):
        parser.error(f"the stages are {', '.join(stage.name for part in parts for stage in PARTS[part])}")
    out = given.out or (RESULTS / "gpu" if given.driver == CUDA else ROOT / "build" / "gpu")
    if given.driver == CUDA and (why := missing()):
        count = sum(map(len, wanted.values()))
        print(f"no GPU here, nothing was measured: {why}; {count} stages skipped. DRIVER=stand-in needs none")
        return 0
    if given.driver == CUDA:
        compile_modules()
    with carried() as found:
        environment = {**found, **(stand_in() if given.driver == STAND_IN else {})}
        fine = [
            run_part(Campaign(part, out, given.driver, environment, given.seconds), stages)
            for part, stages in wanted.items()
            if stages
        ]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
