"""The service on a real Ray cluster whose nodes have IPv6 addresses only."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvservice.cli import check
from kvservice.discovery import find_shards
from kvservice.testing.cluster import free_port
from kvservice.units import MiB
from tests.integration.certificates import write
from tests.ray_nodes import ray_nodes

SERVICE = "six"


def address_of_machine() -> str:
    """Not that of loopback, at which Ray starts no cluster; "" if it has none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            address = ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))
            if not (address.is_loopback or address.is_link_local):
                return str(address)
    return ""


HOST = address_of_machine()
pytestmark = [pytest.mark.ray, pytest.mark.skipif(not HOST, reason="the machine has no IPv6 address")]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kv6-") as folder:
        monkeypatch.setenv("KVSERVICE_RUNTIME_DIR", folder)
        monkeypatch.setenv("KVSERVICE_TLS_DIR", str(write(Path(folder) / "tls")))
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        yield Path(folder)


@pytest.mark.timeout(280)
def test_nodes_with_ipv6_addresses_get_shards(runtime: Path) -> None:
    node = {"num_cpus": 1, "object_store_memory": 80 * MiB, "node_ip_address": HOST}
    port = free_port()
    with ray_nodes(node) as cluster:

        def kvservice(*words: str) -> None:
            command = [sys.executable, "-m", "kvservice", *words, "--service", SERVICE, "--address", cluster.address]
            ended = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=150)
            assert ended.returncode == 0, ended.stderr

        kvservice("up", "--pool-bytes", "32MiB", "--lookup-partitions", "1", "--metrics-port", str(port))
        (shard,) = find_shards(SERVICE)
        assert shard.peer_address.startswith(f"[{HOST}]:") and shard.lookup_addresses[0].startswith(f"[{HOST}]:")
        with urllib.request.urlopen(f"http://[{HOST}]:{port}/readyz", timeout=10) as reply:
            assert reply.status == 200
        metrics = f"[{HOST}]:{port}"
        assert check._ask_metrics({metrics: check._endpoint(metrics)}, 1)[0] == []
        kvservice("down")
        assert not find_shards(SERVICE, live_only=False)
