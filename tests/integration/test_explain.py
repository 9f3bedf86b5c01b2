"""`kvservice explain` against real shards: the reason for each way a block can be missed, and the sources of hits.

One cluster for the file; every request has an id of its own."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import rich.console

from kvservice.cli import blocks, drain, explain
from kvservice.cli.output import Format
from kvservice.client.members import find_members
from kvservice.client.shard import ShardClient
from kvservice.core.messages import AcquireRequest, Handoff, RequestReport
from kvservice.errors import KVServiceError, NoService
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
from kvservice.units import BlockKey, HandoffId, MiB, NodeId
from tests.integration.engine import Engine, attached, chain, spec

POOL_BYTES = 8 * MiB
ALL = 160  # more blocks than fit
seeds = iter(range(50_000, 51_000))


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=3, transport="shm", lease_seconds=2.0, pool_bytes=POOL_BYTES) as running:
        yield running


@pytest.fixture(autouse=True)
def runtime(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KVSERVICE_RUNTIME_DIR", str(cluster.root))
    yield
    for node in cluster.nodes:
        if not cluster._records(node):
            cluster.start_shard(node)


class At:
    """An engine of a node, for the length of a block."""

    def __init__(self, cluster: LocalCluster, node: str, **fields: object) -> None:
        self._socket, self._spec = cluster.socket(node), spec(**fields) if fields else None

    async def __aenter__(self) -> Engine:
        self._engine = await attached(self._socket, self._spec)
        return self._engine

    async def __aexit__(self, *error: object) -> None:
        await self._engine.pool.close()
        self._engine.let_go()


def explained(cluster: LocalCluster, request_id: str) -> dict[str, Any]:
    state = explain.explain(cluster.service, request_id)
    (request,) = state["requests"]
    found: dict[str, Any] = request
    return found


def reasons(request: dict[str, Any]) -> list[tuple[str, int, str | None, str]]:
    return [(one["outcome"], one["count"], one["miss_cause"], one["node"]) for one in request["diagnosis"]]


async def test_every_block_of_a_request_is_accounted_for(cluster: LocalCluster) -> None:
    keys = chain(next(seeds), 20)
    async with At(cluster, "n0") as writer, At(cluster, "n1") as reader:
        await writer.store(keys[:12])
        await reader.store(keys[:5])
        cluster.wait_until_known(keys[:12])
        await reader.read_all(keys, request_id="cmpl-all-0-1234")
        report = RequestReport("cmpl-all-0-1234", 20, 2, 10, 8)
        await reader.pool.renew(reader.attachment.attachment_id, [], [report])
    request = explained(cluster, "cmpl-all")
    assert reasons(request) == [
        ("engine", 2, None, ""),
        ("local", 3, None, ""),
        ("fetched", 7, None, "n0"),
        ("missed", 8, "never_stored", ""),
    ]
    assert request["blocks"] == {"engine": 2, "local": 3, "fetched": 7, "missed": 8}
    assert (request["node"], request["finished"]) == ("n1", True)
    told = io.StringIO()
    state = explain.explain(cluster.service, "cmpl-all")
    rich.console.Console(file=told, width=160).print(explain.draw(state))
    assert f"on node {socket.gethostname()} (n1), model" in told.getvalue()


async def test_an_eviction_is_explained_with_node_and_cause(cluster: LocalCluster) -> None:
    keys, others = chain(next(seeds), 6), chain(next(seeds), ALL)
    async with At(cluster, "n0") as writer, At(cluster, "n1") as reader:
        await writer.store(keys)
        await writer.store(others)
        await asyncio.sleep(0.1)
        await reader.read_all(keys, request_id="evicted")
        name = f"stores of test-model by engine {(await _engine_id(writer)).hex()[:8]}"
    (missed,) = explained(cluster, "evicted")["diagnosis"]
    assert (missed["miss_cause"], missed["node"], missed["count"]) == ("evicted", "n0", 6)
    assert name in missed["text"]


async def _engine_id(engine: Engine) -> bytes:
    return engine.engine_id


async def _ask_and_store(reader: Engine, keys: tuple[BlockKey, ...], request_id: str) -> None:
    """As an engine does: it asks, computes what it missed, stores it, and reports the end of the request."""
    result = await reader.read_all(keys, request_id=request_id)
    hit = len(result.blocks)
    await asyncio.sleep(0.1)
    await reader.store(keys, start=hit)
    report = RequestReport(request_id, len(keys), 0, hit, len(keys) - hit)
    await reader.pool.renew(reader.attachment.attachment_id, [], [report])


@pytest.mark.parametrize("asking", ["n0", "n1"])
async def test_a_miss_is_explained_although_the_request_stored_it(cluster: LocalCluster, asking: str) -> None:
    """Cold, and after an eviction on the node that asks and on another one."""
    cold, evicted = chain(next(seeds), 6), chain(next(seeds), 6)
    async with At(cluster, "n0") as writer, At(cluster, asking) as reader:
        await _ask_and_store(reader, cold, f"cold-{asking}")
        await writer.store(evicted)
        for _ in range(2):
            await writer.store(chain(next(seeds), ALL))
        await asyncio.sleep(0.1)
        await _ask_and_store(reader, evicted, f"again-{asking}")
        for _ in range(2):  # what it stored is evicted once more, which changes no answer
            await reader.store(chain(next(seeds), ALL))
    for _ in range(2):
        request = explained(cluster, f"cold-{asking}")
        assert reasons(request) == [("missed", 6, "never_stored", "")]
        request = explained(cluster, f"again-{asking}")
        assert reasons(request) == [("missed", 6, "evicted", "n0")]
        assert request["diagnosis"][0]["eviction_cause"] == "pressure"
        assert "pool" in request["diagnosis"][0]["text"] and "would have kept it" in request["diagnosis"][0]["text"]


@pytest.mark.parametrize("reading", ["n0", "n1"])
async def test_a_handoff_is_explained_with_its_source_and_time(cluster: LocalCluster, reading: str) -> None:
    keys, handoff = chain(next(seeds), 5), Handoff(HandoffId(os.urandom(16)), NodeId("n0"))
    async with At(cluster, "n0") as writer, At(cluster, reading) as reader:
        await writer.pool.open_handoff(writer.attachment.attachment_id, handoff.handoff_id)
        asked = asyncio.create_task(
            reader.read_all(keys, request_id=f"handed-{reading}", handoff=handoff, timeout=30.0)
        )
        await asyncio.sleep(0.3)
        await writer.store(keys)
        await asked
    request = explained(cluster, f"handed-{reading}")
    outcome, source = ("local", "") if reading == "n0" else ("fetched", "n0")
    assert reasons(request) == [(outcome, 5, None, source)]
    assert request["diagnosis"][0]["text"].startswith("handed off by node n0, after ")
    assert request["handoff_node"] == "n0" and request["took_seconds"] >= 0.3


async def test_a_block_sealed_after_the_ask_was_not_sealed_yet(cluster: LocalCluster) -> None:
    keys = chain(next(seeds), 3)
    async with At(cluster, "n0") as writer, At(cluster, "n1") as reader:
        await reader.read_all(keys, request_id="early")
        await asyncio.sleep(0.1)
        await writer.store(keys)
    assert reasons(explained(cluster, "early")) == [("missed", 3, "not_sealed_yet", "n0")]


async def test_an_owner_that_died_and_one_that_left_are_told_apart(cluster: LocalCluster) -> None:
    died, left = chain(next(seeds), 4), chain(next(seeds), 4)
    async with At(cluster, "n2") as writer:
        await writer.store(left)
        cluster.wait_until_known(left)
    assert await asyncio.to_thread(drain.run, cluster.service, None, "n2", False, 5.0, False, False)
    cluster.exit_code("n2")
    cluster.start_shard("n2")
    async with At(cluster, "n2") as writer:
        await writer.store(died)
        cluster.wait_until_known(died)
    cluster.kill("n2", signal.SIGKILL)
    async with At(cluster, "n1") as reader:
        await reader.read_all(died, request_id="died", timeout=3.0)
        await reader.read_all(left, request_id="left")
    assert reasons(explained(cluster, "died")) == [("missed", 4, "owner_gone", "n2")]
    request = explained(cluster, "left")
    assert reasons(request) == [("missed", 4, "owner_gone", "n2")]
    assert "left the service" in request["diagnosis"][0]["text"]


def test_a_node_that_died_is_named_where_it_may_know_more(cluster: LocalCluster) -> None:
    """Its requests were unknown to all, and the blocks of the others were all that there are."""
    cluster.kill("n2", signal.SIGKILL)
    eventually(lambda: "n2" not in find_members(cluster.service).shards, "the directory to miss n2")
    try:
        assert explain.explain(cluster.service, "of-n2")["silent_nodes"] == ["n2"]
        listed = blocks.collect(cluster.service, None, blocks.Selection())
        assert listed.problems == ("node n2 is silent",) and not listed.complete
        with pytest.raises(NoService, match="n2 is silent"):
            blocks.collect(cluster.service, None, blocks.Selection(node="n2"))
    finally:
        cluster.start_shard("n2")


async def test_a_deadline_is_told(cluster: LocalCluster) -> None:
    keys = chain(next(seeds), 4)
    async with At(cluster, "n0") as writer:
        await writer.store(keys)
        cluster.wait_until_known(keys)
    await asyncio.sleep(0.1)
    cluster.kill("n0", signal.SIGSTOP)
    try:
        async with At(cluster, "n1") as reader:
            await reader.read_all(keys, request_id="late", timeout=0.3)
    finally:
        cluster.kill("n0", signal.SIGCONT)
    assert reasons(explained(cluster, "late")) == [("missed", 4, "deadline", "")]


async def test_a_question_that_was_given_up_was_not_without_a_pool(cluster: LocalCluster) -> None:
    """As when a client goes away. The shard was there, and another node was about to give the blocks."""
    keys = chain(next(seeds), 4)
    async with At(cluster, "n0") as writer:
        await writer.store(keys)
        cluster.wait_until_known(keys)
    cluster.kill("n0", signal.SIGSTOP)
    try:
        async with At(cluster, "n1") as reader:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(reader.acquire(keys, request_id="given-up", timeout=20.0), 0.3)
            report = RequestReport("given-up", 4, 0, 0, 0)
            await reader.pool.renew(reader.attachment.attachment_id, [], [report])
    finally:
        cluster.kill("n0", signal.SIGCONT)
    request = explained(cluster, "given-up")
    assert (request["answered"], request["finished"]) == (False, True)
    assert reasons(request) == [("missed", 4, "engine_did_not_wait", "")]
    told = io.StringIO()
    rich.console.Console(file=told, width=160).print(explain.draw(explain.explain(cluster.service, "given-up")))
    assert "given up before it was answered" in told.getvalue() and "no pool" not in told.getvalue()


async def test_another_fingerprint_is_named_with_its_field(cluster: LocalCluster) -> None:
    keys = chain(next(seeds), 2)
    async with At(cluster, "n0", dtype="fp8"), At(cluster, "n1") as reader:
        await reader.read_all(keys, request_id="mismatch")
        (missed,) = explained(cluster, "mismatch")["diagnosis"]
        with pytest.raises(KVServiceError):
            await Engine.attach(ShardClient(cluster.socket("n1")), spec(dtype="int4"))
    assert missed["miss_cause"] == "other_fingerprint"
    assert "n0" in missed["text"] and "dtype" in missed["text"]
    refused = explain.explain(cluster.service, "nobody")["refused_engines"]
    assert any(row["node"] == "n1" and "dtype" in row["message"] for row in refused)


async def test_blocks_of_another_cache_salt_are_named_as_the_cause(cluster: LocalCluster) -> None:
    keys = chain(next(seeds), 2)
    async with At(cluster, "n1") as reader:
        await reader.read_all(keys, request_id="salted")
        report = RequestReport("salted", 2, 0, 0, 2, salted=True)
        await reader.pool.renew(reader.attachment.attachment_id, [], [report])
    assert reasons(explained(cluster, "salted")) == [("missed", 2, "other_cache_salt", "")]


async def test_an_unknown_request_and_an_unclear_one_say_what_to_do(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    async with At(cluster, "n0") as first, At(cluster, "n1") as second:
        for number, engine in enumerate((first, second)):
            request = AcquireRequest(chain(1, 1), 0, 1.0, request_id=f"chatcmpl-9-{number}")
            await engine.pool.acquire(engine.attachment.attachment_id, request)
    assert not explain.run(cluster.service, None, "chatcmpl-9", Format.TABLE)
    assert "chatcmpl-9-0" in capsys.readouterr().out
    assert not explain.run(cluster.service, None, "nobody", Format.TABLE)
    assert "15 minutes" in capsys.readouterr().out
    assert explain.run(cluster.service, None, "chatcmpl-9-1", Format.JSON)
    state = json.loads(capsys.readouterr().out)
    assert (state["request_id"], state["requests"][0]["node"]) == ("chatcmpl-9-1", "n1")


async def test_asking_why_does_not_hold_up_a_shard(cluster: LocalCluster) -> None:
    keys = chain(next(seeds), ALL)
    async with At(cluster, "n0") as engine:
        for _ in range(3):
            await engine.store(chain(next(seeds), ALL))
        await engine.acquire(keys, request_id="slow")
        started = time.monotonic()
        await asyncio.to_thread(explain.explain, cluster.service, "slow")
        assert time.monotonic() - started < 2.0
    assert sum(one["count"] for one in explained(cluster, "slow")["diagnosis"]) == ALL
