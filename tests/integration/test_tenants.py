"""Tenants on two real shards: who may attach, whose blocks are whose, what quotas hold, what a changed file does."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from kvservice.auth.tenants import (
    Public,
    Tenant,
    Tenants,
    dump_tenants,
    hash_token,
    new_secret,
    new_token,
    token_metadata,
)
from kvservice.auth.token import Token
from kvservice.cli import tenant_usage
from kvservice.client.block_list import BlockFilter, list_blocks
from kvservice.client.channels import Channels
from kvservice.client.engine_stats import EngineStatsReader
from kvservice.client.overview import gather_overview
from kvservice.client.shard import ShardClient
from kvservice.core.block.keys import block_keys, chain_hashes
from kvservice.core.messages import AcquireResult, MissReason, SealItem, SealStatus
from kvservice.errors import NotAttached, Unauthenticated
from kvservice.private_files import write_private
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually_async
from kvservice.units import BlockKey, MiB, NodeId, SpanRoute
from kvservice.wire.v1 import shard_pb2, shard_pb2_grpc
from tests.integration.engine import LAYOUT, Engine, chain, content, spec
from tests.integration.test_two_nodes import leave

TOKENS = {name: new_token() for name in ("a", "b", "small", "narrow", "boss", "turner", "goner")}
BLOCK = LAYOUT.payload_bytes
SMALL_BLOCKS = 16


class File:
    """The tenants file of the cluster, changed as an operator would: all at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        rows = [
            Tenant("a", (hash_token(TOKENS["a"]),), new_secret(), public=Public.PUBLISH),
            Tenant("b", (hash_token(TOKENS["b"]),), new_secret(), public=Public.READ),
            Tenant("small", (hash_token(TOKENS["small"]),), new_secret(), quota=f"{SMALL_BLOCKS * BLOCK}B"),
            Tenant("narrow", (hash_token(TOKENS["narrow"]),), new_secret(), in_flight=4),
            Tenant("boss", (hash_token(TOKENS["boss"]),), new_secret(), admin=True),
            Tenant("turner", (hash_token(TOKENS["turner"]),), new_secret()),
            Tenant("goner", (hash_token(TOKENS["goner"]),), new_secret()),
        ]
        self.now = Tenants(rows, new_secret())
        self.write()

    def write(self) -> None:
        write_private(self.path, dump_tenants(self.now).encode())

    def change(self, name: str, **fields: object) -> None:
        rows = [replace(t, **fields) if t.name == name else t for t in self.now.by_name.values()]  # type: ignore[arg-type]
        self.now = Tenants(rows, self.now.public_secret)
        self.write()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> File:
    return File(tmp_path_factory.mktemp("tenants") / "tenants.json")


@pytest.fixture(scope="module")
def cluster(file: File) -> Iterator[LocalCluster]:
    variables = {"KVSERVICE_TENANTS_FILE": str(file.path)}
    with LocalCluster(2, 1, transport="shm", pool_bytes=12 * MiB, slab_bytes=1 * MiB, environment=variables) as running:
        yield running


async def enter(cluster: LocalCluster, tenant: str, node: str = "n0", engine_id: bytes | None = None) -> Engine:
    client = ShardClient(cluster.socket(node), Token(TOKENS[tenant]))
    return await Engine.attach(client, spec(engine_id=engine_id))


def named(engine: Engine, seed: int, count: int, key: bytes | None = None) -> tuple[BlockKey, ...]:
    """The blocks of one prompt, as this engine's connector would name them."""
    tokens = np.random.default_rng(seed).integers(0, 50_000, count * LAYOUT.block_tokens).tolist()
    hashes = chain_hashes(tokens, LAYOUT.block_tokens)
    return tuple(block_keys(spec().fingerprint.digest, hashes, key or engine.attachment.tenant_key))


def usage(cluster: LocalCluster, tenant: str, node: str = "n0") -> shard_pb2.TenantNumbers:
    return next(row for row in cluster.stats(node).tenants if row.name == tenant)


def held(result: AcquireResult) -> int:
    return len(result.blocks)


async def test_a_prompt_is_shared_within_its_tenant_only(cluster: LocalCluster) -> None:
    """It is shared on all nodes."""
    here, there, other = await enter(cluster, "a"), await enter(cluster, "a", "n1"), await enter(cluster, "b")
    keys = named(here, 1, 8)
    assert await here.store(keys) == [SealStatus.SEALED] * 8
    cluster.wait_until_known(keys)
    assert named(there, 1, 8) == keys
    assert held(await there.read_all(keys)) == 8
    theirs = named(other, 1, 8)
    assert not set(theirs) & set(keys)
    assert held(await other.read_all(theirs)) == 0
    await leave(here, there, other)


async def test_another_tenants_block_looks_like_one_nobody_has(cluster: LocalCluster) -> None:
    owner, other = await enter(cluster, "a"), await enter(cluster, "b")
    keys = named(owner, 2, 4)
    await owner.store(keys)
    cluster.wait_until_known(keys)
    taken, absent = await other.acquire(named(other, 2, 4)), await other.acquire(named(other, 3, 4))
    assert taken == absent
    assert taken.miss is MissReason.NEVER_STORED
    await leave(owner, other)


@pytest.mark.parametrize("token", [None, Token(), Token("kvs_this-is-not-a-token-of-anybody")])
async def test_no_token_or_an_unknown_one_is_refused_with_what_to_do(
    cluster: LocalCluster, token: Token | None
) -> None:
    with pytest.raises(Unauthenticated, match="kvservice tenants add"):
        await Engine.attach(ShardClient(cluster.socket("n0"), token))
    assert cluster.stats("n0").counters["calls_unauthenticated"] >= 1


async def test_an_attachment_is_used_by_its_own_tenant_only(cluster: LocalCluster) -> None:
    """No message names an attachment, and a connection that is attached stays with its tenant."""
    owner = await enter(cluster, "a")
    for token, error in ((TOKENS["b"], NotAttached), ("kvs_this-is-not-a-token-of-anybody", Unauthenticated)):
        owner.pool._token = Token(token)  # type: ignore[attr-defined]
        with pytest.raises(error):
            await owner.pool.reserve(owner.id, 1)  # type: ignore[arg-type]
    owner.pool._token = Token(TOKENS["a"])  # type: ignore[attr-defined]
    assert len(await owner.pool.reserve(owner.id, 1)) == 1  # type: ignore[arg-type]
    await leave(owner)


async def test_an_engine_id_stays_with_its_tenant(cluster: LocalCluster) -> None:
    engine_id = os.urandom(16)
    owner = await enter(cluster, "a", engine_id=engine_id)
    with pytest.raises(Exception, match="belongs to another engine"):
        await enter(cluster, "b", engine_id=engine_id)
    assert len(await owner.pool.reserve(owner.id, 1)) == 1  # type: ignore[arg-type]
    await leave(owner)


async def test_a_rotated_token_loses_no_attachment_and_no_block(
    cluster: LocalCluster, file: File, tmp_path: Path
) -> None:
    path, second = tmp_path / "token", new_token()
    path.write_text(TOKENS["turner"])
    engine = await Engine.attach(ShardClient(cluster.socket("n0"), Token(path=str(path))))
    keys = named(engine, 4, 4)
    await engine.store(keys)
    both = (hash_token(TOKENS["turner"]), hash_token(second))
    file.change("turner", tokens=both)
    fresh = ShardClient(cluster.socket("n0"), Token(second))
    await until_attached(fresh)
    path.write_text(second)
    await asyncio.sleep(1.1)  # the engine looks once a second
    assert held(await engine.read_all(keys)) == 4
    file.change("turner", tokens=(hash_token(second),))
    await until_refused(cluster, TOKENS["turner"])
    assert held(await engine.read_all(keys)) == 4
    assert engine.lost == []
    await leave(engine)


async def until_attached(client: ShardClient) -> None:

    async def is_taken() -> bool:
        try:
            await leave(await Engine.attach(client))
        except Unauthenticated:
            return False
        return True

    await eventually_async(is_taken, "the new token to be taken", 8.0)


async def until_refused(cluster: LocalCluster, token: str) -> None:

    async def is_refused() -> bool:
        try:
            await leave(await Engine.attach(ShardClient(cluster.socket("n0"), Token(token))))
        except Unauthenticated:
            return True
        return False

    await eventually_async(is_refused, "the old token to be refused", 8.0)


async def test_a_revoked_tenants_attachment_ends_within_seconds(cluster: LocalCluster, file: File) -> None:
    engine, other = await enter(cluster, "goner"), await enter(cluster, "a")
    file.change("goner", tokens=())
    await eventually_async(lambda: bool(engine.lost), "the revoked tenant to lose its attachment", 5.0)
    assert "revoked" in engine.lost[0]
    with pytest.raises(Unauthenticated):
        await enter(cluster, "goner")
    assert other.lost == []
    await leave(engine, other)


async def test_a_broken_file_leaves_the_tenants_as_they_were(cluster: LocalCluster, file: File) -> None:
    file.path.write_text("{" + TOKENS["a"])
    await eventually_async(
        lambda: "tenants_file_not_taken" in cluster.log("n0").read_text(), "the log line about the broken file"
    )
    await leave(await enter(cluster, "a"))
    file.write()


async def test_a_tenant_at_its_quota_evicts_its_own_blocks(cluster: LocalCluster) -> None:
    """Nobody else is pushed below a quota."""
    small, hot = await enter(cluster, "small"), await enter(cluster, "a")
    first, more = named(small, 5, SMALL_BLOCKS), named(small, 6, SMALL_BLOCKS)
    assert await small.store(first) == [SealStatus.SEALED] * SMALL_BLOCKS
    for seed in range(100, 112):  # twice what the pool holds
        await store_in_parts(hot, named(hot, seed, 32))
    assert held(await small.read_all(first)) == SMALL_BLOCKS, "a hot tenant took another's blocks"
    kept = usage(cluster, "a").used_bytes
    assert await small.store(more) == [SealStatus.SEALED] * SMALL_BLOCKS
    assert held(await small.read_all(more)) == SMALL_BLOCKS
    assert held(await small.read_all(first)) == 0, "a tenant over its quota gives its own blocks"
    numbers = usage(cluster, "small")
    assert numbers.used_bytes == numbers.quota_bytes == SMALL_BLOCKS * BLOCK
    assert (usage(cluster, "a").used_bytes, numbers.counters["evicted"]) == (kept, SMALL_BLOCKS)
    assert len(await small.pool.reserve(small.id, SMALL_BLOCKS + 5)) == SMALL_BLOCKS  # type: ignore[arg-type]
    assert usage(cluster, "small").counters["quota_refused"] == 5
    assert cluster.accounting("n0").balanced
    await leave(small, hot)


async def store_in_parts(engine: Engine, keys: Sequence[BlockKey]) -> None:
    for start in range(0, len(keys), 16):
        await engine.store(keys[: start + 16], start)


async def test_in_flight_is_limited_without_waiting(cluster: LocalCluster) -> None:
    engine = await enter(cluster, "narrow")
    assert len(await engine.pool.reserve(engine.id, 6)) == 4  # type: ignore[arg-type]
    assert await engine.pool.reserve(engine.id, 1) == []  # type: ignore[arg-type]
    assert usage(cluster, "narrow").counters["in_flight_refused"] == 3
    await leave(engine)


async def test_public_blocks_are_shared_and_nothing_more(cluster: LocalCluster) -> None:
    writer, reader, other = await enter(cluster, "a"), await enter(cluster, "b"), await enter(cluster, "small")
    public = writer.attachment.public_key
    assert public and public == reader.attachment.public_key
    assert (writer.attachment.may_publish, reader.attachment.may_publish) == (True, False)
    assert other.attachment.public_key == b""
    keys = named(writer, 7, 4, public)
    await writer.store(keys)
    assert held(await reader.read_all(named(reader, 7, 4, public))) == 4
    assert held(await reader.read_all(named(reader, 7, 4))) == 0
    await leave(writer, reader, other)


async def test_a_restarted_shard_knows_whom_to_charge(cluster: LocalCluster) -> None:
    engine = await enter(cluster, "small", "n1")
    keys = named(engine, 8, 6)
    await engine.store(keys)
    assert usage(cluster, "small", "n1").used_bytes == 6 * BLOCK
    engine.let_go()
    cluster.kill("n1")
    cluster.start_shard("n1")
    assert usage(cluster, "small", "n1").used_bytes == 6 * BLOCK
    again = await enter(cluster, "small", "n1")
    assert held(await again.read_all(keys)) == 6
    await leave(again)


async def test_what_a_request_did_is_told_to_its_tenant_and_to_admins(cluster: LocalCluster) -> None:
    engine = await enter(cluster, "a")
    await engine.acquire(named(engine, 9, 2), request_id="secret-request")
    await leave(engine)

    def seen(tenant: str | None) -> int:
        metadata = token_metadata(TOKENS[tenant]) if tenant else None
        with cluster.channel(cluster.record("n0").peer_address) as channel:
            stub = shard_pb2_grpc.AdminServiceStub(channel)
            asked = shard_pb2.ExplainRequest(request_id="secret-request")
            return len(stub.Explain(asked, timeout=5, metadata=metadata).records)

    assert (seen("a"), seen("boss"), seen("b")) == (1, 1, 0)
    with pytest.raises(grpc.RpcError) as refused:
        seen(None)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]


async def test_a_tenant_ends_no_lease_and_no_write_of_another(cluster: LocalCluster) -> None:
    """With an attachment of its own, and whatever numbers it guesses."""
    owner, other = await enter(cluster, "a"), await enter(cluster, "b")
    keys = named(owner, 30, 3)
    await owner.store(keys[:2])
    lease = await owner.acquire(keys[:2])
    (ref,) = await owner.pool.reserve(owner.id, 1)
    owner.segment.payload(ref.slot, BLOCK)[:] = content(keys[2])

    def leases() -> int:
        with cluster.channel(cluster.record("n0").peer_address) as channel:
            stub = shard_pb2_grpc.AdminServiceStub(channel)
            return int(stub.Accounting(shard_pb2.AccountingRequest(), timeout=5).leases)

    before = leases()
    await other.pool.release(other.id, [lease.lease_id])
    await other.pool.abort(other.id, [ref, *lease.blocks])
    item = SealItem(ref, named(other, 30, 1)[0], None, 0, SpanRoute(0))
    assert SealStatus.SEALED not in await other.pool.seal(other.id, [item])
    assert leases() == before
    mine = SealItem(ref, keys[2], keys[1], 2, SpanRoute(0))
    assert await owner.pool.seal(owner.id, [mine]) == [SealStatus.SEALED]
    assert held(await owner.read_all(keys)) == 3
    await owner.pool.release(owner.id, [lease.lease_id])
    await leave(owner, other)


async def test_a_router_with_a_token_can_name_its_tenants_blocks(cluster: LocalCluster) -> None:
    mine, other = await enter(cluster, "a"), await enter(cluster, "b")
    found = []
    for token in (Token(TOKENS["a"]), Token()):
        reader = EngineStatsReader(token=token)
        nodes = await reader.read(cluster.lookup_addresses, 5.0)
        await reader.close()
        assert nodes is not None
        found.append([(group.tenant_key, group.attached) for group in nodes[NodeId("n0")].stats.engines])
    assert found == [[(mine.attachment.tenant_key, 1)], [(b"", 2)]]
    await leave(mine, other)


def test_no_token_and_no_secret_is_in_a_log(cluster: LocalCluster, file: File) -> None:
    """The last one: everything above has happened by now."""
    logs = "".join(cluster.log(name).read_text() for name in ("n0", "n1", "lookup0"))
    assert "tenants_file_taken" in logs
    tenants = file.now.by_name.values()
    canaries = [*TOKENS.values(), file.now.public_secret.hex(), *(t.secret.hex() for t in tenants)]
    canaries += [token.hex() for tenant in tenants for token in tenant.tokens]
    canaries += [file.now.block_keys_of(tenant)[0].hex() for tenant in tenants]
    assert [canary for canary in canaries if canary in logs] == []
    assert not any(repr(tenant).count(tenant.secret.hex()) for tenant in tenants)
    assert chain(1, 1)  # the default tenant's names are of another key


async def test_who_looks_sees_blocks_and_requests_of_its_own_tenant(cluster: LocalCluster) -> None:
    """An administrator sees all. A call without a token sees figures, but no request and no block."""
    engines = {tenant: await enter(cluster, tenant) for tenant in ("a", "b")}
    keys = {tenant: named(engine, 77, 2) for tenant, engine in engines.items()}
    for tenant, engine in engines.items():
        await engine.store(keys[tenant])
        await engine.acquire(keys[tenant], request_id=f"look-{tenant}")
    address = cluster.record("n0").peer_address
    seen: dict[str, tuple[set[str], set[str]]] = {}
    for tenant in ("a", "boss"):
        async with Channels(token=Token(TOKENS[tenant])) as channels:
            found = await list_blocks(channels, {"n0": address}, BlockFilter(), 1000)
            overview = await gather_overview(channels, cluster.service, cluster.lookup_addresses)
            asked = await list_blocks(channels, {"n0": address}, BlockFilter(tenant="b"), 1000)
        requests = {one.request_id for one in overview.slowest if one.request_id.startswith("look-")}
        seen[tenant] = requests, {row.tenant for row in found.blocks}
        assert {row.tenant for row in asked.blocks} == ({"a"} if tenant == "a" else {"b"})
    assert seen["a"] == ({"look-a"}, {"a"})
    assert seen["boss"][0] == {"look-a", "look-b"} and {"a", "b"} <= seen["boss"][1]
    async with Channels() as channels:
        nobody = await gather_overview(channels, cluster.service, cluster.lookup_addresses)
        with pytest.raises(Unauthenticated):
            await list_blocks(channels, {"n0": address}, BlockFilter(), 10)
    assert nobody.restricted and not nobody.slowest and {tenant.name for tenant in nobody.tenants} >= {"a", "b"}
    for engine in engines.values():
        await leave(engine)


async def test_usage_says_what_a_tenant_has_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--disk-quota` could be set, and nothing showed what it counts."""
    file = File(tmp_path / "tenants.json")
    file.change("a", disk_quota="25%")
    disk = {"PATH": str(tmp_path / "disk"), "BYTES": "16MiB", "WRITE": "stored"}
    variables = {"KVSERVICE_TENANTS_FILE": str(file.path), **{f"KVSERVICE_DISK_{k}": v for k, v in disk.items()}}
    with LocalCluster(1, 1, transport="shm", pool_bytes=12 * MiB, environment=variables) as one:
        engine = await enter(one, "a")
        assert await engine.store(named(engine, 1, 8)) == [SealStatus.SEALED] * 8
        await eventually_async(lambda: one.stats("n0").counters["tier_disk_written_blocks"] == 8, "the disk has them")
        monkeypatch.setenv("KVSERVICE_RUNTIME_DIR", str(one.root))
        rows = {row.tenant: row for row in (await asyncio.to_thread(tenant_usage.collect, one.service)).held}
        assert rows["a"].disk_used_bytes >= 8 * BLOCK and rows["a"].disk_quota_bytes == 4 * MiB
        assert (rows["b"].disk_used_bytes, rows["b"].disk_quota_bytes) == (0, 0)
        await leave(engine)
