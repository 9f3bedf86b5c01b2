"""`kvservice top` on the full screen: what a service does now, with the way down to a node, a model or a tenant.

The app reads the overview every second or two on its own event loop. Everything on the screen comes from the last one
that it read, so a slow service never blocks a key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.coordinate import Coordinate
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Static, Tab, Tabs

from kvservice.cli.drawing import percent
from kvservice.cli.top.details import detail_of
from kvservice.cli.top.tables import VIEWS, Cell, Row, TopView
from kvservice.cli.top.trends import NodeRates, Trends
from kvservice.errors import KVServiceError
from kvservice.units import counted, format_bytes, printable

if TYPE_CHECKING:
    from kvservice.client.overview import Overview


@dataclass(frozen=True, slots=True)
class Figure:
    """What a meter shows. Its title is short, because a meter has 18 characters on a terminal of 80."""

    title: str
    say: Callable[[NodeRates], str]
    value: Callable[[NodeRates], float]
    top: float = 0.0  # value of a full column; 0 = the largest that is shown


FIGURES = {
    "hits": Figure("hit rate", lambda one: percent(one.hit_rate), lambda one: one.hit_rate or 0.0, top=1.0),
    "loaded": Figure("loaded", lambda one: per_second(one.hit_bytes), lambda one: one.hit_bytes),
    "stored": Figure("stored", lambda one: per_second(one.stored_bytes), lambda one: one.stored_bytes),
    "read": Figure("read", lambda one: per_second(one.fetched_bytes), lambda one: one.fetched_bytes),
}
CHART_LINES = 3  # of a meter
_EIGHTHS = " ▁▂▃▄▅▆▇█"


def per_second(count: float) -> str:
    return f"{format_bytes(int(count))}/s"


def chart(values: Sequence[float], lines: int, top: float) -> str:
    """Columns from 0 to `top`, in `lines` lines of text."""
    heights = [round(8 * lines * min(value / top, 1.0)) if top else 0 for value in values]
    rows = [
        "".join(_EIGHTHS[max(0, min(8, height - 8 * (lines - 1 - row)))] for height in heights) for row in range(lines)
    ]
    rows[-1] = rows[-1].replace(" ", "▁")  # a line at 0, so that the last minutes are seen to be empty
    return "\n".join(rows)


class OverviewSource(Protocol):
    """Where the overview comes from; called on the app's loop."""

    async def read(self) -> Overview: ...

    async def close(self) -> None: ...


class Meter(Vertical):
    """A figure now, and in the last minutes."""

    def __init__(self, figure: str) -> None:
        super().__init__(id=f"meter-{figure}", classes="meter")
        self._figure = figure
        self._text = Static(classes="figure")
        self._chart = Static(classes="chart")

    def compose(self) -> ComposeResult:
        yield self._text
        yield self._chart

    def show(self, history: list[NodeRates]) -> None:
        figure = FIGURES[self._figure]
        now = history[-1] if history else NodeRates()
        self._text.update(Text.assemble((figure.title, "dim"), " ", (figure.say(now), "bold")), layout=False)
        width = max(self.size.width, 1)
        values = [figure.value(one) for one in history[-width:]]
        values = [0.0] * (width - len(values)) + values
        self._chart.update(Text(chart(values, CHART_LINES, figure.top or max(values)), no_wrap=True), layout=False)


class Rows(DataTable[Text]):
    """A table whose rows can be opened."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "Details")]


class Detail(Screen[None]):
    """Everything about one row. It follows the overview like the first screen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,backspace,left", "app.pop_screen", "Back"),
    ]

    def __init__(self, view: str, key: str) -> None:
        super().__init__()
        self.view = view
        self.key = key
        self._head = Static(id="head")
        self._body = Static()
        self._meters = [Meter(name) for name in FIGURES] if view == "nodes" else []

    def compose(self) -> ComposeResult:
        yield self._head
        if self._meters:
            yield Horizontal(*self._meters, id="meters")
        yield VerticalScroll(self._body, id="body")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#body").focus()
        self.redraw()

    def redraw(self) -> None:
        app = self.app
        assert isinstance(app, TopApp)
        if app.seen is None:
            return
        title, body = detail_of(app.seen, app.trends, self.view, self.key)
        self._head.update(title)
        self._body.update(body)
        for meter in self._meters:
            meter.show(app.trends.history(self.key))


class TopApp(App[None]):
    """The first screen: how the whole service does, and one of the tables in VIEWS."""

    TITLE = "kvservice top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: $background; }
    #head { height: 1; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }
    #meters { height: 5; margin: 1 0 0 0; }
    .meter { width: 1fr; height: 5; padding: 0 1; }
    .figure { height: 1; text-overflow: ellipsis; text-wrap: nowrap; }
    .chart { height: 3; color: $primary; }
    Tabs { margin: 0 0 0 0; }
    Rows { height: 1fr; background: $background; scrollbar-size-horizontal: 0; }
    Rows > .datatable--header { text-style: bold; }
    #problems { height: auto; max-height: 4; padding: 0 1; color: $text-error; }
    #body { padding: 1 1; height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("tab", "next_view(1)", "Next table", key_display="tab", priority=True),
        Binding("s", "sort", "Sort by next column"),
        Binding("r", "reverse", "Reverse"),
        Binding("p", "pause", "Pause"),
        *(Binding(str(number), f"view('{name}')", show=False) for number, name in enumerate(VIEWS, 1)),
        Binding("shift+tab", "next_view(-1)", show=False, priority=True),
    ]

    def __init__(self, source: OverviewSource, seconds: float) -> None:
        super().__init__()
        self._source = source
        self._seconds = seconds
        self._view = next(iter(VIEWS))
        self._paused = False
        self._complaint = ""
        self._shown_problems: tuple[str, ...] = ()
        self.seen: Overview | None = None
        self.trends = Trends()
        self._first_head = Static("Reading …", id="head")
        self._meters = [Meter(name) for name in FIGURES]
        self._tabs = Tabs(
            *(Tab(f"{number} {view.title}", id=name) for number, (name, view) in enumerate(VIEWS.items(), 1))
        )
        self._table = Rows(cursor_type="row", zebra_stripes=True)
        self._problems = Static(id="problems")
        self._sorted: dict[str, tuple[int, bool]] = {name: view.first_sort for name, view in VIEWS.items()}

    def compose(self) -> ComposeResult:
        yield self._first_head
        yield Horizontal(*self._meters, id="meters")
        yield self._tabs
        yield self._table
        yield self._problems
        yield Footer()

    def on_mount(self) -> None:
        self._tabs.can_focus = False
        self._problems.display = False
        self._table.focus()
        self._lay_columns()
        self.follow()

    async def on_unmount(self) -> None:
        await self._source.close()

    # -- reading ----

    @work(exclusive=True)
    async def follow(self) -> None:
        """Read the overview for ever."""
        import asyncio

        while True:
            if not self._paused:
                try:
                    self.seen = await self._source.read()
                    self._complaint = ""
                except KVServiceError as error:
                    self._complaint = error.message
                else:
                    self.trends.add(self.seen)
                self.redraw()
            await asyncio.sleep(self._seconds)

    # -- drawing ----

    def redraw(self) -> None:
        if not self._table.is_attached:  # the app ends
            return
        if self.seen is None:
            self._first_head.update(printable(self._complaint) or "Reading …")
            return
        self._first_head.update(self._head(self.seen), layout=False)
        for meter in self._meters:
            meter.show(self.trends.history())
        problems = (*self.seen.problems, *([self._complaint] if self._complaint else []))
        if problems != self._shown_problems:
            self._shown_problems = problems
            self._problems.update(Text("\n".join(f"! {printable(problem)}" for problem in problems)))
            self._problems.display = bool(problems)
        self._fill_table(self.seen)
        if isinstance(self.screen, Detail):
            self.screen.redraw()

    def _head(self, seen: Overview) -> Text:
        pool = seen.pool
        silent = sum(node.state == "silent" for node in seen.nodes)
        head = Text.assemble(
            ("kvservice ", "bold"),
            (printable(seen.service), "bold cyan"),
            f"  {counted(len(seen.nodes), 'node')}",
            (f" ({silent} silent)" if silent else "", "bold red"),
            f"  {counted(len(seen.engines), 'engine')}",
            f"  memory {pool.used_percent:.0f} % of {format_bytes(pool.total_bytes)} used",
            no_wrap=True,
            overflow="ellipsis",
        )
        if self._paused:
            head.append("  paused", "bold yellow")
        return head

    def _lay_columns(self) -> None:
        place = self._table
        place.clear(columns=True)
        sorted_by, reverse = self._sorted[self._view]
        for index, column in enumerate(self._shown_view.columns):
            mark = (" ▼" if reverse else " ▲") if index == sorted_by else ""
            place.add_column(
                Text(column.title + mark, justify="right" if column.is_number else "left"), key=column.title
            )

    def _fill_table(self, seen: Overview) -> None:
        """Change only what has changed: a terminal over a slow line repaints no more than that."""
        place, columns = self._table, self._shown_view.columns
        rows = {
            row.key: [
                Text(cell.text, style=cell.style, justify="right" if column.is_number else "left", no_wrap=True)
                for cell, column in zip(row.cells, columns, strict=True)
            ]
            for row in self._rows(seen)
        }
        if list(rows) == [row.key.value for row in place.ordered_rows]:
            for number, cells in enumerate(rows.values()):
                for index, cell in enumerate(cells):
                    if place.get_cell_at(Coordinate(number, index)) != cell:
                        place.update_cell_at(Coordinate(number, index), cell, update_width=True)
            return
        chosen, scroll = self._key_at(place.cursor_row), place.scroll_offset
        place.clear()
        for key, cells in rows.items():
            place.add_row(*cells, key=key)
        if chosen in rows:
            place.move_cursor(row=list(rows).index(chosen), animate=False, scroll=False)
            place.scroll_to(scroll.x, scroll.y, animate=False)

    def _rows(self, seen: Overview) -> list[Row]:
        index, reverse = self._sorted[self._view]
        rows = self._shown_view.rows(seen, self.trends)

        def place_of(row: Row) -> Any:
            cell: Cell = row.cells[index]
            return cell.sort_by

        return sorted(rows, key=place_of, reverse=reverse)

    @property
    def _shown_view(self) -> TopView:
        return VIEWS[self._view]

    def _key_at(self, row: int) -> str | None:
        place = self._table
        if not place.is_valid_coordinate(Coordinate(row, 0)):
            return None
        return place.coordinate_to_cell_key(Coordinate(row, 0)).row_key.value

    # -- keys ----

    def action_sort(self) -> None:
        index, _ = self._sorted[self._view]
        index = (index + 1) % len(self._shown_view.columns)
        self._sorted[self._view] = (index, self._shown_view.columns[index].is_number)
        self._show_again()

    def action_reverse(self) -> None:
        index, reverse = self._sorted[self._view]
        self._sorted[self._view] = (index, not reverse)
        self._show_again()

    def action_pause(self) -> None:
        self._paused = not self._paused
        self.redraw()

    def action_view(self, name: str) -> None:
        self._tabs.active = name

    def action_next_view(self, step: int) -> None:
        names = list(VIEWS)
        self.action_view(names[(names.index(self._view) + step) % len(names)])

    def on_tabs_tab_activated(self, event: Tabs.TabActivated) -> None:
        name = event.tab.id
        if name is not None and name != self._view:
            self._view = name
            self._show_again()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        if event.row_key.value is not None and self.seen is not None:
            self.push_screen(Detail(self._view, event.row_key.value))

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        index, reverse = self._sorted[self._view]
        same = event.column_index == index
        is_number = self._shown_view.columns[event.column_index].is_number
        self._sorted[self._view] = (event.column_index, not reverse if same else is_number)
        self._show_again()

    def _show_again(self) -> None:
        self._lay_columns()
        if self.seen is not None:
            self._fill_table(self.seen)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Sorting and tables are of the first screen only."""
        return not (isinstance(self.screen, Detail) and action in ("sort", "reverse", "view", "next_view"))
