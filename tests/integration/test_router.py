"""The Serve router against real lookup and cache shards. Replicas are stand-ins: their names, nodes and queues count.

Requests go through Serve's own routing loop, as from a deployment handle. No vLLM engine and no Ray cluster.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from kvservice.breaker import FAILURES_TO_OPEN, OPEN_SECONDS_FIRST
from kvservice.client.shard import ShardClient
from kvservice.connector.vllm.block_hashes import block_namer
from kvservice.core.block.keys import block_keys
from kvservice.observe import tracing
from kvservice.serve.prompt import SENT_TO
from kvservice.serve.router import KvAwareRouter
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually_async
from tests.integration.engine import LAYOUT, Engine, spec

DEPLOYMENT = DeploymentID(name="llm", app_name="test")
MODEL = "org/test-model"
SPEC = spec("test-model", hash="sha256_cbor", hash_seed="0", block_tokens=LAYOUT.block_tokens)
DEAR_FETCH = {"fetch_overhead_ms": 60_000.0, "prefill_tokens_per_second": 1000.0}
BUDGET_MS = 5_000.0  # a busy machine stalls for longer than people wait; the bound is tested with less


class Replica:
    """What the router sees of a running replica."""

    def __init__(self, name: str, node: str, models: Sequence[str] = ()) -> None:
        self.replica_id = ReplicaID(unique_id=name, deployment_id=DEPLOYMENT)
        self.node_id = node
        self.availability_zone = None
        self.max_ongoing_requests = 100
        self.multiplexed_model_ids = set(models)
        self.routing_stats: dict[str, Any] = {}
        self.queue_len = 0

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.queue_len


def tokens(seed: int, count: int = 1024) -> list[int]:
    return [(seed * 100_003 + index * 7919) % 49_000 for index in range(count)]


def request(prompt: list[int] | str, multiplexed: str = "") -> PendingRequest:
    metadata = RequestMetadata(
        request_id=uuid.uuid4().hex, internal_request_id=uuid.uuid4().hex, multiplexed_model_id=multiplexed
    )
    return PendingRequest(args=[SimpleNamespace(model=MODEL, prompt=prompt)], kwargs={}, metadata=metadata)


class Handle:
    """One deployment handle's router, and the calls Serve makes around a request."""

    def __init__(self, router: KvAwareRouter) -> None:
        self.router = router

    async def send(self, pending: PendingRequest, *, keep: bool = False) -> str:
        """Name of the replica that gets it. Unless kept, it completes at once."""
        replica = await asyncio.wait_for(self.router._choose_replica_for_request(pending), 10)
        self.router.on_send_request(replica.replica_id)
        self.router.on_request_routed(pending, replica.replica_id, None)
        if not keep:
            self.router.decrement_queue_len_cache(replica.replica_id)
            self.router.on_request_completed(replica.replica_id, pending.metadata.internal_request_id)
        return str(replica.replica_id.unique_id)

    @asynccontextmanager
    async def dispatch(self, pending: PendingRequest) -> AsyncIterator[str]:
        """As DecodeServer sends it: Serve does not say where the request went, only when it ends."""
        sent_to: Future[str] = Future()
        pending.kwargs[SENT_TO] = sent_to
        replica = await asyncio.wait_for(self.router._choose_replica_for_request(pending), 10)
        self.router.on_new_queue_len_info(replica.replica_id, 1)
        sent_to.set_result(replica.replica_id.unique_id)
        await asyncio.sleep(0)
        yield str(replica.replica_id.unique_id)
        self.router.decrement_queue_len_cache(replica.replica_id)
        self.router.on_request_completed(replica.replica_id, pending.metadata.internal_request_id)

    async def spread(self, prompts: Sequence[list[int]], **metadata: str) -> Counter[str]:
        return Counter([await self.send(request(prompt, **metadata)) for prompt in prompts])

    @property
    def lookup_counters(self) -> dict[str, int]:
        lookup = self.router._holdings._lookup
        return {} if lookup is None else lookup.counters

    @property
    def reasons(self) -> dict[str, int]:
        return self.router._meters.reasons


@asynccontextmanager
async def handle(cluster: LocalCluster | None, *replicas: Replica, **options: Any) -> AsyncIterator[Handle]:
    router = KvAwareRouter(
        deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
    )
    addresses = [] if cluster is None else cluster.lookup_addresses
    service = "nobody" if cluster is None else cluster.service
    common = {"lookup_addresses": addresses, "service": service, "budget_ms": BUDGET_MS, **DEAR_FETCH}
    router.initialize_state(**{**common, **options})
    router.update_replicas(list(replicas))
    await eventually_async(
        lambda: router._reader._loaded and (cluster is None or len(router._holdings.known.nodes) > 0),
        "the router to have heard of the nodes",
    )
    await router._probe_queue_lens(list(replicas), 0)  # Serve does so as well, a moment later
    try:
        yield Handle(router)
    finally:
        await router._holdings.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=2, lookup_partitions=1, pool_bytes=64 << 20) as running:
        yield running


@pytest.fixture
async def engines(cluster: LocalCluster) -> AsyncIterator[list[Engine]]:
    found = [await Engine.attach(ShardClient(cluster.socket(node)), SPEC) for node in cluster.nodes]
    yield found
    for engine in found:
        await engine.pool.detach(engine.attachment.attachment_id)
        engine.let_go()
        await engine.pool.close()


async def store(cluster: LocalCluster, engine: Engine, prompt: list[int]) -> None:
    """As the connector does it."""
    keys = block_keys(SPEC.fingerprint.digest, block_namer(dict(SPEC.fingerprint.fields))(prompt))
    await engine.store(keys)
    await asyncio.to_thread(cluster.wait_until_known, keys)


def pair() -> tuple[Replica, Replica]:
    return Replica("r0", "n0"), Replica("r1", "n1")


async def test_a_prompt_goes_to_the_node_that_holds_it(cluster: LocalCluster, engines: list[Engine]) -> None:
    for index, engine in enumerate(engines):
        await store(cluster, engine, tokens(10 + index))
    async with handle(cluster, *pair(), engine_blocks=0) as app:
        assert await app.spread([tokens(10)] * 6) == {"r0": 6}
        assert await app.spread([tokens(11)] * 6) == {"r1": 6}
        assert app.reasons == {"hit": 12}


async def test_cold_prompts_are_spread(cluster: LocalCluster, engines: list[Engine]) -> None:
    async with handle(cluster, *pair()) as app:
        found = await app.spread([tokens(1000 + index, 64) for index in range(40)])
        assert min(found["r0"], found["r1"]) >= 8
        assert app.reasons == {"cold": 40}


async def test_a_burst_for_one_prefix_does_not_all_go_to_its_holder(
    cluster: LocalCluster, engines: list[Engine]
) -> None:
    await store(cluster, engines[0], tokens(20))
    async with handle(cluster, *pair(), engine_blocks=0, prefill_tokens_per_second=1000.0) as app:
        burst = [request(tokens(20) + tokens(2000 + index, 256)) for index in range(24)]
        found = Counter(await asyncio.gather(*[app.send(pending, keep=True) for pending in burst]))
        assert found["r0"] > found["r1"] >= 2, "0.25 s of work at the holder, 1.3 s elsewhere"
        assert app.reasons["load"] >= 2


async def test_what_an_engine_was_sent_counts_without_a_holder(cluster: LocalCluster, engines: list[Engine]) -> None:
    async with handle(cluster, *pair()) as app:
        conversation = tokens(30)
        first = await app.send(request(conversation))
        for turn in range(1, 5):
            conversation += tokens(300 + turn, 64)
            assert await app.send(request(conversation)) == first
        assert app.reasons == {"cold": 1, "hit": 4}


async def test_what_its_sender_dispatches_counts_as_sent(cluster: LocalCluster, engines: list[Engine]) -> None:
    async with handle(cluster, *pair()) as app:
        conversation, places = tokens(35), set[str]()
        for turn in range(1, 5):
            async with app.dispatch(request(conversation)) as place:
                places.add(place)
                replica = ReplicaID(place, DEPLOYMENT).to_full_id_str()
                now = time.monotonic()
                assert app.router._book.wait(replica, 1, now).waiting == 0, "counted once, as its own"
                assert app.router._book.in_flight(replica, now + 60.0) == 1
            assert app.router._book.in_flight(replica, now) == 0
            conversation += tokens(350 + turn, 64)
        assert len(places) == 1
        assert app.reasons == {"cold": 1, "hit": 3}


async def test_a_restarted_replica_remembers_nothing(cluster: LocalCluster, engines: list[Engine]) -> None:
    stays, leaves = pair()
    async with handle(cluster, stays, leaves) as app:
        stays.queue_len = 50
        app.router.on_new_queue_len_info(stays.replica_id, 50)
        assert await app.send(request(tokens(40))) == "r1"
        app.router.update_replicas([stays])
        again = Replica("r1-again", "n1")
        app.router.update_replicas([stays, again])
        app.router.on_new_queue_len_info(stays.replica_id, 0)
        app.router.on_new_queue_len_info(again.replica_id, 0)
        assert await app.send(request(tokens(40))) in ("r0", "r1-again")
        assert app.reasons == {"cold": 2}


async def test_replicas_come_and_go(cluster: LocalCluster, engines: list[Engine]) -> None:
    await store(cluster, engines[1], tokens(50))
    r0, r1 = pair()
    async with handle(cluster, r0, engine_blocks=0) as app:
        assert await app.spread([tokens(50)] * 2) == {"r0": 2}
        app.router.update_replicas([r0, r1])
        assert await app.spread([tokens(50)] * 2) == {"r1": 2}
        app.router.on_replica_actor_died(r1.replica_id)
        assert await app.spread([tokens(50)] * 2) == {"r0": 2}
        assert app.reasons == {"fallback:one_replica": 4, "hit": 2}


async def test_a_full_replica_is_skipped(cluster: LocalCluster, engines: list[Engine]) -> None:
    await store(cluster, engines[0], tokens(60))
    r0, r1 = pair()
    async with handle(cluster, r0, r1, engine_blocks=0) as app:
        r0.max_ongoing_requests = r0.queue_len = 3
        app.router.on_new_queue_len_info(r0.replica_id, 3)
        assert await app.send(request(tokens(60))) == "r1"


async def test_routers_do_not_need_to_know_of_each_other(cluster: LocalCluster, engines: list[Engine]) -> None:
    await store(cluster, engines[1], tokens(70))
    async with handle(cluster, *pair()) as one, handle(cluster, *pair()) as other:
        assert [await app.send(request(tokens(70))) for app in (one, other)] == ["r1", "r1"]


async def test_a_request_for_an_adapter_goes_where_serve_sends_it(cluster: LocalCluster, engines: list[Engine]) -> None:
    await store(cluster, engines[0], tokens(80))
    async with handle(cluster, Replica("r0", "n0"), Replica("r1", "n1", models=["lora"])) as app:
        found = await app.spread([tokens(80)] * 4, multiplexed="lora")
        assert found == {"r1": 4}
        assert app.reasons == {"fallback:lora": 4}


async def test_by_load_the_shortest_queue_is_taken() -> None:
    r0, r1 = pair()
    r0.queue_len, r1.queue_len = 6, 2
    async with handle(None, r0, r1, policy="load") as app:
        found = Counter([await app.send(request(tokens(1)), keep=True) for _ in range(3)])
        assert found == {"r1": 3}


async def test_a_full_replica_that_says_no_ends_nothing_elsewhere() -> None:
    """Serve reports a try that a full replica refused as completed, maybe after another replica took the request."""
    async with handle(None, *pair(), policy="load") as app:
        first = await app.send(one := request(tokens(1)), keep=True)
        for replica_id in app.router.curr_replicas:
            app.router.on_new_queue_len_info(replica_id, 0)  # of before the request
            if replica_id.unique_id != first:
                app.router.on_request_completed(replica_id, one.metadata.internal_request_id)
        assert {await app.send(request(tokens(2))) for _ in range(6)} == {"r0", "r1"} - {first}


async def test_a_decision_has_a_span_in_the_requests_trace(tmp_path: Path) -> None:
    r0, r1 = pair()
    r0.queue_len, r1.queue_len = 6, 2
    theirs = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    asked = request(tokens(1))
    asked.args[0].kv_transfer_params = {"traceparent": theirs}
    try:
        async with handle(None, r0, r1, policy="load", traces=f"file:{tmp_path / 'spans'}") as app:
            assert await app.send(asked) == "r1"
    finally:
        tracing.stop()
    (span,) = map(json.loads, (tmp_path / "spans").read_text().splitlines())
    assert (span["name"], span["parent_id"]) == ("kvservice.route", f"0x{theirs[36:52]}")
    assert span["attributes"]["kvservice.request_id"] == asked.metadata.request_id
    assert span["attributes"]["kvservice.replica"].endswith("r1")


async def test_without_a_service_serve_decides() -> None:
    async with handle(None, *pair()) as app:
        found = await app.spread([tokens(90)] * 40)
        assert min(found["r0"], found["r1"]) >= 8, "power of two choices"
        assert app.reasons == {"fallback:no_service": 40}


async def test_a_bug_of_the_router_is_counted_and_the_request_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with handle(None, *pair()) as app:

        def fail(*arguments: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(app.router, "_allowed", fail)
        assert (await app.spread([tokens(1)] * 5)).total() == 5
        assert app.reasons == {"fallback:error": 5}


async def test_after_a_fallback_serve_still_prefers_the_replica_nearby() -> None:
    async with handle(None, *pair()) as app:
        app.router._prefer_local_node_routing, app.router._self_node_id = True, "n1"
        app.router.update_replicas(list(app.router.curr_replicas.values()))
        assert await app.spread([tokens(1)] * 8) == {"r1": 8}, "no service: as Serve's own router does"


async def test_nearby_replicas_come_first_and_among_them_the_holder(
    cluster: LocalCluster, engines: list[Engine]
) -> None:
    await store(cluster, engines[0], tokens(120))
    replicas = [Replica("r0", "n0"), Replica("r1", "n1"), Replica("r2", "n1")]
    async with handle(cluster, *replicas, engine_blocks=0) as app:
        app.router._prefer_local_node_routing, app.router._self_node_id = True, "n1"
        app.router.update_replicas(list(app.router.curr_replicas.values()))
        found = await app.spread([tokens(120)] * 8)
        assert set(found) <= {"r1", "r2"}


async def test_a_hanging_service_costs_the_budget_then_nothing(cluster: LocalCluster, engines: list[Engine]) -> None:
    await store(cluster, engines[0], tokens(100))
    async with handle(cluster, *pair(), engine_blocks=0, budget_ms=40.0, answer_seconds=0.0) as app:
        cluster.kill("lookup0", signal.SIGSTOP)
        try:
            seconds: list[float] = []
            for _ in range(12):
                begun = time.monotonic()
                await app.send(request(tokens(100)))
                seconds.append(time.monotonic() - begun)
            counted = app.lookup_counters
        finally:
            cluster.kill("lookup0", signal.SIGCONT)
        assert max(seconds) < 1.0, "40 ms and what a loaded machine adds"
        under_way = 1  # a request gives up a moment before its call has failed, and the next one asks as well
        trials = FAILURES_TO_OPEN + under_way + sum(seconds) / OPEN_SECONDS_FIRST
        assert counted["lookup_rpcs"] <= trials, "three failures, then it is asked once in a second"
        assert counted["lookup_skipped"] > 0 or counted["lookup_rpcs"] < FAILURES_TO_OPEN, "the rest is not asked"
        assert {reason.partition(":")[0] for reason in app.reasons} == {"fallback"}

        async def is_asked() -> bool:
            return await app.send(request(tokens(100))) == "r0" and "hit" in app.reasons

        await eventually_async(is_asked, "the service, which is back, to be asked again")


async def test_a_dead_holder_in_the_directory_fails_no_request(cluster: LocalCluster, engines: list[Engine]) -> None:
    """Whatever the directory still says: the engine there recomputes."""
    await store(cluster, engines[1], tokens(110))
    async with handle(cluster, *pair(), engine_blocks=0) as app:
        cluster.kill("n1")
        try:
            found = await app.spread([tokens(110)] * 5)
            assert found.total() == 5
            await app.router._holdings.refresh()
            assert (await app.spread([tokens(111)] * 5)).total() == 5
        finally:
            cluster.start_shard("n1")


async def test_text_is_looked_up_through_the_tokenizer(
    cluster: LocalCluster, engines: list[Engine], model_path: Path
) -> None:
    from transformers import AutoTokenizer

    text = "The quick brown fox jumps over the lazy dog. " * 60
    ids = AutoTokenizer.from_pretrained(str(model_path)).encode(text)
    node = engines[0].attachment.node_id
    await store(cluster, engines[0], ids)
    async with handle(cluster, *pair(), engine_blocks=0, tokenizer=str(model_path)) as app:
        found = [await app.send(request(text)) for _ in range(4)]
        assert node == "n0"
        assert (found, app.reasons) == (["r0"] * 4, {"hit": 4})
