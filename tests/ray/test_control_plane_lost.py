"""What Ray's control may take with it when it goes: placement, never blocks on the nodes that stay.

One cluster for the file, which the tests take apart step by step.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvservice.actors import deploy, names
from kvservice.actors.supervisor import Supervisor
from kvservice.cli.status import collect
from kvservice.config import ServiceConfig
from kvservice.discovery import find_shards
from kvservice.testing.eventually import eventually
from kvservice.units import MiB
from tests.failpoints import Failpoints
from tests.integration.engine import Engine, chain, with_engine
from tests.ray_nodes import ray_nodes

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * MiB}
SERVICE = "taken"
WAIT_SECONDS = 90.0
COUNT = 24


@pytest.fixture(scope="module")
def runtime() -> Iterator[Path]:
    patch = pytest.MonkeyPatch()
    with tempfile.TemporaryDirectory(prefix="kvc-") as folder:
        patch.setenv("KVSERVICE_RUNTIME_DIR", folder)
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        yield Path(folder)
    patch.undo()


@pytest.fixture(scope="module")
def failpoints(runtime: Path) -> Iterator[Failpoints]:
    points = Failpoints(runtime / "failpoints")
    points.folder.mkdir()
    patch = pytest.MonkeyPatch()
    for name, value in points.environment.items():
        patch.setenv(name, value)  # of the nodes that are started now, and of their actors
    yield points
    patch.undo()


@pytest.fixture(scope="module")
def cluster(runtime: Path, failpoints: Failpoints) -> Iterator[Cluster]:
    with ray_nodes(NODE, NODE) as made:
        (second,) = made.worker_nodes
        config = ServiceConfig(service=SERVICE, pool_bytes=32 * MiB, slab_bytes=8 * MiB, runtime_dir=str(runtime))
        # As `up` does it, but on the node that the first test takes away.
        ray.remote(**deploy.SUPERVISOR)(Supervisor).options(
            name=names.SUPERVISOR,
            namespace=names.namespace(SERVICE),
            lifetime="detached",
            scheduling_strategy=NodeAffinitySchedulingStrategy(second.node_id, soft=True),
        ).remote(config)
        deploy.up(config).wait_complete(WAIT_SECONDS)
        yield made


def agents(cluster: Cluster) -> dict[int, str]:
    """Ray's helpers of every node, by process: when a raylet is killed they stay for minutes to report its end to a
    control plane that may be dead as well."""
    raylets = {str(node.all_processes["raylet"][0].process.pid) for node in cluster.list_all_nodes()}
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "stat").read_text().rpartition(")")[2].split() if entry.name.isdigit() else []
            command = (entry / "cmdline").read_text() if words and words[1] in raylets else ""
        except OSError:
            continue  # ended meanwhile
        if "Agent" in command:
            found[int(entry.name)] = command
    return found


def end(helpers: dict[int, str]) -> None:
    for pid, command in helpers.items():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_text() == command:
                os.kill(pid, signal.SIGKILL)


def described() -> dict[str, Any]:
    """{} while no supervisor answers."""
    try:
        handle = deploy.find(SERVICE)
        return {} if handle is None else handle.describe()
    except ray.exceptions.RayError:
        return {}


def known_keys() -> int:
    return sum(lookup.keys for lookup in collect(SERVICE).lookups)


def kvservice(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvservice", *arguments, "--service", SERVICE]
    return subprocess.run(command, env={**os.environ}, capture_output=True, text=True, timeout=120)


def test_a_node_lost_with_its_supervisor_is_made_up_for(cluster: Cluster) -> None:
    """The node had a lookup partition as well."""
    (second,) = cluster.worker_nodes
    lost = second.node_id
    assert {row["ray_node"] for row in described()["lookup_partitions"]} == {lost, cluster.head_node.node_id}
    (stays,) = (record for record in find_shards(SERVICE) if not lost.startswith(record.node_id))
    with_engine(stays.socket, lambda engine: engine.store(chain(1, COUNT)))
    helpers = agents(cluster)
    cluster.remove_node(second, allow_graceful=False)

    def settled() -> bool:
        state = described()
        return bool(state) and state["complete"] and lost not in state["nodes"]

    eventually(settled, "the service without the lost node")
    end({pid: command for pid, command in helpers.items() if pid not in agents(cluster)})
    assert {row["ray_node"] for row in described()["lookup_partitions"]} == {cluster.head_node.node_id}
    eventually(lambda: known_keys() == COUNT, "the keys of the lost lookup partition")


def test_a_node_lost_as_it_is_given_a_shard_holds_up_nobody(cluster: Cluster, failpoints: Failpoints) -> None:
    failpoints.arm("supervisor.place")
    lost = cluster.add_node(**NODE)
    failpoints.hit("supervisor.place", WAIT_SECONDS)
    helpers = agents(cluster)
    cluster.remove_node(lost, allow_graceful=False)
    failpoints.release("supervisor.place")
    cluster.add_node(**NODE)
    eventually(
        lambda: len(find_shards(SERVICE)) == 2 and described().get("complete", False), "a shard on the next node"
    )
    end({pid: command for pid, command in helpers.items() if pid not in agents(cluster)})


def test_blocks_cross_while_the_control_plane_is_dead(cluster: Cluster, failpoints: Failpoints) -> None:
    first, second = find_shards(SERVICE)
    keys = chain(2, COUNT)
    before = known_keys()
    ray.shutdown()  # a driver without a control plane ends its process

    async def store(engine: Engine) -> None:
        failpoints.arm("shard.digest")
        storing = asyncio.ensure_future(engine.store(keys))
        await asyncio.to_thread(failpoints.hit, "shard.digest")
        cluster.head_node.kill_gcs_server()
        failpoints.release("shard.digest")
        await storing

    with_engine(first.socket, store)
    eventually(lambda: known_keys() >= before + COUNT, "the new keys in the directory")
    result = with_engine(second.socket, lambda engine: engine.read_all(keys))
    assert (len(result.blocks), result.fetched_count) == (COUNT, COUNT)


def test_down_after_the_cluster_removes_what_it_left(cluster: Cluster, runtime: Path) -> None:
    helpers = agents(cluster)
    cluster.shutdown()
    end(helpers)
    eventually(lambda: find_shards(SERVICE) == [], "the end of the shards")
    assert list(Path("/dev/shm").glob(f"kvservice-{SERVICE}-*")), "nothing was left: the test shows nothing"
    done = kvservice("down")
    assert done.returncode == 0, done.stderr
    assert not list(Path("/dev/shm").glob(f"kvservice-{SERVICE}-*"))
    assert not (runtime / SERVICE).exists()
    assert kvservice("down").returncode == 3


def test_a_cluster_whose_nodes_are_gone_is_named_so(runtime: Path) -> None:
    """Its control plane answers on. It is no matter of tokens."""
    alone = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        helpers = agents(alone)
        raylet = alone.head_node.all_processes["raylet"][0].process
        raylet.kill()
        raylet.wait()
        end(helpers)
        told = kvservice("down", "--address", alone.address)
        assert told.returncode == 2 and "RAY_AUTH_MODE" not in told.stderr, told.stderr
        assert "all its nodes are gone: end what is left of it with `ray stop`" in " ".join(told.stderr.split())
    finally:
        alone.shutdown()
