"""Every TCP listener behind real certificates: who gets in, who does not and how that is said, and rotation while
everything runs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.testing import CliRunner, Result

from kvservice.auth import tls as wire_tls
from kvservice.auth.tls import TlsFiles, open_blocking_channel, open_channel
from kvservice.cli import doctor, explain, status
from kvservice.cli.doctor_check import PROBLEM
from kvservice.cli.exits import ExitCode
from kvservice.cli.main import app
from kvservice.client.channels import Channels
from kvservice.client.engine_stats import EngineStatsReader
from kvservice.client.overview import gather_overview
from kvservice.client.peer import PeerClient
from kvservice.client.shard import ShardClient
from kvservice.config import ServiceConfig
from kvservice.core.actions import Locate
from kvservice.core.messages import AcquireResult, Holder, MissReason, SealStatus
from kvservice.errors import ConfigError, Unavailable
from kvservice.lookup.client import LookupClient
from kvservice.lookup.server import LookupServer
from kvservice.observe.endpoint import serve_endpoint
from kvservice.shard.server import ShardServer
from kvservice.shard.server_config import ShardServerConfig
from kvservice.testing.cluster import LocalCluster, free_port
from kvservice.testing.eventually import eventually_async
from kvservice.units import BootEpoch, MiB, NodeId
from kvservice.wire.v1 import lookup_pb2, lookup_pb2_grpc, shard_pb2, shard_pb2_grpc
from kvservice.wire.versions import PROTOCOL_VERSION
from tests.integration.certificates import AUTHORITY, STRANGER, write
from tests.integration.engine import Engine, chain

NODE = NodeId("n0")
CALL_SECONDS = 5.0
KEYS = chain(seed=7, count=4)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return write(tmp_path / "tls")


@asynccontextmanager
async def one_lookup(directory: Path | None) -> AsyncIterator[str]:
    server = LookupServer("127.0.0.1:0", tls_dir=str(directory or ""), allow_plaintext=directory is None)
    try:
        yield await server.start()
    finally:
        await server.stop(0)


@asynccontextmanager
async def one_shard(root: Path, directory: Path | None, *lookups: str) -> AsyncIterator[Holder]:
    server = ShardServer(
        ShardServerConfig(
            ServiceConfig(
                service=f"tls{root.name[:16]}",
                pool_bytes=8 * MiB,
                slab_bytes=1 * MiB,
                transport="shm",
                runtime_dir=str(root),
                heartbeat_seconds=0.1,
                tls_dir=str(directory or ""),
                allow_plaintext=directory is None,
            ),
            NODE,
            lookups,
            segment_dir=root,
        )
    )
    holder = await server.start()
    try:
        yield holder
    finally:
        await server.stop()


async def resolve(address: str, files: TlsFiles | None) -> None:
    """One call on a channel of its own. Raises grpc.aio.AioRpcError."""
    async with open_channel(address, files) as channel:
        stub = lookup_pb2_grpc.LookupServiceStub(channel)
        await stub.Resolve(lookup_pb2.ResolveRequest(keys=b"".join(KEYS)), timeout=CALL_SECONDS)


# -- who gets in ----


async def test_a_client_with_a_certificate_reaches_everything(files: Path, tmp_path: Path) -> None:
    tls = TlsFiles(files)
    async with one_lookup(files) as lookup, one_shard(tmp_path, files, lookup) as holder:
        asking, peers, reader = (
            LookupClient([lookup], tls=tls),
            PeerClient("shm", NodeId("b"), tls=tls),
            EngineStatsReader(tls),
        )
        await eventually_async(lambda: asking.members(CALL_SECONDS), "the announcement of the shard, over TLS too")
        assert (await asking.resolve(KEYS, 0, CALL_SECONDS)).complete
        assert (await peers.handshake(holder, CALL_SECONDS)).epoch == holder.epoch
        located = await peers.locate(Locate(0, holder, KEYS, CALL_SECONDS))
        assert located.handles == (None,) * len(KEYS)
        assert (await peers.room(holder, CALL_SECONDS)).holder == holder
        assert set(await reader.read([lookup], CALL_SECONDS) or {}) == {NODE}
        async with open_channel(lookup, tls) as channel:
            watch = lookup_pb2_grpc.LookupServiceStub(channel).Watch(
                lookup_pb2.WatchRequest(protocol_version=PROTOCOL_VERSION), timeout=CALL_SECONDS
            )
            assert (await watch.read()).node.node_id == NODE
        for address in (lookup, holder.peer_address):
            async with open_channel(address, tls) as channel:
                reply = await health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(service="ready"), timeout=CALL_SECONDS
                )
                assert reply.status == health_pb2.HealthCheckResponse.SERVING

        def stats() -> str:
            with open_blocking_channel(holder.peer_address, tls) as channel:
                stub = shard_pb2_grpc.AdminServiceStub(channel)
                return str(stub.Stats(shard_pb2.StatsRequest(), timeout=CALL_SECONDS).node.node_id)

        assert await asyncio.to_thread(stats) == NODE
        for client in (asking, peers, reader):
            await client.close()


async def test_nobody_else_is_accepted(files: Path, tmp_path: Path) -> None:
    """Neither on a lookup partition nor on a cache shard, with whatever they show."""
    good = TlsFiles(files).current()[1]
    expired, stranger = write(tmp_path / "e", days=-1), write(tmp_path / "s", issuer=STRANGER, trusted=STRANGER.pem)
    read = {path: [(path / name).read_bytes() for name in ("tls.key", "tls.crt")] for path in (expired, stranger)}
    shown = {
        "nothing": grpc.ssl_channel_credentials(good.authority),
        "an expired certificate": grpc.ssl_channel_credentials(good.authority, *read[expired]),
        "a certificate of another CA": grpc.ssl_channel_credentials(good.authority, *read[stranger]),
        "plaintext": None,
    }
    options = [("grpc.ssl_target_name_override", wire_tls.SERVER_NAME)]
    async with one_lookup(files) as lookup, one_shard(tmp_path / "shard", files) as holder:
        for address in (lookup, holder.peer_address):
            for what, credentials in shown.items():
                made = (
                    grpc.aio.insecure_channel(address)
                    if credentials is None
                    else grpc.aio.secure_channel(address, credentials, options=options)
                )
                async with made as channel:
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await health_pb2_grpc.HealthStub(channel).Check(
                            health_pb2.HealthCheckRequest(), timeout=CALL_SECONDS
                        )
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE, what
            await asyncio.wait_for(refuses_bytes(address), CALL_SECONDS)
        await resolve(lookup, TlsFiles(files))


async def refuses_bytes(address: str) -> None:
    """What is no TLS at all ends the connection, and nothing else."""
    reader, writer = await asyncio.open_connection(*address.split(":"))
    writer.write(bytes(range(256)) * 64)
    with_nothing = await reader.read()
    assert len(with_nothing) < 64, "an alert at most"
    writer.close()


@pytest.mark.parametrize(
    ("server", "client", "hint"),
    [
        ({}, None, "it requires TLS, with a valid certificate signed by its CA"),
        (None, {}, "this side uses TLS and the other does not"),
        ({}, {"issuer": STRANGER, "trusted": STRANGER.pem}, "expired or signed by another CA"),
        (
            {},
            {"issuer": STRANGER, "trusted": STRANGER.pem + AUTHORITY.pem},
            "it requires TLS, with a valid certificate signed by its CA",
        ),
    ],
    ids=["plaintext client", "plaintext server", "another CA", "certificate of another CA"],
)
async def test_parts_that_do_not_fit_say_what_to_do(
    server: dict[str, object] | None, client: dict[str, object] | None, hint: str, tmp_path: Path
) -> None:
    served = None if server is None else write(tmp_path / "server", **server)
    tls = None if client is None else TlsFiles(write(tmp_path / "client", **client))
    async with one_lookup(served) as lookup, one_shard(tmp_path / "shard", served) as holder:
        peers = PeerClient("shm", NodeId("b"), tls=tls)
        with pytest.raises(Unavailable, match=hint):
            await peers.handshake(holder, CALL_SECONDS)
        await peers.close()
        asking = LookupClient([lookup], tls=tls)
        answer = await asking.resolve(KEYS, 0, CALL_SECONDS)
        assert (answer.runs, answer.complete) == ((), False), "a miss, and nothing raised"
        assert asking.counters["lookup_failed_unavailable"] == 1
        await asking.close()
        async with Channels(tls) as channels:
            seen = await gather_overview(channels, "", [lookup])
        assert hint in seen.lookups[0].error


async def test_a_port_of_metrics_is_not_only_told_to_want_tls() -> None:
    """Ports of metrics and of lookup partitions are easily mixed up."""
    port = free_port()
    end = serve_endpoint([], lambda: None, port, address="127.0.0.1")
    try:
        async with Channels() as channels:
            seen = await gather_overview(channels, "", [f"127.0.0.1:{port}"])
    finally:
        end()
    assert "no gRPC port, such as that of metrics" in seen.lookups[0].error


async def test_a_server_with_another_name_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tls = TlsFiles(write(tmp_path / "client"))
    monkeypatch.setattr(wire_tls, "SERVER_NAME", "another")  # of the server, and of its own trial of the files
    async with one_shard(tmp_path / "shard", write(tmp_path / "server", name="another")) as holder:
        monkeypatch.undo()
        peers = PeerClient("shm", NodeId("b"), tls=tls)
        with pytest.raises(Unavailable, match="does not have the name DNS:kvservice"):
            await peers.handshake(holder, CALL_SECONDS)
        await peers.close()


# -- start ----


async def test_half_configured_tls_starts_nothing(files: Path, tmp_path: Path) -> None:
    (files / "ca.crt").unlink()
    with pytest.raises(ConfigError, match=r"has no ca\.crt"):
        await LookupServer("127.0.0.1:0", tls_dir=str(files)).start()
    with pytest.raises(ConfigError, match=r"has no ca\.crt"):
        async with one_shard(tmp_path / "shard", files):
            pass
    assert not [path for path in (tmp_path / "shard").rglob("*") if path.is_file()]


async def test_a_plaintext_port_is_refused_with_three_ways_out(files: Path, tmp_path: Path) -> None:
    ways = (
        r"(0\.0\.0\.0|127\.0\.0\.1|10\.9\.9\.9).*KVSERVICE_TLS_DIR.*kvservice certs.*Unix socket.*"
        "KVSERVICE_ALLOW_PLAINTEXT=1"
    )
    with pytest.raises(ConfigError, match=ways):
        await LookupServer("0.0.0.0:0").start()
    with pytest.raises(ConfigError, match=ways):
        await LookupServer("127.0.0.1:0").start()
    settings = ServiceConfig(
        service="tlsrequired", pool_bytes=8 * MiB, slab_bytes=1 * MiB, transport="shm", runtime_dir=str(tmp_path)
    )
    config = ShardServerConfig(settings, NODE, segment_dir=tmp_path)
    for wrong in (
        replace(config, peer_host="0.0.0.0"),
        replace(config, peer_port=free_port()),
        replace(config, lookup_addresses=("127.0.0.1:1",)),
        replace(config, lookup_addresses=("10.9.9.9:1",)),
    ):
        with pytest.raises(ConfigError, match=ways):
            await ShardServer(wrong).start()
    for server in (LookupServer(f"unix:{tmp_path / 'l.sock'}"), LookupServer("0.0.0.0:0", allow_plaintext=True)):
        assert await server.start()
        await server.stop(0)


# -- rotation ----


async def test_open_channels_go_on_and_new_ones_use_the_new_files(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CA changes, too, in the three steps that this takes; no server restarts and no call fails."""
    monkeypatch.setattr(wire_tls, "LOOK_SECONDS", 0.0)
    both = AUTHORITY.pem + STRANGER.pem
    async with one_lookup(files) as lookup:
        tls, old = TlsFiles(files), TlsFiles(write(tmp_path / "old"))
        asking = LookupClient([lookup], tls=tls)
        async with open_channel(lookup, old) as kept:
            stub = lookup_pb2_grpc.LookupServiceStub(kept)
            seen: set[int] = set()
            for issuer, trusted in ((AUTHORITY, both), (STRANGER, both), (STRANGER, STRANGER.pem)):
                write(files, issuer=issuer, trusted=trusted)
                assert (await asking.resolve(KEYS, 0, CALL_SECONDS)).complete
                await stub.Resolve(lookup_pb2.ResolveRequest(keys=b"".join(KEYS)), timeout=CALL_SECONDS)
                seen.add(tls.current()[0])
            assert len(seen) == 3
        await asking.close()
        with pytest.raises(grpc.aio.AioRpcError):  # the first CA is trusted no longer, for new connections
            await resolve(lookup, old)
        await resolve(lookup, tls)


async def test_a_broken_rotation_breaks_nothing(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_tls, "LOOK_SECONDS", 0.0)
    async with one_lookup(files) as lookup:
        tls = TlsFiles(files)
        (files / "tls.key").write_text("")
        await resolve(lookup, tls)
        (files / "tls.crt").unlink()
        await resolve(lookup, tls)
        write(files)
        await resolve(lookup, tls)


# -- a service ----


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    directory = write(tmp_path_factory.mktemp("service") / "tls")
    with LocalCluster(nodes=2, lookup_partitions=1, transport="shm", tls_dir=str(directory)) as running:
        yield running


async def test_nodes_read_each_others_blocks_over_tls(cluster: LocalCluster) -> None:
    a, b = [await Engine.attach(ShardClient(cluster.socket(node))) for node in ("n0", "n1")]
    keys = chain(seed=1, count=20)
    assert await a.store(keys) == [SealStatus.SEALED] * 20
    await asyncio.to_thread(cluster.wait_until_known, keys)

    async def read() -> AcquireResult | None:
        found = await b.read_all(keys)
        return None if found.miss is MissReason.LOOKUP_FAILED else found

    # A node that has just started asks the lookup service while the two still greet each other.
    result = await eventually_async(read, "a lookup that is answered")
    assert (len(result.blocks), result.fetched_count, result.miss) == (20, 20, MissReason.NONE)
    with grpc.insecure_channel(cluster.record("n1").peer_address) as channel, pytest.raises(grpc.RpcError):
        shard_pb2_grpc.AdminServiceStub(channel).Stats(shard_pb2.StatsRequest(), timeout=CALL_SECONDS)
    for engine in (a, b):
        await engine.pool.close()
        engine.let_go()


def test_the_command_line_beside_a_service_finds_its_files(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSERVICE_RUNTIME_DIR", str(cluster.root))
    monkeypatch.delenv("KVSERVICE_TLS_DIR", raising=False)
    seen = status.collect(cluster.service)
    assert seen.problems == () and len(seen.nodes) == 2


@pytest.fixture
def bastion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of its own: no shard is registered on it, and it has a client's certificate."""
    monkeypatch.setenv("KVSERVICE_RUNTIME_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("KVSERVICE_TLS_DIR", str(write(tmp_path / "bastion", client=True)))
    return tmp_path


def test_commands_ask_from_a_machine_without_a_shard(cluster: LocalCluster, bastion: Path) -> None:
    def ask(*words: str) -> Result:
        return CliRunner().invoke(app, [*words, "--lookup", cluster.lookup_addresses[0]])

    seen = ask("status", "-o", "json")
    assert seen.exit_code == 0, seen.output
    assert [node["node_id"] for node in json.loads(seen.stdout)["nodes"]] == ["n0", "n1"]
    assert ask("tenants", "usage").exit_code == 0
    unknown = ask("explain", "nobody")
    assert unknown.exit_code == 1 and "no shard remembers" in unknown.stdout
    drained = ask("drain", "--node", "n0")
    assert drained.exit_code == ExitCode.DENIED and "client" in drained.stderr, drained.output
    assert CliRunner().invoke(app, ["status"]).exit_code == ExitCode.NO_SERVICE


def test_one_lookup_partition_in_the_environment_is_enough(
    cluster: LocalCluster, bastion: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSERVICE_LOOKUP", cluster.lookup_addresses[0])
    assert CliRunner().invoke(app, ["status"]).exit_code == 0
    monkeypatch.delenv("KVSERVICE_TLS_DIR")
    refused = CliRunner().invoke(app, ["status"])
    assert refused.exit_code == ExitCode.NO_SERVICE and "KVSERVICE_TLS_DIR" in refused.stderr


def test_explain_says_what_to_do_about_wrong_certificates(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVSERVICE_RUNTIME_DIR", str(cluster.root))
    monkeypatch.delenv("KVSERVICE_TLS_DIR", raising=False)
    assert explain.explain(cluster.service, "none")["hints"] == []
    monkeypatch.setenv("KVSERVICE_TLS_DIR", str(write(tmp_path / "s", issuer=STRANGER, trusted=STRANGER.pem)))
    state = explain.explain(cluster.service, "none")
    assert state["silent_lookups"] and ["expired or signed by another CA" in hint for hint in state["hints"]] == [True]


def test_doctor_starts_no_part_whose_certificate_is_refused(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The part runs, and takes new files by itself."""
    monkeypatch.setenv("KVSERVICE_RUNTIME_DIR", str(cluster.root))
    monkeypatch.setenv("KVSERVICE_TLS_DIR", str(write(tmp_path / "s", issuer=STRANGER, trusted=STRANGER.pem)))
    refused = [check for check in doctor.service_parts() if check.status == PROBLEM]
    assert refused and all("certs DIR --renew" in check.detail and not check.advice for check in refused), refused


def test_renewed_files_reach_running_processes(cluster: LocalCluster) -> None:
    """Certificates of another CA alone: whoever still answers has taken the new files by itself."""
    directory = Path(cluster.record("n0").tls_dir)
    pids = [cluster.pid(name) for name in ("n0", "n1", "lookup0")]
    write(directory, issuer=STRANGER, trusted=STRANGER.pem)
    time.sleep(wire_tls.LOOK_SECONDS + 0.1)
    found = TlsFiles(directory)
    for address in (*cluster.lookup_addresses, cluster.record("n0").peer_address, cluster.record("n1").peer_address):
        with open_blocking_channel(address, found) as channel:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=CALL_SECONDS)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
    cluster.kill("lookup0")  # the shards must connect anew, and announce themselves
    cluster.start_lookup(0)
    keys = chain(seed=1, count=20)
    cluster._tls = found
    cluster.wait_until_known(keys)
    assert [cluster.pid(name) for name in ("n0", "n1")] == pids[:2]
    assert BootEpoch(cluster.record("n0").epoch)
