"""`kvservice up` where there is no Ray: the one that it starts asks for a token and TLS, which later commands find."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from kvservice.actors.supervisor import listening_hosts
from kvservice.cli import lifecycle
from kvservice.cli.exits import ExitCode
from kvservice.config import ServiceConfig
from kvservice.testing.eventually import eventually

pytestmark = pytest.mark.ray
SERVICE = "own"
# What `up` does before it starts the service.
START = """
import ray
from kvservice.actors import ray_auth
from kvservice.actors.supervisor import listening_hosts
from kvservice.cli import lifecycle
from kvservice.config import ServiceConfig
service = {!r}
started = lifecycle._connect_or_start(service, None)
lifecycle._tell_of_access(service, started=started)
print(len(ray.nodes()), ray_auth.asks_for_token())
"""


class Machine:
    """Folders of its own, and no Ray setting of whoever runs the test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "KVSERVICE_"))}
        marks = {name: value for name, value in os.environ.items() if name.startswith("KVSERVICE_TEST_")}
        self.environment = {
            **kept,
            **marks,
            "KVSERVICE_RUNTIME_DIR": str(root / "k"),
            "RAY_TMPDIR": str(root),
            "HOME": str(root),
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words],
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, *words], env=self.environment, stderr=subprocess.DEVNULL)

    def processes(self) -> Iterator[psutil.Process]:
        """Those that know of its folders."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("HOME") == str(self.root):
                    yield process

    def heads(self) -> Iterator[psutil.Process]:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if lifecycle._is_ray(process.pid):
                    yield process

    def kvservice(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "kvservice", *words)


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


@pytest.mark.parametrize(
    ("hosts", "settings", "expected"),
    [
        (("10.0.0.1", "10.0.0.1"), {}, {"127.0.0.1"}),
        (("10.0.0.1", "10.0.0.2"), {}, {"10.0.0.1", "10.0.0.2"}),  # whose parts refuse to start
        (("10.0.0.1",), {"tls_dir": "/a"}, {"10.0.0.1"}),
        (("10.0.0.1",), {"allow_plaintext": True}, {"10.0.0.1"}),
    ],
)
def test_without_certificates_one_machine_stays_on_loopback(
    hosts: tuple[str, ...], settings: dict[str, Any], expected: set[str]
) -> None:
    nodes = {f"node{index}": host for index, host in enumerate(hosts)}
    found = listening_hosts(nodes, ServiceConfig(**settings))
    assert found.keys() == nodes.keys() and set(found.values()) == expected


def open_channel(address: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    return grpc.insecure_channel(address) if credentials is None else grpc.secure_channel(address, credentials)


@pytest.mark.timeout(280)
def test_the_ray_that_up_starts_asks_for_token_and_certificate(machine: Machine) -> None:
    """Later commands find both."""
    started = machine.run("-c", START.format(SERVICE))
    assert started.returncode == 0, started.stderr
    head = json.loads((machine.root / "k" / f"ray-head-{SERVICE}.json").read_text())
    token = Path(head["token_path"])
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert f"RAY_AUTH_TOKEN_PATH={token}" in started.stderr
    assert started.stdout.split() == ["1", "True"], "the command that started it has joined it"
    assert not (machine.root / ".ray" / "auth_token").exists(), "the user's own token is the user's"

    certificates = Path(head["tls_dir"])
    assert stat.S_IMODE(certificates.stat().st_mode) == 0o700
    assert f"RAY_TLS_SERVER_CERT={certificates / 'server.crt'}" in started.stderr
    ca, certificate, key = ((certificates / name).read_bytes() for name in ("ca.crt", "server.crt", "server.key"))

    # As a driver's first question; Ray's own would try again for half a minute.
    for credentials in (None, grpc.ssl_channel_credentials(ca)):  # plaintext, and TLS without a certificate
        with open_channel(head["address"], credentials) as channel:
            ask = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo", None, None)
            with pytest.raises(grpc.RpcError) as refused:
                ask(b"", timeout=10, metadata=(("authorization", f"Bearer {token.read_text()}"),))
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    with open_channel(head["address"], grpc.ssl_channel_credentials(ca, key, certificate)) as channel:
        ask = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo", None, None)
        for given in ((), (("authorization", "Bearer wrong"),)):
            with pytest.raises(grpc.RpcError) as refused:
                ask(b"", timeout=10, metadata=given)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        ask(b"", timeout=10, metadata=(("authorization", f"Bearer {token.read_text()}"),))
    down = machine.kvservice("down", "--service", SERVICE)  # it joins Ray before it ends it
    assert down.returncode == 0 and "no Ray cluster" not in down.stderr, down.stderr
    assert not token.exists() and not certificates.exists() and not lifecycle._is_ray(head["pid"])


def runs(log: Path) -> bool:
    return "block forever" in log.read_text()


@pytest.mark.timeout(280)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_up_that_ends_while_ray_starts_leaves_no_ray(machine: Machine, number: signal.Signals) -> None:
    """Ctrl-C stops it; after a SIGKILL `down` does, also if that Ray has come so far that it refuses strangers."""
    up = machine.start("-m", "kvservice", "up", "--service", SERVICE, "--pool-bytes", "8MiB")
    eventually(lambda: any(machine.heads()), "Ray to start", 60)
    up.send_signal(number)
    code, begun = up.wait(60), True
    if number == signal.SIGINT:
        assert code == ExitCode.INTERRUPTED
    else:
        log = machine.root / "k" / f"ray-head-{SERVICE}.log"
        eventually(lambda: runs(log) or not any(machine.heads()), "Ray to run, or not to begin", 120)
        begun = runs(log)
        if begun:
            down = machine.kvservice("down", "--service", SERVICE)
            assert down.returncode == 0, down.stderr
    eventually(lambda: not any(machine.processes()), "all processes of Ray to end", 30)
    assert not (begun and list((machine.root / "k").iterdir()))


def test_a_ray_that_nobody_knows_of_does_not_start() -> None:
    """`up` was killed before it had noted which process it is, so `down` would not find it."""
    words = [sys.executable, "-c", lifecycle._RAY, "start", "--head", "--block"]
    ended = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1 and "does not start" in ended.stderr
