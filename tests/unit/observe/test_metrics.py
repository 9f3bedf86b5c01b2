"""What a shard exports to Prometheus, and how log records become lines."""

from __future__ import annotations

import io
import json
import logging
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from kvservice.core.block.tenants import TenantUsage
from kvservice.core.events import PullResult
from kvservice.core.messages import CodecDrift, PoolStats, TierFigures, UsageRow
from kvservice.core.store.guard import Rule
from kvservice.core.store.worth import RuleState
from kvservice.observe import logs
from kvservice.observe.copy_worker_metrics import CopyWorkerCollector
from kvservice.observe.endpoint import CertificateCollector
from kvservice.observe.lookup_metrics import LOOKUP_GAUGES, LookupCollector, LookupNumbers
from kvservice.observe.metrics import COUNTERS, TIER_COUNTERS, ShardCollector, transport_of
from kvservice.observe.timings import Timings
from kvservice.units import BootEpoch, NodeId

ROOT = Path(__file__).resolve().parents[3]
COUNTED = re.compile(r"(?:counters\[|_count\(|_pool\.count\()\"([a-z_]+)\"(?:\] \+=|[,)])")


def stats(**counters: int) -> PoolStats:
    slots = {"free": 3, "sealed": 5, "leased": 0}
    size = {state: count << 10 for state, count in slots.items()}
    return PoolStats(NodeId("n0"), BootEpoch(7), 1 << 20, 4, 1, slots, dict(counters), slot_bytes=size)


def exported(numbers: PoolStats | None) -> str:
    registry = CollectorRegistry()
    registry.register(ShardCollector("s", lambda: numbers))
    return generate_latest(registry).decode()


def test_a_known_counter_has_a_name_of_its_own() -> None:
    assert 'kvservice_hit_remote_blocks_total{node="n0",service="s"} 12.0' in exported(stats(hit_remote_blocks=12))


def test_an_unknown_counter_is_exported_as_an_event() -> None:
    text = exported(stats(something_new=2))
    assert 'kvservice_events_total{event="something_new",node="n0",service="s"} 2.0' in text


def test_bytes_are_exported_by_transport() -> None:
    text = exported(stats(transfer_nixl_bytes=4096))
    assert 'kvservice_transfer_bytes_total{node="n0",service="s",transport="nixl"} 4096.0' in text


def test_a_nodes_machine_is_named_beside_its_id() -> None:
    text = exported(stats())
    assert f'kvservice_node_info{{host="{socket.gethostname()}",node="n0",service="s"}} 1.0' in text


def test_the_rules_of_eviction_are_exported() -> None:
    text = exported(stats(**RuleState(Rule.S3_FIFO, 1, {Rule.LRU: 0.25, Rule.S3_FIFO: 0.5, Rule.WORTH: 0.4}).figures()))
    for rule, rules, found in (("lru", 0.0, 0.25), ("s3-fifo", 1.0, 0.5), ("worth", 0.0, 0.4)):
        assert f'kvservice_eviction_rule{{node="n0",rule="{rule}",service="s"}} {rules}' in text
        assert f'kvservice_eviction_shadow_hit_ratio{{node="n0",rule="{rule}",service="s"}} {found}' in text
    assert 'rule="lru"' not in exported(stats()), "a policy of one rule has no shadows"
    assert 'event="eviction' not in text, "what can fall is no counter"


def test_tiers_have_figures_and_counters_of_their_own() -> None:
    disk = TierFigures("disk", "open", blocks=7, used_bytes=70, budget_bytes=100, waiting_blocks=2)
    counted = stats(tier_disk_written_bytes=4096, tier_disk_read_corrupt=1, tier_disk_other=3)
    text = exported(replace(counted, tiers=(disk, TierFigures("objects", "failed", "no bucket", is_shared=True))))
    for line in (
        'kvservice_tier_open{node="n0",service="s",tier="disk"} 1.0',
        'kvservice_tier_open{node="n0",service="s",tier="objects"} 0.0',
        'kvservice_tier_used_bytes{node="n0",service="s",tier="disk"} 70.0',
        'kvservice_tier_waiting_blocks{node="n0",service="s",tier="disk"} 2.0',
        'kvservice_tier_written_bytes_total{node="n0",service="s",tier="disk"} 4096.0',
        'kvservice_tier_read_corrupt_total{node="n0",service="s",tier="objects"} 0.0',
        'kvservice_events_total{event="tier_disk_other",node="n0",service="s"} 3.0',
    ):
        assert line in text, line
    assert "tier_disk_written" not in text and "kvservice_tier" not in exported(stats())


def test_slots_are_exported_by_state() -> None:
    assert 'kvservice_slots{node="n0",service="s",state="sealed"} 5.0' in exported(stats())


def test_bytes_of_slots_are_exported_by_state() -> None:
    assert 'kvservice_slot_bytes{node="n0",service="s",state="sealed"} 5120.0' in exported(stats())


def test_hits_are_exported_by_model_and_tenant() -> None:
    text = exported(replace(stats(), usage=(UsageRow("m", "team-a", 9, 3, 2, 1),)))
    place = 'model="m",node="n0",service="s"'
    assert f'kvservice_model_asked_blocks_total{{{place},tenant="team-a"}} 9.0' in text
    assert f'kvservice_model_hit_blocks_total{{{place},source="peer",tenant="team-a"}} 2.0' in text
    assert f'kvservice_model_hit_blocks_total{{{place},source="tier",tenant="team-a"}} 1.0' in text


def test_drift_of_lossy_codecs_is_exported_by_model() -> None:
    text = exported(replace(stats(), drifts=(CodecDrift("m", 0.05, 40, 33, 0.2, 0.01, is_off=True),)))
    place = 'model="m",node="n0"'
    assert f'kvservice_codec_drift{{{place},of="keys",service="s"}} 0.2' in text
    assert f'kvservice_codec_off{{{place},service="s"}} 1.0' in text
    assert f'kvservice_codec_lossy_blocks_total{{{place},service="s"}} 40.0' in text
    assert "kvservice_codec" not in exported(stats())


def test_of_two_drifts_of_a_model_the_worst_is_exported() -> None:
    """Two engines may run one model in two number types. Prometheus refuses two samples with the same labels."""
    worst, mild = CodecDrift("m", 0.05, 40, 33, 0.2, 0.01, is_off=True), CodecDrift("m", 0.05, 9, 9, 0.01, 0.01)
    lines = [line for line in exported(replace(stats(), drifts=(worst, mild))).splitlines() if "codec_off{" in line]
    assert lines == ['kvservice_codec_off{model="m",node="n0",service="s"} 1.0']


def test_acquires_cut_short_are_exported_by_reason() -> None:
    text = exported(stats(acquires_cut_never_stored=3))
    assert 'kvservice_acquires_cut_total{node="n0",reason="never_stored",service="s"} 3.0' in text
    assert 'kvservice_acquires_cut_total{node="n0",reason="corrupt",service="s"} 0.0' in text
    assert "acquires_cut_never_stored" not in text


def test_tenants_are_labels_and_their_secrets_are_nowhere() -> None:
    usage = TenantUsage("team-a", 4096, 8192, 3, {"quota_refused": 2})
    text = exported(replace(stats(), tenants=(usage,)))
    place = 'node="n0",service="s",tenant="team-a"}'
    assert f"kvservice_tenant_used_bytes{{{place} 4096.0" in text
    assert f"kvservice_tenant_quota_bytes{{{place} 8192.0" in text
    assert f'kvservice_tenant_events_total{{event="quota_refused",{place} 2.0' in text
    assert "kvservice_tenant_" not in exported(stats())


def test_a_shard_that_is_not_running_exports_nothing() -> None:
    assert exported(None) == ""


def test_only_byte_counters_of_the_transfer_name_a_transport() -> None:
    assert transport_of("transfer_shm_bytes") == "shm"
    assert transport_of("fetched_bytes") is None
    assert transport_of("transfer_blocks") is None


def test_the_table_names_no_counter_that_nobody_counts() -> None:
    """A renamed counter would silently fall out of dashboards."""
    folders = ("auth", "core", "pool", "client", "lookup", "transfer", "shard")
    text = "\n".join(path.read_text() for folder in folders for path in (ROOT / "kvservice" / folder).rglob("*.py"))
    counted = set(COUNTED.findall(text))
    counted |= {f"transfer_{name}" for name in counted}  # the pool prefixes those of the puller
    composed = ("pull_", "evicted_", "eviction_")  # of an enum's values, of a choice, of a policy's rule
    assert {name for name in COUNTERS if not name.startswith(composed)} <= counted


def test_the_table_names_no_counter_of_a_tier_that_nobody_counts() -> None:
    folders = ("core", "pool", "tier")
    text = "\n".join(path.read_text() for folder in folders for path in (ROOT / "kvservice" / folder).rglob("*.py"))
    counted = {name for name in TIER_COUNTERS if f'"{name}"' in text or f'}}_{name}"' in text}
    assert set(TIER_COUNTERS) - counted == {f"read_{result.value}" for result in PullResult} & set(TIER_COUNTERS)


def test_what_dashboards_and_alerts_ask_for_is_there_at_once() -> None:
    """`increase` of a counter that is born with its first event is 0: that event would raise no alert."""
    chart = ROOT / "helm" / "kvservice"
    asked = (chart / "alerts.yaml").read_text() + (chart / "dashboards" / "kvservice.json").read_text()
    learnt = (
        "kvservice_model_",
        "kvservice_tenant_",
        "kvservice_codec_",
    )  # their labels are names that nobody knows beforehand
    names = {name for name in re.findall(r"kvservice_[a-z_]+", asked) if not name.startswith(learnt)}
    registry = CollectorRegistry()
    of_a_node_with_a_tier = replace(stats(), tiers=(TierFigures("disk", "opening"),))
    registry.register(ShardCollector("s", lambda: of_a_node_with_a_tier, Timings))
    lookups = LookupNumbers(0, dict.fromkeys(LOOKUP_GAUGES, 0), {})
    registry.register(LookupCollector("s", lambda: lookups))
    registry.register(CertificateCollector("s", lambda: (0.0, 1.0)))
    registry.register(
        CopyWorkerCollector(
            ("s", "n0", "cpu"), lambda: {"engines": 0, "wedged": False, "device_lost": False, "counters": {}}
        )
    )
    at_rest = {sample.name for family in registry.collect() for sample in family.samples}
    assert len(names) > 25 and names <= at_rest
    assert {f"kvservice_{name}_total" for name in COUNTERS} <= at_rest


def test_the_dashboard_shows_every_cause_of_evictions() -> None:
    asked = (ROOT / "helm" / "kvservice" / "dashboards" / "kvservice.json").read_text()
    causes = {name for name in COUNTERS if name.startswith("evicted_")} - {"evicted_primary", "evicted_secondary"}
    assert causes == {name for name in COUNTERS if f"kvservice_{name}_total" in asked and name.startswith("evicted_")}


def test_the_dashboard_tells_fetches_from_reads_of_tiers() -> None:
    """One histogram has both: a sum over its sources is of neither."""
    text = (ROOT / "helm" / "kvservice" / "dashboards" / "kvservice.json").read_text()
    asked = re.findall(r"kvservice_fetch_seconds_bucket{[^}]*}", text)
    assert len(asked) == 2 and all("source" in one for one in asked)


@pytest.mark.parametrize("name", ["KVServiceShardsMissing", "KVServiceLookupMissing"])
def test_an_alert_about_missing_parts_fires_when_all_are(name: str) -> None:
    """A count of nothing is no number in PromQL, and a comparison with it is false."""
    alerts = yaml.safe_load((ROOT / "helm" / "kvservice" / "alerts.yaml").read_text())["alerts"]
    (expression,) = [alert["expr"] for alert in alerts if alert["name"] == name]
    left = expression.partition("<")[0].strip()
    assert re.fullmatch(r"\(count\([a-z_]+\$SERVICE\) or vector\(0\)\)", left)
    # What it is compared with must not vanish as well: a fixed number, or absent() beside it.
    assert "$LOOKUP_PARTITIONS" in expression or expression.endswith("or on() absent(kvservice_segment_bytes$SERVICE)")


def logged(formatter: logging.Formatter) -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger = logging.Logger("kvservice.test")
    logger.addHandler(handler)
    logger.warning("shard_started", extra={"node": "n0", "epoch": 3})
    return stream.getvalue()


def test_a_text_line_ends_with_its_fields() -> None:
    assert logged(logs.TextFormatter()).endswith("WARNING kvservice.test shard_started node=n0 epoch=3\n")


def test_a_json_line_keeps_fields_as_values() -> None:
    line = json.loads(logged(logs.JsonFormatter()))
    assert (line["event"], line["node"], line["epoch"], line["level"]) == ("shard_started", "n0", 3, "warning")


IN_AN_ENGINE = """
import logging, sys
from kvservice.observe import logs
handler = logging.StreamHandler(sys.stdout)
handler.setFormatter(logging.Formatter("ENGINE %(levelname)s [%(filename)s] %(message)s"))
engine = logging.getLogger("vllm")
engine.addHandler(handler)
engine.setLevel(logging.INFO)
engine.propagate = False
for _ in range(2):  # once for each half of the connector
    logs.speak_through("vllm")
logging.getLogger("kvservice.connector").info("attached to node %s", "n0")
logging.getLogger("kvservice.client").warning("token_file_not_taken", extra={"reason": "it is empty"})
logging.getLogger("kvservice.client").debug("nobody wants to know")
"""


@pytest.mark.processes
def test_in_an_engine_our_records_are_lines_of_its_logger() -> None:
    """They are marked as ours."""
    done = subprocess.run([sys.executable, "-c", IN_AN_ENGINE], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [
        "ENGINE INFO [<string>] kvservice: attached to node n0",
        "ENGINE WARNING [<string>] kvservice: token_file_not_taken reason=it is empty",
    ]
    assert done.stderr == ""


OF_MANY = """
import logging, warnings
from kvservice.observe import logs
logs.configure(json_lines=True)
logs.configure(json_lines=True)
logging.getLogger("kvservice.test").info("ours")
logging.getLogger("asyncio").error("of another library")
logging.getLogger("another.package").info("nobody asked for it")
warnings.warn("of Python")
logs.say("a line for whoever started it")
raise RuntimeError("a bug")
"""


@pytest.mark.processes
def test_with_json_lines_every_record_is_one_json_line() -> None:
    """This holds whoever logs it."""
    done = subprocess.run([sys.executable, "-c", OF_MANY], capture_output=True, text=True, timeout=60, check=False)
    lines = [json.loads(line) for line in (done.stdout + done.stderr).splitlines()]
    assert [line["event"].split("\n")[0].rpartition(": ")[2] for line in lines] == [
        "ours",
        "of another library",
        "of Python",
        "a line for whoever started it",
        "uncaught",
    ]
    assert "RuntimeError: a bug" in lines[-1]["exception"]


def test_a_configured_root_logger_gets_our_records() -> None:
    ours = logging.getLogger("kvservice")
    before = ours.handlers[:], ours.propagate
    logs.speak_through("vllm")  # pytest's own handlers are at the root
    assert (ours.handlers, ours.propagate) == before


def test_a_copy_worker_exports_its_copies_by_direction() -> None:
    state = {
        "engines": 2,
        "wedged": True,
        "device_lost": False,
        "pinned_share": 0.25,
        "counters": {"store_bytes": 4096, "load_blocks": 3},
    }
    registry = CollectorRegistry()
    registry.register(CopyWorkerCollector(("s", "n0", "GPU-1"), lambda: state))
    text = generate_latest(registry).decode()
    labels = 'device="GPU-1",{}node="n0",service="s"'
    assert f"kvservice_copy_worker_wedged{{{labels.format('')}}} 1.0" in text
    assert f"kvservice_copy_worker_pinned_share{{{labels.format('')}}} 0.25" in text
    store, load = (labels.format(f'direction="{direction}",') for direction in ("store", "load"))
    assert f"kvservice_copy_worker_bytes_total{{{store}}} 4096.0" in text
    assert f"kvservice_copy_worker_blocks_total{{{load}}} 3.0" in text
