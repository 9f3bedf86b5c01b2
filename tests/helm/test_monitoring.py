"""Alerts, dashboard and monitors name what exists: metrics, ports, sections of the documentation."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

import pytest
from prometheus_client.core import Metric

from kvservice.core.block.tenants import TenantUsage
from kvservice.core.messages import CodecDrift, PoolStats, TierFigures, UsageRow
from kvservice.observe.copy_worker_metrics import CopyWorkerCollector
from kvservice.observe.endpoint import CertificateCollector
from kvservice.observe.lookup_metrics import LOOKUP_COUNTERS, LOOKUP_GAUGES, LookupCollector, LookupNumbers
from kvservice.observe.metrics import COUNTERS, ShardCollector
from kvservice.observe.timings import Timings
from kvservice.units import BootEpoch, NodeId
from tests.helm.chart import ROOT, TOOLS, Object, find, kinds, pod, pods, rendered
from tests.helm.test_security import allows

# Parses each expression and tells the metrics in it with the labels that are asked for.
PARSER = """
import json, sys, promql_parser
def walk(node, found):
    if type(node).__name__ == "VectorSelector":
        found.append((node.name, [m.name for m in node.matchers.matchers]))
    for name in ("lhs", "rhs", "expr", "args", "vector_selector", "vs", "param"):
        child = getattr(node, name, None)
        for each in child if isinstance(child, list) else [child]:
            if each is not None and type(each).__module__.startswith("promql_parser"):
                walk(each, found)
out = []
for text in json.load(sys.stdin):
    found = []
    walk(promql_parser.parse(text), found)
    out.append(found)
json.dump(out, sys.stdout)
"""


def metrics_in(expressions: list[str]) -> list[list[tuple[str, list[str]]]]:
    done = subprocess.run(
        [TOOLS / "python", "-c", PARSER], input=json.dumps(expressions), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return [[(name, labels) for name, labels in found] for found in json.loads(done.stdout)]


def exported() -> dict[str, set[str]]:
    """Metric -> its labels, from the collectors themselves."""
    counters = {**dict.fromkeys(COUNTERS, 1), "transfer_nixl_bytes": 1, "other": 1}
    stats = PoolStats(
        NodeId("n0"),
        BootEpoch(1),
        1 << 20,
        2,
        1,
        {"free": 1, "quarantined": 0},
        counters,
        tenants=(TenantUsage("t", 1, 1, 1, {}),),
        usage=(UsageRow("m", "t", 1, 1, 1, 1),),
        slot_bytes={"free": 1},
        tiers=(TierFigures("disk", "open"),),
        drifts=(CodecDrift("m", 1.0),),
    )
    lookups = LookupNumbers(0, dict.fromkeys(LOOKUP_GAUGES, 1), dict.fromkeys(LOOKUP_COUNTERS, 1))
    copy_worker = {"engines": 1, "wedged": 0, "device_lost": 0, "counters": {}}
    families: list[Metric] = [
        *ShardCollector("s", lambda: stats, Timings).collect(),
        *LookupCollector("s", lambda: lookups).collect(),
        *CopyWorkerCollector(("s", "n0", "cpu"), lambda: copy_worker).collect(),
        *CertificateCollector("s", lambda: (1.0, 2.0)).collect(),
    ]
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def rules(objects: tuple[Object, ...]) -> list[dict[str, Any]]:
    (group,) = find(objects, "PrometheusRule")["spec"]["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def dashboard(objects: tuple[Object, ...]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(find(objects, "ConfigMap", "-dashboard")["data"]["kvservice.json"])
    return found


@pytest.mark.parametrize("values", ["standalone-full-values.yaml", "ray-full-values.yaml"])
def test_alerts_and_panels_ask_for_metrics_that_exist(values: str) -> None:
    expressions = [rule["expr"] for rule in rules(rendered(values))]
    expressions += [
        re.sub(r"\$__rate_interval", "5m", target["expr"].replace("$service", "prod").replace("$node", "a"))
        for panel in dashboard(rendered(values))["panels"]
        for target in panel.get("targets", [])
    ]
    known = exported()
    for expression, used in zip(expressions, metrics_in(expressions), strict=True):
        assert used, expression
        for name, labels in used:
            assert name in known, f"{name} is not exported: {expression}"
            assert set(labels) <= known[name] and "service" in labels, expression


def test_the_parser_finds_a_metric_that_does_not_exist() -> None:
    ((found,),) = metrics_in(["sum(rate(kvservice_nothing_total{service='x'}[5m]))"])
    assert found[0] == "kvservice_nothing_total" and found[0] not in exported()


def test_panels_do_not_overlap_and_use_the_chosen_source() -> None:
    panels = dashboard(rendered("ray-full-values.yaml"))["panels"]
    cells: list[tuple[int, int]] = []
    for place in (panel["gridPos"] for panel in panels):
        columns, lines = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        cells += [(x, y) for x in columns for y in lines]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert len(panels) == len({panel["id"] for panel in panels}) > 10
    assert {panel["datasource"]["uid"] for panel in panels if panel["type"] != "row"} == {"${datasource}"}


def test_every_alert_has_a_section_in_the_documentation() -> None:
    text = (ROOT / "docs" / "howto" / "alerts.md").read_text()
    headings = [line.lstrip("# ").lower().replace(" ", "-") for line in text.splitlines() if line.startswith("#")]
    sections = {re.sub(r"[^a-z0-9-]", "", heading) for heading in headings}
    found = rules(rendered("standalone-full-values.yaml")) + rules(rendered("ray-full-values.yaml"))
    for rule in found:
        base, _, section = rule["annotations"]["runbook_url"].partition("#")
        assert section in sections, section
        assert base in ("https://runbooks.example.com/kubernetes", "docs/howto/alerts.md")
        assert rule["labels"]["severity"] in ("page", "ticket")


def test_alerts_know_the_service_and_its_partition_count() -> None:
    named = {rule["alert"]: rule["expr"] for rule in rules(rendered("standalone-full-values.yaml"))}
    assert named["KVServiceLookupMissing"].endswith("< 3") and 'service="prod"' in named["KVServiceSlotsQuarantined"]
    on_ray = {rule["alert"] for rule in rules(rendered("ray-full-values.yaml"))}
    assert on_ray == set(named) - {"KVServiceLookupMissing"}, "lookup partitions on Ray export no metrics"


def metrics_ports(objects: tuple[Object, ...]) -> dict[str, set[str]]:
    """Pod -> names of its ports with metrics."""
    found = {}
    for each in pods(objects):
        ports = {port["name"] for container in each.spec["containers"] for port in container.get("ports", [])}
        found[each.owner] = {name for name in ports if "metrics" in name}
    return {owner: names for owner, names in found.items() if names}


def scraped(objects: tuple[Object, ...], kind: str) -> dict[str, set[str]]:
    """Pod -> names of its ports that the monitor of this kind makes Prometheus ask."""
    monitor = find(objects, kind)["spec"]
    (expression,) = monitor["selector"]["matchExpressions"]
    ports = {endpoint["port"] for endpoint in monitor.get("podMetricsEndpoints", monitor.get("endpoints"))}

    def selects(labels: dict[str, str]) -> bool:
        fits = monitor["selector"]["matchLabels"].items() <= labels.items()
        return fits and labels.get(expression["key"]) in expression["values"]

    found: dict[str, set[str]] = {}
    for each in pods(objects):
        asked = ports if kind == "PodMonitor" and selects(each.labels) else set()
        for service in objects if kind == "ServiceMonitor" else ():
            chosen = service["kind"] == "Service" and selects(service["metadata"]["labels"])
            if chosen and service["spec"]["selector"].items() <= each.labels.items():
                asked |= {port["targetPort"] for port in service["spec"]["ports"] if port["name"] in ports}
        there = asked & metrics_ports(objects).get(each.owner, set())
        if there:
            found[each.owner] = there
    return found


ONE_MONITOR = {
    "PodMonitor": ("monitoring.podMonitor.enabled=true", "monitoring.serviceMonitor.enabled=false"),
    "ServiceMonitor": ("monitoring.podMonitor.enabled=false", "monitoring.serviceMonitor.enabled=true"),
}


@pytest.mark.parametrize("head_shard", ["true", "false"])
@pytest.mark.parametrize("kind", ONE_MONITOR)
@pytest.mark.parametrize("values", ["standalone-full-values.yaml", "ray-full-values.yaml"])
def test_a_monitor_reaches_every_port_of_metrics(values: str, kind: str, head_shard: str) -> None:
    objects = rendered(values, *ONE_MONITOR[kind], f"ray.head.shard={head_shard}")
    assert scraped(objects, kind) == metrics_ports(objects) != {}
    if values.startswith("ray"):
        names = metrics_ports(objects)
        assert {f"copy-metrics-{index}" for index in range(8)} <= names["RayCluster/rel-kvservice/prefill"]
        assert "copy-metrics-4" not in names["RayCluster/rel-kvservice/decode"], "a copy worker for each of its 4 GPUs"
        assert ("cache-metrics" in names["RayCluster/rel-kvservice/head"]) == (head_shard == "true")


def test_rays_own_metrics_are_left_to_others_when_told() -> None:
    for kind, settings in ONE_MONITOR.items():
        objects = rendered("ray-full-values.yaml", *settings, "monitoring.ray=false")
        assert not [names for names in scraped(objects, kind).values() if "metrics" in names]


def test_the_policy_lets_prometheus_reach_every_port_of_metrics() -> None:
    peer = 'networkPolicy.monitoring=[{"podSelector":{"matchLabels":{"app":"prometheus"}}}]'
    for values in ("standalone-full-values.yaml", "ray-full-values.yaml"):
        objects = rendered(values, peer)
        policies = [item for item in objects if item["kind"] == "NetworkPolicy"]
        for each in pods(objects):
            own = [
                item for item in policies if item["spec"]["podSelector"]["matchLabels"].items() <= each.labels.items()
            ]
            ports = [port for container in each.spec["containers"] for port in container.get("ports", [])]
            for port in ports:
                if "metrics" in port["name"]:
                    assert allows(own[0], {"app": "prometheus"}, port["containerPort"]), (each.owner, port)


def test_monitoring_is_off_unless_asked_for() -> None:
    assert not kinds(rendered("standalone-values.yaml")) & {"PodMonitor", "ServiceMonitor", "PrometheusRule"}
    assert find(rendered("ray-full-values.yaml"), "ServiceMonitor")["metadata"]["labels"].get("release") is None
    assert find(rendered("standalone-full-values.yaml"), "PodMonitor")["metadata"]["labels"]["release"] == "prometheus"
    assert pod(rendered("standalone-full-values.yaml"), "shard").labels["team"] == "inference"
