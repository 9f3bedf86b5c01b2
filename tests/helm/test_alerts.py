"""Every alert fires when it should and is silent when it should be: played by Prometheus' own promtool.

The rules are those that the chart renders. Each series is a list of samples, one a minute: `0x10 1x20` is 0 eleven
times and then 1 twenty-one times, and `_` is a minute without a sample.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.chart import TOOLS, find, rendered

PROMTOOL = next((path for path in (TOOLS / "promtool", Path(shutil.which("promtool") or "-")) if path.exists()), None)
pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed: `make helm` takes it from Debian")
VALUES = "standalone-full-values.yaml"
SHARD, OTHER, PARTITION = (
    'service="prod",node="a"',
    'service="prod",node="b"',
    'service="prod",partition="{}"',
)


@dataclass(frozen=True, slots=True)
class Case:
    alert: str
    series: dict[str, str]  # samples by series
    minute: int
    labels: dict[str, str] | None  # of the one alert that fires; None: it is silent


SHARDS = tuple(f"kvservice_segment_bytes{{{labels}}}" for labels in (SHARD, OTHER))
OF_A = {"service": "prod", "node": "a"}


def counters(name: str, samples: str, labels: str = SHARD) -> dict[str, str]:
    return {f"{name}{{{labels}}}": samples}


def buckets(fast: str, slow: str) -> dict[str, str]:
    """Local hits below 1 ms, and local hits of 1 s."""
    name = 'kvservice_acquire_seconds_bucket{%s,source="local",le="%s"}'
    return {name % (SHARD, le): fast for le in ("0.001", "0.1")} | {name % (SHARD, le): slow for le in ("1.0", "+Inf")}


DISK = f'{SHARD},tier="disk"'
DAY = 86_400  # seconds
OF_M = OF_A | {"model": "m"}
OF_DISK = OF_A | {"tier": "disk"}


def tier(**samples: str) -> dict[str, str]:
    """Counters of node a's disk, by their names without what all of them share."""
    return {f"kvservice_tier_{name}_total{{{DISK}}}": each for name, each in samples.items()}


def reads(source: str, fast: str, slow: str) -> dict[str, str]:
    """Reads below 0.1 s, and reads of 2 s."""
    name = 'kvservice_fetch_seconds_bucket{%s,source="%s",le="%s"}'
    return {name % (SHARD, source, le): fast for le in ("0.1", "1.0")} | {
        name % (SHARD, source, le): slow for le in ("2.5", "+Inf")
    }


def certificate(begins: int, ends: int) -> dict[str, str]:
    """Its times, in seconds since the first minute."""
    name = 'kvservice_certificate_{}_seconds{{service="prod"}}'
    return {name.format("not_before"): f"{begins}x60", name.format("not_after"): f"{ends}x60"}


CASES = (
    Case("KVServiceCorruptBlocks", counters("kvservice_pull_corrupt_total", "0x10 1x20"), 13, OF_A),
    Case("KVServiceCorruptBlocks", counters("kvservice_pull_corrupt_total", "0x40"), 30, None),
    Case("KVServiceCorruptBlocks", counters("kvservice_pull_corrupt_total", "7x60"), 40, None),
    Case("KVServiceMemoryDamaged", counters("kvservice_evicted_corrupt_total", "0x10 1x20"), 13, OF_A),
    Case("KVServiceMemoryDamaged", counters("kvservice_evicted_corrupt_total", "7x60"), 40, None),
    Case("KVServiceShardsMissing", {SHARDS[0]: "1x120", SHARDS[1]: "1x60 _x60"}, 80, {}),
    Case("KVServiceShardsMissing", {SHARDS[0]: "1x120", SHARDS[1]: "1x120"}, 80, None),
    Case("KVServiceShardsMissing", {each: "1x60 _x240" for each in SHARDS}, 80, {}),
    Case("KVServiceShardsMissing", {each: "1x60 _x240" for each in SHARDS}, 240, {"service": "prod"}),
    Case("KVServiceShardsMissing", {}, 30, {"service": "prod"}),
    Case("KVServiceShardsMissing", {SHARDS[0]: "1x120", SHARDS[1]: "_x60 1x8 _x60"}, 80, None),
    Case(
        "KVServiceLookupMissing",
        {f"kvservice_lookup_boot_epoch{{{PARTITION.format(n)}}}": "1x60" for n in range(2)},
        10,
        {},
    ),
    Case("KVServiceLookupMissing", {}, 10, {}),
    Case(
        "KVServiceLookupMissing",
        {f"kvservice_lookup_boot_epoch{{{PARTITION.format(n)}}}": "1x60" for n in range(3)},
        10,
        None,
    ),
    Case(
        "KVServiceLookupUnanswered",
        counters("kvservice_lookup_incomplete_total", "0+1x60") | counters("kvservice_lookup_calls_total", "0+10x60"),
        40,
        OF_A,
    ),
    Case(
        "KVServiceLookupUnanswered",
        counters("kvservice_lookup_incomplete_total", "0x60") | counters("kvservice_lookup_calls_total", "0x60"),
        40,
        None,
    ),
    Case(
        "KVServiceFetchesFail",
        counters("kvservice_fetches_failed_total", "0+3x60") | counters("kvservice_fetches_started_total", "0+10x60"),
        40,
        OF_A,
    ),
    Case(
        "KVServiceFetchesFail",
        counters("kvservice_fetches_failed_total", "0+1x60") | counters("kvservice_fetches_started_total", "0+10x60"),
        40,
        None,
    ),
    Case("KVServiceCertificateEnds", certificate(0, 13 * DAY), 20, None),  # it lives for days: renewed late on purpose
    Case("KVServiceCertificateEnds", certificate(-70 * DAY, 13 * DAY), 20, {"service": "prod"}),
    Case("KVServiceCertificateEnds", certificate(-300 * DAY, 15 * DAY), 20, None),
    Case("KVServiceEnginesRefused", counters("kvservice_attach_fingerprint_refused_total", "0x10 1x20"), 13, OF_A),
    Case("KVServiceEnginesRefused", counters("kvservice_attach_fingerprint_refused_total", "0x40"), 30, None),
    Case("KVServiceLocalHitsSlow", buckets("0+8x60", "0+10x60"), 40, OF_A),
    Case("KVServiceLocalHitsSlow", buckets("0+95x60", "0+100x60"), 40, None),
    Case("KVServiceLocalHitsSlow", buckets("0x60", "0x60"), 40, None),
    Case(
        "KVServiceAdmissionStopped",
        counters("kvservice_admission_stopped_total", "0x10 1x200")
        | counters("kvservice_admission_resumed_total", "0x210"),
        75,
        OF_A,
    ),
    Case(
        "KVServiceAdmissionStopped",
        counters("kvservice_admission_stopped_total", "0x10 1x200")
        | counters("kvservice_admission_resumed_total", "0x40 1x170"),
        100,
        None,
    ),
    Case(
        "KVServiceAdmissionStopped",
        counters("kvservice_admission_stopped_total", "0+1x300")
        | counters("kvservice_admission_resumed_total", "0x300"),
        100,
        OF_A,
    ),
    Case(
        "KVServiceStoresDropped",
        counters("kvservice_reserve_shortfall_total", "0+9x60") | counters("kvservice_slots_reserved_total", "0+1x60"),
        40,
        OF_A,
    ),
    Case(
        "KVServiceStoresDropped",
        counters("kvservice_reserve_shortfall_total", "0x60") | counters("kvservice_slots_reserved_total", "0+1x60"),
        40,
        None,
    ),
    Case("KVServiceTierDown", counters("kvservice_tier_open", "1x5 0x60", DISK), 40, OF_DISK),
    Case("KVServiceTierDown", counters("kvservice_tier_open", "0x5 1x60", DISK), 40, None),
    Case("KVServiceTierDown", counters("kvservice_tier_open", "1x20 0x8 1x60", DISK), 35, None),
    Case(
        "KVServiceTierWritesDropped",
        tier(dropped_evicted="0+5x60", dropped_full="0+4x60", written_blocks="0+8x60"),
        40,
        OF_DISK,
    ),
    Case(
        "KVServiceTierWritesDropped",
        tier(dropped_evicted="0+3x60", dropped_full="0+4x60", written_blocks="0+8x60"),
        40,
        None,
    ),
    Case("KVServiceTierWritesFail", tier(write_failed="0+3x60", written_blocks="0+2x60"), 40, OF_DISK),
    Case("KVServiceTierWritesFail", tier(write_failed="0x60", written_blocks="0x60"), 40, None),
    Case("KVServiceTierReadsFail", tier(read_failed="0+2x60", read_blocks="0+10x60"), 40, OF_DISK),
    Case("KVServiceTierReadsFail", tier(read_failed="0+1x60", read_blocks="0+10x60"), 40, None),
    Case("KVServiceTierReadsFail", tier(read_failed="0x60", read_blocks="0x60"), 40, None),
    Case("KVServiceTierCorrupt", tier(read_corrupt="0x10 1x20"), 13, OF_DISK),
    Case("KVServiceTierCorrupt", tier(read_corrupt="7x60"), 40, None),
    Case("KVServiceTierSlow", reads("disk", "0+8x60", "0+10x60"), 40, OF_A | {"source": "disk"}),
    Case("KVServiceTierSlow", reads("disk", "0+95x60", "0+100x60"), 40, None),
    Case("KVServiceTierSlow", reads("peer", "0+8x60", "0+10x60"), 40, None),
    Case("KVServiceLossyCodecOff", counters("kvservice_codec_off", "0x5 1x60", f'{SHARD},model="m"'), 20, OF_M),
    Case("KVServiceLossyCodecOff", counters("kvservice_codec_off", "0x60", f'{SHARD},model="m"'), 20, None),
    Case(
        "KVServiceSlotsQuarantined",
        counters("kvservice_slots", "3x60", f'{SHARD},state="quarantined"'),
        30,
        OF_A | {"state": "quarantined"},
    ),
    Case(
        "KVServiceSlotsQuarantined",
        counters("kvservice_slots", "3x5 0x60", f'{SHARD},state="quarantined"')
        | counters("kvservice_slots", "3x60", f'{SHARD},state="sealed"'),
        30,
        None,
    ),
    Case("KVServiceRestarts", counters("kvservice_boot_epoch", "1x9 2x9 3x9 4x9 5x60"), 45, OF_A),
    Case("KVServiceRestarts", counters("kvservice_boot_epoch", "1x9 2x60"), 45, None),
    Case("KVServiceDraining", counters("kvservice_draining", "1x60"), 45, OF_A),
    Case("KVServiceDraining", counters("kvservice_draining", "0x20 1x20 0x60"), 45, None),
)


def rules() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = find(rendered(VALUES), "PrometheusRule")["spec"]["groups"][0]["rules"]
    return found


def expected(case: Case, rule: dict[str, Any]) -> list[dict[str, Any]]:
    if case.labels is None:
        return []
    return [{"exp_labels": {**case.labels, **rule["labels"]}, "exp_annotations": rule["annotations"]}]


def played(folder: Path, cases: tuple[Case, ...]) -> subprocess.CompletedProcess[str]:
    """What promtool says of these cases."""
    by_name = {rule["alert"]: rule for rule in rules()}
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "kvservice", "rules": rules()}]}))
    tests = [
        {
            "interval": "1m",
            "name": f"{case.alert} at {case.minute} min of {case.series}",
            "input_series": [{"series": series, "values": samples} for series, samples in case.series.items()],
            "alert_rule_test": [
                {
                    "eval_time": f"{case.minute}m",
                    "alertname": case.alert,
                    "exp_alerts": expected(case, by_name[case.alert]),
                }
            ],
        }
        for case in cases
    ]
    document = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (folder / "tests.yaml").write_text(yaml.safe_dump(document))
    assert PROMTOOL is not None
    command = [str(PROMTOOL), "test", "rules", "tests.yaml"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_every_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    done = played(tmp_path, CASES)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_played_firing_and_silent() -> None:
    names = {rule["alert"] for rule in rules()}
    assert names == {case.alert for case in CASES if case.labels is not None}
    assert names == {case.alert for case in CASES if case.labels is None}


def test_promtool_notices_a_wrong_expectation(tmp_path: Path) -> None:
    wrong = Case("KVServiceDraining", counters("kvservice_draining", "0x60"), 45, OF_A)
    done = played(tmp_path, (wrong,))
    assert done.returncode != 0 and "KVServiceDraining" in done.stdout + done.stderr
