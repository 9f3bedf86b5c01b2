"""Values and objects for use beside other stacks fit the chart's defaults, and clash with nothing of it.

With KVSERVICE_TEST_CHARTS, a folder with checkouts of `production-stack` and `llm-d-modelservice`, those charts render
the values; without it only what is written here is compared.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvservice.connector.options import ConnectorOptions
from kvservice.session.options import Mode
from tests.helm.chart import NAMESPACE, ROOT, VALUES, Object, Pod, find, helm, pods, rendered, transfer_configs
from tests.helm.test_rendering import invalid

BESIDE = ROOT / "examples" / "kubernetes" / "beside"
CHARTS = {
    "production-stack-values.yaml": "production-stack/helm",
    "llm-d-values.yaml": "llm-d-modelservice/charts/llm-d-modelservice",
}


def written(name: str) -> Any:
    return yaml.safe_load((BESIDE / name).read_text())


def engine(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the file says of the engines: (a pod, its container), with Kubernetes' words for both."""
    found = written(name)
    if name == "rayservice.yaml":
        (group,) = found["spec"]["rayClusterConfig"]["workerGroupSpecs"]
        spec = group["template"]["spec"]
        return spec, spec["containers"][0]
    if name == "llm-d-values.yaml":
        return {**found["decode"], **found["decode"]["extraConfig"]}, found["decode"]["containers"][0]
    spec = found["servingEngineSpec"]
    (model,) = spec["modelSpec"]
    return {**spec, "volumes": model["extraVolumes"]}, {**model, "volumeMounts": model["extraVolumeMounts"]}


@pytest.mark.parametrize("name", [*CHARTS, "rayservice.yaml"])
def test_engines_beside_the_chart_meet_its_shards(name: str) -> None:
    spec, container = engine(name)
    shard = find(rendered("standalone-values.yaml"), "DaemonSet")["spec"]["template"]["spec"]
    for key in ("runAsUser", "runAsGroup", "fsGroup"):
        assert spec["securityContext"][key] == shard["securityContext"][key]
    assert spec["tolerations"] == shard["tolerations"]
    folders = {item["hostPath"]["path"]: item["hostPath"]["type"] for item in spec["volumes"] if "hostPath" in item}
    assert set(folders) == {item["hostPath"]["path"] for item in shard["volumes"] if "hostPath" in item}
    assert set(folders.values()) == {"DirectoryOrCreate"}, "engines do not wait for a shard"
    mounts = {item["name"]: item["mountPath"] for item in container["volumeMounts"]}
    assert all(mounts[item["name"]] == item["hostPath"]["path"] for item in spec["volumes"] if "hostPath" in item)
    theirs = {item["name"]: item for item in shard["containers"][0]["env"]}
    given = {item["name"]: item for item in container["env"]}
    assert all(given[key] == theirs[key] for key in ("KVSERVICE_RUNTIME_DIR", "KVSERVICE_NODE"))
    text = (BESIDE / name).read_text()
    if name == "rayservice.yaml":
        (model,) = yaml.safe_load(written(name)["spec"]["serveConfigV2"])["applications"][0]["args"]["llm_configs"]
        (config,) = [model["engine_kwargs"]["kv_transfer_config"]]
    else:
        (config,) = transfer_configs(text)
    assert (config["kv_connector"], config["kv_connector_module_path"]) == (
        "KVServiceConnector",
        "kvservice.connector.vllm",
    )
    options = ConnectorOptions.parse(config["kv_connector_extra_config"])
    assert (options.mode, options.service) == (Mode.SERVICE, "default")


def test_the_rayservice_is_what_the_operator_knows() -> None:
    assert invalid([written("rayservice.yaml")]) == []


@pytest.mark.parametrize("values", VALUES)
def test_names_and_ports_of_the_chart_are_its_own(values: str) -> None:
    objects = rendered(values)
    names = [(item["apiVersion"], item["kind"], item["metadata"]["name"]) for item in objects]
    assert len(set(names)) == len(names)
    for each in pods(objects):
        ports = [port for container in each.containers for port in container.get("ports", [])]
        for key in ("name", "containerPort"):
            assert len({port[key] for port in ports}) == len(ports), (each.owner, key)
        assert not [port for port in ports if "hostPort" in port] and not each.spec.get("hostNetwork")
    for service in (item for item in objects if item["kind"] == "Service"):
        assert len({port["port"] for port in service["spec"]["ports"]}) == len(service["spec"]["ports"])


def clashes(ours: tuple[Object, ...], theirs: list[Object]) -> list[str]:
    """Objects of one name, and selectors of one that reach pods of the other."""
    names = [{(item["kind"], item["metadata"]["name"]) for item in owner} for owner in (ours, theirs)]
    found = [f"{kind}/{name} is in both" for kind, name in names[0] & names[1]]
    for owner, other in ((ours, theirs), (theirs, ours)):
        for item, each in itertools.product(owner, pods(tuple(other))):
            spec = item.get("spec", {})
            selectors = [spec.get("selector"), spec.get("podSelector")]
            for selector in filter(None, selectors):
                labels = selector.get("matchLabels", {} if "matchExpressions" in selector else selector)
                if labels and labels.items() <= each.labels.items():
                    found.append(f"{item['kind']}/{item['metadata']['name']} selects {each.owner}")
    return found


def with_labels(found: Object) -> Object:
    """As the operator labels its pods; those of the file have none."""
    for group in [
        found["spec"]["rayClusterConfig"]["headGroupSpec"],
        *found["spec"]["rayClusterConfig"]["workerGroupSpecs"],
    ]:
        group["template"]["metadata"] = {"labels": {"app.kubernetes.io/name": "kuberay", "ray.io/cluster": "llm"}}
    return found


def test_the_chart_clashes_with_no_rayservice_beside_it() -> None:
    for values in ("standalone-values.yaml", "standalone-full-values.yaml"):
        assert clashes(rendered(values), [with_labels(written("rayservice.yaml"))]) == []
    planted = with_labels(written("rayservice.yaml"))
    labels = planted["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["metadata"]["labels"]
    labels |= pod_labels(rendered("standalone-values.yaml"))
    assert any("selects RayService/llm/head" in line for line in clashes(rendered("standalone-values.yaml"), [planted]))


def pod_labels(objects: tuple[Object, ...]) -> dict[str, str]:
    first: Pod = next(pods(objects))
    return first.labels


@pytest.mark.parametrize("name", CHARTS)
def test_other_charts_take_the_values(name: str) -> None:
    folder = os.environ.get("KVSERVICE_TEST_CHARTS")
    if not folder:
        pytest.skip("KVSERVICE_TEST_CHARTS names no folder with the charts of others")
    chart = Path(folder) / CHARTS[name]
    done = helm("helm4", "template", "stack", str(chart), "--namespace", NAMESPACE, "--values", str(BESIDE / name))
    assert done.returncode == 0, done.stderr
    objects = [item for item in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if item]
    assert invalid(objects) == [] and clashes(rendered("standalone-values.yaml"), objects) == []
    spec, container = engine(name)
    (found,) = [
        each for each in pods(tuple(objects)) if any("kv-transfer" in str(item) for item in each.spec["containers"])
    ]
    assert found.spec["securityContext"] == spec["securityContext"]
    assert all(volume in found.spec["volumes"] for volume in spec["volumes"])
    assert all(mount in found.spec["containers"][0]["volumeMounts"] for mount in container["volumeMounts"])
    assert "/dev/shm" in {mount["mountPath"] for mount in found.spec["containers"][0]["volumeMounts"]}
    assert all(item in found.spec["containers"][0]["env"] for item in container["env"])
    words = found.spec["containers"][0]["command"] + found.spec["containers"][0].get("args", [])
    (config,) = transfer_configs(words[words.index("--kv-transfer-config") + 1])
    assert config in transfer_configs((BESIDE / name).read_text())
