"""Renders the chart with the real Helm, each combination once, and finds things in what comes out."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
CHART = ROOT / "helm" / "kvservice"
TOOLS = ROOT / ".venv-helm" / "bin"
HELMS = ("helm3", "helm4")
VALUES = tuple(path.name for path in sorted((CHART / "ci").glob("*-values.yaml")))
RELEASE, NAMESPACE = "rel", "team"
# Over any file of values: a Secret of somebody else's, or no certificates at all.
SECRET = "tls.secretName=certs,tls.certManager.enabled=false"
PLAINTEXT = "tls.secretName=,tls.certManager.enabled=false,tls.allowPlaintext=true"
Object = dict[str, Any]


def helm(binary: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(TOOLS / binary), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@functools.cache
def rendered(values: str, *settings: str, binary: str = "helm4") -> tuple[Object, ...]:
    """Objects of this file of values under ci/, with `--set` settings over it."""
    arguments = ["template", RELEASE, str(CHART), "--namespace", NAMESPACE, "--values", str(CHART / "ci" / values)]
    for setting in settings:
        arguments += ["--set-json" if setting.partition("=")[2][:1] in ("[", "{") else "--set", setting]
    done = helm(binary, *arguments)
    assert done.returncode == 0, done.stderr
    return tuple(item for item in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if item)


def refusal(*settings: str, values: str = "") -> str:
    """What Helm says to values that it must not take; over this file of values, or the chart's own."""
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    arguments += ["--values", str(CHART / "ci" / values)] if values else []
    done = helm("helm4", "template", RELEASE, str(CHART), *arguments)
    assert done.returncode != 0, f"taken: {settings}"
    return done.stderr


def find(objects: tuple[Object, ...], kind: str, name: str = "") -> Object:
    """The one object of this kind whose name ends so."""
    found = [item for item in objects if item["kind"] == kind and item["metadata"]["name"].endswith(name)]
    assert len(found) == 1, f"{len(found)} of {kind} {name}"
    return found[0]


def kinds(objects: tuple[Object, ...]) -> set[str]:
    return {item["kind"] for item in objects}


@dataclass(frozen=True, slots=True)
class Pod:
    owner: str  # Kind/name[/group]
    labels: dict[str, str]
    spec: dict[str, Any]

    @property
    def containers(self) -> list[dict[str, Any]]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]


def pods(objects: tuple[Object, ...]) -> Iterator[Pod]:
    """Every pod that these objects lead to."""
    for item in objects:
        owner, spec = f"{item['kind']}/{item['metadata']['name']}", item.get("spec", {})
        if item["kind"] == "Pod":
            yield Pod(owner, item["metadata"]["labels"], spec)
        elif item["kind"] in ("DaemonSet", "StatefulSet", "Deployment", "Job"):
            yield _of_template(owner, spec["template"])
        elif item["kind"] in ("RayCluster", "RayService"):
            cluster = spec.get("rayClusterConfig", spec)
            yield _of_template(f"{owner}/head", cluster["headGroupSpec"]["template"])
            for group in cluster["workerGroupSpecs"]:
                yield _of_template(f"{owner}/{group['groupName']}", group["template"])


def _of_template(owner: str, template: dict[str, Any]) -> Pod:
    return Pod(owner, template["metadata"]["labels"], template["spec"])


def pod(objects: tuple[Object, ...], component: str) -> Pod:
    """The pod of this component; of several worker groups the first."""
    return next(each for each in pods(objects) if each.labels["app.kubernetes.io/component"] == component)


def mebibytes(quantity: str) -> int:
    return int(quantity[:-2]) * {"Mi": 1, "Gi": 1024}[quantity[-2:]]


def transfer_configs(text: str) -> list[dict[str, Any]]:
    """Every --kv-transfer-config in a text, parsed."""
    decoder = json.JSONDecoder()
    starts = [index for index in range(len(text)) if text.startswith('{"kv_connector"', index)]
    return [decoder.raw_decode(text, start)[0] for start in starts]
