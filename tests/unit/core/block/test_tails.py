"""Rules of core.block.tails: which lengths of a tail have names, and that names of different things differ."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from kvservice.core.block.keys import block_key, chain_hashes
from kvservice.core.block.tails import NO_BLOCK, TAIL_NAMES_MAX, tail_hash, tail_lengths, tail_step, tail_tokens


def test_every_token_of_small_blocks_has_a_tail() -> None:
    assert list(tail_lengths(7, 16)) == [7, 6, 5, 4, 3, 2, 1]
    assert list(tail_lengths(100, 16)) == list(range(15, 0, -1))
    assert list(tail_lengths(0, 16)) == []
    assert [tail_step(tokens) for tokens in (1, 16, 64, 65, 128, 256)] == [1, 1, 1, 2, 2, 4]
    assert list(tail_lengths(11, 256)) == [8, 4]
    assert list(tail_lengths(300, 256))[:2] == [252, 248]


@given(tokens=st.integers(0, 5000), block_tokens=st.integers(1, 4096))
def test_one_question_holds_all_lengths(tokens: int, block_tokens: int) -> None:
    """It also holds the longest tail that a block with so many tokens is stored under."""
    lengths = list(tail_lengths(tokens, block_tokens))
    step = tail_step(block_tokens)
    assert len(lengths) <= TAIL_NAMES_MAX
    assert all(0 < length < block_tokens and length <= tokens and length % step == 0 for length in lengths)
    assert lengths == sorted(lengths, reverse=True)
    longest = tail_tokens(tokens, block_tokens)
    assert longest == (lengths[0] if lengths else 0)
    # The place of a length in the question says how long it is.
    assert all(length == (len(lengths) - place) * step for place, length in enumerate(lengths))


def test_a_tail_has_another_name_than_a_whole_block() -> None:
    """Also than that of a block that ends at the same token, and than a tail of other tokens or after another block."""
    whole = chain_hashes(range(32), 16)
    short = [chain_hashes(range(16, 16 + n), n, after=whole[0])[0] for n in (3, 4)]
    elsewhere = chain_hashes(range(16, 19), 3, after=whole[1])[0]
    names = [tail_hash(whole[1], 16), tail_hash(short[0], 3), tail_hash(short[0], 4), tail_hash(short[1], 4)]
    names.append(tail_hash(elsewhere, 3))
    keys = {block_key(b"print", name) for name in [*whole, *short, NO_BLOCK, *names]}
    assert len(keys) == len(whole) + len(short) + 1 + len(names)
