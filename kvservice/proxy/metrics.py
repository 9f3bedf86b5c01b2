"""What the proxy counts, and how it is exported to Prometheus at /metrics. Runs on the proxy's event loop."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvservice.observe.endpoint import BuildCollector
from kvservice.proxy.servers import Server, ServerFault, ServerPool

PATHS = ("/v1/completions", "/v1/chat/completions")  # that clients' requests are counted by
# upper bounds of the histograms' buckets; the last is the default of `request_seconds`
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)


class ServerCollector(Collector):
    """Gauges of each server, read from the pool at each scrape."""

    def __init__(self, pool: ServerPool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        labels = ["role", "server"]
        healthy = GaugeMetricFamily("kvservice_proxy_server_healthy", "1 while the server gets requests", labels=labels)
        known = GaugeMetricFamily(
            "kvservice_proxy_server_node_known",
            "1 while the node of this prefill server is known, so that prefill and decode start together",
            labels=labels,
        )
        in_flight = GaugeMetricFamily(
            "kvservice_proxy_server_in_flight", "requests under way to the server", labels=labels
        )
        for server in self._pool:
            values = [server.role.value, server.url]
            healthy.add_metric(values, int(server.healthy))
            known.add_metric(values, int(server.node is not None))
            in_flight.add_metric(values, server.in_flight)
        yield from (healthy, known, in_flight)


class ProxyMetrics:
    """Counters and histograms of one proxy, in a registry of its own."""

    def __init__(self, pool: ServerPool) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        for collector in (ServerCollector(pool), BuildCollector(), ProcessCollector(registry=None)):
            self._registry.register(collector)
        self._requests = Counter(
            "kvservice_proxy_requests",
            "client requests by path and HTTP status; `left` means that the client disconnected",
            ["path", "status"],
            registry=self._registry,
        )
        self._sent = Counter(
            "kvservice_proxy_sent",
            "requests sent to servers, with a hand-off or without",
            ["role", "server", "handoff"],
            registry=self._registry,
        )
        self._failures = Counter(
            "kvservice_proxy_failures",
            "requests to servers that failed",
            ["role", "server", "fault"],
            registry=self._registry,
        )
        self._cancelled = Counter(
            "kvservice_proxy_cancelled",
            "requests to servers cancelled before their answer was complete",
            ["role", "server"],
            registry=self._registry,
        )
        self._broken = Counter(
            "kvservice_proxy_broken_streams",
            "answers that ended with an error after their first byte",
            registry=self._registry,
        )
        self._given_up = Counter(
            "kvservice_proxy_given_up",
            "requests refused after --tries servers failed while working on them",
            registry=self._registry,
        )
        self._first_byte = Histogram(
            "kvservice_proxy_first_byte_seconds",
            "seconds from the client's request to the first byte of its answer",
            ["path"],
            registry=self._registry,
            buckets=_SECONDS,
        )
        self._duration = Histogram(
            "kvservice_proxy_request_seconds",
            "seconds from the client's request to the end of its answer",
            ["path"],
            registry=self._registry,
            buckets=_SECONDS,
        )

        self._begin(pool)

    def _begin(self, pool: ServerPool) -> None:
        """Export what can be known at the start as 0: `increase` misses the first value of a counter."""
        for path in PATHS:
            for status in ("200", "left"):
                self._requests.labels(path, status)
            self._first_byte.labels(path)
            self._duration.labels(path)
        for server in pool:
            place = (server.role.value, server.url)
            self._cancelled.labels(*place)
            for handoff in ("yes", "no"):
                self._sent.labels(*place, handoff)
            for fault in ServerFault:
                self._failures.labels(*place, fault.value)

    def request_ended(self, path: str, status: str, seconds: float) -> None:
        self._requests.labels(path, status).inc()
        self._duration.labels(path).observe(seconds)

    def first_byte(self, path: str, seconds: float) -> None:
        self._first_byte.labels(path).observe(seconds)

    def sent(self, server: Server, *, handoff: bool) -> None:
        self._sent.labels(server.role.value, server.url, "yes" if handoff else "no").inc()

    def failed(self, server: Server, fault: ServerFault) -> None:
        self._failures.labels(server.role.value, server.url, fault.value).inc()

    def cancelled(self, server: Server) -> None:
        self._cancelled.labels(server.role.value, server.url).inc()

    def given_up(self) -> None:
        self._given_up.inc()

    def broken_stream(self) -> None:
        self._broken.inc()

    def collect(self) -> Iterator[Metric]:
        """All metrics, for their reference."""
        yield from self._registry.collect()

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)
