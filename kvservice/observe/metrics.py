"""Every metric a shard exports, in one table, and the Prometheus collector that reads them from its counters.

Every counter of the table is exported from the start, as 0: `increase` of a counter that is born with its first event
is 0, so an alert would miss that event. A counter that is not in the table is not lost: it shows under
kvservice_events_total with its name as a label. The endpoint runs on threads of prometheus_client; `read` is called
from them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvservice.errors import KVServiceError

log = logging.getLogger("kvservice.observe")

T = TypeVar("T")
READ_SECONDS = 5.0

# Number among a shard's counters that also falls -> what it is. Exported as kvservice_<name>.
GAUGES: Mapping[str, str] = {
    "mirror_keys": "keys in the node's mirror of the directory",
    "mirror_bytes": "shared memory it takes",
    "mirror_live_partitions": "lookup partitions whose part of it is fresh",
    "mirror_age_ms": "since the longest silent one of them was heard of",
}
# Counter of a shard -> what it counts. Exported as kvservice_<name>_total.
COUNTERS: Mapping[str, str] = {
    "acquires": "prefixes that engines asked for",
    "asked_blocks": "blocks in them that the engines did not hold themselves",
    "hit_local_blocks": "blocks promised from this node's own slots",
    "hit_remote_blocks": "blocks promised after fetching them from another node",
    "window_hit_local_blocks": "blocks of window groups found here for hits",
    "window_hit_remote_blocks": "blocks of window groups fetched from another node for hits",
    "blocks_sealed": "blocks that became readable, stored here or fetched",
    "blocks_adopted": "blocks of an earlier boot found intact in the segment",
    "adopt_dropped": "slots of an earlier boot that did not verify",
    "fetched_blocks": "blocks fetched from other nodes and verified",
    "fetched_bytes": "bytes of them",
    "fetches_started": "fetches from other nodes",
    "fetches_failed": "fetches that brought nothing",
    "fetch_not_worthwhile": "blocks not fetched because recomputing is faster",
    "pull_ok": "pulled blocks whose digest, generation and epoch matched",
    "pull_stale": "pulled blocks that had been replaced at their source",
    "pull_corrupt": "pulled blocks whose digest did not match",
    "pull_failed": "blocks that did not arrive",
    "pull_stuck": "blocks that may still arrive: their slots are set aside",
    "peer_located_blocks": "blocks leased to other nodes for reading",
    "peer_absent_blocks": "blocks that other nodes asked for in vain",
    "evicted_primary": "blocks evicted that were computed on this node",
    "evicted_secondary": "blocks evicted that had been fetched from elsewhere",
    "slots_reserved": "slots given to engines for writing",
    "admission_stopped": "times that nothing was reused for so long that storing was stopped, but for a sample",
    "admission_resumed": "times that storing was resumed",
    "chains_not_admitted": "requests whose blocks were not stored because nothing is reused",
    "reserve_shortfall": "slots that engines asked for and did not get",
    "drains_begun": "times that this shard began to leave",
    "drains_done": "times that it had left",
    "drain_blocks_handed": "blocks that other nodes took over when it left",
    "drain_blocks_lost": "blocks that nobody had any more when it left",
    "takeover_blocks_offered": "blocks that leaving nodes offered to this one",
    "takeover_blocks_held": "blocks of them that were here already",
    "takeover_blocks_taken": "blocks of them that were read and kept",
    "takeover_bytes": "bytes of those",
    "slots_quarantined": "slots set aside because somebody might still write them",
    "slabs_moved": "slabs handed from one block size to another",
    "seal_duplicate": "stored blocks that were here already",
    "seal_stale": "seals of reservations that had ended",
    "segments_replaced": "times that the segment's file was removed by somebody, and made again",
    "attaches": "engines that attached",
    "attach_fingerprint_refused": "engines refused for another fingerprint",
    "attach_overtaken": "attaches refused because a later one of the same engine had been answered",
    "attachments_lost": "engines that vanished without detaching",
    "leases_granted": "read leases granted",
    "leases_released": "read leases given back",
    "leases_expired": "read leases that ran out",
    "quota_refused": "slots that tenants did not get because of their quota",
    "in_flight_refused": "slots that tenants did not get because they fill as many as they may",
    "calls_unauthenticated": "calls without a tenant's token, or with a wrong one",
    "attachments_revoked": "engines detached because their tenant's rights changed",
    "lookup_calls": "questions to the lookup service",
    "lookup_rpcs": "calls they took",
    "lookup_incomplete": "questions that a lookup partition did not answer",
    "mirror_answers": "questions answered from the node's mirror of the directory, without a call",
    "mirror_keys_taken": "keys that the mirror was told of, added or removed",
    "mirror_streams": "watch streams that fed it",
    "lookup_skipped": "calls left out because the lookup partition had failed repeatedly",
    "transfer_blocks": "blocks that the transport moved",
    "transfer_connects": "connections to other nodes",
    "transfer_connect_failed": "connections to other nodes that failed",
    "transfer_reads_failed": "reads that the transport reported as failed",
}
TRANSPORTS = ("nixl", "shm")  # that bytes are exported of from the start
ANY_ADDRESS = "0.0.0.0"
_PREFIX = "kvservice"
_TRANSPORT_BYTES = ("transfer_", "_bytes")  # transfer_<transport>_bytes


class TenantRow(Protocol):
    """core.tenants.TenantUsage. There are never more than 65 of them, however many tenants there are."""

    @property
    def name(self) -> str: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def quota_bytes(self) -> int: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def counters(self) -> Mapping[str, int]: ...


class ShardNumbers(Protocol):
    """What is read of a shard: core.messages.PoolStats has it."""

    @property
    def node_id(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def segment_bytes(self) -> int: ...
    @property
    def slab_count(self) -> int: ...
    @property
    def slab_free_count(self) -> int: ...
    @property
    def slots(self) -> Mapping[str, int]: ...
    @property
    def counters(self) -> Mapping[str, int]: ...
    @property
    def draining(self) -> bool: ...
    @property
    def tenants(self) -> Sequence[TenantRow]: ...


class ShardCollector(Collector):
    """`read` returns the shard's numbers now, or None while there are none."""

    def __init__(self, service: str, read: Callable[[], ShardNumbers | None]) -> None:
        self._service = service
        self._read = read

    def collect(self) -> Iterator[Metric]:
        numbers = self._read()
        if numbers is None:
            return
        labels = [self._service, numbers.node_id]
        yield from self._gauges(numbers, labels)
        names = ["service", "node"]
        events = CounterMetricFamily(f"{_PREFIX}_events", "everything else that is counted", labels=[*names, "event"])
        moved = CounterMetricFamily(
            f"{_PREFIX}_transfer_bytes", "bytes fetched, by transport", labels=[*names, "transport"]
        )
        for name, text in COUNTERS.items():  # also those that nothing was counted of: see the docstring
            family = CounterMetricFamily(f"{_PREFIX}_{name}", text, labels=names)
            family.add_metric(labels, numbers.counters.get(name, 0))
            yield family
        bytes_by = dict.fromkeys(TRANSPORTS, 0)
        for name, count in sorted(numbers.counters.items()):
            if (transport := transport_of(name)) is not None:
                bytes_by[transport] = count
            elif name not in COUNTERS and name not in GAUGES:
                events.add_metric([*labels, name], count)
        for transport, count in bytes_by.items():
            moved.add_metric([*labels, transport], count)
        yield moved
        yield events
        yield from self._tenants(numbers, labels)

    @staticmethod
    def _tenants(numbers: ShardNumbers, labels: list[str]) -> Iterator[Metric]:
        names = ["service", "node", "tenant"]
        used = GaugeMetricFamily(f"{_PREFIX}_tenant_used_bytes", "bytes charged to a tenant", labels=names)
        quota = GaugeMetricFamily(f"{_PREFIX}_tenant_quota_bytes", "most it may hold, 0 = no limit", labels=names)
        flight = GaugeMetricFamily(f"{_PREFIX}_tenant_in_flight", "slots it fills at the moment", labels=names)
        events = CounterMetricFamily(f"{_PREFIX}_tenant_events", "what tenants were refused", labels=[*names, "event"])
        for row in numbers.tenants:
            used.add_metric([*labels, row.name], row.used_bytes)
            quota.add_metric([*labels, row.name], row.quota_bytes)
            flight.add_metric([*labels, row.name], row.in_flight)
            for name, count in sorted(row.counters.items()):
                events.add_metric([*labels, row.name, name], count)
        if numbers.tenants:
            yield from (used, quota, flight, events)

    @staticmethod
    def _gauges(numbers: ShardNumbers, labels: list[str]) -> Iterator[Metric]:
        names = ["service", "node"]
        values = {
            "segment_bytes": ("shared memory of the pool", numbers.segment_bytes),
            "slabs": ("slabs of the segment", numbers.slab_count),
            "slabs_free": ("slabs that no block size uses", numbers.slab_free_count),
            "boot_epoch": ("grows with every start of the shard", numbers.epoch),
            **{name: (text, numbers.counters.get(name, 0)) for name, text in GAUGES.items()},
            "draining": ("1 while the shard takes no new work", int(numbers.draining)),
        }
        for name, (text, value) in values.items():
            gauge = GaugeMetricFamily(f"{_PREFIX}_{name}", text, labels=names)
            gauge.add_metric(labels, value)
            yield gauge
        slots = GaugeMetricFamily(f"{_PREFIX}_slots", "slots by state", labels=[*names, "state"])
        for state, count in sorted(numbers.slots.items()):
            slots.add_metric([*labels, state], count)
        yield slots


def transport_of(counter: str) -> str | None:
    """'nixl' for 'transfer_nixl_bytes', None for counters that count something else."""
    head, tail = _TRANSPORT_BYTES
    return counter[len(head) : -len(tail)] if counter.startswith(head) and counter.endswith(tail) else None


def read_on(loop: asyncio.AbstractEventLoop, ask: Callable[[], T]) -> Callable[[], T | None]:
    """What any thread may call to have `ask` called on the loop. It blocks, and returns None when the loop is busy or
    ending."""

    async def call() -> T:
        return ask()

    def read() -> T | None:
        try:
            return asyncio.run_coroutine_threadsafe(call(), loop).result(READ_SECONDS)
        except (concurrent.futures.TimeoutError, RuntimeError, KVServiceError):
            return None

    return read


def serve_metrics(
    service: str, read: Callable[[], ShardNumbers | None], port: int, address: str = ANY_ADDRESS
) -> Callable[[], None]:
    """Answer Prometheus at address:port/metrics. Returns what ends it."""
    return serve_collectors([ShardCollector(service, read)], port, address)


def serve_collectors(collectors: Sequence[Collector], port: int, address: str = ANY_ADDRESS) -> Callable[[], None]:
    """Like `serve_metrics`. A taken port costs the metrics, not what they are about."""
    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)
    try:
        server, thread = start_http_server(port, address, registry)
    except OSError as error:
        log.warning("metrics_port_taken", extra={"port": port, "error": error.strerror})
        return lambda: None

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join(5)

    return end
