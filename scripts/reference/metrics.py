"""docs/reference/metrics.md from the collectors and tables that export the metrics.

The collectors are asked as Prometheus asks them, with one sample of everything that has labels of its own. So a metric
is on the page if, and only if, it is exported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric

from kvservice.core.block.tenants import TenantUsage
from kvservice.core.messages import CodecDrift, PoolStats, TierFigures, UsageRow
from kvservice.core.store.guard import Rule
from kvservice.observe.copy_worker_metrics import CopyWorkerCollector
from kvservice.observe.endpoint import BuildCollector, CertificateCollector
from kvservice.observe.events import (
    CONNECTOR_COUNTERS,
    CONNECTOR_EVENTS,
    LOOKUP_EVENTS,
    OFFLOADING_EVENTS,
    SHARD_EVENTS,
)
from kvservice.observe.lookup_metrics import LOOKUP_GAUGES, LookupCollector, LookupNumbers
from kvservice.observe.metrics import ShardCollector
from kvservice.observe.timings import Timings
from kvservice.proxy.metrics import ProxyMetrics
from kvservice.proxy.servers import ServerPool
from kvservice.serve.meters import COUNTERS as ROUTER_COUNTERS
from kvservice.serve.meters import LOOKUP as ROUTER_LOOKUP
from kvservice.serve.meters import TAGS as ROUTER_TAGS
from kvservice.units import BootEpoch, NodeId
from scripts.reference.markdown import cell

HEAD = """# Metrics

<!-- Made from the collectors in the code by `make docs-reference`. Do not edit. -->

What each process exports to Prometheus. [Monitor the service](../howto/monitor.md) says which of them to watch.

- Every counter is there from the start, as 0, so that `increase()` sees its first event. Exceptions are counters whose
  labels are learnt: tenants, models, and the HTTP status of requests to the proxy.
- A name ends with its unit where there is one: `_seconds`, `_bytes`, `_blocks`.
- `service` and `node` are the names of the service and of the shard's node. `model` and `tenant` have at most 64 values
  together; what is beyond them is added up under `(others)`.
- A client that asks for OpenMetrics gets exemplars: the request id, and with [traces](../howto/traces.md) the trace, of
  one request in each bucket of `kvservice_acquire_seconds`.

Where they are:

| process | address |
|---|---|
| shard, lookup partition | `http://NODE:metrics_port/metrics`; partition i on Ray: `metrics_port` + 65 + i |
| copy worker | `metrics_port` + 1 + its number on the node |
| proxy | `/metrics` beside its API |
| engine | `/metrics` of vLLM; under Ray Serve Ray's |
| router | Ray's, port 8080 of each node |

Beside `/metrics` a shard and a lookup partition answer `/livez` and `/readyz`.
"""

RAY = """
## Under Ray Serve

Ray exports the metrics of its processes itself. It puts `ray_` before each name, writes `_` for `:`, and adds labels of
its own, such as `application`, `deployment`, `replica` and `SessionName`. Sum over what you do not need:

```promql
# blocks loaded from the pool by all engines, per second
sum(rate(ray_vllm_kvservice_load_blocks_total[5m]))
# share of requests that the router sent where their blocks are
sum(rate(ray_kvservice_router_decisions_total{reason=~"hit|fetch"}[5m]))
  / sum(rate(ray_kvservice_router_decisions_total[5m]))
# 99 % of the router's lookups take less than this many seconds
histogram_quantile(0.99, sum by (le) (rate(ray_kvservice_router_lookup_seconds_bucket[5m])))
```

The shards of a service on Ray are scraped at `metrics_port` and keep the names above.
"""


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str

    @property
    def unit(self) -> str:
        """The unit in the name, or what the meaning begins with: 'slots reserved for …' counts slots."""
        in_name = [word for word in self.name.split("_") if word in ("seconds", "bytes", "blocks")]
        first, *_ = self.meaning.split()
        if in_name:
            return in_name[-1]
        if first in ("1", "share"):
            return "0 or 1" if first == "1" else "0 to 1"
        return first if first.endswith("s") and first not in ("grows", "versions") else "–"


def rows(collected: Iterable[Metric]) -> Iterator[Row]:
    """One row for each metric, with the labels of its samples."""
    for metric in collected:
        labels = dict.fromkeys(label for sample in metric.samples for label in sample.labels if label != "le")
        suffix = {"counter": "_total", "info": "_info"}.get(metric.type, "")
        yield Row(metric.name + suffix, metric.type, tuple(labels), metric.documentation)


def shard() -> list[Row]:
    counters = {"pull_ok": 1, **dict.fromkeys((rule.hits_figure for rule in Rule), 1)}
    tenant = TenantUsage("t", 1, 1, 1, {"quota_refused": 1})
    stats = PoolStats(
        NodeId("n"),
        BootEpoch(1),
        1,
        1,
        1,
        {"free": 1},
        counters,
        tenants=(tenant,),
        usage=(UsageRow("m", "t", 1, 1, 1, 1),),
        slot_bytes={"free": 1},
        tiers=(TierFigures("disk", "open"),),
        drifts=(CodecDrift("m", 1.0),),
    )
    return list(rows(ShardCollector("s", lambda: stats, Timings).collect()))


def lookup() -> list[Row]:
    numbers = LookupNumbers(0, dict.fromkeys(LOOKUP_GAUGES, 0), {})
    return list(rows(LookupCollector("s", lambda: numbers).collect()))


def copy_worker() -> list[Row]:
    state = {"engines": 0, "wedged": False, "device_lost": False, "pinned_share": 0.0, "counters": {}}
    return list(rows(CopyWorkerCollector(("s", "n", "cpu"), lambda: state).collect()))


def process() -> list[Row]:
    return list(rows([*BuildCollector().collect(), *ProcessCollector(registry=None).collect()]))


def certificate() -> list[Row]:
    return list(rows(CertificateCollector("s", lambda: (0.0, 0.0)).collect()))


def proxy() -> list[Row]:
    pool = ServerPool(("http://prefill",), ("http://decode",), in_flight_max=1, check_seconds=1.0)
    metrics = ProxyMetrics(pool)
    return [row for row in rows(metrics.collect()) if row not in process()]


def router() -> list[Row]:
    counters = [
        Row(f"{name}_total", "counter", (*ROUTER_TAGS, *tags), text) for name, (text, tags) in ROUTER_COUNTERS.items()
    ]
    return [*counters, Row(ROUTER_LOOKUP[0], "histogram", ROUTER_TAGS, ROUTER_LOOKUP[1])]


def engine() -> list[Row]:
    labels = ("model_name", "engine")
    named = [Row(f"vllm:kvservice_{name}_total", "counter", labels, text) for name, text in CONNECTOR_COUNTERS.items()]
    events = "all other counters of the connector, by event"
    return [*named, Row("vllm:kvservice_connector_events_total", "counter", (*labels, "event"), events)]


def offloading() -> list[Row]:
    text = "what kvservice's tier below vLLM's OffloadingConnector counts, by event, in chunks"
    return [Row("vllm:kvservice_offloading_events_total", "counter", ("model_name", "engine", "event"), text)]


PARTS = (
    ("Shard", "", shard, SHARD_EVENTS, "kvservice_events_total"),
    ("Lookup partition", "", lookup, LOOKUP_EVENTS, "kvservice_lookup_events_total"),
    ("Shard and lookup partition with TLS", "", certificate, {}, ""),
    ("Copy worker", "", copy_worker, {}, ""),
    (
        "Engine",
        "The connector exports through vLLM, beside vLLM's own `vllm:external_prefix_cache_hits_total` and "
        "`vllm:external_prefix_cache_queries_total`, which count tokens.\n\n",
        engine,
        CONNECTOR_EVENTS,
        "vllm:kvservice_connector_events_total",
    ),
    (
        "Tier below the OffloadingConnector",
        "Exported through vLLM, beside its own `vllm:kv_offload_tiering_*`.\n\n",
        offloading,
        OFFLOADING_EVENTS,
        "vllm:kvservice_offloading_events_total",
    ),
    ("Router", "Names as Ray's exporter has them, without its `ray_`.\n\n", router, {}, ""),
    ("Proxy", "", proxy, {}, ""),
    ("Every process but engines and routers", "", process, {}, ""),
)


def table(found: Iterable[Row]) -> str:
    head = "| name | type | unit | labels | meaning |\n|---|---|---|---|---|\n"
    return head + "".join(
        f"| `{row.name}` | {row.kind} | {row.unit} | {', '.join(row.labels) or '–'} | {cell(row.meaning)} |\n"
        for row in found
    )


def events(found: Mapping[str, str], name: str) -> str:
    if not found:
        return ""
    head = f"\nThe values of `event` in `{name}`. A star stands for a reason, an outcome or a kind:\n\n"
    return f"{head}| event | meaning |\n|---|---|\n" + "".join(
        f"| `{event}` | {cell(text)} |\n" for event, text in sorted(found.items())
    )


def page() -> str:
    parts = [
        f"\n## {title}\n\n{words}{table(found())}{events(named, name)}" for title, words, found, named, name in PARTS
    ]
    return HEAD + "".join(parts) + RAY


PAGES = {"metrics.md": page}
