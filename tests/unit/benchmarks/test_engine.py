"""The benchmark of the reference engine, on a tiny model: what it measures happened, and its times add up."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.engine import DEVICE_BLOCKS, HOST_BLOCKS, measure, table
from benchmarks.summary import READERS
from kvservice.engine.loop import PHASES
from tests.unit.engine.tiny_models import make

REQUESTS = 5


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    return measure(make("grouped heads"), "cpu", REQUESTS, 1)


def test_requests_are_served_with_each_host(figures: dict[str, Any]) -> None:
    """Longer sequences and more requests than the device has room for: without a host by computing again."""
    assert [row["host_blocks"] for row in figures["serving"]] == list(HOST_BLOCKS)
    for row in figures["serving"]:
        assert row["served"] == REQUESTS and row["tokens_per_second"] > 0
    without, *_, large = figures["serving"]
    assert without["recomputed"] > 0 and not without["swapped_out"]
    assert large["swapped_out"] > 0
    assert large["recomputed"] < without["recomputed"]  # a swap that a busy machine is slow to bring back is computed
    assert large["prompt_tokens_computed"] < without["prompt_tokens_computed"]


def test_every_operation_has_its_cost(figures: dict[str, Any]) -> None:
    costs = figures["operation_us"]
    assert [name.split(" over")[0] for name in costs] == [
        "allocate",
        "free",
        "swap out",
        "swap in",
        "copy",
        "attention",
    ]
    assert all(0 < taken < 1e6 for taken in costs.values())


def test_phases_make_up_a_step(figures: dict[str, Any]) -> None:
    for row in figures["serving"]:
        assert list(row["phase_ms"]) == list(PHASES)
        steps_seconds = sum(row["phase_ms"].values()) / 1e3 * row["steps"]
        assert 0.5 * row["seconds"] < steps_seconds <= row["seconds"] * 1.01


def test_the_summary_reads_the_result(figures: dict[str, Any]) -> None:
    rows = list(READERS["engine"](figures))
    assert len(rows) == len(HOST_BLOCKS) + len(figures["operation_us"]) + len(PHASES)
    assert f"{DEVICE_BLOCKS} blocks on the device" in rows[0].what and len(table(figures)) > len(rows)
