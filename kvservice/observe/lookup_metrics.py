"""The metrics that a lookup partition exports to Prometheus: kvservice_lookup_*, labelled with service and partition.

`read` is called on threads of prometheus_client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvservice.observe.events import LOOKUP_EVENTS

# Counter of a lookup partition -> help text. Exported as kvservice_lookup_<name>_total. A counter that is not listed
# here is exported under kvservice_lookup_events_total.
LOOKUP_COUNTERS: Mapping[str, str] = {
    "resolve_calls": "calls that asked which nodes hold blocks",
    "resolve_keys": "blocks that those calls asked for",
    "resolve_keys_held": "blocks asked for that some node held",
    "announce_calls": "announcements of cache shards",
    "keys_dropped_full": "announced blocks dropped because the directory was full",
    "watchers_cut_off": "watch streams ended because their reader was too slow",
}
LOOKUP_GAUGES: Mapping[str, str] = {
    "boot_epoch": "another number with every start of the lookup partition",
    "keys": "blocks in this partition that some node holds",
    "nodes_alive": "nodes whose heartbeats arrive",
    "nodes_silent": "nodes whose heartbeats stopped and that are not forgotten yet",
}
_NAMES = ["service", "partition"]


@dataclass(frozen=True, slots=True)
class LookupNumbers:
    partition: int
    gauges: Mapping[str, int]  # the names of LOOKUP_GAUGES
    counters: Mapping[str, int]


class LookupCollector(Collector):
    """Reads one lookup partition. `read` returns its numbers now, or None if it cannot answer."""

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
            "kvservice_lookup_events", "all other counters, by name", labels=[*_NAMES, "event"]
        )
        known = dict.fromkeys((name for name in LOOKUP_EVENTS if "*" not in name), 0)
        for name, count in sorted({**known, **numbers.counters}.items()):
            if name not in LOOKUP_COUNTERS:
                events.add_metric([*labels, name], count)
        yield events
