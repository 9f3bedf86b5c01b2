"""The service on a real Ray cluster of two nodes on this machine: placement, restarts, several drivers, and its end.

One cluster for the file. The tests build on each other's cluster, not on each other's services.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvservice.actors import deploy, names
from kvservice.actors.supervisor import Supervisor
from kvservice.cli import drain
from kvservice.cli.status import collect
from kvservice.config import ServiceConfig
from kvservice.discovery import find_shards
from kvservice.errors import ServiceConflict, Unavailable
from kvservice.memory.segment import is_owned, segment_path
from kvservice.serve.section import parse_section
from kvservice.serve.service import ensure_service
from kvservice.testing.eventually import eventually
from kvservice.units import BlockKey, GiB, MiB
from tests.integration.certificates import write
from tests.integration.engine import chain, with_engine
from tests.ray_nodes import ray_nodes

pytestmark = pytest.mark.ray

NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * MiB}
WAIT_SECONDS = 150.0
METRICS_PORT = 29464  # below the ports that the kernel gives away
PREEMPTION = 2  # autoscaler.proto: DrainNodeReason


@pytest.fixture(scope="module")
def runtime() -> Iterator[Path]:
    """Where this file's services register; also for processes that inherit the environment."""
    with tempfile.TemporaryDirectory(prefix="kvr-") as folder:
        before = os.environ.get("KVSERVICE_RUNTIME_DIR")
        os.environ.update(KVSERVICE_RUNTIME_DIR=folder, RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
        yield Path(folder)
        if before is None:
            del os.environ["KVSERVICE_RUNTIME_DIR"]
        else:
            os.environ["KVSERVICE_RUNTIME_DIR"] = before


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        directory = write(tmp_path_factory.mktemp("ray") / "tls")
        patch.setenv("KVSERVICE_TLS_DIR", str(directory))  # for drivers that bring the service up
        yield directory


@pytest.fixture(scope="module")
def cluster(runtime: Path) -> Iterator[Cluster]:
    with ray_nodes(NODE, NODE) as made:
        yield made


@pytest.fixture(scope="module")
def config(cluster: Cluster, runtime: Path, certificates: Path) -> Iterator[ServiceConfig]:
    """The settings of a service that runs, with TLS between its parts."""
    wanted = ServiceConfig(
        service="rt",
        pool_bytes=32 * MiB,
        slab_bytes=8 * MiB,
        runtime_dir=str(runtime),
        tls_dir=str(certificates),
        metrics_port=METRICS_PORT,
    )
    deploy.up(wanted).wait_complete(WAIT_SECONDS)
    yield wanted
    deploy.down("rt")


def described(service: str = "rt") -> dict[str, Any]:
    handle = deploy.find(service)
    assert handle is not None
    return handle.describe()


def process_of(actor: ray.actor.ActorHandle) -> int:
    return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=WAIT_SECONDS))


def kvservice(*arguments: str, cluster: Cluster) -> subprocess.CompletedProcess[str]:
    """Another driver: a process of its own."""
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    command = [sys.executable, "-m", "kvservice", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)


def socket_of(node_id: str) -> str:
    return next(record.socket for record in find_shards("rt") if record.node_id == node_id)


def lookup_keys() -> int:
    return sum(lookup.keys for lookup in collect("rt").lookups)


def store_at_head(cluster: Cluster, keys: tuple[BlockKey, ...]) -> None:
    """So that the directory knows blocks also when a test runs alone."""
    with_engine(socket_of(cluster.head_node.node_id[:12]), lambda engine: engine.store(keys))
    eventually(lambda: lookup_keys() >= len(keys), "their keys in the directory")


def test_an_app_waits_for_a_service_whose_head_has_no_shard(cluster: Cluster, runtime: Path) -> None:
    settings = {"pool_bytes": 32 * MiB, "slab_bytes": 8 * MiB, "runtime_dir": str(runtime), "allow_plaintext": True}
    section = parse_section({"service": "headless", "start": False, "wait_seconds": WAIT_SECONDS})
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(ensure_service, section)
        with pytest.raises(FutureTimeout):  # it looks once a second, and finds nothing
            waiting.result(2.5)
        try:
            state = deploy.up(ServiceConfig(service="headless", head_shard=False, **settings)).wait_complete(
                WAIT_SECONDS
            )
            assert not waiting.result(WAIT_SECONDS).started
        finally:
            deploy.down("headless")
    head = cluster.head_node.node_id
    assert head not in state["nodes"] and [row["ray_node"] for row in state["shards"]] == list(state["nodes"])
    assert len(state["nodes"]) == 1 and len(state["lookup_partitions"]) == 2


def test_who_gives_up_leaves_what_another_started(
    cluster: Cluster, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"pool_bytes": 32 * MiB, "slab_bytes": 8 * MiB, "runtime_dir": str(runtime), "allow_plaintext": True}
    section = parse_section({"service": "shared", "wait_seconds": 0.01, "settings": settings})
    handle, find = deploy.up(section.service_config()), deploy.find
    try:
        assert handle.started
        looks = [lambda _: None] * 2  # before the other has started it
        monkeypatch.setattr(deploy, "find", lambda service: (looks.pop() if looks else find)(service))
        with pytest.raises(Unavailable, match="not complete"):
            ensure_service(section)
        assert not looks and handle.wait_complete(WAIT_SECONDS)["complete"]
    finally:
        assert deploy.down("shared")
    with pytest.raises(Unavailable, match="taken down meanwhile"):
        handle.describe()


def test_why_a_supervisor_cannot_start_is_said(config: ServiceConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __init__(self, config: ServiceConfig) -> None:
            raise RuntimeError("a node has another kvservice")

        def config(self) -> None:
            """What `up` asks first."""

    monkeypatch.setattr(deploy, "Supervisor", Failing)
    with pytest.raises(Unavailable, match="supervisor cannot start: RuntimeError: a node has another kvservice"):
        deploy.up(config.model_copy(update={"service": "unborn"}))
    assert deploy.find("unborn") is None


def test_every_node_gets_one_shard_and_one_lookup_partition(config: ServiceConfig) -> None:
    state = described()
    assert len(state["nodes"]) == 2
    assert {row["ray_node"] for row in state["shards"]} == set(state["nodes"])
    assert {row["ray_node"] for row in state["lookup_partitions"]} == set(state["nodes"])
    assert {record.node_id for record in find_shards("rt")} == {node[:12] for node in state["nodes"]}


def test_every_lookup_partition_has_metrics_of_its_own(config: ServiceConfig) -> None:
    for partition in range(2):
        url = f"http://127.0.0.1:{METRICS_PORT + 65 + partition}/metrics"
        text = urllib.request.urlopen(url, timeout=10).read().decode()
        assert f'kvservice_lookup_nodes_alive{{partition="{partition}",service="rt"}} 2.0' in text


def test_another_driver_with_other_settings_is_refused(config: ServiceConfig, cluster: Cluster) -> None:
    """With the same settings it finds the service."""
    before = described()
    ports = ["--metrics-port", str(config.metrics_port)]
    settings = ["--service", "rt", "--pool-bytes", "32MiB", "--slab-bytes", "8MiB", *ports]
    found = kvservice("up", *settings, cluster=cluster)
    assert found.returncode == 0, found.stderr
    refused = kvservice("up", "--service", "rt", "--pool-bytes", "64MiB", "--slab-bytes", "8MiB", cluster=cluster)
    assert refused.returncode == 1
    assert "other settings" in refused.stderr
    assert "pool_bytes: it runs with 33554432, you asked for 67108864" in refused.stderr
    assert described()["shards"] == before["shards"]  # the same processes, untouched


def test_status_counts_a_block_that_crossed_between_the_nodes(config: ServiceConfig) -> None:
    first, second = (row["node_id"] for row in described()["shards"])
    keys = chain(1, 20)
    with_engine(socket_of(first), lambda engine: engine.store(keys))
    eventually(lambda: lookup_keys() >= 20, "20 keys in the directory")
    result = with_engine(socket_of(second), lambda engine: engine.read_all(keys))
    assert (len(result.blocks), result.fetched_count) == (20, 20)
    seen = collect("rt")
    rows = {node.node_id: node for node in seen.nodes}
    assert rows[second].counters["transfer_shm_bytes"] == 20 * 64 * 1024  # both nodes are of one machine
    assert [(flow.source, flow.target, flow.bytes) for flow in seen.flows] == [(first, second, 20 * 64 * 1024)]
    assert rows[first].counters["peer_located_blocks"] == 20
    assert seen.problems == ()


def test_a_killed_shard_is_restarted_and_its_blocks_hit_again(config: ServiceConfig) -> None:
    row = described()["shards"][0]
    keys = chain(2, 30)
    with_engine(socket_of(row["node_id"]), lambda engine: engine.store(keys))
    os.kill(row["pid"], signal.SIGKILL)

    def restarted() -> bool:
        now = next(r for r in described()["shards"] if r["node_id"] == row["node_id"])
        return bool(now["running"] and now["pid"] != row["pid"] and now["epoch"] > row["epoch"])

    eventually(restarted, "the shard's restart")
    result = with_engine(socket_of(row["node_id"]), lambda engine: engine.read_all(keys))
    assert (len(result.blocks), result.fetched_count) == (30, 0)
    counters = next(node.counters for node in collect("rt").nodes if node.node_id == row["node_id"])
    assert counters["blocks_adopted"] >= 30


def test_a_killed_lookup_partition_returns_and_is_rebuilt(config: ServiceConfig, cluster: Cluster) -> None:
    """It returns at the same address."""
    store_at_head(cluster, chain(4, 20))
    row = described()["lookup_partitions"][0]
    before = lookup_keys()
    assert before > 0
    os.kill(row["pid"], signal.SIGKILL)
    eventually(lambda: described()["lookup_partitions"][0]["pid"] != row["pid"], "the lookup partition's restart")
    assert described()["lookup_partitions"][0]["address"] == row["address"]
    eventually(lambda: lookup_keys() >= before, "the rebuilt directory")


def two_shards() -> bool:
    return len(find_shards("rt")) == 2 and bool(described()["complete"])


def ended(cluster: Cluster) -> str:
    """Which of Ray's own node processes have ended, and how: one that a busy machine killed is no fault of ours."""
    raylets = [node.all_processes["raylet"][0].process for node in cluster.worker_nodes]
    return "raylets: " + ", ".join(f"{process.pid} ended with {process.poll()}" for process in raylets)


def restart_supervisor() -> None:
    handle = deploy.find("rt")
    assert handle is not None
    killed = process_of(handle.supervisor)
    ray.kill(handle.supervisor, no_restart=False)
    # the killed process may answer once more
    eventually(lambda: process_of(handle.supervisor) != killed, "the supervisor's restart")


def test_the_supervisor_takes_up_what_runs_when_it_is_restarted(config: ServiceConfig) -> None:
    before = described()
    restart_supervisor()
    eventually(lambda: described()["complete"], "the service under the next supervisor")
    after = described()
    assert [row["pid"] for row in after["shards"]] == [row["pid"] for row in before["shards"]]
    assert [row["address"] for row in after["lookup_partitions"]] == [
        row["address"] for row in before["lookup_partitions"]
    ]


def test_two_services_live_side_by_side(config: ServiceConfig, runtime: Path) -> None:
    other = config.model_copy(update={"service": "rt-two", "lookup_partitions": 1})
    with pytest.raises(ServiceConflict, match="lookup_partitions"):
        deploy.up(other.model_copy(update={"service": "rt"}))
    deploy.up(other).wait_complete(WAIT_SECONDS)
    assert len(find_shards("rt-two")) == len(find_shards("rt")) == 2
    assert deploy.down("rt-two")
    assert find_shards("rt-two") == []
    assert not (runtime / "rt-two").exists()
    assert len(find_shards("rt")) == 2
    assert not deploy.down("rt-two")


def test_a_budget_beyond_the_shared_memory_is_said_soon(config: ServiceConfig) -> None:
    """Nothing is left behind."""
    too_much = {"service": "rt-greedy", "pool_bytes": 1 << 50, "slab_bytes": 4 * GiB, "lookup_partitions": 1}
    greedy = config.model_copy(update=too_much)
    try:
        with pytest.raises(Unavailable, match="/dev/shm"):
            deploy.up(greedy).wait_complete(WAIT_SECONDS)
    finally:
        deploy.down("rt-greedy")
    assert find_shards("rt-greedy", live_only=False) == []


def test_new_nodes_get_a_shard_and_lost_partitions_move(config: ServiceConfig, cluster: Cluster) -> None:
    store_at_head(cluster, chain(9, 20))
    joined = cluster.add_node(**NODE)
    eventually(
        lambda: len(find_shards("rt")) == 3 and described()["complete"],
        "a shard on the new node",
        detail=lambda: ended(cluster),
    )
    leaving = next(node for node in cluster.worker_nodes if node is not joined)
    lost = leaving.node_id
    moved = next(row for row in described()["lookup_partitions"] if row["ray_node"] == lost)
    cluster.remove_node(leaving, allow_graceful=False)

    def settled() -> bool:
        state = described()
        return bool(state["complete"] and lost not in state["nodes"] and len(state["shards"]) == 2)

    eventually(settled, "the service without the lost node", detail=lambda: f"{described()}\n{ended(cluster)}")
    now = described()["lookup_partitions"][moved["partition"]]
    assert now["ray_node"] != lost
    addresses = tuple(row["address"] for row in described()["lookup_partitions"])
    eventually(lambda: all(r.lookup_addresses == addresses for r in find_shards("rt")), "shards that know it")
    eventually(lambda: lookup_keys() > 0, "the moved lookup partition's keys")


def test_a_drained_shard_stays_away_until_the_next_up(config: ServiceConfig, cluster: Cluster) -> None:
    head, other = sorted(described()["shards"], key=lambda row: row["ray_node"] != cluster.head_node.node_id)
    keys = chain(7, 20)
    with_engine(socket_of(other["node_id"]), lambda engine: engine.store(keys))
    assert drain.run("rt", None, other["node_id"], False, 20.0, True, False)
    eventually(lambda: described()["left"] == [other["node_id"]], "the supervisor's word that it left")
    state = described()
    assert state["complete"] and [row["node_id"] for row in state["shards"]] == [head["node_id"]]
    result = with_engine(socket_of(head["node_id"]), lambda engine: engine.read_all(keys))
    assert (len(result.blocks), result.fetched_count) == (20, 0)
    restart_supervisor()
    eventually(lambda: described()["complete"], "the service under the next supervisor")
    state = described()
    assert [row["node_id"] for row in state["shards"]] == [head["node_id"]]
    assert state["left"] == [other["node_id"]]
    deploy.up(config).wait_complete(WAIT_SECONDS)
    eventually(lambda: len(find_shards("rt")) == 2, "the shard that is back")


def take_away(node: str, cluster: Cluster) -> None:
    client = ray._raylet.GcsClient(address=cluster.address)
    accepted, why = client.drain_node(node, PREEMPTION, "scale-down in a test", int((time.time() + 120) * 1000))
    assert accepted, why


@pytest.mark.parametrize("restarted", [False, True], ids=["", "supervisor_restarted"])
def test_a_node_that_ray_takes_away_hands_its_blocks_over(
    config: ServiceConfig, cluster: Cluster, restarted: bool
) -> None:
    if len(described()["shards"]) < 2:
        cluster.add_node(**NODE)  # an earlier test had the other one taken away
        eventually(two_shards, "a shard on the new node", detail=lambda: f"{described()}\n{ended(cluster)}")
    head, other = sorted(described()["shards"], key=lambda row: row["ray_node"] != cluster.head_node.node_id)
    keys = chain(8 + restarted, 20)
    with_engine(socket_of(other["node_id"]), lambda engine: engine.store(keys))
    handle = deploy.find("rt")
    assert handle is not None
    process = process_of(handle.supervisor)
    os.kill(process, signal.SIGSTOP)  # one that is killed hears nothing of the drain before
    try:
        take_away(other["ray_node"], cluster)
    finally:  # a stopped supervisor would fail the tests that follow
        os.kill(process, signal.SIGKILL if restarted else signal.SIGCONT)

    def is_gone() -> bool:
        # Ray ends a draining node once nothing runs there: its shard may never be seen among those that left.
        return [row["node_id"] for row in described()["shards"]] == [head["node_id"]]

    eventually(is_gone, "the shard of the draining node to leave")
    result = with_engine(socket_of(head["node_id"]), lambda engine: engine.read_all(keys))
    assert (len(result.blocks), result.fetched_count) == (20, 0)
    eventually(lambda: described()["complete"], "the service without the node")


def test_a_call_outlives_a_supervisor_that_has_moved(config: ServiceConfig, cluster: Cluster) -> None:
    """It has moved from a node that Ray takes away."""
    moved = config.model_copy(update={"service": "rt-moved", "lookup_partitions": 1, "metrics_port": 0})
    leaving = str(cluster.add_node(**NODE).node_id)
    ray.remote(**deploy.SUPERVISOR)(Supervisor).options(
        name=names.SUPERVISOR,
        namespace=names.namespace(moved.service),
        lifetime="detached",
        scheduling_strategy=NodeAffinitySchedulingStrategy(leaving, soft=True),
    ).remote(moved)
    handle = deploy.up(moved)
    handle.wait_complete(WAIT_SECONDS)
    first = process_of(handle.supervisor)
    take_away(leaving, cluster)
    os.kill(first, signal.SIGKILL)
    eventually(lambda: process_of(handle.supervisor) != first, "the supervisor's move")
    second = process_of(handle.supervisor)
    os.kill(second, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(handle.describe)
        with pytest.raises(FutureTimeout):
            asked.result(1.0)
        os.kill(second, signal.SIGKILL)
        assert asked.result(WAIT_SECONDS)["service"] == moved.service
    # Ray may kill the shard there while `down` works, and nothing removes the memory of one that dies after that.
    segment = segment_path(moved.service, names.node_id(leaving))
    eventually(lambda: not is_owned(segment), "the end of the shard on the node that Ray takes away")
    assert deploy.down(moved.service)
    assert not segment.exists()


def test_down_leaves_no_file_and_no_actor(config: ServiceConfig, cluster: Cluster, runtime: Path) -> None:
    pids = [row["pid"] for row in [*described()["shards"], *described()["lookup_partitions"]]]
    done = kvservice("down", "--service", "rt", cluster=cluster)
    assert done.returncode == 0, done.stderr
    assert not list(Path("/dev/shm").glob("kvservice-rt-*"))
    assert not (runtime / "rt").exists()
    assert deploy.find("rt") is None
    assert not [row for row in ray.util.list_named_actors(all_namespaces=True) if row["namespace"] == "kvservice-rt"]
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the end of the processes", 15)
    assert kvservice("status", "--service", "rt", cluster=cluster).returncode == 3
    assert kvservice("down", "--service", "rt", cluster=cluster).returncode == 3
