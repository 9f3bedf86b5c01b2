"""The service on hosts of their own, without Ray: a lookup partition and a cache shard on each, as processes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from kvservice.core.segment.geometry import CONTROL_BYTES, SCRATCH_BYTES
from kvservice.testing.eventually import eventually
from tests.integration.certificates import write
from tests.netns.hosts import RUNTIME_ROOT, Host

SERVICE = "netns"
LOOKUP_PORT = 7400
READY = "serves peers"


def socket_on(index: int) -> str:
    """The socket of the shard of host `index`, as that host sees it."""
    return str(RUNTIME_ROOT / SERVICE / f"host{index}" / "shard.sock")


class Service:
    """`with Service(hosts, logs, "--pool-bytes", "64MiB"):` the options go to the shards."""

    def __init__(self, hosts: Sequence[Host], logs: Path, *options: str) -> None:
        self.hosts = hosts
        self._logs = logs
        self._options = options
        self._environment = {
            "KVSERVICE_TLS_DIR": str(write(logs / "tls")),
            "KVSERVICE_SERVICE": SERVICE,
            "KVSERVICE_RUNTIME_DIR": str(RUNTIME_ROOT),
        }
        self._lookups = [f"{host.address}:{LOOKUP_PORT}" for host in hosts]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._shards: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Service:
        try:
            for index, host in enumerate(self.hosts):
                lookup = ["--host", host.address, "--port", str(LOOKUP_PORT), "--partition", str(index)]
                lookup += ["--lookup-partitions", str(len(self.hosts))]
                command = [sys.executable, "-m", "kvservice", "lookup", *lookup]
                self._processes.append(host.run(command, self._logs / f"lookup{index}.log", **self._environment))
                self._start(index)
            for index in range(len(self.hosts)):
                self._wait(index, 1)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(30)

    def ports(self) -> list[int]:
        """Where lookup partitions and shards take calls."""
        found = [re.findall(r"serves peers at \S+:(\d+)", self._log(index).read_text()) for index in self._shards]
        return [LOOKUP_PORT, *(int(ports[-1]) for ports in found)]

    def kill_shard(self, index: int) -> None:
        self._shards[index].kill()
        self._shards[index].wait()

    def start_shard(self, index: int) -> None:
        """Again, after its end. Blocks until it serves."""
        times = self._log(index).read_text().count(READY)
        self._start(index)
        self._wait(index, times + 1)

    def damage(self, index: int, seed: int, count: int = 200) -> None:
        """Flip this many bits in what the slabs of a host's segment hold, payloads and headers."""
        root = Path(f"/proc/{self.hosts[index].pid}/root/dev/shm")
        (path,) = (path for path in root.glob(f"kvservice-{SERVICE}-*") if not path.name.endswith("~mirror"))
        memory = np.memmap(path, np.uint8, "r+", CONTROL_BYTES + SCRATCH_BYTES)
        draw = np.random.default_rng(seed)
        places = draw.integers(0, memory.size, 50 * count)
        places = places[memory[places] != 0][:count]
        memory[places] ^= (1 << draw.integers(0, 8, places.size)).astype(np.uint8)

    def _start(self, index: int) -> None:
        host = self.hosts[index]
        shard = [sys.executable, "-m", "kvservice", "shard", "--node", f"host{index}", "--host", host.address]
        shard += ["--transport", "nixl", *self._options]
        shard += [word for address in self._lookups for word in ("--lookup", address)]
        environment = {**self._environment, "UCX_TLS": "tcp"}
        self._shards[index] = host.run(shard, self._log(index), **environment)
        self._processes.append(self._shards[index])

    def _wait(self, index: int, times: int) -> None:
        log = self._log(index)
        eventually(
            lambda: log.read_text().count(READY) >= times,
            f"shard on {self.hosts[index].address}",
            detail=lambda: log.read_text(errors="replace")[-2000:],
        )

    def _log(self, index: int) -> Path:
        return self._logs / f"shard{index}.log"
