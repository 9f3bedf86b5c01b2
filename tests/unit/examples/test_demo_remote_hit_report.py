"""The demos with a remote hit, of vLLM and of SGLang: what they count as shown."""

from __future__ import annotations

from typing import Any

import pytest

from examples.demo.remote_hit_report import CACHE_OFF, Row, shortfalls

PROMPT_TOKENS = 1000


def row(question: int, replica: str, *, said: int = 5, with_cache: bool = True, **hit: int) -> Row:
    """`hit`: tokens by where they came from; the others are computed."""
    sources = {f"{name}_tokens": hit.get(name, 0) for name in ("engine", "pool", "remote")}
    answer: dict[str, Any] = {
        **sources,
        "computed_tokens": PROMPT_TOKENS - sum(hit.values()),
        "prompt_tokens": PROMPT_TOKENS,
        "first_token_seconds": 1.0,
        "token_ids": [said],
        "text": str(said),
    }
    return Row.of(question, replica, answer, with_cache=with_cache)


def played(**changed: Row) -> list[Row]:
    """All as it should be, but for the rows that are given by name."""
    good = {
        "first": row(1, "A"),
        "remote": row(1, "B", remote=990),
        "local": row(1, "B, engine emptied", pool=990),
        "plain": row(1, CACHE_OFF, with_cache=False),
    }
    return list({**good, **changed}.values())


def test_a_demo_that_shows_all_has_no_shortfall() -> None:
    assert shortfalls(played()) == []
    assert shortfalls([*played(), row(2, "B", engine=990), row(2, CACHE_OFF, with_cache=False)]) == []


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (played(remote=row(1, "B")), "no prompt was hit remotely"),
        (played(remote=row(1, "B", remote=400)), "no prompt was hit remotely"),
        (played(local=row(1, "B, engine emptied", engine=990)), "no prompt was hit in the pool of its own node"),
        (played(plain=row(1, CACHE_OFF, with_cache=False, engine=990)), "with the cache off something was hit"),
        (played(remote=row(1, "B", said=6, remote=990)), "B says other tokens to question 1 than with the cache off"),
        (
            played(local=row(1, "B, engine emptied", said=6, pool=990)),
            "B, engine emptied says other tokens to question 1 than with the cache off",
        ),
    ],
)
def test_what_is_not_shown_is_named(found: list[Row], words: str) -> None:
    assert shortfalls(found) == [words]


def test_what_the_first_engine_says_is_not_compared() -> None:
    """It may be another replica's rounding: what counts is B with and without the cache."""
    assert shortfalls(played(first=row(1, "A", said=6))) == []
