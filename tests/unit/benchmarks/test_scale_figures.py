"""What pages say of many shards follows from the results."""

from __future__ import annotations

from typing import Any

from benchmarks import scale_figures
from benchmarks.scale import KINDS

RUN = {
    "commit": "0123456789ab",
    "date": "2026-01-02T03:04:05",
    "machine": {"cpu": "Some(R) CPU @ 3GHz", "cpu_count": 2},
}


def document() -> dict[str, Any]:
    rows = ("idle_per_process_and_second", "per_request_local", "per_block_fetched", "per_block_stored")
    costs = {name: dict.fromkeys(KINDS, 1000.0) for name in (*rows, "per_announced_key")}
    restarts = [
        {"part": "lookup0", "seconds": 1.0},
        {"part": "n0", "way": "handed over", "handed": 1200},
        {"part": "n1", "way": "memory kept"},
    ]
    figures = {
        "shards": 2,
        "lookup_partitions": 1,
        "engines": 4,
        "blocks_per_request": 24,
        "corpus_blocks": 1000,
        "cpu_microseconds": costs,
        "memory": {kind: {"pss_without_the_pool_mib": {"median": 50.0}} for kind in KINDS},
        "phases": [{"name": "restart", "seconds": 120.0}],
        "restarts": restarts,
        "requests_during_the_restart": 5000,
        "requests_that_hang": 0,
        "blocks_compared": 9000,
        "wrong": [],
        "lost": [],
    }
    return {**RUN, "figures": figures}


def test_a_core_carries_what_its_cost_allows() -> None:
    said = scale_figures.costs(document())
    assert said.startswith("Measured at commit 0123456, 2026-01-02, 2 cores, Some CPU 3GHz (`scale.json`).")
    assert "a shard carries 700 such requests a second" in said and "700 announced keys" in said


def test_a_cost_below_the_noise_is_no_rate() -> None:
    noisy = document()
    noisy["figures"]["cpu_microseconds"]["per_announced_key"] = dict.fromkeys(KINDS, -20.0)
    said = scale_figures.costs(noisy)
    assert "a lookup partition announced keys at a cost below the noise" in said and "-" not in said.splitlines()[-1]


def test_a_restart_says_what_moved_and_what_was_lost() -> None:
    said = scale_figures.restart(document())
    assert "3 parts restarted one after the other in 2 minutes" in said
    assert "1 shards handed 1,200 blocks over,\n1 kept their memory" in said and "none was lost" in said


def test_a_broken_promise_of_many_nodes_is_said() -> None:
    names = ("lookup_partitions", "requests", "faults", "virtual_seconds", "turns_per_node_and_second")
    run = dict.fromkeys((*names, "cpu_seconds", "memory_mib"), 1) | {"nodes": 1000, "violation": ""}
    assert "No promise was broken" in scale_figures.wide({**RUN, "figures": {"runs": [run]}})
    broken = {**RUN, "figures": {"runs": [{**run, "violation": "a block is wrong"}]}}
    assert "A promise was broken: a block is wrong" in scale_figures.wide(broken)
