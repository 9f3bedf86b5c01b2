"""The newest vLLM, of which only the Python files are here: its scheduler and connector code with our connector.

`make test-all` unpacks it. Engines of it cannot be started: it has no build for CPUs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.vllm_versions import SourceTree, compare, installed, version_of

SECONDS = 1800.0  # for a thousand unit tests and the import of vLLM, on a loaded machine: eleven minutes alone
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(SECONDS)]

ROOT = Path(__file__).parent.parent.parent
SITE = ROOT / ".venv-vllm-next" / "site"
UNITS = ("tests/unit/connector/vllm", "tests/unit/connector/offloading")


@pytest.fixture(scope="module", autouse=True)
def _unpacked() -> None:
    if not (SITE / "vllm").is_dir():
        pytest.skip("run `make vllm-versions`, which unpacks the newest vLLM")


def test_the_newest_vllm_fits_by_its_text() -> None:
    found = compare(installed(), SourceTree(SITE))
    assert found.fits, found.line(version_of(SITE))


def test_the_connectors_units_pass_with_the_newest_vllm() -> None:
    """The connector and the tier, on its base classes, schedulers' types, layouts and tiering manager."""
    environment = {**os.environ, "PYTHONPATH": f"{SITE}{os.pathsep}{ROOT}"}
    asked = "import vllm; print(vllm.__version__)"
    loaded = subprocess.run(
        [sys.executable, "-c", asked], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS
    )
    assert loaded.stdout.split()[-1:] == [version_of(SITE)], loaded.stderr[-2000:]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *UNITS],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert run.returncode == 0, run.stdout[-6000:]
    assert "passed" in run.stdout.splitlines()[-1] and "skipped" not in run.stdout.splitlines()[-1]
