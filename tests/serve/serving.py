"""Ray Serve on a cluster of two nodes of this machine, for the tests of its apps."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from examples.demo.offspring import offspring_ended
from examples.demo.serve import ROUND_ROBIN, model_config
from kvservice.actors import deploy
from kvservice.cli.status import collect
from kvservice.testing.cluster import free_port
from kvservice.units import MiB
from tests.ray_nodes import ray_nodes
from tests.vllm.shared_memory import vllm_segments_removed

SERVICE = "serve-test"
POOL_BYTES = 192 * MiB


def node(**marks: int) -> dict[str, Any]:
    return {"num_cpus": 2, "object_store_memory": 80 * MiB, "resources": marks}


# Marks that let each engine run on one node only: the replicas spread, prefill on the one, decode on the other.
NODES = (node(replica=1, prefill=1), node(replica=1, decode=1))


@dataclass(frozen=True, slots=True)
class Serving:
    base_url: str  # without the app's prefix
    cluster: Cluster


@contextlib.contextmanager
def serving(nodes: int = len(NODES)) -> Iterator[Serving]:
    """Everything that runs within is gone afterwards, with its shared memory."""
    variables = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_worker_prestart": "0"}
    with (
        tempfile.TemporaryDirectory(prefix="kvs-") as folder,
        environment(KVSERVICE_RUNTIME_DIR=folder, PYTHONPATH=str(Path(__file__).parents[2]), **variables),
        vllm_segments_removed(),
        offspring_ended(),
        ray_nodes(*NODES[:nodes]) as cluster,
    ):
        try:
            port = free_port()
            options = {"host": "127.0.0.1", "port": port}
            serve.start(proxy_location="HeadOnly", http_options=options, logging_config={"log_level": "WARNING"})
            yield Serving(f"http://127.0.0.1:{port}", cluster)
        finally:
            if ray.is_initialized():
                with contextlib.suppress(ray.exceptions.RayError):
                    serve.shutdown()
                deploy.down(SERVICE)


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def engine(model: Path, mark: str, replicas: int = 1, router: str | None = ROUND_ROBIN) -> dict[str, Any]:
    """An LLMConfig of the tests' model, on the nodes with this mark."""
    found = model_config(
        str(model), {"request_router_class": router} if router else {}, replicas, max_num_batched_tokens=512
    )
    found["placement_group_config"] = {"bundles": [{"CPU": 1, mark: 1}]}
    return found


def arguments(**more: Any) -> dict[str, Any]:
    """The section and the ingress, for any app."""
    settings = {"pool_bytes": POOL_BYTES, "slab_bytes": 16 * MiB, "lookup_partitions": 1}
    return {
        "ingress_deployment_config": {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0}},
        "kvservice": {"service": SERVICE, "settings": settings, "router": "default"},
        **more,
    }


def deploy_file(*applications: dict[str, Any]) -> None:
    """As `serve deploy` does: the controller builds the apps in tasks of its own. Returns at once."""
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate({"applications": list(applications)}))


def known_keys() -> int:
    """Blocks in the directory."""
    return sum(lookup.keys for lookup in collect(SERVICE).lookups)


def counters() -> dict[str, int]:
    """Of all shards, added."""
    found: dict[str, int] = {}
    for node in collect(SERVICE).nodes:
        for key, value in node.counters.items():
            found[key] = found.get(key, 0) + value
    return found


def replica_processes(deployment: str, node: Any = None) -> list[psutil.Process]:
    """Processes of a deployment's replicas, all or those of one of the cluster's nodes."""
    above = psutil.Process() if node is None else psutil.Process(node.all_processes["raylet"][0].process.pid)
    found = []
    for process in above.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "ServeReplica" in " ".join(process.cmdline()) and deployment in " ".join(process.cmdline()):
                found.append(process)
    return found


def kill_engine(replica: psutil.Process) -> None:
    """The engine's process dies, its replica's lives."""
    (engine_process,) = [child for child in replica.children() if "EngineCore" in child.name()]
    engine_process.kill()
