"""The connector's counters at vLLM's /metrics."""

from __future__ import annotations

import functools
from types import SimpleNamespace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvservice.connector.vllm.stats import ConnectorPromMetrics
from kvservice.observe.events import CONNECTOR_COUNTERS, CONNECTOR_EVENTS


def test_every_counter_is_there_from_the_start_and_counts() -> None:
    registry = CollectorRegistry()
    kinds = {kind: functools.partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    labels = ["model_name", "engine"]
    made = ConnectorPromMetrics(SimpleNamespace(kv_transfer_config=None), kinds, labels, {0: ["m", "0"]})
    place = 'engine="0",model_name="m"'
    text = generate_latest(registry).decode()
    for name in CONNECTOR_COUNTERS:
        assert f"vllm:kvservice_{name}_total{{{place}}} 0.0" in text
    for event in CONNECTOR_EVENTS:
        there = f'vllm:kvservice_connector_events_total{{engine="0",event="{event}",model_name="m"}} 0.0' in text
        assert there == ("*" not in event)
    made.observe({"loads_failed": 2, "acquires_cut_stale": 1})
    text = generate_latest(registry).decode()
    assert f"vllm:kvservice_loads_failed_total{{{place}}} 2.0" in text
    assert 'event="acquires_cut_stale",model_name="m"} 1.0' in text
