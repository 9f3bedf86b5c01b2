"""What a lookup partition exports to Prometheus: kvservice_lookup_*, labelled with service and partition.

`read` is called from threads of prometheus_client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvservice.observe.metrics import ANY_ADDRESS, serve_collectors

# Counter of a lookup partition -> what it counts. Exported as kvservice_lookup_<name>_total; others show as events.
LOOKUP_COUNTERS: Mapping[str, str] = {
    "resolve_calls": "questions who holds blocks",
    "resolve_keys": "blocks in them",
    "resolve_keys_held": "blocks that some node held",
    "announce_calls": "announcements of cache shards",
    "keys_dropped_full": "announced blocks that found no room in the directory",
    "watchers_cut_off": "watchers that read too slowly",
}
LOOKUP_GAUGES: Mapping[str, str] = {
    "boot_epoch": "differs with every start of the lookup partition",
    "keys": "blocks that some node holds, in this part of the directory",
    "nodes_alive": "nodes that were heard of in time",
    "nodes_silent": "nodes that were not, and are not forgotten yet",
}
_NAMES = ["service", "partition"]


@dataclass(frozen=True, slots=True)
class LookupNumbers:
    partition: int
    gauges: Mapping[str, int]  # the names of LOOKUP_GAUGES
    counters: Mapping[str, int]


class LookupCollector(Collector):
    """`read` returns the lookup partition's numbers now, or None while there are none."""

    def __init__(self, service: str, read: Callable[[], LookupNumbers | None]) -> None:
        self._service = service
        self._read = read

    def collect(self) -> Iterator[Metric]:
        numbers = self._read()
        if numbers is None:
            return
        labels = [self._service, str(numbers.partition)]
        for name, text in LOOKUP_GAUGES.items():
            gauge = GaugeMetricFamily(f"kvservice_lookup_{name}", text, labels=_NAMES)
            gauge.add_metric(labels, numbers.gauges[name])
            yield gauge
        for name, text in LOOKUP_COUNTERS.items():
            counter = CounterMetricFamily(f"kvservice_lookup_{name}", text, labels=_NAMES)
            counter.add_metric(labels, numbers.counters.get(name, 0))
            yield counter
        events = CounterMetricFamily(
            "kvservice_lookup_events", "everything else that is counted", labels=[*_NAMES, "event"]
        )
        for name, count in sorted(numbers.counters.items()):
            if name not in LOOKUP_COUNTERS:
                events.add_metric([*labels, name], count)
        yield events


def serve_lookup_metrics(
    service: str, read: Callable[[], LookupNumbers | None], port: int, address: str = ANY_ADDRESS
) -> Callable[[], None]:
    """Answer Prometheus at address:port/metrics. Returns what ends it."""
    return serve_collectors([LookupCollector(service, read)], port, address)
