"""The pods of standalone mode, run as local processes: two nodes, two lookup partitions, blocks from one node on the
other.

A chart whose commands, settings, ports, probes or hooks do not fit the program cannot pass.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvservice.cli.main import app
from kvservice.client.shard import ShardClient
from kvservice.core.messages import MissReason, SealStatus
from kvservice.testing.eventually import eventually_async
from tests.helm.chart import NAMESPACE, PLAINTEXT, Pod, find, pod, rendered
from tests.helm.pod_process import ContainerProcess, Place
from tests.integration.certificates import write
from tests.integration.engine import Engine, chain

SETTINGS = ("cache.pool=64Mi", "cache.drainSeconds=3", "cache.graceSeconds=2", "tests.minNodes=2", "cache.service=k8s")
NODES = ("node-a", "node-b")
KEEPER = "node-a"  # its pod is rendered with shard.keepBlocks
START_SECONDS = 120
MIRRORED = "kvservice_mirror_keys{"
ADOPTED = "kvservice_blocks_adopted_total{"
TAKEN = "kvservice_takeover_blocks_taken_total{"


class Cluster:
    """What a cluster gives to pods: addresses, names, folders of nodes. And the pods."""

    namespace = NAMESPACE

    def __init__(self, *settings: str) -> None:
        self.settings = (*SETTINGS, *settings)
        self.objects = rendered("standalone-values.yaml", *self.settings)
        self.root = Path(tempfile.mkdtemp(prefix="kvh-"))
        self.memory = Path(tempfile.mkdtemp(prefix="kvh-", dir="/dev/shm"))
        self._network = f"127.{random.randint(2, 250)}.{random.randint(0, 250)}"
        self._next = 1
        self.names: dict[str, str] = {}
        self.lookups: list[ContainerProcess] = []
        self.shards: dict[str, ContainerProcess] = {}

    def address(self) -> str:
        self._next += 1
        return f"{self._network}.{self._next}"

    def place(self, of: Pod, node: str = "", labels: dict[str, str] | None = None, ip: str | None = None) -> Place:
        """Folders for the volumes of this pod: a node's own for hostPath, the settings for the ConfigMap."""
        own = Path(tempfile.mkdtemp(dir=self.root))
        paths: dict[str, Path] = {}
        kinds = {volume["name"]: volume for volume in of.spec["volumes"]}
        for mount in of.containers[-1]["volumeMounts"]:
            volume, target = kinds[mount["name"]], own / mount["name"]
            if "hostPath" in volume:
                host = self.memory if volume["hostPath"]["path"].startswith("/dev/shm/") else self.root
                target = host / node / mount["name"]
                target.parent.mkdir(exist_ok=True)
            paths[mount["mountPath"]] = target
        place = Place(ip or self.address(), node, paths, dict(self.names), labels or {})
        for mount in of.containers[-1]["volumeMounts"]:
            volume, target = kinds[mount["name"]], paths[mount["mountPath"]]
            if "configMap" in volume:
                target.mkdir()
                for name, text in find(self.objects, "ConfigMap", volume["configMap"]["name"])["data"].items():
                    target.joinpath(name).write_text(place.local(text))
            elif "secret" in volume:
                write(target)
            elif "emptyDir" in volume:
                target.mkdir()
        return place

    def start(self, nodes: Sequence[str] = NODES) -> None:
        service = find(self.objects, "Service", "-lookup")["metadata"]["name"]
        count = find(self.objects, "StatefulSet")["spec"]["replicas"]
        ips = [self.address() for _ in range(count)]
        # gRPC's own resolver asks name servers, so it is given the address in place of the name.
        self.names = {f"{service}-{i}.{service}.{self.namespace}.svc": ip for i, ip in enumerate(ips)}
        self.lookups = [self.start_lookup(index, ip) for index, ip in enumerate(ips)]
        for node in nodes:
            self.start_shard(node)
        for process in [*self.lookups, *self.shards.values()]:
            wait_until_ready(process)

    def start_lookup(self, index: int, ip: str) -> ContainerProcess:
        lookup = pod(self.objects, "lookup")
        place = self.place(lookup, labels={"apps.kubernetes.io/pod-index": str(index)}, ip=ip)
        started = ContainerProcess(lookup.spec["containers"][0], place, self.root / f"lookup-{index}.log")
        started.start()
        return started

    def change(self, *settings: str) -> None:
        """As `helm upgrade`: pods that start from now on are those of these settings."""
        self.settings = (*self.settings, *settings)
        self.objects = rendered("standalone-values.yaml", *self.settings)

    def shard_of(self, node: str) -> Pod:
        setting = ("shard.keepBlocks=true",) if node == KEEPER else ()
        return pod(rendered("standalone-values.yaml", *self.settings, *setting), "shard")

    def start_shard(self, node: str) -> None:
        shard = self.shard_of(node)
        place = self.place(shard, node)
        (prepare,) = shard.spec["initContainers"]
        if os.getuid() == 0:  # it gives the folders to the pod's user, which takes root here as there
            done = ContainerProcess(prepare, place, self.root / "prepare.log").run()
            assert done.returncode == 0, done.stderr
        for path in place.paths.values():
            path.mkdir(exist_ok=True)
            os.chown(path, os.getuid(), -1)  # a pod's user is the chart's; here it is whoever runs the test
        self.shards[node] = ContainerProcess(shard.spec["containers"][0], place, self.root / f"{node}.log")
        self.shards[node].start()

    def socket(self, node: str) -> str:
        (found,) = (self.root / node / "runtime").glob("*/*/shard.sock")
        return str(found)

    def close(self) -> None:
        for process in [*self.shards.values(), *self.lookups]:
            process.kill()
        shutil.rmtree(self.root)
        shutil.rmtree(self.memory)


def wait_until_ready(process: ContainerProcess) -> None:
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        process.wait_for(probe, START_SECONDS)


def metrics_of(process: ContainerProcess) -> str:
    (port,) = (port["containerPort"] for port in process.container["ports"] if port["name"] == "metrics")
    with urllib.request.urlopen(f"http://{process.place.ip}:{port}/metrics", timeout=5) as reply:
        return str(reply.read().decode())


def value_of(process: ContainerProcess, metric: str) -> float:
    """`metric` is its name and the brace of its labels."""
    (line,) = (line for line in metrics_of(process).splitlines() if line.startswith(metric))
    return float(line.split()[-1])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster(PLAINTEXT)
    try:
        made.start()
        yield made
    finally:
        made.close()


def commands() -> set[str]:
    return {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}


async def test_block_stored_through_one_pod_is_read_through_the_other(cluster: Cluster) -> None:
    a, b = [await Engine.attach(ShardClient(cluster.socket(node))) for node in NODES]
    keys = chain(seed=7, count=40)
    assert await a.store(keys) == [SealStatus.SEALED] * 40

    await eventually_async(
        lambda: value_of(cluster.shards[NODES[1]], MIRRORED) == 40, "the blocks in the mirror that the other pod asks"
    )
    result = await b.read_all(keys)
    assert (len(result.blocks), result.fetched_count, result.miss) == (40, 40, MissReason.NONE)
    for engine in (a, b):
        await engine.pool.close()
        engine.let_go()


def test_the_pod_of_helm_test_passes(cluster: Cluster) -> None:
    check = pod(cluster.objects, "check")
    place = cluster.place(check)
    process = ContainerProcess(check.spec["containers"][0], place, cluster.root / "check.log")
    # One name stands for all shards; here it is given once for each of their addresses.
    (metrics,) = (word for word in process.command() if word.startswith("--metrics="))
    service = find(cluster.objects, "Service", "-shard")["metadata"]["name"]
    assert metrics == f"--metrics={service}:9464"
    others = [word for word in process.command() if word != metrics]
    named = [metrics.replace(service, shard.place.ip) for shard in cluster.shards.values()]
    done = process.run([*others, *named])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 lookup partitions, 2 cache shards" in done.stdout and "metrics of 2 shards" in done.stdout
    wrong = process.run([*[word for word in others if not word.startswith(("--nodes", "--wait"))], "--nodes=3"])
    assert wrong.returncode == 1 and "3 are expected" in wrong.stderr


def test_metrics_answer_at_the_port_that_monitors_scrape(cluster: Cluster) -> None:
    for process, metric in [(cluster.lookups[1], 'kvservice_lookup_keys{partition="1",service="k8s"}')] + [
        (shard, f'kvservice_segment_bytes{{node="{node}",service="k8s"}}') for node, shard in cluster.shards.items()
    ]:
        assert metric in metrics_of(process)


def test_status_works_inside_a_shard_pod(cluster: Cluster) -> None:
    done = cluster.shards["node-a"].run(["kvservice", "status", "-o", "json"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"service": "k8s"' in done.stdout and "node-b" in done.stdout


def test_draining_takes_readiness_and_leaves_liveness(cluster: Cluster) -> None:
    import grpc

    from kvservice.wire.v1 import shard_pb2, shard_pb2_grpc

    shard = cluster.shards["node-b"]
    with grpc.insecure_channel(f"{shard.place.ip}:7401") as channel:
        admin = shard_pb2_grpc.AdminServiceStub(channel)
        admin.Drain(shard_pb2.DrainRequest(), timeout=5)
        assert (shard.probe("readinessProbe"), shard.probe("livenessProbe")) == (False, True)
        admin.Drain(shard_pb2.DrainRequest(undo=True), timeout=5)
    assert shard.probe("readinessProbe")


async def test_the_next_pod_of_a_node_takes_up_the_kept_blocks(cluster: Cluster) -> None:
    engine = await Engine.attach(ShardClient(cluster.socket(KEEPER)))
    await engine.store(chain(seed=8, count=8))  # which no other node has
    await engine.pool.close()
    engine.let_go()
    hook = cluster.shards[KEEPER].container["lifecycle"]["preStop"]["exec"]["command"]
    assert cluster.shards[KEEPER].run(hook).returncode == 0
    assert cluster.shards[KEEPER].end(30) == 0
    taken = [value_of(each, TAKEN) for node, each in cluster.shards.items() if node != KEEPER]
    assert taken and not any(taken), "others took what this node keeps"
    cluster.start_shard(KEEPER)
    wait_until_ready(cluster.shards[KEEPER])
    assert value_of(cluster.shards[KEEPER], ADOPTED) == 48


def test_pods_end_with_zero_in_time_and_leave_nothing(cluster: Cluster) -> None:
    """Last: it ends the pods of this module, as Kubernetes does: preStop, then SIGTERM."""
    shard, lookup = pod(cluster.objects, "shard"), pod(cluster.objects, "lookup")
    for node, process in cluster.shards.items():
        hook = process.container["lifecycle"]["preStop"]["exec"]["command"]
        began = time.monotonic()
        if hook[1] in commands():
            done = process.run(hook)
            assert done.returncode == 0, done.stdout + done.stderr
            with contextlib.suppress(subprocess.TimeoutExpired):  # a drained shard may end by itself
                assert process.process is not None
                process.process.wait(2)
        assert process.process is not None
        ended = process.process.poll()
        code = process.end(30) if ended is None else ended
        assert code == 0, process.log.read_text()[-2000:]
        assert time.monotonic() - began < shard.spec["terminationGracePeriodSeconds"]
        left = [
            path.name for path in (cluster.root / node / "runtime").rglob("*") if path.is_symlink() or path.is_file()
        ]
        assert left == (["kept"] if node == KEEPER else []), "a word of the memory, where it is kept"
        assert len(list(cluster.memory.glob(f"{node}/*/*"))) == (node == KEEPER), "the segment, where it is kept"
    for process in cluster.lookups:
        assert process.end(lookup.spec["terminationGracePeriodSeconds"]) == 0


def test_pods_with_a_secret_serve_nobody_in_plaintext() -> None:
    cluster = Cluster("lookup.partitions=1", "cache.drainSeconds=1")
    try:
        cluster.start(NODES[1:])
        check = pod(cluster.objects, "check")
        process = ContainerProcess(check.spec["containers"][0], cluster.place(check), cluster.root / "check.log")
        given = [word for word in process.command() if "-metrics" not in word and not word.startswith("--nodes")]
        command = [*given, "--nodes=1"]
        done = process.run(command)
        assert done.returncode == 0 and "1 lookup partition, 1 cache shard," in done.stdout, done.stdout + done.stderr
        del process.environment["KVSERVICE_TLS_DIR"]
        without = process.run([*[word for word in command if not word.startswith("--wait")], "--wait=0"])
        assert without.returncode == 1 and "it requires TLS" in without.stderr
        shard = cluster.shards[NODES[1]]
        drained = shard.run(shard.container["lifecycle"]["preStop"]["exec"]["command"])
        assert drained.returncode == 0, drained.stderr
    finally:
        cluster.close()
