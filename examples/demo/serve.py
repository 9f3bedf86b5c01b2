"""`make demo-serve`: the same conversations against three Ray Serve apps of two vLLM replicas on two nodes.

Round-robin without the cache, round-robin with it, and routed to where a prompt costs least. An engine's own cache
holds only part of the conversations, so that where a turn is computed, and what the nodes hold, matters.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from examples.demo.conversation import Shape, play, warm
from examples.demo.network import Crossing, why_not
from examples.demo.offspring import engine_memory_removed
from examples.demo.replica import DTYPE, ENVIRONMENT
from examples.demo.serve_report import Played, routing_shortfall, save, shortfalls, show
from examples.demo.stage import (
    PLAIN_WIDTH,
    SERVICE,
    Steps,
    Stops,
    TwoNodes,
    conclude,
    performance,
    prepared_model,
    ray_cluster,
    shard_numbers,
    shipped_document,
)
from kvservice.errors import KVServiceError, Unavailable
from kvservice.units import MiB

MODEL = "smol"
APP = "demo"
ROUND_ROBIN = "ray.serve.experimental.round_robin_router:RoundRobinRouter"
BLOCK_TOKENS = 32
MODEL_LENGTH = 2048
ENGINE_BLOCKS = 112  # 3,584 tokens: about three of the conversations at their end
SLAB_BYTES = 8 * MiB
WARM_REQUESTS = 6
START_SECONDS = 400.0


def run(model: str | None, out: Path, shape: Shape) -> None:
    """Raises KVServiceError when a step fails, or when the cache was not better; everything is cleaned up by then."""
    started = time.perf_counter()
    document, _ = shipped_document(1)
    log = out / "demo-serve.log"
    with output_into(log) as console:
        console.print(f"the output of Ray, Serve and vLLM goes into {log}", highlight=False)
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        if load > cores / 2:
            console.print(
                f"others use this machine (load {load:.1f} on {cores} cores): times will say more about them than "
                "about the cache",
                highlight=False,
            )
        with engine_memory_removed(), performance(console) as (stack, stops):
            steps = stack.enter_context(Steps(console, total=2 + 2 * len(APPS), redirect=False))
            found, crossing = _measure(steps, stops, model, document, shape)
        show(found, console)
        console.print(crossing.sentence, highlight=False)
        conclude(console, started, save(found, shape, out))
        worse = worse_apps(found)
        if worse:
            raise KVServiceError("not better in everything that is compared. " + ". ".join(worse))
        console.print("with the cache, better in everything that is compared")


def worse_apps(found: list[Played]) -> list[str]:
    """The problems. Empty if the cache is better than no cache and routing costs no hits."""
    without, plain, routed = found
    faults = {plain.name: shortfalls(without, plain), routed.name: shortfalls(without, routed)}
    faults[routed.name] += routing_shortfall(plain, routed)
    return [f"{name}: {'; '.join(words)}" for name, words in faults.items() if words]


@contextlib.contextmanager
def output_into(log: Path) -> Iterator[Console]:
    """Whatever this process and its children write goes into the file; yields a console on the former stdout."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(number) for number in (1, 2)]
    with log.open("wb") as file, os.fdopen(os.dup(1), "w") as stdout:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            yield Console(file=stdout) if stdout.isatty() else Console(file=stdout, width=PLAIN_WIDTH)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, former in zip((1, 2), kept, strict=True):
                os.dup2(former, number)
                os.close(former)


# Name, and the kvservice section's router; None is an app without the cache.
APPS: tuple[tuple[str, str | None], ...] = (
    ("round-robin, no cache", None),
    ("round-robin, kvservice", "default"),
    ("KV-aware, kvservice", "kv_aware"),
)


def _measure(
    steps: Steps, stops: Stops, model: str | None, document: str, shape: Shape
) -> tuple[list[Played], Crossing]:
    steps.begin("preparing the model")
    folder = prepared_model(model)
    steps.begin("starting a Ray cluster of two nodes")
    found: list[Played] = []
    # Two vLLM replicas import for seconds on few cores; workers started for nothing would take the time from them.
    os.environ.setdefault("RAY_enable_worker_prestart", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", ENVIRONMENT["VLLM_LOGGING_LEVEL"])
    with ray_cluster(stops, why_not(folder)) as cluster, serve_running() as base_url:
        stops.watch()
        quiet()
        for name, router in APPS:
            steps.begin(f"{name}: starting the app, two replicas load the model")
            with deployed(folder, router, service_settings(shape, cluster)):
                asyncio.run(warm(base_url, MODEL, WARM_REQUESTS))
                steps.begin(f"{name}: {shape.users} users, {shape.turns} turns each")
                before = _fetched(cluster, router)
                started = time.perf_counter()
                turns = asyncio.run(play(base_url, MODEL, document, shape))
                seconds = time.perf_counter() - started
                found.append(Played(name, tuple(turns), seconds, _fetched(cluster, router) - before))
                if router is not None:
                    crossing = cluster.crossing()
            one = found[-1]
            steps.say(
                f"{name}: hit rate {one.hit_rate:.1%}, {one.recomputed_tokens:,} tokens recomputed, first token of "
                f"later turns p50 {one.first_token_seconds(0.5):.2f} s, p90 {one.first_token_seconds(0.9):.2f} s"
            )
    return found, crossing


def quiet() -> None:
    """Show only the demo's output. Serve and vLLM make this process log every deployment and every HTTP request."""
    for name in ("ray", "ray.serve", "ray.llm", "httpx", "vllm", "kvservice"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextlib.contextmanager
def serve_running() -> Iterator[str]:
    """Ray Serve on the connected cluster; yields the base URL of its OpenAI API."""
    from ray import serve

    quiet()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": "127.0.0.1", "port": port},
        logging_config={"log_level": "WARNING"},
    )
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        serve.shutdown()


@contextlib.contextmanager
def deployed(folder: str, router: str | None, settings: dict[str, Any]) -> Iterator[None]:
    """Start one app and wait until its replicas answer. It is removed at the end, with its cache."""
    from ray import serve

    from kvservice.actors import deploy

    try:
        serve.run(application(folder, router, settings), name=APP, route_prefix="/", blocking=False)
        wait_running(APP, START_SECONDS)
        quiet()  # again: what building the app has imported has set levels of its own
        yield
    finally:
        serve.delete(APP)
        if router is not None:
            deploy.down(SERVICE)


def service_settings(shape: Shape, cluster: TwoNodes) -> dict[str, Any]:
    """A node's pool holds about three quarters of all conversations at their end, many times what its engine does."""
    pool_bytes = shape.users * (12 + 6 * shape.turns) * MiB
    return {"pool_bytes": pool_bytes, "slab_bytes": SLAB_BYTES, "allow_plaintext": cluster.has_own_network}


def application(folder: str, router: str | None, settings: dict[str, Any]) -> Any:
    """Two replicas, each on a node of its own because it takes all of the node's CPUs."""
    arguments: dict[str, Any] = {
        "llm_configs": [model_config(folder, {} if router == "kv_aware" else {"request_router_class": ROUND_ROBIN})],
        "ingress_deployment_config": {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0}},
    }
    if router is None:
        from ray.serve.llm import build_openai_app as build_plain_app

        return build_plain_app(arguments)
    from kvservice.serve import build_openai_app

    section = {"service": SERVICE, "settings": settings, "router": router}
    return build_openai_app({**arguments, "kvservice": section})


def model_config(folder: str, router_config: dict[str, Any], replicas: int = 2, **engine: Any) -> dict[str, Any]:
    """An LLMConfig, as a mapping, of the demo's model on CPUs."""
    variables = {**ENVIRONMENT, "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    here: dict[str, Any] = {}
    if Path(folder).exists():
        variables["HF_HUB_OFFLINE"] = "1"
        here["callback_config"] = {"callback_class": "examples.demo.model_is_here.ModelIsHere"}
    deployment: dict[str, Any] = {"num_replicas": replicas, "ray_actor_options": {"num_cpus": 0}}
    if router_config:
        deployment["request_router_config"] = router_config
    return {
        "model_loading_config": {"model_id": MODEL, "model_source": folder},
        "placement_group_config": {"bundles": [{"CPU": 2}]},
        "runtime_env": {"env_vars": variables},
        "deployment_config": deployment,
        "log_engine_metrics": False,
        **here,
        "engine_kwargs": {
            "dtype": DTYPE,
            "max_model_len": MODEL_LENGTH,
            "block_size": BLOCK_TOKENS,
            "num_gpu_blocks_override": ENGINE_BLOCKS,
            "max_num_seqs": 4,
            "enforce_eager": True,
            "enable_prompt_tokens_details": True,
            **engine,
        },
    }


def wait_running(app: str, seconds: float) -> None:
    """Raises Unavailable with Serve's own words when the app does not come up."""
    from ray import serve

    deadline = time.monotonic() + seconds
    while True:
        state = serve.status().applications.get(app)
        if state is not None and state.status == "RUNNING":
            return
        if (state is not None and state.status in ("DEPLOY_FAILED", "UNHEALTHY")) or time.monotonic() > deadline:
            words = (
                ""
                if state is None
                else "; ".join([state.message, *(one.message for one in state.deployments.values())])
            )
            raise Unavailable(f"the app did not come up: {words.strip() or 'no word from Serve'}")
        time.sleep(0.5)


def _fetched(cluster: TwoNodes, router: str | None) -> int:
    if router is None:
        return 0
    return sum(shard["counters"].get("fetched_blocks", 0) for shard in shard_numbers(cluster.ids))
