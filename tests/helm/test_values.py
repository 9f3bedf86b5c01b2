"""What each value does to what is rendered."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import tomllib
import yaml

from kvservice.config import load_config
from kvservice.connector.options import ConnectorOptions
from kvservice.session.options import Mode
from tests.helm.chart import (
    CHART,
    PLAINTEXT,
    ROOT,
    SECRET,
    VALUES,
    Object,
    Pod,
    find,
    helm,
    kinds,
    mebibytes,
    pod,
    pods,
    refusal,
    rendered,
    transfer_configs,
)

STANDALONE, FULL, BARE = "standalone-values.yaml", "standalone-full-values.yaml", "standalone-bare-values.yaml"
RAY, RAY_FULL, SERVICE = "ray-cluster-values.yaml", "ray-full-values.yaml", "ray-service-values.yaml"


def limit(of: Pod) -> int:
    return mebibytes(of.spec["containers"][0]["resources"]["limits"]["memory"])


def settings(objects: tuple[Object, ...]) -> dict[str, Any]:
    (text,) = (item["data"]["kvservice.toml"] for item in objects if "kvservice.toml" in item.get("data", {}))
    return tomllib.loads(text)


def cluster(objects: tuple[Object, ...]) -> dict[str, Any]:
    spec: dict[str, Any] = next(item["spec"] for item in objects if item["kind"] in ("RayCluster", "RayService"))
    return spec.get("rayClusterConfig", spec)


# -- memory ----


@pytest.mark.parametrize("pool", ["512Mi", "16Gi"])
def test_pool_counts_in_the_memory_limit(pool: str) -> None:
    objects = rendered(STANDALONE, f"cache.pool={pool}")
    assert limit(pod(objects, "shard")) == mebibytes(pool) + 2048 + 512
    assert settings(objects)["pool_bytes"] == f"{pool}B"


def test_shared_memory_of_a_ray_pod_holds_all_its_parts() -> None:
    """These are the pool, the object store and the engine."""
    objects = rendered(RAY_FULL)
    for each in (each for each in pods(objects) if each.owner.startswith("Ray")):
        (shm,) = (volume["emptyDir"] for volume in each.spec["volumes"] if volume["name"] == "shm")
        assert (shm["medium"], mebibytes(shm["sizeLimit"])) == ("Memory", (128 + 4 + 16) * 1024 + 512)
        assert {"name": "shm", "mountPath": "/dev/shm"} in each.spec["containers"][0]["volumeMounts"]
    workers = [each for each in pods(objects) if each.labels["app.kubernetes.io/component"] == "worker"]
    assert [limit(each) for each in workers] == [(128 + 148) * 1024 + 512, (64 + 148) * 1024 + 512]
    starts = [group["rayStartParams"]["object-store-memory"] for group in cluster(objects)["workerGroupSpecs"]]
    assert starts == [str(4 << 30)] * 2, "left alone, the object store would take shared memory of the pool"


def test_requests_of_memory_are_its_limits() -> None:
    for values in VALUES:
        for each in pods(rendered(values)):
            for container in each.spec["containers"]:
                if container["name"] != "lookup":
                    resources = container["resources"]
                    assert resources["requests"]["memory"] == resources["limits"]["memory"] or each.owner.startswith(
                        "Pod/"
                    ), each.owner


# -- settings ----


@pytest.mark.parametrize("values", VALUES)
def test_settings_file_is_what_the_program_takes(values: str, tmp_path: Any) -> None:
    objects = rendered(values)
    path = tmp_path / "kvservice.toml"
    (text,) = (item["data"]["kvservice.toml"] for item in objects if "kvservice.toml" in item.get("data", {}))
    path.write_text(text)
    config = load_config(path, {})
    if "standalone" in values:
        names = config.lookup
        assert len(names) == config.lookup_partitions == find(objects, "StatefulSet")["spec"]["replicas"]
        service = find(objects, "Service", "-lookup")["metadata"]["name"]
        port = find(objects, "Service", "-lookup")["spec"]["ports"][0]["port"]
        assert names[0] == f"dns:///{service}-0.{service}.team.svc:{port}"
    else:
        assert config.lookup_port == 7400 and config.lookup == ()


def test_full_values_reach_the_settings() -> None:
    given = settings(rendered(FULL))
    assert (given["service"], given["slab_bytes"], given["transport"], given["lease_seconds"]) == (
        "prod",
        "128MiB",
        "nixl",
        15,
    )
    assert settings(rendered(RAY_FULL))["copy_workers"] == "auto"


def test_changed_settings_restart_pods() -> None:
    def mark(*changes: str) -> str:
        template = find(rendered(STANDALONE, *changes), "DaemonSet")["spec"]["template"]
        return str(template["metadata"]["annotations"]["kvservice/config"])

    assert mark() == mark("tests.minNodes=2") != mark("cache.leaseSeconds=20")


@pytest.mark.parametrize("values", VALUES)
def test_variables_of_services_never_look_like_settings(values: str) -> None:
    assert all(each.spec["enableServiceLinks"] is False for each in pods(rendered(values)))


@pytest.mark.parametrize("values", [STANDALONE, RAY])
def test_the_connector_takes_what_the_notes_tell_engines(values: str) -> None:
    done = helm("helm4", "install", "rel", str(CHART), "--dry-run=client", "--values", str(CHART / "ci" / values))
    (config,) = transfer_configs(done.stdout.split("NOTES:")[1])
    options = ConnectorOptions.parse(config["kv_connector_extra_config"])
    assert (options.mode, options.service) == (Mode.SERVICE, "default")
    assert (config["kv_connector"], config["kv_role"]) == ("KVServiceConnector", "kv_both")


# -- tiers ----


def volume(of: Pod, name: str) -> Any:
    found = [each for each in of.spec["volumes"] if each["name"] == name]
    return found[0] if found else None


def test_a_disk_of_the_node_is_mounted_and_prepared() -> None:
    shard = pod(rendered(FULL), "shard")
    assert volume(shard, "blocks")["hostPath"] == {"path": "/mnt/nvme/kv", "type": "DirectoryOrCreate"}
    mount = {"name": "blocks", "mountPath": "/mnt/nvme/kv"}
    prepare, server = shard.containers
    assert mount in prepare["volumeMounts"] and mount in server["volumeMounts"] and "/mnt/nvme/kv" in prepare["args"]
    given = settings(rendered(FULL))
    assert (given["disk_path"], given["disk_bytes"], given["disk_write"]) == ("/mnt/nvme/kv", "2TiB", "reused")
    assert volume(pod(rendered(STANDALONE), "shard"), "blocks") is None
    assert "disk_path" not in settings(rendered(STANDALONE))


@pytest.mark.parametrize(
    ("values", "volume_of_it"),
    [
        (("volume=emptyDir", "size=50Gi"), {"emptyDir": {"sizeLimit": "50Gi"}}),
        (("volume=claim", "claimName=blocks"), {"persistentVolumeClaim": {"claimName": "blocks"}}),
    ],
)
def test_a_disk_is_any_volume(values: tuple[str, ...], volume_of_it: Object) -> None:
    for base, component in ((STANDALONE, "shard"), (RAY, "worker")):
        objects = rendered(base, *(f"tiers.disk.{value}" for value in values))
        assert volume(pod(objects, component), "blocks") == {"name": "blocks", **volume_of_it}
        mounts = pod(objects, component).spec["containers"][0]["volumeMounts"]
        assert {"name": "blocks", "mountPath": settings(objects)["disk_path"]} in mounts


@pytest.mark.parametrize(("size", "room"), [("50Gi", "46080MiB"), ("2Ti", "1887436MiB"), ("100Mi", "90MiB")])
def test_blocks_leave_room_in_an_empty_dir(size: str, room: str) -> None:
    """The kubelet evicts a pod whose emptyDir is over its limit, and a full tier has an index and folders too."""
    given = settings(rendered(STANDALONE, "tiers.disk.volume=emptyDir", f"tiers.disk.size={size}"))
    assert given["disk_bytes"] == room


def test_a_claim_without_a_name_is_made_for_each_pod() -> None:
    made = volume(pod(rendered(RAY_FULL), "worker"), "blocks")["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert made["storageClassName"] == "local-nvme" and made["resources"]["requests"] == {"storage": "1Ti"}
    assert "needs a size" in refusal("tiers.disk.volume=claim", values=STANDALONE)
    assert "needs a limit" in refusal("tiers.disk.volume=emptyDir", values=STANDALONE)


@pytest.mark.parametrize(("base", "component"), [(STANDALONE, "shard"), (RAY, "worker")])
def test_the_key_of_blocks_of_nobody_is_mounted(base: str, component: str) -> None:
    objects = rendered(
        base, "tiers.codecKeySecretName=at-rest", "tiers.disk.codec=aesgcm", "tiers.disk.volume=hostPath"
    )
    secret = volume(pod(objects, component), "codec-key")["secret"]
    assert secret == {"secretName": "at-rest", "defaultMode": 0o440}, "others than its user must not read it"
    path = settings(objects)["codec_key_file"]
    mounts = {each["name"]: each["mountPath"] for each in pod(objects, component).spec["containers"][0]["volumeMounts"]}
    assert path == f"{mounts['codec-key']}/codec.key"
    assert (
        "codec_key_file" not in settings(rendered(base)) and volume(pod(rendered(base), component), "codec-key") is None
    )


def test_memory_nodes_run_shards_that_accept_what_others_evict() -> None:
    engines, memory = (find(rendered(FULL), "DaemonSet", name)["spec"] for name in ("-shard", "-shard-memory"))
    added = {"--accept-spill", "--pool-bytes=512GiB"}
    of_engines, of_memory = (set(each["template"]["spec"]["containers"][0]["args"]) for each in (engines, memory))
    assert of_memory - of_engines == added and of_engines <= of_memory
    assert memory["template"]["spec"]["nodeSelector"] == {"pool": "memory", "kubernetes.io/os": "linux"}
    assert limit(next(each for each in pods(rendered(FULL)) if each.owner.endswith("-memory"))) == (
        512 - 64
    ) * 1024 + limit(pod(rendered(FULL), "shard"))
    service = find(rendered(FULL), "Service", "-shard")["spec"]["selector"]
    for mine, other in ((engines, memory), (memory, engines)):
        chosen = mine["selector"]["matchLabels"]
        labels = [each["template"]["metadata"]["labels"] for each in (mine, other)]
        assert chosen.items() <= labels[0].items() and not chosen.items() <= labels[1].items()
        assert service.items() <= labels[0].items()
    assert "nodeSelector" in refusal("tiers.memoryNodes.enabled=true", PLAINTEXT)


def test_object_store_gets_its_secret_and_its_ports() -> None:
    shard = pod(rendered(FULL), "shard").spec["containers"][0]
    assert shard["envFrom"] == [{"secretRef": {"name": "s3"}}]
    given = settings(rendered(FULL))
    assert (given["objects_url"], given["objects_namespace"]) == ("s3://blocks/prod", "prod")
    assert {"ports": [{"port": 443}, {"port": 9000}]} in find(rendered(FULL), "NetworkPolicy", "-shard")["spec"][
        "egress"
    ]
    for component in ("head", "worker"):
        assert pod(rendered(RAY_FULL), component).spec["containers"][0]["envFrom"] == [{"secretRef": {"name": "gcs"}}]
    assert "envFrom" not in pod(rendered(STANDALONE), "shard").spec["containers"][0]
    assert {"port": 443} not in [
        port
        for rule in find(rendered(STANDALONE), "NetworkPolicy", "-shard")["spec"]["egress"]
        for port in rule.get("ports", [])
    ]


# -- placement and life ----


def test_placement_reaches_the_pods() -> None:
    objects = rendered(FULL)
    shard, lookup, check = (pod(objects, name).spec for name in ("shard", "lookup", "check"))
    assert shard["nodeSelector"] == {"nvidia.com/gpu.present": "true", "kubernetes.io/os": "linux"}
    assert "nodeAffinity" in shard["affinity"] and shard["priorityClassName"] == "system-node-critical"
    assert lookup["nodeSelector"] == {"pool": "cpu", "kubernetes.io/os": "linux"}
    assert check["nodeSelector"] == {"kubernetes.io/os": "linux"}
    everybody = {"key": "dedicated", "operator": "Exists"}
    assert lookup["tolerations"] == [everybody, {"key": "cpu-only", "operator": "Exists"}]
    assert shard["tolerations"] == check["tolerations"] == [everybody]
    update = find(objects, "DaemonSet", "-shard")["spec"]["updateStrategy"]["rollingUpdate"]
    assert update == {"maxUnavailable": "10%"}
    assert pod(rendered(RAY_FULL), "worker").spec["nodeSelector"] == {"gpu": "h200"}


@pytest.mark.parametrize("values", [STANDALONE, RAY])
def test_every_pod_tolerates_the_taint_of_gpu_nodes_by_default(values: str) -> None:
    wanted = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    found = [each for each in pods(rendered(values)) if wanted in each.spec["tolerations"]]
    assert len(found) == len(list(pods(rendered(values)))) == 3, (
        "a cluster of tainted nodes has no place for the others"
    )


def test_a_priority_class_of_the_release_never_evicts() -> None:
    objects = rendered(STANDALONE)
    made = find(objects, "PriorityClass")
    assert made["metadata"]["name"] == "team-rel-kvservice" and made["preemptionPolicy"] == "Never"
    assert {each.spec["priorityClassName"] for each in pods(objects)} == {"team-rel-kvservice"}
    for values in (BARE, RAY):
        assert not [each for each in pods(rendered(values)) if "priorityClassName" in each.spec]
        assert "PriorityClass" not in kinds(rendered(values))


def test_networks_of_the_transport_are_values() -> None:
    def environment(objects: tuple[Object, ...], component: str) -> dict[str, str]:
        found = pod(objects, component).spec["containers"][0]["env"]
        return {item["name"]: item["value"] for item in found if item["name"].startswith("UCX_")}

    wanted = {"UCX_NET_DEVICES": "eth1,mlx5_0:1", "UCX_TCP_PORT_RANGE": "7600-7699"}
    assert wanted.items() <= environment(rendered(FULL), "shard").items()
    assert (
        wanted.items()
        <= environment(
            rendered(RAY, "cache.transferDevices=eth1\\,mlx5_0:1", "cache.transferPorts=7600-7699"), "worker"
        ).items()
    )
    assert environment(rendered(STANDALONE), "shard") == {}


def test_another_user_gets_the_capability_by_the_launcher() -> None:
    shard = pod(rendered(FULL), "shard").spec["containers"][0]
    assert shard["command"][0] == "/usr/local/libexec/setpriv-ipc-lock" and shard["command"][-2:] == [
        "kvservice",
        "shard",
    ]
    security = shard["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]} and security["allowPrivilegeEscalation"]
    plain = pod(rendered(FULL, "rdma.lockMemory=false"), "shard").spec["containers"][0]
    assert plain["command"] == ["kvservice", "shard"] and plain["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    for each in pods(rendered(RAY_FULL)):
        assert "add" not in each.spec["containers"][0]["securityContext"]["capabilities"], (
            "Ray's processes cannot use it"
        )


def test_lookup_partitions_and_workers_spread() -> None:
    for each, keys in (
        (pod(rendered(STANDALONE), "lookup"), ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]),
        (pod(rendered(RAY), "worker"), ["kubernetes.io/hostname"]),
    ):
        spread = each.spec["topologySpreadConstraints"]
        assert [item["topologyKey"] for item in spread] == keys
        for item in spread:
            assert item["labelSelector"]["matchLabels"].items() <= each.labels.items()
    assert "topologySpreadConstraints" not in pod(rendered(BARE), "lookup").spec


@pytest.mark.parametrize(("values", "seconds"), [(STANDALONE, 45), (RAY, 45)])
def test_a_pod_has_time_for_drain_and_grace(values: str, seconds: int) -> None:
    component = "shard" if values == STANDALONE else "worker"
    each = pod(rendered(values), component)
    assert each.spec["terminationGracePeriodSeconds"] == seconds
    longer = pod(rendered(values, "cache.drainSeconds=100"), component)
    assert longer.spec["terminationGracePeriodSeconds"] == 125
    hook = " ".join(longer.spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"])
    assert "kvservice drain --local --timeout 100" in hook


@pytest.mark.parametrize("values", VALUES)
def test_liveness_and_readiness_differ(values: str) -> None:
    """They differ in what they ask, or in patience."""
    for each in pods(rendered(values)):
        for container in each.spec["containers"]:
            if each.owner.startswith("Pod/"):
                continue
            live, ready = container["livenessProbe"], container["readinessProbe"]
            if each.labels["app.kubernetes.io/component"] in ("shard", "lookup"):
                assert live["httpGet"] == container["startupProbe"]["httpGet"] == {"path": "/livez", "port": "metrics"}
                assert ready["httpGet"] == {"path": "/readyz", "port": "metrics"}
            else:
                assert live["httpGet"] != ready["httpGet"] or each.labels["app.kubernetes.io/component"] == "worker"
            patience = live["periodSeconds"] * live["failureThreshold"]
            assert patience > ready["periodSeconds"] * 3 and "startupProbe" in container


def test_a_large_pool_has_the_time_that_its_start_takes() -> None:
    def patience(of: Pod) -> int:
        probe = of.spec["containers"][0]["startupProbe"]
        return int(probe["periodSeconds"]) * int(probe["failureThreshold"])

    memory = next(each for each in pods(rendered(FULL)) if each.owner.endswith("-memory"))
    assert patience(pod(rendered(STANDALONE, "cache.pool=512Mi"), "shard")) == 600
    assert patience(pod(rendered(FULL), "shard")) == 600 + 125, "64 GiB at two seconds each, in periods of five"
    assert patience(memory) == 600 + 1020


def test_kept_blocks_is_an_argument_of_the_shard() -> None:
    assert "--keep-blocks" in pod(rendered(FULL), "shard").spec["containers"][0]["args"]
    assert "--keep-blocks" not in pod(rendered(STANDALONE), "shard").spec["containers"][0]["args"]


def test_disruption_budgets_leave_enough_standing() -> None:
    lookup = find(rendered(STANDALONE), "PodDisruptionBudget")["spec"]
    assert lookup["maxUnavailable"] == 1
    assert lookup["selector"]["matchLabels"].items() <= pod(rendered(STANDALONE), "lookup").labels.items()
    workers = find(rendered(RAY_FULL), "PodDisruptionBudget")["spec"]
    assert workers["minAvailable"] == 1 + 3 - 1, "of pods of an operator only a number can be kept"
    assert workers["selector"]["matchLabels"].items() <= pod(rendered(RAY_FULL), "worker").labels.items()
    assert "PodDisruptionBudget" not in kinds(rendered(BARE))


# -- devices ----


def test_devices_are_asked_for_only_where_they_are_set() -> None:
    for objects in (rendered(FULL), rendered(RAY_FULL)):
        for each in pods(objects):
            limits = each.spec["containers"][0]["resources"]["limits"]
            if each.labels["app.kubernetes.io/component"] in ("shard", "worker"):
                assert limits["rdma/hca"] == "1" and "hugepages-2Mi" in limits
                assert any(item["name"] == "UCX_TLS" for item in each.spec["containers"][0]["env"])
            else:
                assert set(limits) == {"memory"}
    groups = [each for each in pods(rendered(RAY_FULL)) if each.labels["app.kubernetes.io/component"] == "worker"]
    limits = [each.spec["containers"][0]["resources"]["limits"] for each in groups]
    assert [item["nvidia.com/gpu"] for item in limits] == ["8", "4"] and limits[1]["example.com/nic"] == "2"
    assert set(pod(rendered(RAY), "worker").spec["containers"][0]["resources"]["limits"]) == {"memory"}


# -- Ray ----


def test_head_survives_with_redis_and_its_password_from_a_secret() -> None:
    options = cluster(rendered(RAY_FULL))["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == "redis.redis.svc:6379"
    assert options["redisPassword"] == {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "password"}}}
    assert "gcsFaultToleranceOptions" not in cluster(rendered(RAY))


def test_ray_asks_for_a_token_unless_told_otherwise() -> None:
    assert cluster(rendered(RAY))["authOptions"] == {"mode": "token"}
    assert cluster(rendered(RAY_FULL))["authOptions"] == {"mode": "token", "secretName": "ray-token"}
    open_cluster = rendered(SERVICE)
    assert cluster(open_cluster)["authOptions"] == {"mode": "disabled"}
    assert {"name": "RAY_AUTH_MODE", "value": "disabled"} in pod(open_cluster, "worker").spec["containers"][0]["env"]
    assert "RAY_AUTH_MODE" not in json.dumps(rendered(RAY))


@pytest.mark.parametrize("values", VALUES)
def test_a_certificate_secret_reaches_every_pod(values: str) -> None:
    objects = rendered(values, SECRET)
    directory = settings(objects)["tls_dir"]
    assert "allow_plaintext" not in settings(objects) and "Secret" not in kinds(objects)
    for each in pods(objects):
        volume = {"name": "tls", "secret": {"secretName": "certs", "defaultMode": 0o440}}
        assert volume in each.spec["volumes"], each.owner
        container = each.spec["containers"][0]
        assert {"name": "tls", "mountPath": directory, "readOnly": True} in container["volumeMounts"]
        assert {"name": "KVSERVICE_TLS_DIR", "value": directory} in container["env"]


@pytest.mark.parametrize("values", VALUES)
def test_only_the_override_is_plaintext(values: str) -> None:
    """Then nothing in the objects is about TLS."""
    objects = rendered(values, PLAINTEXT)
    assert settings(objects)["allow_plaintext"] is True and "tls_dir" not in settings(objects)
    assert "Secret" not in kinds(objects)
    for each in pods(objects):
        assert "tls" not in {volume["name"] for volume in each.spec["volumes"]}
        assert "KVSERVICE_TLS_DIR" not in {item["name"] for item in each.spec["containers"][0].get("env", [])}


@pytest.mark.parametrize("values", [FULL, RAY_FULL])
def test_tenants_file_reaches_shards_and_a_token_engines(values: str) -> None:
    plain = rendered(values)
    assert "tenants_file" not in settings(plain) and "KVSERVICE_TOKEN_FILE" not in json.dumps(plain)
    objects = rendered(values, "tenants.secretName=who,tenants.tokenSecretName=mine")
    file = settings(objects)["tenants_file"]
    with_file = [each for each in pods(objects) if "tenants" in {volume["name"] for volume in each.spec["volumes"]}]
    assert with_file and not [each.owner for each in with_file if "lookup" in each.owner]
    for each in with_file:
        assert {"name": "tenants", "secret": {"secretName": "who", "defaultMode": 0o440}} in each.spec["volumes"]
        mount = {"name": "tenants", "mountPath": file.rpartition("/")[0], "readOnly": True}
        assert mount in each.spec["containers"][0]["volumeMounts"], each.owner
    ray = values == RAY_FULL
    assert ray == ("KVSERVICE_TOKEN_FILE" in json.dumps(objects)), "engines run in Ray's pods, and in pods of their own"


def test_tls_between_ray_processes_is_the_operators() -> None:
    assert cluster(rendered(RAY_FULL))["tlsOptions"] == {"enabled": True} and "tlsOptions" not in cluster(rendered(RAY))


def test_autoscaling_has_limits_and_the_only_token() -> None:
    scaled = cluster(rendered(RAY_FULL))
    assert scaled["enableInTreeAutoscaling"] and scaled["autoscalerOptions"]["idleTimeoutSeconds"] == 600
    assert [(group["minReplicas"], group["maxReplicas"]) for group in scaled["workerGroupSpecs"]] == [(1, 4), (3, 8)]
    for values in VALUES:
        for each in pods(rendered(values)):
            is_scaling_head = values == RAY_FULL and each.labels["app.kubernetes.io/component"] == "head"
            assert (each.spec.get("automountServiceAccountToken") is False) != is_scaling_head, each.owner


def test_serve_app_becomes_a_ray_service() -> None:
    spec = find(rendered(SERVICE), "RayService")["spec"]
    serve = yaml.safe_load(spec["serveConfigV2"])
    (app,) = serve["applications"]
    assert (app["name"], app["route_prefix"], app["import_path"]) == ("llm", "/", "kvservice.serve:build_openai_app")
    assert app["args"]["llm_configs"][0]["engine_kwargs"] == {"max_model_len": 4096}
    assert serve["http_options"]["host"] == "0.0.0.0"
    ready = pod(rendered(SERVICE), "worker").spec["containers"][0]["readinessProbe"]
    assert ready["httpGet"] == {"path": "/-/healthz", "port": 8000}
    assert "RayService" not in kinds(rendered(RAY))


def test_ray_listens_where_probes_of_ipv6_alone_ask() -> None:
    """A socket of 0.0.0.0 takes no IPv6, and the dashboard's at :: takes nothing else."""
    for address in ("0.0.0.0", "::"):
        objects = rendered(SERVICE, f"ray.listenAddress={address}")
        assert cluster(objects)["headGroupSpec"]["rayStartParams"]["dashboard-host"] == address
        serve = yaml.safe_load(find(objects, "RayService")["spec"]["serveConfigV2"])
        assert serve["http_options"] == {"host": address, "port": 8000}
    assert "listenAddress" in refusal("mode=ray", "ray.listenAddress=fd00::1", PLAINTEXT)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own models
def test_serve_takes_the_rendered_application() -> None:
    from ray.serve.schema import ServeDeploySchema

    text = find(rendered(SERVICE), "RayService")["spec"]["serveConfigV2"]
    schema = ServeDeploySchema.model_validate(yaml.safe_load(text))
    assert schema.applications[0].import_path == "kvservice.serve:build_openai_app"


# -- refusals, documentation ----


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        (["mode=other"], "mode"),
        (["cache.pool=16G"], "pool"),
        (["cache.poool=16Gi"], "poool"),
        (["lookup.partitions=0"], "partitions"),
        (["security.runAsUser=0"], "runAsUser"),
        (["mode=ray", "ray.serve.enabled=true"], "args"),
        (["mode=ray", "ray.gcsFaultTolerance.enabled=true"], "redisAddress"),
        (["image.digest=latest"], "digest"),
        (["shard.hostMemoryDir=/"], "hostMemoryDir"),
        (["shard.hostMemoryDir=/dev/shm", PLAINTEXT], "hostMemoryDir: /dev/shm is a folder of the node's system"),
        (["shard.hostRuntimeDir=/var/../run", PLAINTEXT], "such as /run/kvservice"),
        (["tiers.disk.volume=hostPath", "tiers.disk.path=/var/lib/", PLAINTEXT], "tiers.disk.path"),
        (["networkPolicy.clients=x"], "clients"),
        (["cache.metricsPort=7401", PLAINTEXT], "as shard.port"),
        (["mode=ray", "cache.metricsPort=8080", PLAINTEXT], "Ray's metrics"),
        (["mode=ray", "lookup.port=9463", PLAINTEXT], "the metrics for partition 1"),
        (["cache.transferPorts=7600"], "transferPorts"),
        (["shard.nodeSelector.gpu=true"], "gpu"),
        (["commonLabels.release=7"], "release"),
        (["shard.extraEnv[0].name=A", "shard.extraEnv[0].value=4"], "extraEnv"),
        (["tolerations[0].value=true"], "tolerations"),
        (["commonLabels.app\\.kubernetes\\.io/name=mine"], "app.kubernetes.io/name"),
        (["tls.secretName=certs", "tls.certManager.enabled=true"], "one of them"),
        (["monitoring.podMonitor.enabled=true", "monitoring.serviceMonitor.enabled=true", PLAINTEXT], "count twice"),
    ],
)
def test_wrong_values_are_refused_by_name(settings: list[str], word: str) -> None:
    assert word in refusal(*settings)


def test_schema_knows_exactly_the_values() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def compare(values: Any, known: dict[str, Any], path: str) -> None:
        if "properties" not in known:
            return
        assert known["additionalProperties"] is False and set(values) == set(known["properties"]) - {"global"}, path
        for name, value in values.items():
            compare(value, known["properties"][name], f"{path}.{name}")

    compare(yaml.safe_load((CHART / "values.yaml").read_text()), schema, "values")


def test_every_value_has_a_comment_and_the_readme_has_them() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "chart_readme.py"), str(CHART), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_objects_of_bare_values_are_only_the_parts() -> None:
    assert kinds(rendered(BARE)) == {"ConfigMap", "Service", "StatefulSet", "DaemonSet", "Pod"}
    assert "initContainers" not in pod(rendered(BARE), "shard").spec


def test_versions_agree() -> None:
    import kvservice

    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert about["appVersion"] == kvservice.__version__
