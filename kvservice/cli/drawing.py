"""What the tables of several commands are made of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvservice.units import format_bytes, printable

if TYPE_CHECKING:
    from kvservice.client.tier_overview import TierOverview


def plain(text: str) -> str:
    """Text from others, unchanged, but neither Rich nor the terminal acts on it."""
    return escape(printable(text))


def problem_line(problem: str) -> Text:
    return Text.assemble(("problem: ", "red"), printable(problem))


def span(seconds: float) -> str:
    """A time span in at most two units: '45s', '3m', '2h 5m', '4d 3h'."""
    minutes, hours, days = int(seconds) // 60, int(seconds) // 3600, int(seconds) // 86400
    if days:
        return f"{days}d {hours % 24}h"
    if hours:
        return f"{hours}h {minutes % 60}m"
    return f"{minutes}m" if minutes else f"{int(seconds)}s"


def percent(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.1f} %"


def bound(byte_count: int) -> str:
    """A quota or a budget, in which 0 is none."""
    return format_bytes(byte_count) if byte_count else "-"


def used_of(tier: TierOverview) -> str:
    """'3.0 GiB of 1.0 TiB'; without the end for a tier without a bound."""
    budget = f" of {format_bytes(tier.budget_bytes)}" if tier.budget_bytes else ""
    return format_bytes(tier.used_bytes) + budget


def table(*columns: str, fold: Iterable[str] = (), first_folds: bool = True) -> Table:
    """A table without lines. A star before its title marks a column of numbers. When it is too wide, those in `fold`,
    and the first one, take more lines."""
    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    folded = {*fold, *columns[: int(first_folds)]}
    for column in columns:
        name = column.removeprefix("*")
        justify: Any = "left" if name == column else "right"
        made.add_column(name, justify=justify, no_wrap=name not in folded, overflow="fold")
    return made
