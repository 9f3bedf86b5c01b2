"""How much of what was asked for each model and tenant had a hit. Pure.

Models and tenants come and go for as long as a service runs, so the table is bounded. What leaves it is added to the
row of the others, so that the sums over all rows never fall.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvservice.core.block.tenants import OTHERS
from kvservice.core.bounded_table import BoundedTable
from kvservice.core.messages import UsageRow

# Pairs of a model and a tenant that have a row: it bounds the metric series of one shard. Further ones share a row.
ROWS_MAX = 64


class UsageTable:
    def __init__(self, rows_max: int = ROWS_MAX) -> None:
        self._rows: BoundedTable[tuple[str, str], list[int]] = BoundedTable(rows_max, self._drop)
        self._others: list[int] | None = None

    def add(self, model: str, tenant: str, asked: int, local: int, remote: int, tier: int) -> None:
        """Count the blocks of one answer: those asked for, and those promised, by where they were."""
        name = (model, tenant)
        row = self._rows.get(name) or self._rows.put(name, [0, 0, 0, 0])
        _add(row, (asked, local, remote, tier))

    def rows(self) -> tuple[UsageRow, ...]:
        """Sorted by model and tenant; the row of the others is the last one."""
        found = [UsageRow(model, tenant, *counts) for (model, tenant), counts in sorted(self._rows.items())]
        if self._others is not None:
            found.append(UsageRow(OTHERS, OTHERS, *self._others))
        return tuple(found)

    def _drop(self, row: list[int]) -> None:
        self._others = self._others or [0, 0, 0, 0]
        _add(self._others, row)


def _add(row: list[int], counts: Sequence[int]) -> None:
    for index, count in enumerate(counts):
        row[index] += count
