"""The main job between two hosts with addresses of their own: what replica A computed is a remote hit at replica B."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvservice.transfer.nixl import nixl_available
from tests.integration.certificates import write
from tests.netns.hosts import RUNTIME_ROOT, Host, Hosts, wait_for, why_not
from tests.vllm.replica import Replica, close_all

REASON = why_not() or (None if nixl_available() else "NIXL is not installed")
pytestmark = [
    pytest.mark.netns,
    pytest.mark.vllm,
    pytest.mark.nixl,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

TOKEN_BYTES = 30 * 3 * 2 * 64 * 4  # layers, kv heads, K and V, head size, float32
PROMPT = "The lighthouse keeper writes in the log every evening what the sea was like. " * 60 + "Tonight the sea was"


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with Hosts() as pair:
        yield pair


def start_service(hosts: tuple[Host, Host], logs: Path) -> list[subprocess.Popen[bytes]]:
    """A lookup shard on each host and a cache shard on each host, as `python -m` processes."""
    lookups = [f"{host.address}:7400" for host in hosts]
    processes: list[subprocess.Popen[bytes]] = []
    tls = {"KVSERVICE_TLS_DIR": str(write(logs / "tls"))}
    for index, host in enumerate(hosts):
        lookup = [sys.executable, "-m", "kvservice.lookup", "--bind", lookups[index], "--partition", str(index)]
        processes.append(host.run([*lookup, "--partition-count", "2"], logs / f"lookup{index}.log", **tls))
        shard = [sys.executable, "-m", "kvservice.shard", "--service", "netns", "--node", f"host{index}"]
        shard += [
            "--pool",
            "256MiB",
            "--host",
            host.address,
            "--transport",
            "nixl",
            "--runtime-root",
            str(RUNTIME_ROOT),
        ]
        shard += [word for address in lookups for word in ("--lookup", address)]
        environment = {**tls, "UCX_TLS": "tcp", "UCX_NET_DEVICES": host.device}
        processes.append(host.run(shard, logs / f"shard{index}.log", **environment))
    for index, host in enumerate(hosts):
        log = logs / f"shard{index}.log"
        wait_for(lambda log=log: "serves peers" in log.read_text(), f"shard on {host.address}", log)
    return processes


def received_bytes(host: Host) -> int:
    return int(host.output(["cat", f"/sys/class/net/{host.device}/statistics/rx_bytes"]))


def test_prefix_computed_on_one_host_is_a_remote_hit_on_the_other(
    hosts: tuple[Host, Host], tmp_path: Path, model_path: Path
) -> None:
    processes = start_service(hosts, tmp_path)
    replicas: list[Replica] = []
    try:
        for index, host in enumerate(hosts):
            socket = str(RUNTIME_ROOT / "netns" / f"host{index}" / "shard.sock")
            extra: dict[str, object] = {"mode": "service", "socket": socket}
            replicas.append(Replica(model_path, extra, tmp_path / f"replica{index}.log", host.pid))
        a, b = (replica.ready() for replica in replicas)
        cold = a.ask(PROMPT)
        before = received_bytes(hosts[1])
        warm = b.ask(PROMPT)
        crossed = received_bytes(hosts[1]) - before
        assert warm["token_ids"] == cold["token_ids"]
        assert warm["cached_tokens"] >= 600, f"no remote hit: {warm}"
        assert crossed >= warm["cached_tokens"] * TOKEN_BYTES, "the blocks did not cross the wire"
    finally:
        close_all(replicas)
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(15)
