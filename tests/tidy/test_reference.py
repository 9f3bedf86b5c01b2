"""The pages of docs/reference that are made from the code are what the code says."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.pictures import FOLDER as PICTURES
from benchmarks.pictures import drawings
from scripts import architecture_picture
from scripts.reference import cli, metrics
from scripts.reference.pages import FOLDER, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_page_is_current(name: str) -> None:
    assert (FOLDER / name).read_text() == PAGES[name](), "run `make docs-reference`"


def test_no_page_is_left_of_a_group_of_commands_that_went() -> None:
    assert {f"cli/{path.name}" for path in (FOLDER / "cli").glob("*.md")} <= set(cli.PAGES)


def test_each_metric_of_a_shard_is_shown_with_its_labels() -> None:
    """A metric of which the page's made-up shard has no sample would be shown without any."""
    assert [row.name for row in metrics.shard() if not {"service", "node"} <= set(row.labels)] == []


@pytest.mark.parametrize("draw", [drawings, architecture_picture.drawings], ids=["results", "architecture"])
def test_pictures_are_what_results_and_code_draw(draw: Callable[[], dict[str, str]]) -> None:
    drawn = draw()
    assert {name.rpartition("-")[2] for name in drawn} == {"light.svg", "dark.svg"}
    for name, picture in drawn.items():
        assert (PICTURES / name).read_text() == picture, "run `make figures`"
