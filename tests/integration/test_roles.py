"""Who may do what: roles and names that certificates carry, and nodes that share one or have none."""

from __future__ import annotations

import secrets
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from kvservice.auth.identity import CLIENT_MAY, Proofs, lookup_audience, proofs_of
from kvservice.auth.tls import TlsFiles, open_channel
from kvservice.client.peer import PeerClient
from kvservice.client.shard import ShardClient
from kvservice.config import ServiceConfig
from kvservice.core.actions import Follow, Locate, Offer, ReleaseRemote
from kvservice.core.messages import Handoff, Holder, SealStatus, TakeOverItem
from kvservice.discovery import SECRET_NAME, node_directory, node_secret
from kvservice.errors import ConfigError, Forbidden, KVServiceError, Unavailable
from kvservice.lookup.server import LookupServer
from kvservice.shard.server import ShardServer
from kvservice.shard.server_config import ShardServerConfig
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually_async
from kvservice.units import BootEpoch, HandoffId, LeaseId, MiB, NodeId, SpanRoute
from kvservice.wire.status import error_from_rpc
from kvservice.wire.v1 import common_pb2, lookup_pb2, lookup_pb2_grpc
from kvservice.wire.versions import PROTOCOL_VERSION
from tests.fuzz.messages import methods, path_of
from tests.integration.certificates import AUTHORITY, write
from tests.integration.engine import LAYOUT, Engine, chain
from tests.integration.test_two_nodes import leave

CALL_SECONDS = 5.0
N0, N1 = NodeId("n0"), NodeId("n1")
NOBODY = proofs_of(b"")


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Plaintext on loopback: certificates say nothing here."""
    with LocalCluster(nodes=2, lookup_partitions=1, transport="shm") as running:
        yield running


def holder_of(cluster: LocalCluster, node: str) -> Holder:
    record = cluster.record(node)
    return Holder(record.node_id, record.peer_address, record.epoch)


async def announce(
    address: str, node: Holder, tls: TlsFiles | None = None, *, proofs: Proofs = NOBODY, leaving: bool = False
) -> int:
    """The outcome. Raises what the lookup partition raised."""
    request = lookup_pb2.AnnounceRequest(
        protocol_version=PROTOCOL_VERSION,
        node=common_pb2.NodeInfo(node_id=node.node_id, peer_address=node.peer_address, epoch=node.epoch),
        sequence=1 << 40,
        full_begin=not leaving,
        full_end=not leaving,
        partition_count=1,
        leaving=leaving,
    )
    async with open_channel(address, tls) as channel:
        call = lookup_pb2_grpc.LookupServiceStub(channel).Announce
        try:
            reply = await call(request, timeout=CALL_SECONDS, metadata=proofs(lookup_audience(0)))
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, "announce") from error
    return int(reply.outcome)


async def members(cluster: LocalCluster) -> dict[str, int]:
    """Epoch by node, as the directory says."""
    async with open_channel(cluster.lookup_addresses[0], None) as channel:
        stub = lookup_pb2_grpc.LookupServiceStub(channel)
        reply = await stub.LookupStats(lookup_pb2.LookupStatsRequest(), timeout=CALL_SECONDS)
    return {row.node.node_id: row.node.epoch for row in reply.nodes if row.alive}


async def everybody_is_there(cluster: LocalCluster) -> None:
    expected = {node: cluster.record(node).epoch for node in cluster.nodes}

    async def are_there() -> bool:
        return await members(cluster) == expected

    await eventually_async(are_there, f"{expected} in the directory")


async def nobody_can_speak_for(cluster: LocalCluster, node: str) -> None:
    """Neither announce nor take leave, newer or not, without a secret or with another one."""
    real = holder_of(cluster, node)
    for epoch in (real.epoch, real.epoch + 1):
        forged = Holder(real.node_id, "127.0.0.1:1", BootEpoch(epoch))
        for proofs in (NOBODY, proofs_of(secrets.token_bytes(32))):
            for leaving in (False, True):
                with pytest.raises(Forbidden, match=f"node {node} is announced by another process"):
                    await announce(cluster.lookup_addresses[0], forged, proofs=proofs, leaving=leaving)
    assert (await members(cluster))[node] == real.epoch
    assert not cluster.stats(node).draining


async def test_nobody_else_announces_a_node_or_leaves_in_its_name(cluster: LocalCluster) -> None:
    await everybody_is_there(cluster)
    await nobody_can_speak_for(cluster, "n0")
    newcomer = Holder(NodeId("n9"), "127.0.0.1:1", BootEpoch(1))  # a name that nobody has is free
    applied = lookup_pb2.AnnounceReply.OUTCOME_APPLIED
    assert await announce(cluster.lookup_addresses[0], newcomer) == applied
    assert await announce(cluster.lookup_addresses[0], newcomer, leaving=True) == applied


async def test_a_node_is_known_again_after_any_restart(cluster: LocalCluster) -> None:
    """Of the directory, which then forgets whom it knew, and of a shard that was killed."""
    secret = node_directory(cluster.service, N0, cluster.root) / SECRET_NAME
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    before = secret.read_bytes()
    cluster.kill("lookup0")
    cluster.start_lookup(0)
    await everybody_is_there(cluster)
    await nobody_can_speak_for(cluster, "n0")
    epoch = cluster.record("n0").epoch
    cluster.kill("n0")
    cluster.start_shard("n0")
    assert cluster.record("n0").epoch > epoch and secret.read_bytes() == before
    await everybody_is_there(cluster)
    await nobody_can_speak_for(cluster, "n0")


async def test_a_lease_is_released_by_the_reader_that_has_it(cluster: LocalCluster) -> None:
    engine = await Engine.attach(ShardClient(cluster.socket("n0")))
    keys = chain(seed=11, count=6)
    assert await engine.store(keys) == [SealStatus.SEALED] * 6
    holder = holder_of(cluster, "n0")
    mine, thief, other = [PeerClient("shm", N1, secret=secret) for secret in (b"m" * 32, b"", b"t" * 32)]
    located = await mine.locate(Locate(0, holder, keys, CALL_SECONDS))
    for forger in (thief, other):
        await forger.locate(Locate(0, holder, keys, CALL_SECONDS))  # in the same name: a lease of its own
        with pytest.raises(Forbidden, match="is not this reader's"):
            await forger.release(ReleaseRemote(holder, holder.epoch, located.lease_id), CALL_SECONDS)
    assert cluster.accounting("n0").leases == 3
    await mine.release(ReleaseRemote(holder, holder.epoch, located.lease_id), CALL_SECONDS)
    assert cluster.accounting("n0").leases == 2
    assert cluster.stats("n0").counters["peer_forbidden"] == 2
    await mine.release(ReleaseRemote(holder, holder.epoch, LeaseId(999_999)), CALL_SECONDS)  # ended already: as ever
    for client in (mine, thief, other):
        await client.close()
    await leave(engine)


async def test_nothing_is_taken_over_from_a_node_that_does_not_leave(cluster: LocalCluster) -> None:
    await everybody_is_there(cluster)
    n0, n1 = holder_of(cluster, "n0"), holder_of(cluster, "n1")
    forger = PeerClient("shm", NodeId("n7"))
    items = [TakeOverItem(key, None, index, SpanRoute(1), 1.0) for index, key in enumerate(chain(seed=12, count=4))]
    offer = Offer(0, n1, LAYOUT.payload_bytes, tuple(items), 1.0)
    with pytest.raises(Forbidden, match="n0 says that it does not leave"):
        await forger.take_over(n0, offer, CALL_SECONDS)
    assert cluster.stats("n1").counters["takeover_forged"] == 1
    await forger.close()


def test_a_secret_is_made_once_and_goes_when_its_node_leaves(cluster: LocalCluster, tmp_path: Path) -> None:
    assert node_secret(tmp_path) == node_secret(tmp_path)
    (tmp_path / SECRET_NAME).write_bytes(b"half")
    assert len(node_secret(tmp_path)) == 32
    with pytest.raises(ConfigError, match="cannot keep the node's secret"):
        node_secret(tmp_path / "absent")
    secret = node_directory(cluster.service, N1, cluster.root) / SECRET_NAME
    assert secret.exists()
    cluster.kill("n1", 15)
    assert not secret.exists()


# -- certificates ----


@asynccontextmanager
async def service(
    root: Path, directory: Path, *, lookup_directory: Path | None = None
) -> AsyncIterator[tuple[str, Holder]]:
    """A lookup partition and the cache shard of n0."""
    lookup = LookupServer("127.0.0.1:0", tls_dir=str(lookup_directory or directory))
    address = await lookup.start()
    shard = ShardServer(
        ShardServerConfig(
            ServiceConfig(
                service=f"roles{root.name[:16]}",
                pool_bytes=8 * MiB,
                slab_bytes=1 * MiB,
                transport="shm",
                runtime_dir=str(root),
                heartbeat_seconds=0.1,
                tls_dir=str(directory),
            ),
            N0,
            (address,),
            segment_dir=root,
        )
    )
    try:
        yield address, await shard.start()
    finally:
        await shard.stop()
        await lookup.stop(0)


async def refused(channel: grpc.aio.Channel, path: str, *, streams: bool) -> bool:
    """Whether the caller may not do this at all."""
    try:
        if streams:
            async for _ in channel.unary_stream(path, None, None)(b"", timeout=0.3):
                return False
        else:
            await channel.unary_unary(path, None, None)(b"", timeout=CALL_SECONDS)
    except grpc.aio.AioRpcError as error:
        return error.code() is grpc.StatusCode.PERMISSION_DENIED
    return False


@pytest.mark.parametrize(("name", "may"), [("client.kvservice", CLIENT_MAY), ("elsewhere", frozenset())])
async def test_a_role_may_do_what_is_listed_and_nothing_else(name: str, may: frozenset[str], tmp_path: Path) -> None:
    served = write(tmp_path / "node")
    client = name.startswith("client")
    shown = write(tmp_path / "shown", client=True) if client else write(tmp_path / "shown", name=name)
    credentials = grpc.ssl_channel_credentials(
        AUTHORITY.pem, (shown / "tls.key").read_bytes(), (shown / "tls.crt").read_bytes()
    )
    options = [("grpc.ssl_target_name_override", "kvservice")]
    async with service(tmp_path / "s", served) as (lookup, holder):
        allowed: set[str] = set()
        for method in methods():
            service_name = method.containing_service.name
            address = lookup if service_name == "LookupService" else holder.peer_address
            async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
                if not await refused(channel, path_of(method), streams=method.server_streaming):
                    allowed.add(method.full_name)
    assert allowed == may
    if client:
        closed = {method.name for method in methods()} - {rpc.rpartition(".")[2] for rpc in allowed}
        changes = {"Announce", "Drain", "Handshake", "Locate", "Follow", "ReleaseLocated", "TakeOver"}
        assert closed >= changes


async def test_a_clients_certificate_serves_nothing(tmp_path: Path) -> None:
    served, shown = write(tmp_path / "node"), write(tmp_path / "client", client=True)
    with pytest.raises(ConfigError, match=r"a client's certificate.*cannot serve"):
        await LookupServer("127.0.0.1:0", tls_dir=str(shown)).start()
    impostor = grpc.aio.server()
    pair = ((shown / "tls.key").read_bytes(), (shown / "tls.crt").read_bytes())
    port = impostor.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair], AUTHORITY.pem, True))
    await impostor.start()
    peers = PeerClient("shm", N1, tls=TlsFiles(served))
    with pytest.raises(Unavailable):
        await peers.handshake(Holder(N0, f"127.0.0.1:{port}", BootEpoch(1)), CALL_SECONDS)
    await peers.close()
    await impostor.stop(0)


async def test_a_nodes_certificate_speaks_for_that_node_alone(tmp_path: Path) -> None:
    everybody = write(tmp_path / "all")
    own = write(tmp_path / "n0", nodes=("n0",), addresses=("127.0.0.1",))
    other = TlsFiles(write(tmp_path / "n1", nodes=("n1",)))
    async with service(tmp_path / "s", own, lookup_directory=everybody) as (lookup, holder):
        peers, stranger = PeerClient("shm", N1, tls=other), PeerClient("shm", N0, tls=other)
        forged = Holder(NodeId("n3"), "127.0.0.1:1", BootEpoch(1))
        followed = Follow(0, 0, Handoff(HandoffId(b"h" * 16), holder.node_id), chain(seed=1, count=2), 0.1)
        attempts = {
            "announce": announce(lookup, forged, other),
            "leave": announce(lookup, forged, other, leaving=True),
            "locate": stranger.locate(Locate(0, holder, chain(seed=1, count=2), CALL_SECONDS)),
            "follow": stranger.follow(holder, followed, CALL_SECONDS),
            "take over": peers.take_over(holder, Offer(0, holder, LAYOUT.payload_bytes, (), 0.1), CALL_SECONDS),
        }
        for what, attempt in attempts.items():
            with pytest.raises(KVServiceError, match="this certificate is of node n1, not of") as error:
                await attempt
            assert isinstance(error.value, Forbidden), what
        async with open_channel(lookup, other) as channel:
            stub = lookup_pb2_grpc.LookupServiceStub(channel)
            counters = (await stub.LookupStats(lookup_pb2.LookupStatsRequest(), timeout=CALL_SECONDS)).counters
        assert counters["announce_wrong_certificate"] == 2
        with pytest.raises(Forbidden, match="this certificate is of node n1"):
            await stranger.release(ReleaseRemote(holder, holder.epoch, LeaseId(1)), CALL_SECONDS)
        await peers.locate(Locate(0, holder, chain(seed=1, count=2), CALL_SECONDS))  # in its own name
        moved = TlsFiles(write(tmp_path / "moved", nodes=("n5",), addresses=("10.0.0.5",)))
        with pytest.raises(Forbidden, match=r"for address 10\.0\.0\.5"):
            await announce(lookup, Holder(NodeId("n5"), "127.0.0.1:1", BootEpoch(1)), moved)
        await announce(lookup, Holder(NodeId("n5"), "10.0.0.5:1", BootEpoch(1)), moved)

        async def known() -> bool:
            async with open_channel(lookup, other) as channel:
                stub = lookup_pb2_grpc.LookupServiceStub(channel)
                found = await stub.FindNode(lookup_pb2.FindNodeRequest(node_id=N0), timeout=CALL_SECONDS)
                return bool(found.node.epoch == holder.epoch)

        await eventually_async(known, "n0 itself, which is let in")
        for client in (peers, stranger):
            await client.close()
