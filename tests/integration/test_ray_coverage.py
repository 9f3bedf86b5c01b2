"""What a worker of Ray ran counts for `make coverage`, although nothing in it hears of its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from coverage import CoverageData
from coverage.exceptions import CoverageException

from kvservice.testing.eventually import eventually

ROOT = Path(__file__).resolve().parents[2]
WORKER = "import time\nfrom kvservice.units import format_bytes\nformat_bytes(1)\ntime.sleep(600)\n"


def test_a_killed_worker_of_ray_leaves_what_it_measured(tmp_path: Path) -> None:
    script, measured = tmp_path / "default_worker.py", tmp_path / "measured"
    script.write_text(WORKER)
    command = [sys.executable, "-m", "coverage", "run", "--data-file", str(measured / "data"), str(script)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    with subprocess.Popen(command, cwd=ROOT, env=environment) as worker:

        def lines() -> list[int]:
            found = [CoverageData(str(path)) for path in measured.glob("data.*")]
            try:
                for data in found:
                    data.read()
            except CoverageException:  # it is being written
                return []
            return [line for data in found for line in data.lines(str(ROOT / "kvservice/units.py")) or ()]

        try:
            assert len(eventually(lines, "the lines of the worker", 30.0)) > 10
        finally:
            worker.kill()
