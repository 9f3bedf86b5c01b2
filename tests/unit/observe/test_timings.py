"""Latencies of a pool as histograms, with exemplars."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest

from kvservice.core.messages import PoolStats
from kvservice.observe.metrics import ShardCollector
from kvservice.observe.timings import EXEMPLAR_CHARS_MAX, HISTOGRAMS, Timings, exemplar_of
from kvservice.units import BootEpoch, NodeId


def exported(timings: Timings) -> str:
    registry = CollectorRegistry()
    stats = PoolStats(NodeId("n0"), BootEpoch(1), 1, 1, 1)
    registry.register(ShardCollector("s", lambda: stats, lambda: timings))
    text: bytes = generate_latest(registry)
    return text.decode()


def test_every_histogram_is_there_before_the_first_call() -> None:
    text = exported(Timings())
    for name, (_, sources) in HISTOGRAMS.items():
        for source in sources:
            assert f'kvservice_{name}_count{{node="n0",service="s",source="{source}"}} 0.0' in text
        assert sources or f'kvservice_{name}_count{{node="n0",service="s"}} 0.0' in text


def test_a_duration_is_counted_with_its_request_as_exemplar() -> None:
    timings = Timings()
    timings.add("acquire_seconds", 0.003, "peer", "chat-1")
    text = exported(timings)
    bucket = (
        'kvservice_acquire_seconds_bucket{le="0.005",node="n0",service="s",source="peer"} 1.0 # {request_id="chat-1"}'
    )
    assert bucket in text
    assert 'kvservice_acquire_seconds_sum{node="n0",service="s",source="peer"} 0.003' in text


def test_a_clock_that_goes_back_counts_as_no_time() -> None:
    timings = Timings()
    timings.add("seal_seconds", -1.0)
    assert 'kvservice_seal_seconds_bucket{le="0.0001",node="n0",service="s"} 1.0' in exported(timings)


@pytest.mark.parametrize(
    ("request_id", "trace_id", "kept"),
    [
        ("", "", None),
        ("r", "t" * 32, {"request_id", "trace_id"}),
        ("r" * 100, "t" * 32, {"trace_id"}),
        ("r" * 1000, "", None),
    ],
)
def test_an_exemplar_keeps_what_fits(request_id: str, trace_id: str, kept: set[str] | None) -> None:
    found = exemplar_of(request_id, trace_id)
    assert (None if found is None else found.keys()) == kept
    assert sum(len(name) + len(value) for name, value in (found or {}).items()) <= EXEMPLAR_CHARS_MAX
