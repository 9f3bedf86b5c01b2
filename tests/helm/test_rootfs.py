"""The root file system of docker/shard.Dockerfile, made without Docker, and the chart's pods in it: their user, their
capabilities, a read-only root. Needs root, mmdebstrap and a mirror of Debian; KVSERVICE_TEST_ROOTFS names one that
`make rootfs` has made.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helm.chart import NAMESPACE, ROOT, Pod, find, pod, rendered
from tests.helm.pod_process import Place
from tests.helm.rootfs import Node, RootfsProcess
from tests.helm.test_images_and_docs import instructions
from tests.packaging.wheel import build_wheel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SETTINGS = (
    "cache.pool=64Mi",
    "cache.drainSeconds=2",
    "cache.graceSeconds=2",
    "tests.minNodes=2",
    "cache.transport=nixl",
)
PORTS = range(7600, 7700)  # of cache.transferPorts below
START_SECONDS = 120
IPC_LOCK = 1 << 14  # CAP_IPC_LOCK in the masks of /proc/PID/status
# Lock 1 MiB where 64 KiB are allowed: 0, or -1.
LOCK = (
    "import ctypes, mmap, resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536));"
    "m = mmap.mmap(-1, 1 << 20); at = ctypes.addressof(ctypes.c_char.from_buffer(m));"
    "print(ctypes.CDLL(None).mlock(ctypes.c_void_p(at), ctypes.c_size_t(1 << 20)))"
)


@pytest.fixture(scope="module")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if made := os.environ.get("KVSERVICE_TEST_ROOTFS"):
        return Path(made)
    wheel = build_wheel(tmp_path_factory.mktemp("wheel"))
    target = tmp_path_factory.mktemp("image") / "rootfs"
    command = [ROOT / "docker" / "rootfs.sh", sys.executable, target, wheel]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-3000:]
    return target


@pytest.fixture
def nodes(rootfs: Path) -> Iterator[tuple[Node, Node]]:
    made = Node("node-a", rootfs), Node("node-b", rootfs)
    yield made
    for node in made:
        node.close()


def process(of: Pod, node: Node, place: Place, log: Path, *settings: str) -> RootfsProcess:
    """The pod's container; its init containers have run."""
    objects = rendered("standalone-values.yaml", *SETTINGS, *settings)
    volumes = node.volumes(of, objects, place)
    for container in of.spec.get("initContainers", []):
        done = RootfsProcess(of, container, node, place, volumes, log).run()
        assert done.returncode == 0, done.stdout + done.stderr
    return RootfsProcess(of, of.spec["containers"][0], node, place, volumes, log)


def test_the_entry_point_runs_on_a_read_only_root(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    (entry,) = (words for name, words in instructions(ROOT / "docker" / "shard.Dockerfile") if name == "CMD")
    check = pod(rendered("standalone-values.yaml"), "check")
    container = process(check, nodes[0], Place("127.0.0.1", "node-a", {}), tmp_path / "log")
    for words in (entry.strip("[]").replace('"', "").split(", "), ["kvservice", "shard", "--help"]):
        done = container.run(words)
        assert done.returncode == 0 and "Usage: kvservice" in done.stdout, done.stdout + done.stderr
    assert container.run(["id", "-u"]).stdout == "60900\n"
    assert "Read-only file system" in container.run(["touch", "/opt/x"]).stderr
    assert container.run(["touch", "/tmp/x"]).returncode == 0
    assert container.run(["sh", "-c", "grep CapEff /proc/self/status"]).stdout.split()[1] == "0" * 16


def test_pods_serve_each_other_in_the_image(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    """With TLS and NIXL, whose bytes go over the ports that the chart names."""
    settings = (f"cache.transferPorts={PORTS[0]}-{PORTS[-1]}", "lookup.partitions=1")
    objects = rendered("standalone-values.yaml", *SETTINGS, *settings)
    network = f"127.{random.randint(2, 250)}.{random.randint(0, 250)}"
    service = find(objects, "Service", "-lookup")["metadata"]["name"]
    names = {f"{service}-0.{service}.{NAMESPACE}.svc": f"{network}.2"}
    running: list[RootfsProcess] = []
    try:
        place = Place(f"{network}.2", "node-a", {}, names, {"apps.kubernetes.io/pod-index": "0"})
        running.append(process(pod(objects, "lookup"), nodes[0], place, tmp_path / "lookup", *settings))
        for index, node in enumerate(nodes):
            place = Place(f"{network}.{3 + index}", node.name, {}, names)
            running.append(process(pod(objects, "shard"), node, place, tmp_path / node.name, *settings))
        for each in running:
            each.start()
        for each in running:
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                each.wait_for(probe, START_SECONDS)
        shards = running[1:]
        done = checked(objects, nodes[0], shards, names, tmp_path)
        assert done.returncode == 0 and "1 lookup partition, 2 cache shards" in done.stdout, done.stdout + done.stderr
        for shard in shards:
            assert shard.process is not None and Path(f"/proc/{shard.process.pid}").stat().st_uid == 60900
            ports = listening(shard.process.pid)
            assert {7401, 9464} < ports and ports - {7401, 9464} <= set(PORTS), ports
            shown = shard.run(["kvservice", "status"])
            assert shown.returncode == 0, shown.stdout + shown.stderr
            drained = shard.run(shard.container["lifecycle"]["preStop"]["exec"]["command"])
            assert drained.returncode == 0, drained.stdout + drained.stderr
            assert ended(shard) == 0, shard.log.read_text()[-2000:]
        assert running[0].end(30) == 0
        assert not [path for node in nodes for path in node.memory.rglob("*") if path.is_file()]
    finally:
        for each in running:
            each.kill()


def test_the_launcher_locks_memory_for_a_plain_user(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    shard = pod(rendered("standalone-values.yaml", *SETTINGS, "rdma.enabled=true"), "shard")
    container = process(shard, nodes[0], Place("127.0.0.1", "node-a", {}), tmp_path / "log")
    launcher = shard.spec["containers"][0]["command"][:-2]
    masks = container.run([*launcher, "grep", "Cap[EA]", "/proc/self/status"]).stdout.split()
    assert [int(mask, 16) for mask in masks[1::2]] == [IPC_LOCK, IPC_LOCK], "effective, and kept over exec"
    python = ["/opt/kvservice/bin/python", "-c", LOCK]
    assert container.run([*launcher, *python]).stdout == "0\n"
    assert container.run(python).stdout == "-1\n", "the capability of the pod alone has no effect"


def checked(
    objects: tuple[dict[str, object], ...], node: Node, shards: list[RootfsProcess], names: dict[str, str], logs: Path
) -> subprocess.CompletedProcess[str]:
    """The pod of `helm test`; the name of all shards' metrics is given once for each of their addresses."""
    check = pod(objects, "check")
    container = process(check, node, Place("127.0.0.1", node.name, {}, names), logs / "check")
    words = [word for word in container.command() if not word.startswith("--metrics=")]
    return container.run([*words, *(f"--metrics={shard.place.ip}:9464" for shard in shards)], timeout=120)


def listening(pid: int) -> set[int]:
    """TCP ports on which this process listens."""
    sockets = {str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    inodes = {match.group(1) for name in sockets if (match := re.fullmatch(r"socket:\[(\d+)\]", name))}
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


def ended(shard: RootfsProcess) -> int:
    """A drained shard may end by itself."""
    assert shard.process is not None
    time.sleep(1)
    code = shard.process.poll()
    return shard.end(30) if code is None else code
