"""What pods may do, and who may reach them."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvservice.auth.tls import TlsFiles
from tests.helm.api_server import installed
from tests.helm.chart import ROOT, VALUES, Pod, find, kinds, pod, pods, refusal, rendered

# What the restricted pod security standard allows, https://kubernetes.io/docs/concepts/security/pod-security-standards/
VOLUMES = {"configMap", "emptyDir", "secret", "persistentVolumeClaim", "projected", "downwardAPI", "csi", "ephemeral"}


def violations(each: Pod) -> list[str]:
    """Of the restricted standard."""
    found = [f"{key} is set" for key in ("hostNetwork", "hostPID", "hostIPC") if each.spec.get(key)]
    for volume in each.spec.get("volumes", []):
        found += [f"volume {volume['name']} is a {kind}" for kind in volume if kind not in VOLUMES | {"name"}]
    whole: dict[str, Any] = each.spec.get("securityContext", {})
    for container in each.containers:
        security, name = {**whole, **container.get("securityContext", {})}, container["name"]
        capabilities = security.get("capabilities", {})
        if security.get("privileged"):
            found.append(f"{name} is privileged")
        if security.get("allowPrivilegeEscalation") is not False:
            found.append(f"{name} may gain privileges")
        if security.get("runAsNonRoot") is not True or security.get("runAsUser") == 0:
            found.append(f"{name} runs as root")
        if security.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
            found.append(f"{name} has no seccomp profile")
        if capabilities.get("drop") != ["ALL"] or set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
            found.append(f"{name} has capabilities {capabilities}")
        if any("hostPort" in port for port in container.get("ports", [])):
            found.append(f"{name} has a host port")
    return found


@pytest.mark.parametrize("values", VALUES)
def test_pods_meet_the_restricted_standard_as_documented(values: str) -> None:
    for each in pods(rendered(values)):
        component = each.labels["app.kubernetes.io/component"]
        expected = set()
        if component == "shard":  # it shares sockets and memory with the engines of its node
            expected = {"volume runtime is a hostPath", "volume memory is a hostPath"}
            if "initContainers" in each.spec:
                added = {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]}
                expected |= {"prepare-host runs as root", f"prepare-host has capabilities {added}"}
        if component == "shard" and "full" in values:  # RDMA pins memory
            expected.add(f"shard has capabilities { ({'drop': ['ALL'], 'add': ['IPC_LOCK']}) }")
            expected.add("shard may gain privileges")
        if component == "shard" and values == "standalone-full-values.yaml":  # its disk is one of the node's
            expected.add("volume blocks is a hostPath")
        assert set(violations(each)) == expected, each.owner


@pytest.mark.parametrize("disk", ["volume=hostPath", "volume=claim", "volume=claim,tiers.disk.claimName=one"])
def test_openshifts_constraints_allow_what_shards_ask_for(disk: str) -> None:
    scc = yaml.safe_load((ROOT / "examples" / "kubernetes" / "openshift-scc.yaml").read_text())
    shard = pod(rendered("standalone-full-values.yaml", f"tiers.disk.size=1Ti,tiers.disk.{disk}"), "shard")
    asked = {kind for volume in shard.spec["volumes"] for kind in volume if kind != "name"}
    assert asked <= set(scc["volumes"])
    added = {name for each in shard.containers for name in each["securityContext"]["capabilities"].get("add", [])}
    assert added == set(scc["allowedCapabilities"])


@pytest.mark.parametrize("values", VALUES)
def test_root_file_systems_are_read_only_and_tmp_is_a_volume(values: str) -> None:
    for each in pods(rendered(values)):
        for container in each.containers:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
            assert "/tmp" in mounted or container["name"] in ("prepare-host", "private-home")
            home = {item["name"]: item.get("value") for item in container.get("env", [])}.get("HOME")
            assert home is None or home in mounted
    loose = pod(rendered(values, "security.readOnlyRootFilesystem=false"), "check")
    assert loose.spec["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is False


def test_secrets_are_not_in_what_is_rendered() -> None:
    assert "Secret" not in {kind for values in VALUES for kind in kinds(rendered(values))}
    roles = {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}
    assert not roles & {kind for values in VALUES for kind in kinds(rendered(values))}


def test_the_charts_certificates_need_a_cluster_that_keeps_them() -> None:
    said = refusal("tls.secretName=", values="standalone-values.yaml")
    assert "tls.secretName" in said and "tls.certManager.enabled" in said and "tls.allowPlaintext" in said
    assert "Secret" in kinds(installed("standalone-values.yaml", "tls.secretName="))


def test_rights_in_one_namespace_are_enough_to_install() -> None:
    """Without the class, which belongs to the cluster, nothing outside the release's namespace is asked for."""
    objects = installed("standalone-values.yaml", "tls.secretName=", "priorityClass.create=false", of_namespace=True)
    assert "Secret" in kinds(objects) and "PriorityClass" not in kinds(objects)


def test_what_the_chart_makes_is_taken_and_kept(tmp_path: Path) -> None:
    objects = installed("standalone-values.yaml", "tls.secretName=")
    secret = find(objects, "Secret")
    for name, text in secret["data"].items():
        (tmp_path / name).write_bytes(base64.b64decode(text))
    assert TlsFiles(tmp_path).current()[0] == 1  # chain, name, key, both uses
    for each in pods(objects):
        volume = {"name": "tls", "secret": {"secretName": secret["metadata"]["name"], "defaultMode": 0o440}}
        assert volume in each.spec["volumes"], each.owner
    again = installed("standalone-values.yaml", "tls.secretName=", kept=secret)
    assert find(again, "Secret")["data"] == secret["data"]


def test_cert_manager_makes_what_the_service_takes() -> None:
    objects = rendered("standalone-full-values.yaml")
    leaf, authority = find(objects, "Certificate", "cache"), find(objects, "Certificate", "cache-ca")
    assert leaf["spec"]["dnsNames"] == ["kvservice"] and leaf["spec"]["usages"] == ["server auth", "client auth"]
    assert leaf["spec"]["issuerRef"] == {"name": "cache-ca", "kind": "Issuer"}, "a CA that nobody else has"
    assert find(objects, "Issuer", "cache-ca")["spec"]["ca"]["secretName"] == authority["spec"]["secretName"]
    assert authority["spec"]["isCA"] and find(objects, "Issuer", authority["spec"]["issuerRef"]["name"])
    for each in pods(objects):
        assert leaf["spec"]["secretName"] in [
            volume.get("secret", {}).get("secretName") for volume in each.spec["volumes"]
        ]
    given = rendered("ray-full-values.yaml")
    assert "Issuer" not in kinds(given)
    assert find(given, "Certificate")["spec"]["issuerRef"] == {"name": "inference-ca", "kind": "ClusterIssuer"}


def allows(policy: dict[str, Any], labels: dict[str, str], port: int) -> bool:
    """May a pod of the same namespace with these labels reach this port?"""
    for rule in policy["spec"]["ingress"]:
        ports = rule.get("ports")
        fits = ports is None or any(item["port"] <= port <= item.get("endPort", item["port"]) for item in ports)
        if fits and ("from" not in rule or any(matches(peer, labels) for peer in rule["from"])):
            return True
    return False


def matches(peer: dict[str, Any], labels: dict[str, str]) -> bool:
    if peer.get("namespaceSelector"):
        return False
    selector = peer.get("podSelector", {})
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(item["key"]) in item["values"] for item in selector.get("matchExpressions", [])
    )


def test_only_the_cache_reaches_the_cache() -> None:
    objects = rendered("standalone-values.yaml")
    shard, lookup, check = (pod(objects, name).labels for name in ("shard", "lookup", "check"))
    to_shard, to_lookup = (find(objects, "NetworkPolicy", name) for name in ("-shard", "-lookup"))
    assert to_shard["spec"]["podSelector"]["matchLabels"].items() <= shard.items()
    assert to_lookup["spec"]["podSelector"]["matchLabels"].items() <= lookup.items()
    engine = {"app": "vllm"}
    assert allows(to_shard, shard, 7401) and allows(to_shard, shard, 40_000), "transports choose their ports"
    assert allows(to_lookup, shard, 7400) and not allows(to_lookup, shard, 9464)
    assert allows(to_lookup, check, 7400) and allows(to_shard, check, 9464) and not allows(to_shard, check, 40_000)
    for port in (7400, 7401, 9464, 40_000):
        assert not allows(to_shard, engine, port) and not allows(to_lookup, engine, port)
    names = {(port["port"], port["protocol"]) for port in to_shard["spec"]["egress"][-1]["ports"]}
    assert names == {(port, protocol) for port in (53, 5353) for protocol in ("UDP", "TCP")}, "5353 is OpenShift's"
    assert to_lookup["spec"]["egress"] == [] and "Egress" in to_lookup["spec"]["policyTypes"]
    opened = find(rendered("standalone-full-values.yaml"), "NetworkPolicy", "-lookup")
    assert allows(opened, {"app": "router"}, 7500) and not allows(opened, {"app": "router"}, 9464)
    assert "NetworkPolicy" not in kinds(rendered("standalone-bare-values.yaml"))


def test_only_ray_reaches_ray_and_clients_reach_serve() -> None:
    objects = rendered("ray-cluster-values.yaml")
    policy = find(objects, "NetworkPolicy")
    head, worker = pod(objects, "head").labels, pod(objects, "worker").labels
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= head.items() & worker.items()
    assert allows(policy, worker, 6379) and allows(policy, worker, 30_000)
    operator = {"app.kubernetes.io/name": "kuberay-operator"}
    assert allows(policy, operator, 8265) and not allows(policy, operator, 10001)
    anybody = {"app": "x"}
    assert allows(policy, anybody, 8000) and not allows(policy, anybody, 8265) and not allows(policy, anybody, 6379)
    assert not allows(find(rendered("ray-service-values.yaml"), "NetworkPolicy"), anybody, 8000)
