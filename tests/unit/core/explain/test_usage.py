"""Bounded tables: of anything, and of the hits of each model and tenant."""

from __future__ import annotations

from kvservice.core.bounded_table import BoundedTable
from kvservice.core.explain.usage import OTHERS, UsageTable
from kvservice.core.messages import UsageRow


def test_the_entry_used_longest_ago_leaves_a_full_table() -> None:
    dropped: list[int] = []
    table: BoundedTable[str, int] = BoundedTable(2, dropped.append)
    table.put("a", 1)
    table.put("b", 2)
    assert table.get("a") == 1
    table.put("c", 3)
    assert dropped == [2]
    assert (table.get("a"), table.get("b"), table.get("c")) == (1, None, 3)
    assert (table.pop("a"), table.pop("a"), dropped) == (1, None, [2])


def test_a_table_that_tells_nobody_drops_all_the_same() -> None:
    table: BoundedTable[str, int] = BoundedTable(1)
    table.put("a", 1)
    table.put("b", 2)
    assert (table.get("a"), table.get("b")) == (None, 2)


def test_what_leaves_the_usage_goes_into_the_row_of_the_others() -> None:
    """The sums over all rows never fall, as a counter must not."""
    usage = UsageTable(rows_max=2)
    usage.add("m", "t", 10, 4, 2, 3)
    usage.add("m", "t", 1, 1, 0, 0)
    assert usage.rows() == (UsageRow("m", "t", 11, 5, 2, 3),)
    for model in ("n", "o", "p"):
        usage.add(model, "", 5, 1, 1, 2)
    others = UsageRow(OTHERS, OTHERS, 16, 6, 3, 5)
    assert usage.rows() == (UsageRow("o", "", 5, 1, 1, 2), UsageRow("p", "", 5, 1, 1, 2), others)
