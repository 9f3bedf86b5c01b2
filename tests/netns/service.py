"""The service on hosts of their own, without Ray: a lookup shard and a cache shard on each, as processes."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.netns.hosts import RUNTIME_ROOT, Host, wait_for

SERVICE = "netns"
LOOKUP_PORT = 7400


def socket_on(index: int) -> str:
    """The socket of the shard of host `index`, as that host sees it."""
    return str(RUNTIME_ROOT / SERVICE / f"host{index}" / "shard.sock")


def lookup_addresses(hosts: Sequence[Host]) -> list[str]:
    return [f"{host.address}:{LOOKUP_PORT}" for host in hosts]


@contextlib.contextmanager
def running(hosts: Sequence[Host], logs: Path, *options: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """`options` go to the shards. Yields the lookup shard and the cache shard of the first host, then of the next."""
    processes: list[subprocess.Popen[bytes]] = []
    lookups = lookup_addresses(hosts)
    try:
        for index, host in enumerate(hosts):
            lookup = [sys.executable, "-m", "kvservice.lookup", "--bind", lookups[index], "--partition", str(index)]
            processes.append(host.run([*lookup, "--partition-count", str(len(hosts))], logs / f"lookup{index}.log"))
            shard = [sys.executable, "-m", "kvservice.shard", "--service", SERVICE, "--node", f"host{index}"]
            shard += ["--host", host.address, "--transport", "nixl", "--runtime-root", str(RUNTIME_ROOT), *options]
            shard += [word for address in lookups for word in ("--lookup", address)]
            environment = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": host.device}
            processes.append(host.run(shard, logs / f"shard{index}.log", **environment))
        for index, host in enumerate(hosts):
            log = logs / f"shard{index}.log"
            wait_for(lambda log=log: "serves peers" in log.read_text(), f"shard on {host.address}", log)
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)
