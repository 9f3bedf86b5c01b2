"""An operator who has the page on Kubernetes and no cluster yet: lint, render, and then the pods run as processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.helm.chart import CHART, ROOT, TOOLS, Pod, pod
from tests.helm.pod_process import ContainerProcess
from tests.helm.test_standalone_runs import Cluster
from tests.journeys.journey import Journey

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (TOOLS / "helm4").exists(), reason="Helm is not installed: `make helm` installs it"),
]
NODES = ("gpu-1", "gpu-2", "gpu-3")


class Rendered(Cluster):
    """The objects that the page's command has rendered."""

    namespace = "inference"

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.objects = tuple(item for item in yaml.safe_load_all(path.read_text()) if item)

    def shard_of(self, node: str) -> Pod:
        return pod(self.objects, "shard")


def test_documented_values_render_and_their_pods_run(empty_folder: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "helm").symlink_to(TOOLS / "helm4")
    journey = Journey(
        "kubernetes",
        [ROOT / "docs" / "kubernetes.md"],
        empty_folder,
        replace={"./helm/kvservice": str(CHART), "64Gi": "64Mi"},  # where the repository is, and what fits here
        environment={"PATH": f"{tools}:/usr/bin:/bin"},
    )
    with journey:
        journey.play()
        cluster = Rendered(empty_folder / "here" / "objects.yaml")
        try:
            cluster.start(NODES)
            check = pod(cluster.objects, "check")
            process = ContainerProcess(check.spec["containers"][0], cluster.place(check), cluster.root / "check.log")
            words = [word for word in process.command() if not word.startswith("--metrics=")]
            done = process.run([*words, *(f"--metrics={shard.place.ip}:9464" for shard in cluster.shards.values())])
            assert done.returncode == 0 and "2 lookup partitions, 3 cache shards" in done.stdout, (
                done.stdout + done.stderr
            )
        finally:
            cluster.close()
    assert journey.seconds < 600
