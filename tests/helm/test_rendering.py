"""Both Helms take every file of values, and everything that comes out is what Kubernetes and the operators know."""

from __future__ import annotations

import copy
import json
import subprocess
from typing import Any

import pytest
import yaml

from tests.helm.chart import CHART, HELMS, NAMESPACE, RELEASE, ROOT, TOOLS, VALUES, Object, find, helm, rendered


def invalid(objects: tuple[Object, ...] | list[Object]) -> list[str]:
    command = [TOOLS / "python", ROOT / "tests" / "helm" / "validate.py"]
    done = subprocess.run(command, input=json.dumps(list(objects)), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("binary", HELMS)
def test_both_helms_lint_every_file_of_values(binary: str) -> None:
    for name in VALUES:
        done = helm(binary, "lint", "--strict", str(CHART), "--values", str(CHART / "ci" / name))
        assert done.returncode == 0, done.stdout + done.stderr
    assert len(VALUES) >= 6


def test_both_helms_render_the_same() -> None:
    for name in VALUES:
        both = [rendered(name, binary=each) for each in HELMS]
        first, second = ({json.dumps(item, sort_keys=True) for item in objects} for objects in both)
        assert first == second, name


def test_every_rendered_object_is_valid() -> None:
    everything = [item for name in VALUES for item in rendered(name)]
    assert invalid(everything) == []
    operators = {"RayCluster", "RayService", "PodMonitor", "ServiceMonitor", "PrometheusRule", "Certificate", "Issuer"}
    assert operators <= {item["kind"] for item in everything}


def test_the_validation_finds_planted_faults() -> None:
    broken: list[Object] = []

    def plant(kind: str, values: str, path: list[Any], value: object) -> None:
        item = copy.deepcopy(find(rendered(values), kind))
        place = item
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value
        broken.append(item)

    plant("RayCluster", "ray-cluster-values.yaml", ["spec", "headGroupSpec", "rayStartParameters"], {})
    plant("RayCluster", "ray-cluster-values.yaml", ["spec", "workerGroupSpecs", 0, "replicas"], "two")
    plant("RayService", "ray-service-values.yaml", ["spec", "rayClusterConfig", "authOptions", "mode"], "tokens")
    plant("ServiceMonitor", "ray-full-values.yaml", ["spec", "endpoints", 0, "ports"], "x")
    plant("Certificate", "ray-full-values.yaml", ["spec", "secretname"], "x")
    plant("Certificate", "ray-full-values.yaml", ["spec", "usages"], ["server"])
    plant("DaemonSet", "standalone-values.yaml", ["spec", "template", "spec", "containers", 0, "imagePolicy"], "x")
    plant("StatefulSet", "standalone-values.yaml", ["spec", "replicas"], "2")
    found = invalid(broken)
    for item, word in zip(
        broken,
        ("rayStartParameters", "two", "tokens", "ports", "secretname", "server", "imagePolicy", "replicas"),
        strict=True,
    ):
        name = f"{item['kind']}/"
        assert any(line.startswith(name) and word in line for line in found), (name, word, found)


@pytest.mark.parametrize("values", ["standalone-full-values.yaml", "ray-service-values.yaml"])
def test_installing_tells_what_to_do_next(values: str) -> None:
    """With Helm 4 only: Helm 3 asks for a cluster even for a dry run on the client."""
    done = helm(
        "helm4",
        "install",
        RELEASE,
        str(CHART),
        "--dry-run=client",
        "--namespace",
        NAMESPACE,
        "--values",
        str(CHART / "ci" / values),
    )
    assert done.returncode == 0, done.stderr
    notes = done.stdout.split("NOTES:\n")[1]
    assert f"helm test {RELEASE} --namespace {NAMESPACE}" in notes
    assert "<no value>" not in done.stdout and "%!" not in done.stdout
    if values.startswith("standalone"):
        snippet = notes.split("lines in its Deployment:")[1].split("These two folders are")[0]
        parsed = yaml.safe_load(snippet)["spec"]
        shard = find(rendered(values), "DaemonSet", "-shard")["spec"]["template"]["spec"]
        folders = [volume["hostPath"] for volume in parsed["volumes"] if "hostPath" in volume]
        paths = {folder["path"] for folder in folders}
        assert {folder["type"] for folder in folders} == {"DirectoryOrCreate"}, "engines do not wait for a shard"
        of_shard = [volume for volume in shard["volumes"] if "hostPath" in volume and volume["name"] != "blocks"]
        assert paths == {volume["hostPath"]["path"] for volume in of_shard}, "the disk is the shard's alone"
        assert {mount["mountPath"] for mount in parsed["containers"][0]["volumeMounts"]} == paths | {"/dev/shm"}
        assert parsed["securityContext"]["runAsUser"] == shard["securityContext"]["runAsUser"]
        assert "uninstall" in notes, "kept blocks are warned of"
    else:
        assert "rel-kvservice-serve-svc.team.svc:8000" in notes
