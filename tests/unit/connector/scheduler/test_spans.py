"""Spans of an engine's copies: below the request's acquire, from the plan of a step to the workers' report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvservice.observe import tracing
from tests.unit.connector.line import BLOCK, Line, half, hashes, plan_step, report, run_step

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def played(path: Path, trace: str) -> list[dict[str, Any]]:
    """The spans of a request that loads two blocks and stores one."""
    line, chain = Line(), hashes(1, 3)
    tracing.start(f"file:{path}", "kvservice-test")
    try:
        scheduler = half(line)
        scheduler.on_new_request("r", chain, 0.0, trace=trace)
        line.answer(2)
        scheduler.matched("r", 0, 49, 0.1)
        scheduler.allocated("r", [1, 2, 3, 4], 2 * BLOCK)
        plan_step(scheduler)
        scheduler.loaded("r", failed=False)
        plan = run_step(scheduler, "r", chain, 3 * BLOCK)
        assert plan.stores
        scheduler.reported(report(plan))
    finally:
        tracing.stop()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_loads_and_stores_are_below_their_requests_trace(tmp_path: Path) -> None:
    found = {span["name"].removeprefix("kvservice."): span for span in played(tmp_path / "spans", CALLER)}
    assert found.keys() == {"load", "store"}
    assert {span["parent_id"] for span in found.values()} == {f"0x{CALLER[36:52]}"}
    assert found["load"]["attributes"] == {"kvservice.blocks": 2, "kvservice.fetched_blocks": 0}
    assert found["store"]["attributes"] == {"kvservice.blocks": 1, "kvservice.failed": False}


def test_copies_of_a_request_without_a_trace_have_no_spans(tmp_path: Path) -> None:
    assert played(tmp_path / "spans", "") == []
