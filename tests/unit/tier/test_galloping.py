"""Where a stored prefix ends is found in few rounds, and never behind a hole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvservice.tier.galloping import first_looks, narrowed, next_looks


def search(there: list[bool]) -> tuple[int, int, int]:
    """(blocks found, rounds, looks)"""
    low, high = 0, len(there)
    looks, rounds, total = first_looks(low, high), 0, 0
    while looks:
        assert all(low <= index < high for index in looks)
        rounds, total = rounds + 1, total + len(looks)
        low, high = narrowed(low, high, {index: there[index] for index in looks})
        looks = next_looks(low, high)
    return low, rounds, total


def test_every_end_is_found_in_four_rounds() -> None:
    for count in (0, 1, 2, 3, 50, 333):
        for end in range(count + 1):
            found, rounds, _ = search([True] * end + [False] * (count - end))
            assert found == end and rounds <= 3
    for end in range(0, 4097, 61):
        found, rounds, looks = search([True] * end + [False] * (4096 - end))
        assert found == end and rounds <= 4 and looks <= 64


def test_a_whole_prefix_and_none_take_one_round() -> None:
    assert search([True] * 1000)[:2] == (1000, 1)
    assert search([False] * 1000)[:2] == (0, 1)


@given(st.lists(st.booleans(), max_size=200))
def test_a_hole_is_never_promised_where_it_was_seen(there: list[bool]) -> None:
    """With holes the answer may be any beginning whose last block was seen; nothing seen absent is before it."""
    found, _, _ = search(there)
    assert found <= len(there) and (found == 0 or there[found - 1])
    assert found == len(there) or not there[found]


def test_what_is_not_known_narrows_nothing() -> None:
    assert narrowed(0, 10, {0: None, 4: True, 7: None, 8: False}) == (5, 8)
    assert narrowed(0, 10, {4: True, 2: False}) == (0, 2)
