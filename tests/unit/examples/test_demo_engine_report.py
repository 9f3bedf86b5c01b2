"""The demo of two reference engines: what it counts as shown."""

from __future__ import annotations

from typing import Any

import pytest

from examples.demo.engine_report import Played, shortfalls

SHOWN = {"load_blocks_remote": 70, "swapped_out": 1, "swapped_in": 1, "copied": 3}


def played(tokens: int = 5, loaded: int = 64, **counters: int) -> Played:
    def engine(said: int) -> dict[str, Any]:
        return {"token_ids": [[said]], "loaded_tokens": [loaded], "counters": {**SHOWN, **counters}}

    return Played(engine(5), engine(tokens), [[5]])


def test_a_demo_that_shows_all_has_no_shortfall() -> None:
    assert shortfalls(played()) == []


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (played(load_blocks_remote=0), "no block crossed to the second engine"),
        (played(loaded=0), "the second engine loaded no prompt"),
        (played(swapped_out=0), "no request was swapped out"),
        (played(swapped_in=0), "no swapped request came back"),
        (played(copied=0), "no block was copied on write"),
        (played(tokens=6), "the second node says other tokens than transformers"),
    ],
)
def test_what_is_not_shown_is_named(found: Played, words: str) -> None:
    assert shortfalls(found) == [words]
