"""Commands that look for a Ray cluster say soon that there is none. No cluster is started here."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from ray._private import services

from kvservice.actors import deploy, ray_auth, ray_port
from kvservice.cli import certs
from kvservice.errors import ConfigError, Unavailable
from tests.interruptible import interruptible

pytestmark = pytest.mark.ray
SOON = 10.0  # seconds; Ray itself goes on trying for more than a minute


def test_a_cluster_out_of_reach_does_not_hold_up_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray finds the clusters of this machine by their processes. One of another container cannot be reached."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: frozenset({"127.0.0.1:1"}))
    begun = time.monotonic()
    with pytest.raises(Unavailable, match="nothing listens there"):
        deploy.connect(None)
    assert time.monotonic() - begun < SOON


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of what takes connections and answers nothing, as a Ray that hangs."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield server.getsockname()[1]


def test_a_cluster_that_does_not_answer_is_named_soon(silent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_port, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(ray_port, "CONNECT_SECONDS", 0.5)
    monkeypatch.delenv(ray_auth.USE_TLS, raising=False)
    with pytest.raises(ConfigError, match="does not answer as a Ray cluster"):
        deploy.connect(f"127.0.0.1:{silent}")


def test_a_cluster_with_tls_is_told_from_one_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In both directions."""
    monkeypatch.setattr(ray_port, "ANSWER_SECONDS", 1.0)
    monkeypatch.delenv(ray_auth.USE_TLS, raising=False)
    certs.for_ray(tmp_path / "tls", "127.0.0.1")
    files = {name: (tmp_path / "tls" / file).read_bytes() for name, file in ray_auth.TLS_FILES.items()}
    certificate, key, authority = files.values()
    server = grpc.server(ThreadPoolExecutor(1))
    credentials = grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True)
    encrypted = server.add_secure_port("127.0.0.1:0", credentials)
    plain = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        ray_port.check_answers("127.0.0.1", plain)
        with pytest.raises(ConfigError, match="asks for TLS: set RAY_USE_TLS=1"):
            ray_port.check_answers("127.0.0.1", encrypted)
        for name, value in ray_auth.tls_variables(tmp_path / "tls").items():
            monkeypatch.setenv(name, value)
        ray_port.check_answers("127.0.0.1", encrypted)
        with pytest.raises(ConfigError, match="set RAY_USE_TLS=0 if it has no TLS"):
            ray_port.check_answers("127.0.0.1", plain)
    finally:
        server.stop(None).wait()


def test_tls_without_its_files_is_named(silent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ray_auth.TLS_FILES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(ray_auth.USE_TLS, "1")
    with pytest.raises(ConfigError, match=r"RAY_USE_TLS=1 needs RAY_TLS_SERVER_CERT, .* too"):
        ray_port.check_answers("127.0.0.1", silent)


def test_ctrl_c_ends_up_beside_a_cluster_that_does_not_answer(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "kvservice", "up", "--pool-bytes", "16MiB", "--address"]
    variables = {**os.environ, "KVSERVICE_RUNTIME_DIR": str(tmp_path)}
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        words.append(f"127.0.0.1:{server.getsockname()[1]}")
        with subprocess.Popen(interruptible(words), env=variables, stderr=subprocess.PIPE, text=True) as process:
            for _ in range(2):  # the first connection looks whether anything listens
                server.accept()
            process.send_signal(signal.SIGINT)
            assert process.wait(SOON) == 130
            assert process.stderr is not None and "Traceback" not in process.stderr.read()
