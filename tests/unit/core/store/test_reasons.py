"""A reason is a number in the eviction history, and words for people."""

from __future__ import annotations

import itertools

import pytest

from kvservice.core.store.kinds import KINDS, PAUSES, PRIVATE, SHARED, Expected, kind_of
from kvservice.core.store.reasons import NOT_BY_WORTH, REASONS, describe_reason, reason_of
from kvservice.core.store.worths import AGES


def test_every_reason_is_a_number_of_its_own_and_has_words() -> None:
    found = {
        reason_of(kind, age, is_secondary=is_secondary)
        for kind, age, is_secondary in itertools.product(range(KINDS), range(AGES), (False, True))
    }
    assert found == set(range(1, REASONS))
    assert all(describe_reason(reason) for reason in found)


def test_where_worth_did_not_choose_nothing_is_said() -> None:
    assert describe_reason(NOT_BY_WORTH) == ""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (kind_of(0, 0, 0, 0, 0), "a block of a prompt that nobody has continued"),
        (kind_of(1, 0, 2, 1, 2), "a block of the beginning of a prompt, used again once, the last two 4 to 15 prompts"),
        (kind_of(0, 1, 0, 1, 2), "a block of a conversation of 2 turns, the last two 4 to 15 prompts apart"),
        (kind_of(2, 3, 1, 5, 1), "a block of a conversation of 5 to 8 turns, the last two 1 to 3 prompts apart"),
        (kind_of(0, 9, 0, 20, PAUSES - 1), "a block of a conversation of 9 or more turns, the last two 16,384 or more"),
        (
            kind_of(0, 1, 0, 1, 2, Expected.LAST_TURN),
            "a block of a conversation of 2 turns, its last, as a client",
        ),
        (
            kind_of(0, 0, 0, 0, 0, Expected.SOON),
            "a block of a prompt that nobody has continued, needed soon",
        ),
        (kind_of(7, 0, 3, 2, 0), "a shared block, used again 4 to 7 times, the last two 16 to 63 prompts apart"),
        (kind_of(999, 0, 3, 2, 0), "a shared block, used again 16 or more times, the last two 16 to 63 prompts apart"),
    ],
)
def test_a_kind_is_said_in_words(kind: int, words: str) -> None:
    assert describe_reason(reason_of(kind, 2, is_secondary=False)).startswith(
        f"of the blocks that could go it was expected to bring the fewest hits: {words}"
    )


@pytest.mark.parametrize(
    ("age", "words"),
    [(1, "for 1 prompt"), (4, "for 4 prompts"), (7, "for 11 to 15 prompts"), (AGES - 1, " prompts or more")],
)
def test_an_age_is_said_in_prompts(age: int, words: str) -> None:
    said = describe_reason(reason_of(PRIVATE, age, is_secondary=False))
    assert ", not used for " in said and said.endswith(words)


def test_a_copy_of_another_nodes_block_is_called_that() -> None:
    said = describe_reason(reason_of(SHARED * PAUSES, 0, is_secondary=True))
    assert said.startswith("of the copies of blocks that another node has it was expected")
