"""How long a hit can be when some layers see a window only: the rules, and a model that tries every length."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.core.block.window_groups import WINDOW_GROUPS_MAX, Window, group_key, longest_whole
from kvservice.errors import UnsupportedLayout
from kvservice.testing.builders import make_chain
from kvservice.units import BlockKey

BLOCK = 16


@pytest.mark.parametrize(
    ("window", "count", "first"),
    [
        (Window(sliding_tokens=33), 10, 8),  # the 32 tokens before the end
        (Window(sliding_tokens=34), 10, 7),  # one more is in the block before them
        (Window(sliding_tokens=33), 1, 0),
        (Window(sliding_tokens=1), 10, 10),  # a layer that sees its own token only needs nothing
        (Window(sliding_tokens=1000), 10, 0),
        (Window(chunk_tokens=64), 10, 8),
        (Window(chunk_tokens=64), 8, 8),  # the next token begins a chunk
        (Window(chunk_tokens=40), 3, 2),  # a chunk may begin within a block
        (Window(is_state=True), 10, 9),  # what is left of all tokens lies with the last one
        (Window(is_state=True), 1, 0),
        (Window(is_state=True), 0, 0),
    ],
)
def test_blocks_from_the_first_token_that_is_read_are_needed(window: Window, count: int, first: int) -> None:
    assert window.first_block(count, BLOCK) == first


@pytest.mark.parametrize("wrong", [(0, 0), (5, 5), (-1, 0), (0, -3), (5, 0, True), (0, 3, True), (-1, 0, True)])
def test_window_is_sliding_or_a_chunk_or_a_state(wrong: tuple[Any, ...]) -> None:
    with pytest.raises(UnsupportedLayout):
        Window(*wrong)


@pytest.mark.parametrize(
    ("missing", "hit"),
    [
        (set(), 10),
        ({9}, 9),  # the last block: the window before it counts
        ({8}, 8),
        ({7}, 10),  # outside the window of the end
        ({9, 8}, 8),
        ({9, 7}, 7),
        ({8, 6, 4, 2}, 2),
        (set(range(10)), 0),
        (set(range(1, 10)), 1),  # less than a window, and all of it is here
    ],
)
def test_gap_in_the_window_ends_the_hit_before_it(missing: set[int], hit: int) -> None:
    first = partial(Window(sliding_tokens=2 * BLOCK + 1).first_block, block_tokens=BLOCK)
    assert longest_whole(10, [first], [lambda i: i not in missing]) == hit


def test_every_group_must_have_its_window() -> None:
    short = partial(Window(sliding_tokens=BLOCK + 1).first_block, block_tokens=BLOCK)
    long = partial(Window(sliding_tokens=3 * BLOCK + 1).first_block, block_tokens=BLOCK)
    assert longest_whole(10, [short, long], [lambda i: i != 9, lambda i: i != 5]) == 9
    assert longest_whole(10, [short, long], [lambda i: i != 9, lambda i: i != 7]) == 7
    assert longest_whole(10, [], []) == 10


windows = st.one_of(
    st.integers(1, 120).map(lambda n: Window(sliding_tokens=n)),
    st.integers(1, 120).map(lambda n: Window(chunk_tokens=n)),
    st.just(Window(is_state=True)),
)


@given(st.integers(0, 12), st.lists(st.tuples(windows, st.sets(st.integers(0, 11))), max_size=3))
def test_hit_is_the_longest_that_trying_every_length_finds(count: int, groups: list[tuple[Window, set[int]]]) -> None:
    def complete(hit: int) -> bool:
        # Token by token: what is read of the hit when its next token is computed lies in blocks that are there.
        return all(
            token // BLOCK in here
            for window, here in groups
            for token in range(window.first_token(hit * BLOCK), hit * BLOCK)
        )

    firsts = [partial(window.first_block, block_tokens=BLOCK) for window, _ in groups]
    found = longest_whole(count, firsts, [here.__contains__ for _, here in groups])
    assert found == max(hit for hit in range(count + 1) if complete(hit))


def test_keys_of_a_chain_and_of_its_groups_are_all_different() -> None:
    chain = make_chain(40)
    keys = [*chain, *(group_key(key, group) for key in chain for group in range(1, WINDOW_GROUPS_MAX + 1))]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {16}


def test_keys_of_a_group_are_the_same_in_every_release() -> None:
    """They name blocks between nodes: a change makes every stored window unknown."""
    assert group_key(BlockKey(bytes(range(16))), 1).hex() == "a64477c8abe80edc3c7d5a8e3b16097d"
