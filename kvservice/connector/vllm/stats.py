"""The connector's counters in vLLM's own metrics: its log line and its /metrics endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

# Counter -> help text. Counters that are not listed are exported under kvservice_connector_events_total.
DESCRIBED = {
    "load_blocks": "blocks promised to the engine and loaded from the pool",
    "load_blocks_remote": "loaded blocks that came from another node for the request",
    "loaded_blocks_slot": "blocks that workers copied from the pool's memory into the engine",
    "loaded_blocks_engine": "blocks that workers copied from another engine's KV cache",
    "loads_failed": "loads that failed after the promise and were recomputed",
    "store_blocks_planned": "blocks whose copy from the engine to the pool was planned",
    "stored_blocks": "blocks sealed in the pool",
    "store_blocks_put_off": "blocks that found no free slot in their step",
}


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
            for name, text in DESCRIBED.items()
        }
        self._events = metric_types[Counter](
            name="vllm:kvservice_connector_events",
            documentation="all other counters of the connector, by event",
            labelnames=[*labelnames, "event"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            if name in self._named:
                self._named[name].labels(*labels).inc(count)
            else:
                self._events.labels(*labels, name).inc(count)
