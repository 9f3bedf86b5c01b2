"""A moment of Atheris for every parser; `make fuzz` gives it longer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SITE = ROOT / ".venv-fuzz/site"


@pytest.mark.processes
@pytest.mark.skipif(not (SITE / "atheris").is_dir(), reason="Atheris is not installed: make .venv-fuzz/.installed")
def test_no_input_that_atheris_finds_breaks_a_parser(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SITE), str(ROOT)])}
    command = [sys.executable, "-m", "tests.fuzz.guided", "mixed", "--seconds", "5"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
