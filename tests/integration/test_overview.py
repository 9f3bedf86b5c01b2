"""The overview and the block list of a real service: two shards, two lookup partitions, engines that store and load."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvservice.client.block_list import BlockFilter, BlockList, list_blocks
from kvservice.client.channels import Channels
from kvservice.client.members import find_members
from kvservice.client.overview import DRAINING, OK, SILENT, Overview, as_json, gather_overview
from kvservice.client.shard import ShardClient
from kvservice.config import ServiceConfig
from kvservice.core.store.slots import SHOWN_STATES
from kvservice.errors import FingerprintMismatch, InvalidRequest, NoService
from kvservice.shard.server import ShardServer
from kvservice.shard.server_config import ShardServerConfig
from kvservice.testing.cluster import LocalCluster
from kvservice.units import MiB, NodeId
from kvservice.wire.v1 import shard_pb2, shard_pb2_grpc
from tests.integration.engine import LAYOUT, Engine, chain, spec

BLOCK = LAYOUT.payload_bytes


@pytest.fixture
async def cluster() -> AsyncIterator[LocalCluster]:
    with LocalCluster(2, 2, pool_bytes=16 * MiB) as running:
        yield running


async def overview_of(cluster: LocalCluster, timeout: float = 5.0) -> Overview:
    async with Channels() as channels:
        return await gather_overview(channels, cluster.service, cluster.lookup_addresses, timeout=timeout)


async def blocks_of(cluster: LocalCluster, wanted: BlockFilter, limit: int = 1000) -> BlockList:
    addresses = {node: cluster.record(node).peer_address for node in cluster.nodes}
    async with Channels() as channels:
        return await list_blocks(channels, addresses, wanted, limit)


async def test_the_overview_shows_what_engines_did(cluster: LocalCluster) -> None:
    writer = await Engine.attach(ShardClient(cluster.socket("n0")))
    reader = await Engine.attach(ShardClient(cluster.socket("n1")))
    keys = chain(1, 8)
    await writer.store(keys)
    await writer.pool.reserve(writer.attachment.attachment_id, 3)
    cluster.wait_until_known(keys)
    got = await reader.acquire(keys, request_id="cmpl-1")
    assert got.fetched_count == 8
    with pytest.raises(FingerprintMismatch):
        await Engine.attach(ShardClient(cluster.socket("n1")), spec(dtype="float16"))

    seen = await overview_of(cluster)
    n0, n1 = seen.nodes
    assert (n0.state, n1.state, seen.problems, seen.restricted) == (OK, OK, (), False)
    assert {usage.state: (usage.slots, usage.bytes) for usage in n0.pool.states}["reserved"] == (3, 3 * BLOCK)
    assert [usage.state for usage in seen.pool.states] == list(SHOWN_STATES)
    for pool in (n0.pool, n1.pool, seen.pool):
        assert pool.used_bytes + pool.free_bytes + pool.overhead_bytes == pool.total_bytes
    assert seen.pool.used_bytes == (8 + 3 + 8) * BLOCK
    assert [(window.name, window.hit_rate, window.remote_hit_rate) for window in seen.windows] == [
        ("start", 1.0, 1.0),
        ("10m", 1.0, 1.0),
        ("1m", 1.0, 1.0),
    ]
    assert (n0.windows[0].stored_bytes, n0.windows[0].served_bytes) == (8 * BLOCK, 8 * BLOCK)
    (flow,) = seen.flows
    assert (flow.source, flow.target, flow.bytes) == ("n0", "n1", 8 * BLOCK) and flow.bytes_per_second > 0
    (model,) = seen.models
    assert (model.model, model.engines, model.nodes) == ("test-model", 2, ("n0", "n1"))
    (refused,) = seen.refused
    assert [(one.field, one.attached, one.refused) for one in refused.differences] == [("dtype", "bfloat16", "float16")]
    (slow,) = seen.slowest
    assert (slow.node_id, slow.request_id, slow.asked_blocks, slow.fetched_blocks) == ("n1", "cmpl-1", 8, 8)
    (hits,) = seen.hits
    assert (hits.model, hits.tenant, hits.asked_blocks, hits.hit_rate) == ("test-model", "", 8, 1.0)
    assert [lookup.nodes_alive for lookup in seen.lookups] == [2, 2] and n0.lookup_keys == 8
    assert json.loads(json.dumps(as_json(seen)))["nodes"][1]["pool"]["states"][3]["slots"] == 0


async def test_parts_that_do_not_answer_are_problems_of_the_overview(cluster: LocalCluster) -> None:
    async def are_known() -> bool:
        return [lookup.nodes_alive for lookup in (await overview_of(cluster)).lookups] == [2, 2]

    while not await are_known():  # a shard answers before it has announced itself
        await asyncio.sleep(0.05)
    with cluster.channel(cluster.record("n0").peer_address) as channel:
        shard_pb2_grpc.AdminServiceStub(channel).Drain(shard_pb2.DrainRequest(), timeout=5)
    cluster.kill("n1", signal.SIGSTOP)
    cluster.kill("lookup1")
    try:
        seen = await overview_of(cluster, timeout=1.0)
    finally:
        cluster.kill("n1", signal.SIGCONT)
    assert [node.state for node in seen.nodes] == [DRAINING, SILENT]
    assert [bool(lookup.error) for lookup in seen.lookups] == [False, True]
    assert len(seen.problems) == 2 and "n1" in seen.problems[1]


async def test_a_node_whose_clock_differs_is_named(tmp_path: Path) -> None:
    """Clears and ages go by the clocks. That of the machine that looks does not count."""
    settings = ServiceConfig(service="clocks", pool_bytes=16 * MiB, transport="shm", runtime_dir=str(tmp_path))
    async with AsyncExitStack() as stack:
        addresses: dict[str, str] = {}
        for node, seconds in {"n0": -3600.0, "n1": -3600.0, "n2": -3690.0}.items():
            config = ShardServerConfig(settings, NodeId(node), segment_dir=tmp_path)
            server = ShardServer(config, wall_clock=lambda by=seconds: time.time() + by)  # type: ignore[misc]
            addresses[node] = (await server.start()).peer_address
            stack.push_async_callback(server.stop)
        async with Channels() as channels:
            seen = await gather_overview(channels, "clocks", [], addresses)
    (said,) = seen.problems
    assert f"clock of node {seen.nodes[2].label} is 90 s behind that of node" in said


async def test_blocks_of_all_nodes_are_listed_and_filtered(cluster: LocalCluster) -> None:
    writer = await Engine.attach(ShardClient(cluster.socket("n0")))
    reader = await Engine.attach(ShardClient(cluster.socket("n1")))
    keys = chain(2, 6)
    await writer.store(keys)
    cluster.wait_until_known(keys)
    await reader.acquire(keys[:2])
    found = await blocks_of(cluster, BlockFilter(states=("sealed", "leased")))
    assert found.complete and not found.problems
    assert [(row.node_id, row.position, row.copy) for row in found.blocks] == [
        *(("n0", position, "primary") for position in range(6)),
        *(("n1", position, "secondary") for position in range(2)),
    ]
    assert {row.state for row in found.blocks if row.node_id == "n1"} == {"leased"}
    assert {(row.model, row.tenant, row.tier, row.bytes) for row in found.blocks} == {
        ("test-model", "", "memory", BLOCK)
    }
    by_key = await blocks_of(cluster, BlockFilter(key_prefix=keys[1].hex()[:6]))
    assert [row.node_id for row in by_key.blocks] == ["n0", "n1"]
    short = await blocks_of(cluster, BlockFilter(), limit=3)
    assert (len(short.blocks), short.complete) == (3, False)
    for wrong in (BlockFilter(states=("molten",)), BlockFilter(key_prefix="xyz")):
        with pytest.raises(InvalidRequest):
            await blocks_of(cluster, wrong)


async def test_a_shard_in_place_of_a_lookup_partition_is_told_as_such(cluster: LocalCluster) -> None:
    shard = cluster.record("n0").peer_address
    async with Channels() as channels:
        seen = await gather_overview(channels, cluster.service, [shard])
    told = "it is another part of the service, such as a shard in place of a lookup partition, or of an older version"
    assert told in seen.lookups[0].error and told in " ".join(seen.problems)
    with pytest.raises(NoService, match=told):
        find_members(None, [shard])
