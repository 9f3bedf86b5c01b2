"""What `kvservice clear` says of a name that nobody knows, and of names that it does not know."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvservice.cli import clear, tenant_usage
from kvservice.cli.clear import ClearedNode, ClearReport, Scope
from kvservice.cli.tenant_usage import Held, Usage
from kvservice.errors import ConfigError
from tests.unit.cli.overviews import MODEL, make_node, make_overview

SEEN = make_overview([make_node(0), make_node(1)])

USAGE = [Held("search", "a", 1, 0, 0, 0, 0)]


def said(monkeypatch: pytest.MonkeyPatch, wanted: Scope, *, found: bool = False, complete: bool = True) -> str:
    """What a clear prints that found a block or none."""
    report = ClearReport((ClearedNode("a"),), (), complete)

    async def cleared(*_: object) -> tuple[ClearReport, bool]:
        return report, found

    console = Console(width=200, no_color=True, file=io.StringIO())
    monkeypatch.setattr(clear, "_clear", cleared)
    monkeypatch.setattr(clear, "collect", lambda *_: SEEN)
    monkeypatch.setattr(tenant_usage, "collect", lambda *_: Usage(USAGE))
    monkeypatch.setattr(clear, "write", lambda made, draw, _: console.print(draw(made, False)))
    assert clear.run(None, None, wanted, 0.0) is complete
    file: Any = console.file
    return str(file.getvalue())


@pytest.mark.parametrize(
    ("wanted", "note"),
    [
        (Scope(model="nope"), f"no node knows a model 'nope'; known: {MODEL}"),
        (Scope(tenant="nope"), "no node knows a tenant 'nope'; known: search"),
        (Scope(namespace="nope"), "no node knows a namespace 'nope'; known: none"),
    ],
)
def test_a_clear_of_an_unknown_name_says_so(monkeypatch: pytest.MonkeyPatch, wanted: Scope, note: str) -> None:
    assert note in said(monkeypatch, wanted)


@pytest.mark.parametrize("wanted", [Scope(model=MODEL), Scope(tenant="search"), Scope(namespace="")])
def test_a_clear_of_a_known_name_is_just_complete(monkeypatch: pytest.MonkeyPatch, wanted: Scope) -> None:
    assert "no node knows" not in said(monkeypatch, wanted)


def test_a_clear_that_found_blocks_doubts_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no node knows" not in said(monkeypatch, Scope(model="nope"), found=True)
    assert "no node knows" not in said(monkeypatch, Scope(model="nope"), complete=False)
    assert "no node knows" not in said(monkeypatch, Scope(everything=True))


@pytest.mark.parametrize("found", [True, False])
def test_a_clear_of_prompts_says_what_it_cannot_name(monkeypatch: pytest.MonkeyPatch, *, found: bool) -> None:
    """It said that every node had forgotten a prompt that was computed with new weights."""
    wanted = Scope(prompt=Path("prompts.jsonl"), model=MODEL)
    assert "behind a change of weights in place" in said(monkeypatch, wanted, found=found)
    assert "change of weights" not in said(monkeypatch, Scope(model=MODEL), found=found)


def test_without_engines_no_names_are_listed() -> None:
    nobody = replace(SEEN, engines=(), hits=())
    assert clear.doubt(Scope(model="nope"), nobody).endswith("known: none")


def test_no_tenant_is_cleared_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block is of no known tenant there, so each of them would go."""
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match=r"no tenants.*--everything"):
        patch.setattr("tests.unit.cli.test_clear.USAGE", [])
        said(patch, Scope(tenant="nope"))
