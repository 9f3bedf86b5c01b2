"""A thousand nodes at once: what holds for three must hold for many, and one more node must not cost all others."""

from __future__ import annotations

import pytest

from kvservice.testing.sim.run import run_schedule
from kvservice.testing.sim.schedule import make_wide_schedule

pytestmark = [pytest.mark.sim, pytest.mark.slow]

NODES = 1000
TURNS_PER_NODE_MAX = 2.0  # times those of a twentieth of the nodes: what a node does must not grow with their number


def test_a_thousand_nodes_break_no_promise() -> None:
    few, many = (run_schedule(make_wide_schedule(1, nodes)) for nodes in (NODES // 20, NODES))
    assert not many.violation, f"see it happen: kvservice sim --nodes {NODES} --seed 1\n{many.violation}"
    assert many.counters["blocks_pulled"] > NODES, "hardly anything came from another node"
    per_node = [outcome.counters["turns"] / nodes for outcome, nodes in ((few, NODES // 20), (many, NODES))]
    assert per_node[1] < TURNS_PER_NODE_MAX * per_node[0], per_node
