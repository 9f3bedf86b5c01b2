"""Two hosts on one machine: network namespaces on a bridge, each with its own /dev/shm and its own runtime directory.

Nothing is shared between them but the read-only program files, so a test that passes here relies neither on loopback
nor on a common file system.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

RUNTIME_ROOT = Path("/run/kvs-host")
_numbers = itertools.count()


def why_not() -> str | None:
    """Reason this machine cannot make network namespaces, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("nsenter") is None or shutil.which("unshare") is None:
        return "iproute2 and util-linux are not installed"
    probe = f"kvsprobe{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode:
        return "this kernel or container does not permit network namespaces"
    subprocess.run(["ip", "netns", "del", probe], check=False)
    return None


class Host:
    def __init__(self, namespace: str, address: str, device: str, outer: str) -> None:
        self.namespace = namespace
        self.address = address
        self.outer = outer
        self.device = device
        mounts = f"mount -t tmpfs -o size=2g tmpfs /dev/shm && mount -t tmpfs tmpfs {RUNTIME_ROOT}"
        self._anchor = subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                namespace,
                "unshare",
                "--mount",
                "--propagation",
                "private",
                "sh",
                "-c",
                f"{mounts} && echo ok && exec sleep infinity",
            ],
            stdout=subprocess.PIPE,
        )
        assert self._anchor.stdout is not None
        assert self._anchor.stdout.readline() == b"ok\n", "the host's file systems could not be mounted"

    @property
    def prefix(self) -> list[str]:
        """Put before a command to run it on this host."""
        return ["nsenter", "--target", str(self._anchor.pid), "--net", "--mount", "--wd=" + str(Path.cwd())]

    @property
    def pid(self) -> int:
        """A process that sees what processes on this host see."""
        return self._anchor.pid

    def run(self, command: Sequence[str], log: Path, **environment: str) -> subprocess.Popen[bytes]:
        with log.open("ab") as out:
            return subprocess.Popen(
                [*self.prefix, *command], stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **environment}
            )

    def output(self, command: Sequence[str]) -> str:
        return subprocess.run([*self.prefix, *command], capture_output=True, text=True, check=True).stdout

    def stop(self) -> None:
        self._anchor.kill()
        self._anchor.wait()


class Hosts:
    """`with Hosts() as (a, b):` two hosts, 10.77.<n>.1 and .2, that reach each other over a bridge."""

    def __init__(self) -> None:
        # The kernel takes a namespace and its devices away some time after it is deleted: names are used once.
        number = os.getpid() * 8 + next(_numbers) % 8
        self._tag = f"{number % 100_000}"
        self._net = f"10.77.{number % 250}"
        self._bridge = f"kvsb{self._tag}"
        self._hosts: list[Host] = []

    def __enter__(self) -> tuple[Host, Host]:
        RUNTIME_ROOT.mkdir(exist_ok=True)
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("link", "set", self._bridge, "up")
        for index in (1, 2):
            namespace, outer, inner = f"kvsn{self._tag}{index}", f"kvsv{self._tag}{index}", f"kvse{index}"
            _ip("netns", "add", namespace)
            _ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", namespace)
            _ip("link", "set", outer, "master", self._bridge, "up")
            _ip("-n", namespace, "addr", "add", f"{self._net}.{index}/24", "dev", inner)
            _ip("-n", namespace, "link", "set", inner, "up")
            _ip("-n", namespace, "link", "set", "lo", "up")
            self._hosts.append(Host(namespace, f"{self._net}.{index}", inner, outer))
        return self._hosts[0], self._hosts[1]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in self._hosts:
            host.stop()
            for pid in _ip("netns", "pids", host.namespace, check=False).split():
                os.kill(int(pid), signal.SIGKILL)
            _ip("link", "del", host.outer, check=False)
            _ip("netns", "del", host.namespace, check=False)
        _ip("link", "del", self._bridge, check=False)


def link(device: str, state: str) -> None:
    """Set a device of the outer namespace `up` or `down`, as a cable that is pulled."""
    _ip("link", "set", device, state)


def _ip(*words: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert not check or done.returncode == 0, f"ip {' '.join(words)}: {done.stderr.strip()}"
    return done.stdout
