"""The service as an operator has it: a Ray cluster of two hosts with addresses of their own, and the command line.

Nothing here reaches into the service: `kvservice up`, `status` and `down` do all, each in a process on one of the
hosts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvservice.testing.eventually import eventually
from kvservice.transfer.nixl import nixl_available
from tests.integration.certificates import write
from tests.integration.engine import LAYOUT
from tests.netns.blocks import RemoteEngine
from tests.netns.hosts import RUNTIME_ROOT, Host, Hosts, why_not

REASON = why_not() or (None if nixl_available() else "NIXL is not installed")
pytestmark = [
    pytest.mark.netns,
    pytest.mark.ray,
    pytest.mark.nixl,
    pytest.mark.slow,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

RAY = str(Path(sys.executable).parent / "ray")
RAY_PORT = 6399
RUNTIME = RUNTIME_ROOT / "kvs"  # a file system of each host's own
SERVICE = "hosts"
COUNT = 40


class Site:
    """One host: its Ray node and the commands an operator runs there."""

    def __init__(self, host: Host, head: str, logs: Path) -> None:
        self.host = host
        self._head = head
        self._log = logs / f"ray-{host.address}.log"
        # A node without a way out has no address of its own that Ray could find.
        host.output(["ip", "route", "add", "default", "dev", host.device])
        RUNTIME_ROOT.mkdir(exist_ok=True)
        self._environment = {
            "KVSERVICE_RUNTIME_DIR": str(RUNTIME),
            "RAY_AUTH_MODE": "disabled",
            "RAY_TMPDIR": str(RUNTIME_ROOT),
            "RAY_USAGE_STATS_ENABLED": "0",
            "UCX_TLS": "tcp",
            "UCX_NET_DEVICES": host.device,
        }

    def start_ray(self) -> None:
        common = ["--node-ip-address", self.host.address, "--num-cpus=1", "--object-store-memory=80000000", "--block"]
        is_head = self.host.address == self._head
        role = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"] if is_head else ["--address", self.ray]
        self.host.run([RAY, "start", *role, *common], self._log, **self._environment)
        eventually(
            lambda: "Ray runtime started" in self._log.read_text(),
            f"Ray on {self.host.address}",
            detail=lambda: self._log.read_text(errors="replace")[-2000:],
        )

    def use(self, **settings: Path) -> None:
        """By the commands from now on; parts on Ray's nodes are told by `up`."""
        self._environment |= {f"KVSERVICE_{name.upper()}": str(value) for name, value in settings.items()}

    @property
    def ray(self) -> str:
        return f"{self._head}:{RAY_PORT}"

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.host.prefix, sys.executable, "-m", *command],
            env={**os.environ, **self._environment},
            capture_output=True,
            text=True,
            timeout=120,
        )

    def kvservice(self, *command: str) -> subprocess.CompletedProcess[str]:
        return self.run("kvservice", *command)

    def status(self) -> dict[str, Any]:
        """As an operator without Ray sees it."""
        done = self.kvservice("status", "--service", SERVICE, "-o", "json")
        assert done.returncode in (0, 1), done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def blocks(self, verb: str, seed: int, token: Path) -> dict[str, Any]:
        """Asked by an engine of the tenant with this token."""
        (socket,) = self.host.output(["find", str(RUNTIME / SERVICE), "-name", "shard.sock"]).split()
        with RemoteEngine(self.host, socket, KVSERVICE_TOKEN_FILE=str(token)) as engine:
            return engine.ask(verb, seed=seed, count=COUNT)

    def received_bytes(self) -> int:
        return int(self.host.output(["cat", f"/sys/class/net/{self.host.device}/statistics/rx_bytes"]))

    def cut_power(self) -> None:
        pids = subprocess.run(["ip", "netns", "pids", self.host.namespace], capture_output=True, text=True, check=True)
        for pid in pids.stdout.split():
            os.kill(int(pid), signal.SIGKILL)


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    return write(tmp_path / "tls")


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[tuple[Site, Site]]:
    with Hosts() as hosts:
        head, other = (Site(host, hosts[0].address, tmp_path) for host in hosts)
        head.start_ray()
        other.start_ray()
        yield head, other


def settled(read: Callable[[], dict[str, Any]], condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first state that meets the condition."""

    def accepted() -> dict[str, Any] | None:
        state = read()
        return state if condition(state) else None

    return eventually(accepted, "a settled service", detail=lambda: json.dumps(read(), indent=1))


def hosts_of(rows: list[dict[str, Any]], key: str) -> list[str]:
    return sorted(row[key].rpartition(":")[0] for row in rows)


@pytest.mark.timeout(280)
def test_service_outlives_the_loss_of_a_host_and_ends_clean(
    sites: tuple[Site, Site], certificates: Path, tmp_path: Path
) -> None:
    """With certificates and tenants."""
    head, other = sites
    tenants, token, stranger = tmp_path / "tenants.toml", tmp_path / "token", tmp_path / "stranger"
    added = head.kvservice("tenants", "add", "search", "--file", str(tenants), "--token-to", str(token))
    assert added.returncode == 0, added.stderr
    stranger.write_text("0" * len(token.read_text()))
    stranger.chmod(0o600)
    addresses = [head.host.address, other.host.address]
    words = ("up", "--address", head.ray, "--service", SERVICE, "--pool-bytes", "64MiB")
    refused = head.kvservice(*words)  # before anything is started
    assert refused.returncode == 2 and "2 machines" in refused.stderr and "kvservice certs DIR" in refused.stderr
    assert head.host.output(["find", "/dev/shm", str(RUNTIME_ROOT), "-name", "*shard*"]) == ""
    for site in sites:
        site.use(tls_dir=certificates, tenants_file=tenants)
    up = head.kvservice(*words)
    assert up.returncode == 0, up.stderr

    state = other.status()
    assert hosts_of(state["nodes"], "address") == addresses
    assert hosts_of(state["lookups"], "address") == addresses
    assert {row["transport"] for row in state["nodes"]} == {"shm+nixl"}
    assert state["problems"] == []

    assert head.blocks("store", 1, token) == {"sealed": COUNT}
    settled(other.status, lambda now: sum(row["keys"] for row in now["lookups"]) >= COUNT)
    with pytest.raises(AssertionError, match="the engine ended"):
        other.blocks("read", 1, stranger)
    before = other.received_bytes()
    read = other.blocks("read", 1, token)
    assert (read["promised"], read["fetched"]) == (COUNT, COUNT)
    assert other.received_bytes() - before >= COUNT * LAYOUT.payload_bytes, "the blocks did not cross the wire"

    other.cut_power()
    alone = [head.host.address]
    state = settled(
        head.status,
        lambda now: (
            not now["problems"]
            and hosts_of(now["lookups"], "address") == alone * 2
            and sum(row["keys"] for row in now["lookups"]) == COUNT
        ),
    )
    assert hosts_of(state["nodes"], "address") == alone
    read = head.blocks("read", 1, token)
    assert (read["promised"], read["fetched"]) == (COUNT, 0)

    down = head.kvservice("down", "--address", head.ray, "--service", SERVICE)
    assert down.returncode == 0, down.stderr
    left = head.host.output(["find", "/dev/shm", str(RUNTIME), "-name", "kvservice*", "-o", "-name", SERVICE])
    assert left == ""
