"""The router in a real Serve application: loaded by name, fed by the service on two Ray nodes, and left alone by it.

The deployment only says where it runs: what an engine would have stored is stored by the test.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from kvservice.actors import deploy, names
from kvservice.client.shard import ShardClient
from kvservice.config import ServiceConfig
from kvservice.connector.vllm.block_hashes import block_namer
from kvservice.core.block.keys import block_keys
from kvservice.discovery import find_shards
from kvservice.testing.eventually import eventually_async
from kvservice.units import MiB
from tests.integration.engine import LAYOUT, Engine, spec
from tests.ray_nodes import ray_nodes

pytestmark = pytest.mark.ray

NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * MiB}
SERVICE = "routed"
SPEC = spec("test-model", hash="sha256_cbor", hash_seed="0", block_tokens=LAYOUT.block_tokens)
ROUTER = RequestRouterConfig(
    request_router_class="kvservice.serve.router.KvAwareRouter",
    request_router_kwargs={
        "service": SERVICE,
        "budget_ms": 500.0,
        "refresh_seconds": 0.5,
        "engine_blocks": 0,
        "fetch_overhead_ms": 60_000.0,
        "prefill_tokens_per_second": 1000.0,
    },
)


@serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 1}, request_router_config=ROUTER)
class Where:
    """One replica a node: each takes the node's only CPU."""

    async def completions(self, request: Any) -> str:
        return str(ray.get_runtime_context().get_node_id())


@serve.deployment(
    ray_actor_options={"num_cpus": 1},
    request_router_config=ROUTER,
    max_ongoing_requests=20,
    autoscaling_config={
        "min_replicas": 1,
        "max_replicas": 2,
        "target_ongoing_requests": 3,
        "metrics_interval_s": 0.2,
        "look_back_period_s": 1.0,
        "upscale_delay_s": 0.5,
        "downscale_delay_s": 2.0,
    },
)
class Slowly:
    """Takes its time, so that requests that wait call for a second replica."""

    async def completions(self, request: Any) -> str:
        await asyncio.sleep(0.2)
        return str(ray.get_runtime_context().get_node_id())


@pytest.fixture(scope="module")
def service() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="kvr-") as folder, pytest.MonkeyPatch.context() as patch:
        for name, value in (("KVSERVICE_RUNTIME_DIR", folder), ("RAY_AUTH_MODE", "disabled")):
            patch.setenv(name, value)
        root = str(Path(__file__).resolve().parents[2])
        patch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
        with ray_nodes(NODE, NODE):
            try:
                wanted = ServiceConfig(service=SERVICE, pool_bytes=32 * MiB, slab_bytes=8 * MiB, runtime_dir=folder)
                deploy.up(wanted).wait_complete(150)
                yield
            finally:
                serve.shutdown()
                if deploy.find(SERVICE) is not None:
                    deploy.down(SERVICE)


@pytest.fixture
async def engines(service: None) -> AsyncIterator[dict[str, Engine]]:
    found = {
        str(record.node_id): await Engine.attach(ShardClient(record.socket), SPEC) for record in find_shards(SERVICE)
    }
    yield found
    for engine in found.values():
        engine.let_go()
        await engine.pool.close()


def tokens(seed: int) -> list[int]:
    return [(seed * 100_003 + index * 7919) % 49_000 for index in range(1024)]


def replicas_of(app: str) -> int:
    (deployment,) = serve.status().applications[app].deployments.values()
    return int(deployment.replica_states.get("RUNNING", 0))


async def test_added_replicas_are_used_and_removed_ones_fail_nothing(
    engines: dict[str, Engine],
) -> None:
    app = await asyncio.to_thread(serve.run, Slowly.bind(), name="scaled", route_prefix=None)  # type: ignore[attr-defined]
    answered: list[str] = []
    busy = asyncio.Event()
    busy.set()

    async def keep_asking(seed: int) -> None:
        while busy.is_set():
            request = SimpleNamespace(model="test-model", prompt=tokens(100 + seed))
            answered.append(names.node_id(await app.completions.remote(request)))

    asking = [asyncio.ensure_future(keep_asking(seed)) for seed in range(12)]
    try:
        await eventually_async(lambda: set(answered[-50:]) == set(engines), "answers of a second replica")
        for task in asking[1:]:  # Serve scales down while somebody still asks
            task.cancel()
        await eventually_async(lambda: replicas_of("scaled") == 1, "the end of the second replica")
        count = len(answered)
        await eventually_async(lambda: len(answered) > count + 5, "answers of the remaining replica")
    finally:
        busy.clear()
        ends = await asyncio.gather(*asking, return_exceptions=True)
        await asyncio.to_thread(serve.delete, "scaled")
    assert [end for end in ends if end is not None and not isinstance(end, asyncio.CancelledError)] == []


def prefill_and_decode() -> serve.Application:
    """An app with the decode server of kvservice.serve, without engines. Its answer is the node of the prefill."""
    from ray.llm._internal.serve.core.server.llm_server import LLMServer
    from ray.serve.llm import LLMConfig

    from kvservice.serve.ray_llm import DecodeServer, KVServiceBackend

    config = RequestRouterConfig(
        request_router_class=ROUTER.request_router_class,
        request_router_kwargs={**ROUTER.request_router_kwargs, "engine_blocks": 2048},
    )

    @serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 1}, request_router_config=config)
    class Prefill:
        def __init__(self) -> None:
            """Import what a request is made of, as an engine's replica does before it is ready; it takes seconds."""
            import ray.llm._internal.serve.core.configs.openai_api_models  # noqa: F401

        def record_replica_metadata(self) -> dict[str, str]:
            return {"node": names.node_id(ray.get_runtime_context().get_node_id())}

        async def completions(self, request: Any, raw: Any) -> AsyncIterator[str]:
            yield "done"

    @serve.deployment(ray_actor_options={"num_cpus": 0})
    class Decode(DecodeServer):  # type: ignore[misc]
        def __init__(self, prefill: Any) -> None:
            self._prefill_handle = prefill.options(stream=True)
            self._backend = KVServiceBackend(LLMConfig(model_loading_config={"model_id": "test-model"}))
            LLMServer.completions = type(self).decoded  # type: ignore[method-assign]

        def __del__(self) -> None:
            """Ray's is a coroutine, which nobody awaits."""

        def _get_connector_backend(self) -> KVServiceBackend:
            return self._backend

        async def decoded(self, request: Any, raw: Any) -> AsyncIterator[str]:
            async def answer() -> AsyncIterator[str]:
                handed = request.kv_transfer_params or {"kvservice": {"node": ""}}  # no prefill replica is known yet
                yield handed["kvservice"]["node"]

            return answer()

        async def completions(self, request: Any) -> str:
            (node,) = [node async for node in self._pd_handle_request(request)]
            return str(node)

        async def check_health(self) -> None:
            pass

    return Decode.bind(Prefill.bind())  # type: ignore[attr-defined]


async def test_a_conversation_stays_with_its_prefill_replica(engines: dict[str, Engine]) -> None:
    pytest.importorskip("ray.serve.llm")
    from ray.llm._internal.serve.core.configs.openai_api_models import CompletionRequest

    app = await asyncio.to_thread(serve.run, prefill_and_decode(), name="pd", route_prefix=None)

    async def ask(prompt: list[int]) -> str:
        return str(await app.completions.remote(CompletionRequest(model="test-model", prompt=prompt)))

    begun = iter(range(200, 1000))

    async def stay() -> bool:
        talks = [next(begun) for _ in range(4)]
        turns = [[await ask(tokens(talk) + list(range(1, 1 + 64 * turn))) for talk in talks] for turn in range(6)]
        places[:] = [set(nodes) for nodes in zip(*turns, strict=True)]
        return all(len(place) == 1 for place in places) and set.union(*places) == set(engines)

    places = list[set[str]]()
    # The first requests come before the router has heard of the nodes.
    await eventually_async(stay, "conversations that stay, on both nodes", detail=lambda: places)
    await asyncio.to_thread(serve.delete, "pd")


async def test_prompts_go_to_their_holder_and_on_without_the_service(engines: dict[str, Engine]) -> None:
    assert len(engines) == 2
    prompts = {node: tokens(index) for index, node in enumerate(engines)}
    for node, engine in engines.items():
        await engine.store(
            block_keys(SPEC.fingerprint.digest, block_namer(dict(SPEC.fingerprint.fields))(prompts[node]))
        )
    app = await asyncio.to_thread(serve.run, Where.bind(), name="routed", route_prefix=None)  # type: ignore[attr-defined]

    async def ask(prompt: list[int]) -> str:
        found = await app.completions.remote(SimpleNamespace(model="test-model", prompt=prompt))
        return str(names.node_id(found))

    asked, answered = [node for node in engines for _ in range(6)], list[str]()

    async def are_routed() -> bool:
        answered[:] = [await ask(prompts[node]) for node in asked]
        return answered == asked

    # The first requests come before the router has heard of the nodes.
    await eventually_async(are_routed, f"answers of {asked}", detail=lambda: answered)
    await asyncio.to_thread(deploy.down, SERVICE)
    begun = time.monotonic()
    after = [await ask(prompts[node]) for node in asked]
    assert len(after) == len(asked), "every request is answered"
    assert time.monotonic() - begun < 12 * 0.5 + 5
