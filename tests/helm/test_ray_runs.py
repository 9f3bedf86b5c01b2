"""The head pod of `ray` mode as local processes: what the operator starts, then the hook that brings the service up.

Only what the operator adds is written here: `ray start` with the rendered parameters and its own ports.
"""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvservice.testing.cluster import free_port
from kvservice.testing.unique import unique_name
from tests.helm.chart import PLAINTEXT, Object, find, pod, rendered
from tests.helm.pod_process import BIN, ContainerProcess, Place

pytestmark = [pytest.mark.ray, pytest.mark.helm, pytest.mark.slow]
START_SECONDS = 120


class Head:
    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="kvr-"))
        self.ports = {
            name: free_port() for name in ("gcs", "dashboard", "agent", "client", "export", "cache", "lookup")
        }
        self.service = f"t{unique_name()}"
        self.objects: tuple[Object, ...] = rendered(
            "ray-cluster-values.yaml",
            "cache.pool=64Mi",
            f"cache.service={self.service}",
            "ray.auth.mode=disabled",
            "ray.objectStore=128Mi",
            f"cache.metricsPort={self.ports['cache']}",
            f"lookup.port={self.ports['lookup']}",
            "lookup.partitions=1",
            "ray.head.shard=true",
            PLAINTEXT,
        )
        container = copy.deepcopy(pod(self.objects, "head").spec["containers"][0])
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            where = container[probe]["httpGet"]
            where["port"] = self.ports[{52365: "agent", 8265: "dashboard"}[where["port"]]]
        (self.root / "config").mkdir()
        (self.root / "home").mkdir()
        (self.root / "log").touch()
        (text,) = find(self.objects, "ConfigMap")["data"].values()
        (self.root / "config" / "kvservice.toml").write_text(text)
        paths = {
            "/etc/kvservice": self.root / "config",
            "/home/kvservice": self.root / "home",
            "/proc/1/fd/1": self.root / "log",
            "/tmp/kvservice-up.log": self.root / "none",
        }
        self.address = f"127.0.0.1:{self.ports['gcs']}"
        self.place = Place("127.0.0.1", "", paths, {"127.0.0.1:6379": self.address, "rel-kvservice-nodes": "127.0.0.1"})
        self.process = ContainerProcess(container, self.place, self.root / "head.log")
        assert "command" not in container, "the operator would put it before its own"

    def start(self) -> None:
        """As the operator's command does, with ports that are free here."""
        cluster = find(self.objects, "RayCluster")["spec"]
        own = {
            "port": self.ports["gcs"],
            "dashboard-port": self.ports["dashboard"],
            "node-ip-address": "127.0.0.1",
            "dashboard-agent-listen-port": self.ports["agent"],
            "metrics-export-port": self.ports["export"],
            "ray-client-server-port": self.ports["client"],
            "temp-dir": str(self.root / "ray"),
        }
        given = {**cluster["headGroupSpec"]["rayStartParams"], **own}
        words = [f"--{name}={value}" for name, value in given.items()]
        self.process.start(["/bin/bash", "-c", f"ulimit -n 65536; exec ray start --head --block {' '.join(words)}"])

    def close(self) -> None:
        self.process.run(["kvservice", "down", "--address", self.address])
        if self.process.process is not None and self.process.process.poll() is None:
            self.process.process.terminate()
            try:
                self.process.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
        shutil.rmtree(self.root, ignore_errors=True)


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    made = Head()
    try:
        made.start()
        yield made
    finally:
        made.close()


def test_the_head_brings_the_service_up_by_itself(head: Head) -> None:
    hook = head.process.container["lifecycle"]["postStart"]["exec"]["command"]
    began = time.monotonic()
    done = head.process.run(hook)  # before there is a cluster, as the kubelet may
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "") and time.monotonic() - began < 5
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        head.process.wait_for(probe, START_SECONDS)
    check = pod(head.objects, "check").spec["containers"][0]
    done = ContainerProcess(check, head.place, head.root / "check.log").run(timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr + (head.root / "log").read_text()
    assert "metrics of 1 shard" in done.stdout
    status: dict[str, Any] = json.loads(head.process.run(["kvservice", "status", "-o", "json"]).stdout)
    assert status["service"] == head.service and len(status["nodes"]) == len(status["lookups"]) == 1
    (lookup,) = status["lookups"]
    assert lookup["address"].endswith(f":{head.ports['lookup']}"), "the port that the NetworkPolicy names"


def test_ray_takes_the_options_of_the_hooks(head: Head) -> None:
    """Not run: `ray stop` would stop every Ray of this machine."""
    (command,) = head.process.container["lifecycle"]["preStop"]["exec"]["command"][2:]
    assert "ray stop --grace-period 10" in command
    assert "--grace-period" in subprocess.run([BIN / "ray", "stop", "--help"], capture_output=True, text=True).stdout
