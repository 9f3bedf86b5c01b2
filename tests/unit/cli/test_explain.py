"""What `kvservice explain` says when there is no record of the request."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from kvservice.cli.explain import draw


def said(**changes: object) -> str:
    nothing: dict[str, Any] = {
        "asked_for": "cmpl-1",
        "requests": [],
        "candidates": [],
        "keep_seconds": 600.0,
        "refused_engines": [],
        "silent_nodes": [],
        "unreadable": [],
        "silent_lookups": [],
        "hints": [],
        "hosts": {},
    }
    console = Console(width=400, no_color=True, file=io.StringIO())
    console.print(draw({**nothing, **changes}))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_a_request_that_no_node_remembers_says_for_how_long() -> None:
    assert "A node keeps records for 10 minutes" in said()


def test_without_an_answer_no_time_is_named() -> None:
    told = said(keep_seconds=0.0, silent_nodes=["a"])
    assert "no node answered, so nothing is known of a request 'cmpl-1'" in told and "minutes" not in told
    assert "node a did not answer" in told


def test_what_cannot_be_read_is_left_out_and_named() -> None:
    assert "left out, because it cannot be read: engines of m" in said(unreadable=["engines of m"])


ROW = {
    "node": "a",
    "model": "m",
    "age_seconds": 1.0,
    "answered": True,
    "took_seconds": 0.01,
    "handoff_node": "",
    "finished": True,
    "report": {"asked": True},
    "blocks_asked": 2_000,
    "blocks": {"engine": 0, "local": 0, "fetched": 2_000, "missed": 0},
    "diagnosis": [],
}


def test_a_request_that_did_not_ask_is_not_unanswered() -> None:
    """The client had its answer; the word is for a question to the pool that nobody has answered yet."""
    for end, words in (
        ({"asked": False}, "and its engine did not ask"),
        ({"asked": True}, "given up before it was answered"),
        (None, "never answered"),
    ):
        told = said(requests=[{**ROW, "answered": False, "report": end}], request_id="c")
        assert f"1.0 s ago, {words}" in told
    short = {**ROW, "answered": False, "report": {"asked": False}, "blocks_asked": 0}
    assert "shorter than a block" in said(requests=[short], request_id="c")


def test_a_tier_is_a_source_in_words() -> None:
    fetched = {"start": 0, "count": 2_000, "outcome": "fetched", "node": "~disk", "miss_cause": None, "text": ""}
    told = said(requests=[{**ROW, "diagnosis": [fetched]}], request_id="cmpl-1")
    assert "disk tier" in told and "~" not in told
    assert "2,000 blocks asked: 0 in the engine, 0 local, 2,000 fetched" in told
