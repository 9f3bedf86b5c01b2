"""Builds the wheel that users install."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEFT_BEHIND = shutil.ignore_patterns("__pycache__", "*.egg-info")


def build_wheel(folder: Path) -> Path:
    """The wheel, in `folder`. Built from a copy, so that building leaves nothing in the working tree. Takes seconds."""
    source, out = folder / "source", folder / "dist"
    for name in ("kvservice", "actors"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=LEFT_BEHIND)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source / file)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = out.glob("*.whl")
    return built
