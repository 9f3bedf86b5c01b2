"""Other users of the machine: whoever is first in a directory, listens at a socket or reaches a port gets nothing."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvservice import discovery
from kvservice.client.shard import ShardClient
from kvservice.config import ServiceConfig
from kvservice.connector.options import ConnectorOptions
from kvservice.discovery import ShardRecord, choose_shard, find_shards, write_record
from kvservice.errors import ConfigError, SegmentError, Unavailable
from kvservice.memory.segment import open_private, segment_path
from kvservice.private_files import check_directory, check_socket_path, is_listening, make_directory
from kvservice.session.pool_choice import choose_pool
from kvservice.shard.server import ShardServer
from kvservice.shard.server_config import ShardServerConfig
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually_async
from kvservice.transfer.nixl import nixl_available
from kvservice.units import BootEpoch, MiB, NodeId
from tests.faults import other_user
from tests.faults.other_user import ANOTHER
from tests.integration.engine import Engine, attached, chain, spec

pytestmark = pytest.mark.faults

two_users = pytest.mark.skipif(other_user.why_not() is not None, reason=str(other_user.why_not()))
NAMED = rf"uid {ANOTHER}\b"
# A record and a listener, as a shard has them, made by whoever runs this.
SQUAT = """
root = pathlib.Path(sys.argv[1]); node = root / "default" / "n0"; os.umask(0); node.mkdir(parents=True)
listener = socket.socket(socket.AF_UNIX); listener.bind(str(node / "shard.sock")); listener.listen()
(node / "shard.json").write_text(json.dumps(dict(service="default", node_id="n0", socket=str(node / "shard.sock"),
    peer_address="127.0.0.1:1", pid=1, epoch=1, lookup_addresses=[])))
print("ready", flush=True)
listener.settimeout(60)
try:
    while True:
        connection, _ = listener.accept()
        connection.settimeout(1)
        print("got", connection.recv(100), flush=True)
except OSError:
    pass
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory where everybody may make entries, as /tmp."""
    path = Path(tempfile.mkdtemp(prefix="kvt-"))
    path.chmod(0o1777)
    try:
        yield path
    finally:
        shutil.rmtree(path)


def config(root: Path, name: str = "squat") -> ShardServerConfig:
    settings = ServiceConfig(service=name, pool_bytes=8 * MiB, runtime_dir=str(root), slab_bytes=MiB, transport="shm")
    return ShardServerConfig(settings, NodeId("n0"), segment_dir=root.parent)


# -- whoever comes first ----


@two_users
async def test_a_squatter_is_refused_by_name_and_hears_nothing(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = shared / "kvservice"
    squatter = other_user.start("import json, os, pathlib, socket, sys", SQUAT, str(root))
    try:
        assert squatter.stdout is not None and squatter.stdout.readline() == "ready\n"
        monkeypatch.setenv("KVSERVICE_RUNTIME_DIR", str(root))
        for look in (choose_shard, find_shards, lambda: choose_pool(ConnectorOptions(), spec())):
            with pytest.raises(ConfigError, match=NAMED):
                look()
        with pytest.raises(ConfigError, match=NAMED):
            await ShardServer(config(root)).start()
        named = choose_pool(ConnectorOptions(socket=str(root / "default/n0/shard.sock")), spec())
        with pytest.raises(Unavailable, match=NAMED):
            await named.open()
        assert not list(root.glob("squat*")), "nothing of ours was put there"
    finally:
        squatter.kill()
        heard, _ = squatter.communicate(timeout=30)
    assert set(heard.splitlines()) <= {"got b''"}, "he was connected to, to ask the kernel who he is, and told nothing"


@two_users
@pytest.mark.parametrize("place", ["service", "node", "record", "link", "parent"])
def test_every_component_and_the_record_belong_to_us(shared: Path, place: str) -> None:
    shared.chmod(0o755)
    root = shared / "root"
    record = ShardRecord("default", NodeId("n0"), "/x.sock", "unix:/y.sock", 1, BootEpoch(1))
    write_record(record, root)
    assert find_shards("default", root, live_only=False) == [record]
    foreign = {
        "service": root / "default",
        "node": root / "default/n0",
        "record": root / "default/n0/shard.json",
        "link": shared / "link",
        "parent": shared,
    }[place]
    if place == "link":
        foreign.symlink_to(root)
    os.chown(foreign, ANOTHER, -1, follow_symlinks=False)
    with pytest.raises(ConfigError, match=NAMED):
        find_shards("default", foreign if place == "link" else root, live_only=False)


@pytest.mark.parametrize(
    ("mode", "fine"), [(0o755, True), (0o700, True), (0o1777, True), (0o777, False), (0o757, False)]
)
def test_a_directory_others_can_write_must_be_sticky(tmp_path: Path, mode: int, fine: bool) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()
    parent.chmod(mode)
    for check in (check_directory, make_directory):
        if fine:
            check(parent / "root" / "default")
        else:
            with pytest.raises(ConfigError, match=r"other users can write .*parent"):
                check(parent / "root" / "default")
    assert (parent / "root").exists() == fine
    for made in (parent / "root", parent / "root" / "default") if fine else ():
        assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_a_record_that_others_can_write_is_refused(tmp_path: Path) -> None:
    record = ShardRecord("default", NodeId("n0"), "/x.sock", "unix:/y.sock", 1, BootEpoch(1))
    path = write_record(record, tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="others can write"):
        find_shards("default", tmp_path, live_only=False)


@two_users
def test_a_segment_of_another_user_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(b"")
    os.chown(path, ANOTHER, -1)
    with pytest.raises(SegmentError, match=NAMED):
        open_private(path, os.O_RDWR | os.O_CREAT)


@two_users
@pytest.mark.parametrize(
    ("what", "advice"),
    [("segment", f"belongs to uid {os.getuid()} "), ("directory", "set KVSERVICE_RUNTIME_DIR to a directory of your")],
)
def test_who_is_refused_at_a_users_files_hears_what_to_do(shared: Path, what: str, advice: str) -> None:
    """The files may not even be looked at: it ended with a traceback, and with a bare "Permission denied"."""
    root = shared / "kvservice"
    node = root / "default" / "n0"
    make_directory(node)
    segment = segment_path("default", NodeId("n0"), shared)
    segment.touch(0o600)
    if what == "segment":
        root = shared / "of_his_own"
    else:
        root.chmod(0o755)
        segment.unlink()
    imports = "from kvservice.cli.main import app; import kvservice.shard.process, kvservice.config"
    imports += "; import kvservice.shard.server, kvservice.transfer.mapped, kvservice.cli.processes"
    words = ["shard", "--node", "n0", "--pool-bytes", "8MiB", "--transport", "shm", "--runtime-dir", str(root)]
    said = other_user.output(imports, "app()", *words, "--segment-dir", str(shared))
    assert "Traceback" not in said and advice in said, said


@two_users
def test_no_default_can_be_taken_by_another_user(tmp_path: Path) -> None:
    """Neither below /tmp, where anybody is first, nor below /run/user, which goes at logout."""
    variables = "os.environ.pop('KVSERVICE_RUNTIME_DIR', 0); os.environ.pop('XDG_STATE_HOME', 0)\n"
    ask = variables + "os.environ['HOME'] = '/home/x'\nprint(discovery.default_runtime_root())"
    found = other_user.output("import os; from kvservice import discovery", ask)
    assert found == "/home/x/.local/state/kvservice\n"
    stated = f"os.environ['XDG_STATE_HOME'] = {str(tmp_path)!r}\nprint(discovery.default_runtime_root())"
    found = other_user.output("import os; from kvservice import discovery", variables + stated)
    assert found == f"{tmp_path}/kvservice\n"


def test_root_has_a_directory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSERVICE_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert discovery.default_runtime_root() == Path("/run/kvservice")


def test_a_socket_path_that_is_too_long_is_said_with_what_to_do(tmp_path: Path) -> None:
    fits = "/" + "x" * 106
    check_socket_path(fits)
    with socket.socket(socket.AF_UNIX) as probe:
        with pytest.raises(OSError, match=r"No such file|too long"):
            probe.connect(fits)
        with pytest.raises(OSError, match="too long"):
            probe.connect(fits + "x")
    for call in (discovery.shard_socket, discovery.rpc_socket):
        with pytest.raises(ConfigError, match=r"at most 107.*KVSERVICE_RUNTIME_DIR to a short path"):
            call("default", NodeId("n"), tmp_path / ("x" * 100))


# -- a running service without TLS ----


PROBE = """
for address in sys.argv[1:]:
    with grpc.insecure_channel(address) as channel:
        for call, request in (
            (lookup_pb2_grpc.LookupServiceStub(channel).LookupStats, lookup_pb2.LookupStatsRequest()),
            (shard_pb2_grpc.PeerServiceStub(channel).Handshake, shard_pb2.HandshakeRequest(protocol_version=1)),
            (shard_pb2_grpc.AdminServiceStub(channel).Drain, shard_pb2.DrainRequest(timeout_seconds=1, exit=True)),
            (shard_pb2_grpc.AdminServiceStub(channel).Stats, shard_pb2.StatsRequest()),
            (health_pb2_grpc.HealthStub(channel).Check, health_pb2.HealthCheckRequest()),
        ):
            try:
                call(request, timeout=5)
                print("ANSWERED", address)
            except grpc.RpcError as error:
                print("refused", error.details())
"""
IMPORTS = """
import os, sys
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvservice.wire.v1 import lookup_pb2, lookup_pb2_grpc, shard_pb2, shard_pb2_grpc
"""


@two_users
@pytest.mark.parametrize(
    "transport",
    ["shm", pytest.param("nixl", marks=pytest.mark.skipif(not nixl_available(), reason="needs NIXL"))],
)
async def test_another_user_reads_nothing_and_ends_nothing(transport: str) -> None:
    with LocalCluster(nodes=1, lookup_partitions=1, pool_bytes=16 * MiB, transport=transport) as cluster:
        engine = await Engine.attach(ShardClient(cluster.socket("n0")))
        keys = chain(3, 32)
        await engine.store(keys)
        cluster.wait_until_known(keys)
        record = cluster.record("n0")
        addresses = (cluster.lookup_addresses[0], record.peer_address, f"unix:{record.socket}")
        said = other_user.output(IMPORTS, PROBE, *addresses).splitlines()
        assert len(said) == 15 and all(line.startswith("refused") for line in said), said
        assert sum("Permission denied" in line for line in said) == 15, said
        files = (engine.attachment.segment_path, record.socket, str(cluster.root / cluster.service))
        tried = "for path in sys.argv[1:]:\n try: os.stat(path); open(path, 'rb'); print('OPENED')\n except OSError as"
        said = other_user.output("import os, sys", f"{tried} error: print(error.strerror)", *files).splitlines()
        assert said == ["Permission denied"] * 3
        assert cluster.accounting("n0").balanced
        assert (await engine.read_all(keys)).blocks
        engine.let_go()


@pytest.mark.skipif(not nixl_available(), reason="needs NIXL")
def test_ucx_listens_where_the_service_does_unless_set(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvservice.transfer.nixl import DEVICES_VARIABLE, ucx_devices_of

    monkeypatch.delenv(DEVICES_VARIABLE, raising=False)
    for host in ("127.0.0.1", "::1", "localhost"):
        with ucx_devices_of(host):
            assert os.environ[DEVICES_VARIABLE] == "lo"
        assert DEVICES_VARIABLE not in os.environ
    with ucx_devices_of("0.0.0.0"):
        assert DEVICES_VARIABLE not in os.environ, "a service on every interface"
    monkeypatch.setenv(DEVICES_VARIABLE, "mlx5_0:1")
    with ucx_devices_of("127.0.0.1"):
        assert os.environ[DEVICES_VARIABLE] == "mlx5_0:1", "the operator knows better"


# -- the directory goes ----


async def test_a_removed_runtime_directory_is_made_again() -> None:
    """It is there again within a heartbeat."""
    with LocalCluster(nodes=2, lookup_partitions=1, pool_bytes=16 * MiB) as cluster:
        engine = await Engine.attach(ShardClient(cluster.socket("n0")))
        keys = chain(5, 16)
        await engine.store(keys)
        cluster.wait_until_known(keys)
        before = cluster.record("n0")
        secret = (cluster.root / cluster.service / "n0" / "secret").read_bytes()
        for _ in range(2):
            shutil.rmtree(cluster.root / cluster.service)
            await eventually_async(lambda: len(find_shards(cluster.service, cluster.root)) == 2, "records and sockets")
            assert cluster.record("n0") == before, "the same boot, at the same place"
            assert (cluster.root / cluster.service / "n0" / "secret").read_bytes() == secret
            assert stat.S_IMODE((cluster.root / cluster.service / "n0").stat().st_mode) == 0o700
        await eventually_async(
            lambda: is_listening(cluster.lookup_addresses[0].removeprefix("unix:")), "the lookup partition"
        )
        assert cluster.stats("n0").counters["runtime_files_remade"] >= 2
        assert not engine.lost, "who was attached stays so"
        assert (await engine.read_all(keys)).blocks
        other = await attached(cluster.socket("n1"))

        async def all_read() -> bool:
            return len((await other.read_all(keys)).blocks) == len(keys)

        await eventually_async(all_read, "n1 to reach n0 again: gRPC tries a lost peer after a pause")
        for one in (engine, other):
            await one.pool.close()
            one.let_go()
