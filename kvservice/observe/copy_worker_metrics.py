"""The metrics that a copy worker exports to Prometheus: kvservice_copy_worker_*, labelled with service, node and
device.

`read` is called on threads of prometheus_client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

COPY_WORKER_COUNTERS: Mapping[str, str] = {
    "jobs": "copy jobs that ended",
    "blocks": "blocks copied",
    "bytes": "bytes copied",
    "stale": "jobs that ended because a slot no longer held the promised block",
    "failed": "jobs that ended because a copy failed or was refused",
}
_NAMES = ["service", "node", "device"]


class CopyWorkerCollector(Collector):
    """Reads one copy worker. `read` returns `CopyWorker.state()`; `labels` are service, node and device."""

    def __init__(self, labels: tuple[str, str, str], read: Callable[[], Mapping[str, Any]]) -> None:
        self._labels = list(labels)
        self._read = read

    def collect(self) -> Iterator[Metric]:
        state = self._read()
        gauges = {
            "engines": ("engines connected to this worker", float(state["engines"])),
            "wedged": ("1 while a copy hangs and no other can start", float(state["wedged"])),
            "device_lost": (
                "1 after the device failed: no copy of this worker can succeed any more",
                float(state["device_lost"]),
            ),
        }
        if "pinned_share" in state:
            gauges["pinned_share"] = (
                "share of the pool's memory that is pinned for the GPU, 0 to 1",
                state["pinned_share"],
            )
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"kvservice_copy_worker_{name}", text, labels=_NAMES)
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, text in COPY_WORKER_COUNTERS.items():
            counter = CounterMetricFamily(f"kvservice_copy_worker_{name}", text, labels=[*_NAMES, "direction"])
            for direction in ("load", "store"):
                counter.add_metric([*self._labels, direction], state["counters"].get(f"{direction}_{name}", 0))
            yield counter
        source = CounterMetricFamily(
            "kvservice_copy_worker_loaded_blocks",
            "blocks loaded into engines, by the source of the bytes",
            labels=[*_NAMES, "source"],
        )
        from_engines = state["counters"].get("borrowed_blocks", 0)
        source.add_metric([*self._labels, "engine"], from_engines)
        source.add_metric([*self._labels, "slot"], state["counters"].get("load_blocks", 0) - from_engines)
        yield source
