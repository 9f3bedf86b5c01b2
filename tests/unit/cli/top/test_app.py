"""The screen of `kvservice top`, driven by keys as people drive it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from textual.widgets import DataTable, Static

from kvservice.cli.top.app import Detail, TopApp
from kvservice.client.overview import Overview
from kvservice.errors import Unavailable
from kvservice.testing.eventually import eventually_async
from tests.unit.cli.overviews import make_node, make_overview, make_tiers


class Canned:
    """A service whose counters grow with every reading. `broken` makes it fail."""

    def __init__(self, **changes: object) -> None:
        self.readings = 0
        self.broken = False
        self.closed = False
        self._changes = changes

    async def read(self) -> Overview:
        self.readings += 1
        if self.broken:
            raise Unavailable("the service is [bold]away")
        nodes = (
            replace(make_node(0, 800 * self.readings), tiers=make_tiers()[:1]),
            make_node(1, 400 * self.readings),
            make_node(2, state="silent"),
        )
        return replace(make_overview(nodes), at=1000.0 + self.readings, **self._changes)  # type: ignore[arg-type]

    async def close(self) -> None:
        self.closed = True


def column(app: TopApp, index: int) -> list[str]:
    table = app.screen_stack[0].query_one(DataTable)
    return [str(table.get_cell_at((row, index))) for row in range(table.row_count)]  # type: ignore[arg-type]


def text_of(app: TopApp, selector: str) -> str:
    return str(app.screen.query_one(selector, Static).render())


async def settled(app: TopApp, source: Canned, readings: int = 2) -> None:
    wanted = source.readings + readings
    await eventually_async(lambda: source.readings >= wanted, "further readings")


async def test_rows_are_sorted_and_the_cursor_stays_with_its_row() -> None:
    source = Canned()
    app = TopApp(source, 0.2)
    async with app.run_test(size=(120, 30)) as pilot:
        await settled(app, source)
        assert column(app, 0) == ["526d7a5fe832", "gpu-a.rack1", "gpu-b.rack1"]
        await pilot.press("down")
        await pilot.press("r")
        assert column(app, 0) == ["gpu-b.rack1", "gpu-a.rack1", "526d7a5fe832"]
        for _ in range(5):
            await pilot.press("s")  # to loaded/s
        await settled(app, source)
        assert column(app, 0) == ["gpu-a.rack1", "gpu-b.rack1", "526d7a5fe832"]
        assert column(app, 5) == ["800.0 MiB", "800.0 MiB", "-"]
        await pilot.press("enter")
        assert isinstance(app.screen, Detail) and app.screen.key == "526d7a5fe830"


BEHIND = {
    "1": ("gpu-b.rack1", "Node gpu-b.rack1 (526d7a5fe831)"),
    "2": ("meta-llama/Llama-3.3-70B-Instruct", "Model meta-llama"),
    "3": ("a0b3c4d5", "Engine a0b3c4d5"),
    "4": ("search", "Tenant search"),
    "5": ("cmpl-6f2a9c0e1", "Request cmpl-6f2a9c0e1"),
    "6": ("gpu-a.rack1", "Tier disk  of gpu-a.rack1"),
}


async def test_each_table_leads_to_what_is_behind_a_row() -> None:
    source = Canned()
    app = TopApp(source, 0.2)
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(app, source)
        for key, (row, said) in BEHIND.items():
            await pilot.press(key)
            await pilot.pause()
            await pilot.press(*["down"] * column(app, 0).index(row), "enter")
            await settled(app, source, 1)
            assert said in text_of(app, "#head")
            await pilot.press("s", "2")  # keys of the first screen do nothing here
            await pilot.press("escape")
            assert not isinstance(app.screen, Detail) and row in column(app, 0)


async def test_pause_stops_reading_and_says_so() -> None:
    source = Canned()
    app = TopApp(source, 0.2)
    async with app.run_test(size=(120, 30)) as pilot:
        await settled(app, source)
        await pilot.press("p")
        assert "paused" in text_of(app, "#head")
        before = source.readings
        await pilot.pause(0.5)
        assert source.readings <= before + 1
        await pilot.press("p")
        await settled(app, source)


async def test_a_failing_reading_is_shown_and_the_last_picture_stays() -> None:
    source = Canned()
    app = TopApp(source, 0.2)
    async with app.run_test(size=(120, 30)):
        await settled(app, source)
        source.broken = True
        await settled(app, source)
        assert "the service is [bold]away" in text_of(app, "#problems")
        assert len(column(app, 0)) == 3


async def test_names_of_others_are_shown_and_do_nothing() -> None:
    source = Canned(service="[red]evil\x1b[2J", models=make_overview(model="[/]\x1b").models)
    app = TopApp(source, 0.2)
    async with app.run_test(size=(120, 30)) as pilot:
        await settled(app, source)
        assert "[red]evil\\x1b[2J" in text_of(app, "#head")
        await pilot.press("2")
        await pilot.pause()
        assert column(app, 0) == ["[/]\\x1b"]


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
async def test_q_and_ctrl_c_end_it(key: str) -> None:
    source = Canned()
    app = TopApp(source, 0.2)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(app, source)
        await pilot.press("enter")  # also from a screen further down
        await pilot.press(key)
        await pilot.pause()
        assert not app.is_running or app._exit
    assert source.closed and app.return_code == 0
