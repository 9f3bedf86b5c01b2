"""Shards that leave: what they held is found elsewhere at once, readers finish, and nothing of them stays."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvservice.cli import drain
from kvservice.cli.output import Format
from kvservice.client.operator import OperatorClient
from kvservice.core.block.marks import Mark, MarkKind
from kvservice.core.messages import MissReason
from kvservice.errors import ConfigError, KVServiceError
from kvservice.memory.segment import segment_path
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
from kvservice.units import MiB, NodeId
from kvservice.wire.v1 import common_pb2, shard_pb2, shard_pb2_grpc
from tests.integration.engine import Engine, attached, chain, spec

T = TypeVar("T")
LEASE_SECONDS = 2.0
POOL_BYTES = 8 * MiB
MORE_THAN_ALL = 160  # blocks
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
seeds = iter(range(40_000, 41_000))


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(
        nodes=3, transport="shm", lease_seconds=LEASE_SECONDS, pool_bytes=POOL_BYTES, drain_seconds=1.0
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def all_nodes_run_and_are_empty(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KVSERVICE_RUNTIME_DIR", str(cluster.root))
    yield
    for node in cluster.nodes:
        if not any(record.node_id == node for record in cluster._records(node)):
            cluster.start_shard(node)
    for node in cluster.nodes:
        eventually(lambda node=node: balanced(cluster, node), f"node {node} without leases and writers")


def balanced(cluster: LocalCluster, node: str) -> bool:
    found = cluster.accounting(node)
    assert found.balanced, found
    return not (found.leases or found.attachments or found.slots["writing"] or found.slots["quarantined"])


def at(cluster: LocalCluster, node: str, work: Callable[[Engine], Awaitable[T]], model: str = "test-model") -> T:
    """An engine of this node does something and leaves."""

    async def run() -> T:
        engine = await attached(cluster.socket(node), spec(model))
        try:
            return await work(engine)
        finally:
            await engine.pool.close()
            engine.let_go()

    return asyncio.run(run())


def clear(cluster: LocalCluster, model: str) -> None:
    """`kvservice clear --model` of the nodes that are there."""

    async def run() -> None:
        operator = OperatorClient()
        for node in cluster.nodes:
            if any(record.node_id == node for record in cluster._records(node)):
                await operator.clear(cluster.record(node).peer_address, [Mark(MarkKind.MODEL, time.time(), model)])
        await operator.close()

    asyncio.run(run())


def health(cluster: LocalCluster, name: str) -> int:
    with grpc.insecure_channel(cluster.record("n0").rpc_address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5).status)


def leave(
    cluster: LocalCluster, node: str, capsys: pytest.CaptureFixture[str], timeout: float = 10.0, handover: bool = True
) -> dict[str, Any]:
    """`kvservice drain --node`; what it says of this node. Blocks until the shard has ended."""
    capsys.readouterr()
    assert drain.run(cluster.service, None, node, False, timeout, handover, False, Format.JSON)
    assert cluster.exit_code(node) == 0
    assert not segment_path(cluster.service, NodeId(node)).exists()
    told = capsys.readouterr()
    said: dict[str, Any] = json.loads(told.out)[0]
    assert said["phase"] == "gone"
    assert "lost" not in told.err, "the node may come back with its disk, or with memory that it kept"
    return said


def test_blocks_of_a_leaving_node_are_found_elsewhere(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [chain(next(seeds), 20) for _ in range(3)]
    for prompt in prompts:
        at(cluster, "n0", lambda engine, prompt=prompt: engine.store(prompt))
    cluster.wait_until_known(prompts[0])
    at(cluster, "n1", lambda engine: engine.read_all(prompts[0]))  # has copies of them
    cluster.wait_until_announced("n1")
    cluster.wait_until_known(prompts[2])
    said = leave(cluster, "n0", capsys)
    assert (said["blocks_total"], said["blocks_elsewhere"], said["blocks_handed"]) == (60, 20, 40), said
    for prompt in prompts:
        assert cluster.known(prompt) == 20
        for node in ("n1", "n2"):
            result = at(cluster, node, lambda engine, prompt=prompt: engine.read_all(prompt))
            assert (len(result.blocks), result.miss) == (20, MissReason.NONE)


def test_after_a_clear_a_drain_hands_over_what_is_of_others(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next clear of another model leaves them, too, and one of their own reaches them at their new node."""
    prompt = chain(next(seeds), 10, "handed over")
    at(cluster, "n0", lambda engine: engine.store(prompt), "handed over")
    cluster.wait_until_known(prompt)
    clear(cluster, "cleared before")
    said = leave(cluster, "n0", capsys)
    assert said["blocks_lost"] == 0, said
    clear(cluster, "cleared after")
    assert at(cluster, "n1", lambda engine: engine.read_all(prompt), "handed over").miss is MissReason.NONE
    clear(cluster, "handed over")
    assert not at(cluster, "n1", lambda engine: engine.read_all(prompt), "handed over").blocks


def test_a_drain_without_hand_over_only_says_that_the_blocks_go(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = chain(next(seeds), 10)
    at(cluster, "n0", lambda engine: engine.store(prompt))
    cluster.wait_until_known(prompt)
    said = leave(cluster, "n0", capsys, handover=False)
    assert said["blocks_lost"] >= 10
    assert cluster.known(prompt) == 0
    assert said["seconds"] < 1.0


def test_reads_from_a_leaving_node_end_well_or_as_a_miss(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [chain(next(seeds), 8) for _ in range(3)]  # few: what a full node evicts would be missing, too
    for prompt in prompts:
        at(cluster, "n0", lambda engine, prompt=prompt: engine.store(prompt))
        cluster.wait_until_known(prompt)
    begun, over = threading.Event(), threading.Event()

    async def read_on(engine: Engine) -> None:
        while not over.is_set():
            for prompt in prompts:
                await engine.read_all(prompt)  # checks every byte
                begun.set()

    reader = threading.Thread(target=at, args=(cluster, "n1", read_on))
    reader.start()
    assert begun.wait(60)
    said = leave(cluster, "n0", capsys)
    over.set()
    reader.join(60)
    assert not reader.is_alive()
    assert said["blocks_lost"] == 0, said
    for prompt in prompts:  # anew: the last read of before may have met the end of n0
        cluster.wait_until_known(prompt)
        result = at(cluster, "n1", lambda engine, prompt=prompt: engine.read_all(prompt))
        assert len(result.blocks) == 8


def test_a_leaving_node_serves_its_engine_until_the_end(cluster: LocalCluster) -> None:
    """The engine's stores find no slot."""
    prompt, late = chain(next(seeds), 10), chain(next(seeds), 4)

    async def run(engine: Engine) -> tuple[Any, Any, list[Any]]:
        await engine.store(prompt)
        held = await engine.acquire(prompt)
        leaving = asyncio.create_task(
            asyncio.to_thread(drain.run, cluster.service, None, "n0", False, 4.0, True, False)
        )
        await asyncio.sleep(0.5)
        assert (health(cluster, "kvservice.wire.v1.PeerService"), health(cluster, "")) == (NOT_SERVING, SERVING)
        assert all(engine.read(ref, key) for ref, key in zip(held.blocks, prompt, strict=True))
        refused = await engine.store(late)
        result = await engine.acquire(late, timeout=1.0)
        assert not leaving.done(), "a lease is out"
        await engine.pool.release(engine.attachment.attachment_id, [held.lease_id])
        assert await leaving
        return held, result, refused

    async def whole() -> None:
        engine = await attached(cluster.socket("n0"))
        held, result, refused = await run(engine)
        assert len(held.blocks) == 10
        assert (refused, result.miss) == ([], MissReason.DRAINING)
        await engine.pool.close()
        engine.let_go()

    asyncio.run(whole())
    assert cluster.exit_code("n0") == 0


def test_a_lease_holds_a_drain_no_longer_than_its_time(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = chain(next(seeds), 5)

    async def hold(engine: Engine) -> dict[str, Any]:
        await engine.store(prompt)
        held = await engine.acquire(prompt)
        over = False

        async def renew() -> None:
            while not over:
                await engine.pool.renew(engine.attachment.attachment_id, [held.lease_id])
                await asyncio.sleep(0.2)

        renewing = asyncio.create_task(renew())
        said = await asyncio.to_thread(leave, cluster, "n0", capsys, 1.0)
        over = True
        await asyncio.gather(renewing, return_exceptions=True)
        return said

    async def whole() -> dict[str, Any]:
        engine = await attached(cluster.socket("n0"))
        said = await hold(engine)
        await engine.pool.close()
        engine.let_go()
        return said

    said = asyncio.run(whole())
    assert "still out" in said["note"]
    assert 0.9 < said["seconds"] < 3.0


def test_peers_evict_nothing_younger_than_what_is_offered(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cold = chain(next(seeds), 10)
    at(cluster, "n0", lambda engine: engine.store(cold))
    hot = {}
    for node in ("n1", "n2"):
        wanted = chain(next(seeds), MORE_THAN_ALL)
        room = len(at(cluster, node, lambda engine, wanted=wanted: engine.store(wanted)))
        hot[node] = wanted[:room]
    cluster.wait_until_known(cold)
    said = leave(cluster, "n0", capsys)
    assert said["blocks_handed"] == 0
    assert "has no room" in said["note"]
    for node in ("n1", "n2"):
        result = at(cluster, node, lambda engine, node=node: engine.read_all(hot[node]))
        assert (len(result.blocks), result.fetched_count) == (len(hot[node]), 0)


def test_a_pool_full_of_copies_takes_more_than_a_full_one(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Copies make way. Both had equal shares, and the other pool evicted what no other node had."""
    own, leaving = chain(next(seeds), MORE_THAN_ALL), chain(next(seeds), 20)
    own = own[: len(at(cluster, "n2", lambda engine: engine.store(own)))]
    cluster.wait_until_known(own)
    copied = at(cluster, "n1", lambda engine: engine.read_all(own))
    assert copied.fetched_count > len(own) / 2
    at(cluster, "n0", lambda engine: engine.store(leaving))
    cluster.wait_until_known(leaving)
    said = leave(cluster, "n0", capsys)
    assert said["blocks_handed"] == 20 and said["receivers"]["n1"] > 16


def test_a_leaving_node_that_dies_leaves_receivers_whole(cluster: LocalCluster) -> None:
    prompt = chain(next(seeds), 30)
    at(cluster, "n0", lambda engine: engine.store(prompt))
    cluster.wait_until_known(prompt)
    receivers = ("n1", "n2")
    chosen = drain._choose(cluster.service, None, "n0", False)[0]
    drain._ask(chosen, 10.0, True)
    cluster.kill("n0")
    drain._ask(chosen, 10.0, True)
    assert chosen.done
    for node in receivers:
        eventually(lambda node=node: balanced(cluster, node), f"node {node} without leases and writers")
    result = at(cluster, "n1", lambda engine: engine.read_all(prompt, timeout=2.0))
    assert len(result.blocks) in range(31)  # every promised byte was checked


def test_sigterm_hands_over_before_the_shard_ends(cluster: LocalCluster) -> None:
    prompt = chain(next(seeds), 12)
    at(cluster, "n0", lambda engine: engine.store(prompt))
    cluster.wait_until_known(prompt)
    cluster.kill("n0", signal.SIGTERM)
    assert cluster.exit_code("n0") == 0
    assert cluster.known(prompt) == 12
    result = at(cluster, "n2", lambda engine: engine.read_all(prompt))
    assert len(result.blocks) == 12


def test_a_node_that_is_not_there_is_named_with_those_that_are(cluster: LocalCluster) -> None:
    with pytest.raises(ConfigError, match="n0, n1, n2"):
        drain.run(cluster.service, None, "n7", False, 1.0, True, False)
    with pytest.raises(ConfigError, match="--local"):
        drain.run(cluster.service, None, None, False, 1.0, True, False)
    with pytest.raises(KVServiceError, match="no service"):
        drain.run("nobody", None, None, True, 1.0, True, False)


@pytest.mark.parametrize(
    ("ends", "says"), [(signal.SIGKILL, "nothing is left to drain"), (signal.SIGSTOP, "it hangs, or")]
)
def test_a_drain_of_a_silent_node_says_what_happened(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str], ends: signal.Signals, says: str
) -> None:
    """It printed gRPC's own text."""
    cluster.kill("n0", ends)
    try:
        assert not drain.run(cluster.service, None, "n0", False, 1.0, True, False)
    finally:
        if ends is signal.SIGSTOP:
            cluster.kill("n0", signal.SIGCONT)
    said = capsys.readouterr().err
    assert says in said and "last error" not in said and "Deadline" not in said


def test_an_offer_of_a_node_that_is_no_member_is_refused(cluster: LocalCluster) -> None:
    stranger = common_pb2.NodeInfo(node_id="n9", peer_address="127.0.0.1:1", epoch=1)
    record = cluster.record("n1")
    request = shard_pb2.TakeOverRequest(
        leaver=stranger,
        epoch=record.epoch,
        payload_bytes=64 << 10,
        keys=bytes(16),
        parents=bytes(16),
        positions=[0],
        routes=[0],
        idle_seconds=[0.0],
        wait_seconds=1.0,
    )
    with grpc.insecure_channel(record.peer_address) as channel, pytest.raises(grpc.RpcError) as refused:
        shard_pb2_grpc.PeerServiceStub(channel).TakeOver(request, timeout=5)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "not a member" in refused.value.details()
