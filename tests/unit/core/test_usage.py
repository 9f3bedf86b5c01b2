"""Hits by model and tenant: bounded, and no block is lost from the sums."""

from __future__ import annotations

from kvservice.core.messages import UsageRow
from kvservice.core.usage import OTHERS, UsageTable
from kvservice.testing.builders import CoreHarness, make_chain, make_spec


def test_blocks_are_counted_by_model_and_tenant() -> None:
    table = UsageTable()
    table.add("b", "t1", 10, 4, 2)
    table.add("a", "t1", 1, 0, 0)
    table.add("b", "t1", 5, 5, 0)
    assert table.rows() == (UsageRow("a", "t1", 1, 0, 0), UsageRow("b", "t1", 15, 9, 2))


def test_the_row_used_longest_ago_joins_the_others() -> None:
    table = UsageTable(rows_max=2)
    for model in ("a", "b", "a", "c", "d"):
        table.add(model, "", 10, 1, 2)
    assert table.rows() == (
        UsageRow("c", "", 10, 1, 2),
        UsageRow("d", "", 10, 1, 2),
        UsageRow(OTHERS, OTHERS, 30, 3, 6),
    )


def test_a_shard_counts_what_it_answers() -> None:
    harness = CoreHarness()
    engine = harness.attach(make_spec())
    chain = make_chain(4)
    harness.store(engine, chain[:3])
    harness.acquire(engine, chain[:3])
    (row,) = harness.state.model_usage()
    assert (row.model, row.tenant, row.asked_blocks, row.hit_local_blocks) == (make_spec().model, "", 3, 3)
