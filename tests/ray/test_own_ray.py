"""`kvservice up` where there is no Ray: the one that it starts asks for a token, the service stays on loopback, and
later commands find both."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvservice.wire.tls import is_loopback

pytestmark = pytest.mark.ray
SERVICE = "own"
JOIN = "import ray; ray.init(address={!r}, log_to_driver=False); print(len(ray.nodes()))"


class Machine:
    """Folders of its own, and no Ray setting of whoever runs the test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "KVSERVICE_"))}
        marks = {name: value for name, value in os.environ.items() if name.startswith("KVSERVICE_TEST_")}
        self.environment = {
            **kept, **marks, "KVSERVICE_RUNTIME_DIR": str(root / "k"), "RAY_TMPDIR": str(root), "HOME": str(root),
            "RAY_USAGE_STATS_ENABLED": "0",
        }  # fmt: skip

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words], env={**self.environment, **environment}, capture_output=True, text=True,
            timeout=150, check=False,
        )  # fmt: skip

    def kvservice(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "kvservice.cli.main", *words)


@pytest.fixture
def machine() -> Iterator[Machine]:
    root = Path(tempfile.mkdtemp(prefix="kvo-"))
    found = Machine(root)
    try:
        yield found
    finally:
        if list(root.glob("k/ray-head-*.json")):  # the test did not come to its end
            found.kvservice("down", "--service", SERVICE)
        shutil.rmtree(root, ignore_errors=True)


@pytest.mark.timeout(280)
def test_the_ray_that_up_starts_asks_for_a_token_and_stays_on_this_machine(machine: Machine) -> None:
    up = machine.kvservice("up", "--service", SERVICE, "--pool", "16MiB", "--lookups", "1")
    assert up.returncode == 0, up.stderr
    head = json.loads((machine.root / "k" / f"ray-head-{SERVICE}.json").read_text())
    token = Path(head["token_path"])
    assert f"RAY_AUTH_TOKEN_PATH={token}" in up.stderr and stat.S_IMODE(token.stat().st_mode) == 0o600
    assert not (machine.root / ".ray" / "auth_token").exists(), "the user's own token is the user's"

    join = JOIN.format(head["address"])
    without = machine.run("-c", join, RAY_AUTH_MODE="disabled")
    assert without.returncode != 0 and "1\n" not in without.stdout
    joined = machine.run("-c", join, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token))
    assert joined.returncode == 0 and joined.stdout.endswith("1\n"), joined.stderr
    state = json.loads(machine.kvservice("status", "--service", SERVICE, "--json").stdout)
    assert state["problems"] == []
    parts = [row["peer_address"] for row in state["nodes"]] + [row["address"] for row in state["lookups"]]
    assert len(parts) == 2 and all(map(is_loopback, parts)), parts
    down = machine.kvservice("down", "--service", SERVICE)
    assert down.returncode == 0, down.stderr
    assert not token.exists() and not psutil.pid_exists(head["pid"])
