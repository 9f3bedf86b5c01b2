"""How long a pool takes: latencies as Prometheus histograms, with the request of a slow one as an exemplar.

The pool's runtime measures and records here; the core knows no clock. `collect` may run on any thread. Recording takes
about two microseconds, with an exemplar four.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import Histogram
from prometheus_client.core import Metric

from kvservice.observe import tracing

# Seconds, the upper bounds of the buckets of every histogram: from a hit in memory to the longest wait for a peer.
BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SOURCES = ("none", "local", "peer", "disk", "objects")
TIERS = ("disk", "objects")  # a tier of another package appears with its own name once it works
# Of all label names and values of one exemplar, as OpenMetrics has it. A longer request id is left out.
EXEMPLAR_CHARS_MAX = 128

# Name -> (help text, values of its label `source`). Exported as kvservice_<name>.
HISTOGRAMS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "acquire_seconds": (
        "time of an engine's acquire, by the farthest source of the promised blocks; none = nothing was promised",
        SOURCES,
    ),
    "fetch_seconds": ("time to read and verify blocks of one source, in one pull", ("peer", *TIERS)),
    "resolve_seconds": ("time in which the directory says which nodes hold a prefix, from the mirror or by calls", ()),
    "locate_seconds": ("time in which a peer leases blocks for reading, with the handshake of a first contact", ()),
    "digest_seconds": ("time to compute the digests of blocks that were sealed together, on one thread", ()),
    "seal_seconds": ("time of an engine's seal, with its digests", ()),
    "write_down_seconds": ("time to write blocks of one job into a tier, with its wait in the tier's queue", TIERS),
}


class Timings:
    """The histograms of one pool."""

    def __init__(self) -> None:
        self._histograms = {
            name: Histogram(f"kvservice_{name}", text, ["source"] if sources else [], registry=None, buckets=BOUNDS)
            for name, (text, sources) in HISTOGRAMS.items()
        }
        self._children = {
            (name, source): self._histograms[name].labels(source) if source else self._histograms[name]
            for name, (_, sources) in HISTOGRAMS.items()
            for source in sources or ("",)
        }

    def add(self, name: str, seconds: float, source: str = "", request_id: str = "") -> None:
        """Record one duration. The exemplar names the request, and the trace if there is one."""
        child = self._children.get((name, source)) or self._histograms[name].labels(source)
        child.observe(max(seconds, 0.0), exemplar_of(request_id, tracing.trace_id()))

    def collect(self, names: Sequence[str], labels: Sequence[str]) -> Iterator[Metric]:
        """The histograms, with these labels added to each sample."""
        added = dict(zip(names, labels, strict=True))
        for histogram in self._histograms.values():
            for family in histogram.collect():
                family.samples = [each._replace(labels={**added, **each.labels}) for each in family.samples]
                yield family


def exemplar_of(request_id: str, trace_id: str) -> dict[str, str] | None:
    """The labels of an exemplar; None when nothing is known that fits."""
    found: dict[str, str] = {}
    for name, value in (("trace_id", trace_id), ("request_id", request_id)):
        chars = sum(len(text) for pair in found.items() for text in pair)
        if value and chars + len(name) + len(value) <= EXEMPLAR_CHARS_MAX:
            found[name] = value
    return found or None
