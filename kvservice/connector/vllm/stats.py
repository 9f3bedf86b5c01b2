"""The connector's counters in vLLM's own metrics: its log line and its /metrics endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvservice.observe.events import CONNECTOR_COUNTERS, CONNECTOR_EVENTS


@dataclass
class ConnectorStats(KVConnectorStats):
    """Counters of one interval. `data` maps a counter's name to its increase since the last report."""

    def reset(self) -> None:
        self.data: dict[str, int] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        merged = dict(self.data)
        for name, count in other.data.items():
            merged[name] = merged.get(name, 0) + count
        return ConnectorStats(merged)

    def reduce(self) -> dict[str, int | float]:
        return {name: count for name, count in sorted(self.data.items()) if count}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class ConnectorPromMetrics(KVConnectorPromMetrics):
    """One counter with an `event` label per engine, made through vLLM's own metric classes, which may be Ray's."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._named = {
            name: metric_types[Counter](name=f"vllm:kvservice_{name}", documentation=text, labelnames=labelnames)
            for name, text in CONNECTOR_COUNTERS.items()
        }
        self._events = metric_types[Counter](
            name="vllm:kvservice_connector_events",
            documentation="all other counters of the connector, by event",
            labelnames=[*labelnames, "event"],
        )
        # Each is 0 from the start, because `increase` misses a counter's first value.
        for values in per_engine_labelvalues.values():
            for metric in self._named.values():
                metric.labels(*values).inc(0)
            for event in CONNECTOR_EVENTS:
                if "*" not in event:
                    self._events.labels(*values, event).inc(0)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            if name in self._named:
                self._named[name].labels(*labels).inc(count)
            else:
                self._events.labels(*labels, name).inc(count)
