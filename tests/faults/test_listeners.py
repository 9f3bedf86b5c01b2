"""Every mode listens where it says, and nowhere else: what /proc says of all its processes.

On a host of its own, where network namespaces are allowed: a bridge's address is then there to listen at by mistake.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvservice.cli.certs import run as make_certificates
from kvservice.testing.cluster import free_port
from kvservice.testing.eventually import eventually
from kvservice.transfer.nixl import nixl_available
from tests.netns.hosts import RUNTIME_ROOT, Hosts, why_not

pytestmark = pytest.mark.faults

KVSERVICE = [sys.executable, "-c", "from kvservice.cli.main import app; app()"]
needs_nixl = pytest.mark.skipif(not nixl_available(), reason="needs NIXL")
SETTLE_SECONDS = 1.0  # a transport listens before the shard says that it serves; a thread of it may be later
EMBEDDED = """
import asyncio, sys
from kvservice.connector.options import ConnectorOptions
from kvservice.session.options import Mode
from kvservice.session.pool_choice import choose_pool
from tests.integration.engine import Engine, spec
async def main():
    choice = choose_pool(ConnectorOptions(mode=Mode.EMBEDDED, memory=32 << 20), spec())
    engine = await Engine.attach(await choice.open(), choice.spec)
    print("is ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    engine.let_go()
    await engine.pool.close()
asyncio.run(main())
"""


@dataclass(frozen=True)
class Place:
    """Where the processes run: a host of its own or this machine."""

    prefix: tuple[str, ...]
    address: str
    pid: int  # of a process that sees its network
    runtime: Path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    if why_not() is not None:
        yield Place((), "", os.getpid(), tmp_path_factory.mktemp("runtime"))
        return
    with Hosts() as (host, _):
        yield Place(tuple(host.prefix), host.address, host.pid, RUNTIME_ROOT / "kvs")


@contextlib.contextmanager
def started(place: Place, log: Path, command: list[str], ready: str, **environment: str) -> Iterator[int]:
    """The process id, once the word that it is ready was said; it has ended afterwards."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("KVSERVICE_T", "UCX_"))}
    variables = {**plain, "KVSERVICE_RUNTIME_DIR": str(place.runtime), **environment}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*place.prefix, *command], stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, env=variables
        )
    try:

        def is_ready() -> bool:
            assert process.poll() is None, log.read_text()
            return ready in log.read_text()

        eventually(is_ready, f"{ready!r} in its log", detail=log.read_text)
        time.sleep(SETTLE_SECONDS)
        yield process.pid
    finally:
        assert process.stdin is not None
        process.stdin.close()
        if EMBEDDED not in command:  # that one ends with its input
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, -signal.SIGTERM), log.read_text()


def listeners(pid: int) -> set[tuple[str, int]]:
    """(address, port) of every TCP listener of this process and its children, in the network that it sees."""
    own: set[str] = set()
    for one in [pid, *descendants(pid)]:
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{one}/fd").iterdir():
                with contextlib.suppress(OSError):
                    own.add(str(descriptor.readlink()))
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                digits, port = words[1].split(":")
                found.add((address_of(digits), int(port, 16)))
    return found


def address_of(digits: str) -> str:
    """'0100007F' is 127.0.0.1: words of four bytes, each the other way round."""
    words = [bytes.fromhex(digits[start : start + 8])[::-1] for start in range(0, len(digits), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def descendants(pid: int) -> list[int]:
    children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [one for child in children for one in (child, *descendants(child))]


def hosts_of(found: set[tuple[str, int]]) -> list[str]:
    return sorted(address for address, _ in found)


UP = [*KVSERVICE, "up", "--no-ray", "--pool-bytes", "32MiB"]
READY_UP = "runs on this machine"


@pytest.mark.parametrize(
    ("transport", "expected"),
    [("auto", []), ("shm", []), pytest.param("nixl", ["127.0.0.1"], marks=needs_nixl)],
)
def test_one_machine_has_no_port_but_ucx_on_loopback(
    place: Place, tmp_path: Path, transport: str, expected: list[str]
) -> None:
    name = f"l{os.getpid()}{transport}"
    command = [*UP, "--transport", transport, "--service", name]
    with started(place, tmp_path / "log", command, READY_UP) as pid:
        assert hosts_of(listeners(pid)) == expected


@pytest.mark.parametrize("transport", ["auto", pytest.param("nixl", marks=needs_nixl)])
def test_with_certificates_on_loopback_there_are_its_two_ports(place: Place, tmp_path: Path, transport: str) -> None:
    make_certificates(tmp_path / "tls", 1, renew=False)
    command = [*UP, "--transport", transport, "--service", f"c{os.getpid()}{transport}"]
    with started(place, tmp_path / "log", command, READY_UP, KVSERVICE_TLS_DIR=str(tmp_path / "tls")) as pid:
        assert hosts_of(listeners(pid)) == ["127.0.0.1"] * (3 if transport == "nixl" else 2)


@needs_nixl
def test_with_a_network_address_everything_is_there(place: Place, tmp_path: Path) -> None:
    if not place.address:
        pytest.skip(f"needs a host of its own: {why_not()}")
    make_certificates(tmp_path / "tls", 1, renew=False)
    ports = free_port(), free_port()
    tls = {"KVSERVICE_TLS_DIR": str(tmp_path / "tls"), "KVSERVICE_METRICS_PORT": str(ports[1])}
    name = f"n{os.getpid()}"
    command = [*KVSERVICE, "shard", "--node", "n0", "--host", place.address, "--port", str(ports[0])]
    command += ["--pool-bytes", "32MiB", "--service", name]
    with started(place, tmp_path / "log", command, "serves peers", **tls) as pid:
        found = listeners(pid)
        assert {(place.address, port) for port in ports} <= found
        assert hosts_of(found) == [place.address] * 3, "its peers, its metrics, and UCX"


def test_processes_of_one_machine_have_sockets(place: Place, tmp_path: Path) -> None:
    name = f"p{os.getpid()}"
    lookup = [*KVSERVICE, "lookup", "--lookup-partitions", "1", "--service", name]
    address = f"unix:{place.runtime}/{name}/lookup-0.sock"
    shard = [*KVSERVICE, "shard", "--node", "n0", "--pool-bytes", "32MiB", "--service", name, "--lookup", address]
    with (
        started(place, tmp_path / "lookup", lookup, f"serves {address}") as first,
        started(place, tmp_path / "shard", shard, "serves peers") as second,
    ):
        assert listeners(first) | listeners(second) == set()


def test_metrics_have_a_port_only_where_asked_for(place: Place, tmp_path: Path) -> None:
    port = free_port()
    command = [*KVSERVICE, "shard", "--node", "n0", "--pool-bytes", "32MiB", "--service", f"m{os.getpid()}"]
    with started(place, tmp_path / "log", command, "serves peers", KVSERVICE_METRICS_PORT=str(port)) as pid:
        assert listeners(pid) == {("127.0.0.1", port)}


def test_the_proxy_listens_at_its_own_port_alone(place: Place, tmp_path: Path) -> None:
    port = free_port()
    command = [*KVSERVICE, "proxy", "--decode", "http://127.0.0.1:9", "--port", str(port)]
    with started(place, tmp_path / "log", command, str(port)) as pid:
        assert listeners(pid) == {("127.0.0.1", port)}


def test_an_engine_with_a_pool_of_its_own_has_no_port(place: Place, tmp_path: Path) -> None:
    with started(place, tmp_path / "log", [sys.executable, "-c", EMBEDDED], "is ready") as pid:
        assert listeners(pid) == set()


def test_the_reader_of_proc_sees_every_listener(tmp_path: Path) -> None:
    """A check that cannot fail is none."""
    code = "import socket; a = socket.create_server(('0.0.0.0', 0)); b = socket.create_server(('::1', 0), "
    code += "family=socket.AF_INET6); print('is ready', flush=True); input()"
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=out)
    try:
        eventually(lambda: "is ready" in log.read_text() or process.poll() is not None, "a service that is ready")
        assert process.poll() is None
        assert hosts_of(listeners(process.pid)) == ["0.0.0.0", "::1"]
    finally:
        process.kill()
        process.communicate()
