"""What `kvservice blocks` chooses, sorts and says."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from kvservice.cli import blocks
from kvservice.cli.blocks import SORTS, Selection, arrange, check, choose_nodes, draw, silent_nodes
from kvservice.cli.commands.look import Order
from kvservice.cli.output import Format
from kvservice.client.block_list import BlockList, BlockRow
from kvservice.client.members import Members
from kvservice.errors import ConfigError, NoService

ROW = BlockRow(
    "n0", 7, "sealed", 737_280, "search", "4f2a9c" + 26 * "0", "Llama", 3, "primary", "memory", 120.0, 60.0, 2
)
ROWS = (ROW, replace(ROW, slot=8, uses=9, position=4), replace(ROW, slot=9, key="", copy="", state="reserved"))


def shown(found: BlockList, selected: Selection, *, wide: bool = False) -> str:
    out = io.StringIO()
    Console(width=120, file=out, highlight=False).print(draw(found, selected, wide))
    return out.getvalue()


def test_a_block_is_a_line_and_a_slot_without_one_says_so() -> None:
    head, first, _, reserved, summary = shown(BlockList(ROWS, True, ()), Selection()).splitlines()
    assert head.startswith("key           node  model  tenant  state     tier    position")
    assert first.split()[:9] == ["4f2a9c000000", "n0", "Llama", "search", "sealed", "memory", "3", "720.0", "KiB"]
    assert first.split()[9:] == ["2m", "1m", "2"]
    assert reserved.split()[-6:] == ["-", "720.0", "KiB", "-", "-", "-"]
    assert summary == "3 shown, all that match."


def test_a_usual_terminal_shows_a_block_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal wraps it. A table of 80 characters had the names one letter below the other."""
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("COLUMNS", "80")
    row = replace(ROW, node_id="526d7a5fe830", model="meta-llama/Llama-3.3-70B")
    monkeypatch.setattr(blocks, "collect", lambda *_: BlockList((row,), True, ()))
    blocks.run(None, None, Selection(), Format.TABLE)
    assert "4f2a9c000000  526d7a5fe830  meta-llama/Llama-3.3-70B  search" in screen.getvalue()


@pytest.mark.parametrize("wrong", [Selection(state=("molten",)), Selection(key="xyz"), Selection(key=33 * "a")])
def test_a_choice_that_nothing_can_match_is_refused(wrong: Selection) -> None:
    with pytest.raises(ConfigError):
        check(wrong)


def test_wide_shows_whole_keys_and_copies() -> None:
    text = shown(BlockList(ROWS, True, ()), Selection(), wide=True)
    assert ROW.key in text and "primary" in text


def test_the_largest_come_first_and_no_more_than_asked_for() -> None:
    found = arrange(BlockList(ROWS, True, ()), Selection(sort="uses", limit=2))
    assert ([row.uses for row in found.blocks], found.complete) == ([9, 2], False)
    assert "there are more" in shown(found, Selection(limit=2))
    unsorted = arrange(BlockList(ROWS, True, ()), Selection())
    assert (unsorted.blocks, unsorted.complete) == (ROWS, True)


def test_every_order_of_the_command_line_can_be_sorted_by() -> None:
    assert {order.value for order in Order} == set(SORTS)


def test_a_node_is_chosen_by_the_beginning_of_its_id() -> None:
    members = Members("s", {"526d7a": "a", "526f00": "b"}, (), {}, (), (), None)
    assert choose_nodes(members, "526d") == {"526d7a": "a"}
    assert choose_nodes(members, None) == members.shards
    with pytest.raises(ConfigError, match="526d7a, 526f00"):
        choose_nodes(members, "x")


def test_a_node_that_was_just_killed_is_told_of_once() -> None:
    """Nobody listens there, and the directory does not know it yet: it is asked, and that says what is wrong."""
    members = Members("s", {"n0": "a"}, (), {"n0": "a", "n1": "b"}, (), (), None, hidden={"n2": "c"})
    assert silent_nodes(members, None) == ("node n1 is silent", "node n2 is silent")


def test_a_service_without_a_shard_that_answers_is_none() -> None:
    members = Members("s", {}, (), {"n0": "a", "n1": "b"}, (), (), None)
    for wanted in (None, "", "n0"):
        with pytest.raises(NoService, match="no shard of service 's' answers: n0, n1 are silent"):
            choose_nodes(members, wanted)
    with pytest.raises(NoService, match="answers: n0 is silent"):
        choose_nodes(replace(members, gone={"n0": "a"}), None)
    with pytest.raises(NoService, match=r"answers$"):
        choose_nodes(replace(members, gone={}), None)


def test_names_of_others_are_shown_and_do_nothing() -> None:
    row = replace(ROW, model="[red]\x1b[2J", tenant="[/]")
    text = shown(BlockList((row,), True, ("node n1: [b]\x1b",)), Selection())
    assert "\x1b" not in text and "[red]" in text and "[b]" in text


def test_nothing_found_is_said() -> None:
    assert shown(BlockList((), True, ()), Selection()).strip() == "No block matches."
