"""The console in a real browser, against real shards under load: what `make browser` installs plays a person there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
from kvservice.units import MiB
from tests.conftest import ROOT

SITE = ROOT / ".venv-browser"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
SHOTS = os.environ.get("KVSERVICE_TEST_SHOTS", "")  # a folder for pictures of the page
SCRIPT = ROOT / "tests/browser/console.mjs"
CHECKS = re.findall(r"^  async \"?([\w', -]+?)\"?\(\) \{$", SCRIPT.read_text(), re.MULTILINE)
POOL_BYTES = 32 * MiB  # about a third of the blocks that the load stores
DISK_BYTES = 64 * MiB  # of each node, for another part of them

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (SITE / "node_modules").is_dir() or not BROWSER,
        reason="no browser is installed: `make browser` installs it",
    ),
]


@contextmanager
def running(*command: str, environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen([*command], env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By check: what went wrong, "" if nothing did."""
    folder = tmp_path_factory.mktemp("console")
    disk = {"KVSERVICE_DISK_PATH": str(folder / "disk"), "KVSERVICE_DISK_BYTES": str(DISK_BYTES)}
    with LocalCluster(nodes=2, lookup_partitions=1, pool_bytes=POOL_BYTES, environment=disk) as cluster:
        environment = {**os.environ, "KVSERVICE_RUNTIME_DIR": str(cluster.root), "KVSERVICE_SERVICE": cluster.service}
        load = [sys.executable, "-m", "tests.browser.load", *[cluster.socket(node) for node in cluster.nodes]]
        console = [sys.executable, "-m", "kvservice", "console", "--port", "0"]
        hostile = [sys.executable, "-m", "tests.browser.hostile"]
        with (
            running(*load, environment=environment, log=folder / "load") as engines,
            running(*console, environment=environment, log=folder / "console") as served,
            running(*hostile, environment=environment, log=folder / "hostile"),
        ):

            def url(name: str) -> str:
                said = (folder / name).read_text()
                assert served.poll() is None and engines.poll() is None, said
                found = re.search(r"http://\S+", said)
                return found[0] if found and "attached" in (folder / "load").read_text() else ""

            addresses = [eventually(partial(url, name), f"{name} and its load", 60) for name in ("console", "hostile")]
            pids = {"n1": cluster.pid("n1"), "console": served.pid}
            played = subprocess.run(
                ["node", SCRIPT, addresses[0], SHOTS, json.dumps({"hostile": addresses[1], "pids": pids})],
                env={**os.environ, "KVSERVICE_TEST_SITE": str(SITE), "KVSERVICE_TEST_BROWSER": BROWSER},
                capture_output=True,
                text=True,
                timeout=800,
            )
            assert served.wait(20) == 0, (folder / "console").read_text()
    assert played.returncode == 0, played.stderr
    return {row["name"]: row["problem"] for row in map(json.loads, played.stdout.splitlines())}


@pytest.mark.parametrize("check", CHECKS)
def test_a_person_at_the_console(report: dict[str, str], check: str) -> None:
    assert report[check] == ""


def test_every_check_was_played(report: dict[str, str]) -> None:
    assert list(report) == CHECKS and len(CHECKS) >= 13
