"""Rules of core.segment.layout: ranks of any degree find their bytes in a slot that ranks of any other degree wrote."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.core.segment.layout import SlotLayout
from kvservice.errors import UnsupportedLayout

LAYOUT = SlotLayout(layer_count=3, kv_head_count=8, cell_bytes=10, block_tokens=16)


def test_sizes_multiply_up() -> None:
    assert LAYOUT.layer_bytes == LAYOUT.part_bytes == 80
    assert LAYOUT.payload_bytes == 240
    assert LAYOUT.part_tokens == 16


def test_parts_lie_side_by_side_in_a_layer_and_share_the_tokens() -> None:
    several = replace(LAYOUT, block_tokens=64, parts=4)
    assert (several.part_bytes, several.layer_bytes, several.payload_bytes) == (80, 320, 960)
    assert several.part_tokens == 16
    with pytest.raises(UnsupportedLayout, match="parts"):
        replace(LAYOUT, parts=3)


def held(layout: SlotLayout, rank_count: int) -> list[int]:
    """How many ranks hold each head."""
    shares = [layout.share(rank, rank_count).heads for rank in range(rank_count)]
    return [sum(head in heads for heads in shares) for head in range(layout.kv_head_count)]


@pytest.mark.parametrize("rank_count", [1, 2, 4, 8])
def test_ranks_cover_every_head_exactly_once(rank_count: int) -> None:
    assert set(held(LAYOUT, rank_count)) == {1}


@pytest.mark.parametrize("rank_count", [16, 32])
def test_ranks_beyond_the_heads_share_them_evenly(rank_count: int) -> None:
    assert set(held(LAYOUT, rank_count)) == {rank_count // 8}


@given(st.integers(1, 4), st.sampled_from([1, 2, 4, 6, 12]), st.integers(1, 5), st.integers(1, 24))
def test_whatever_divides_covers_the_heads(layers: int, heads: int, cell: int, rank_count: int) -> None:
    layout = SlotLayout(layers, heads, cell, 16)
    if heads % rank_count and rank_count % heads:
        with pytest.raises(UnsupportedLayout):
            layout.share(0, rank_count)
        return
    assert set(held(layout, rank_count)) == {max(1, rank_count // heads)}


@pytest.mark.parametrize("rank_count", [3, 5, 12])
def test_heads_that_do_not_divide_are_refused(rank_count: int) -> None:
    with pytest.raises(UnsupportedLayout):
        LAYOUT.share(0, rank_count)


@pytest.mark.parametrize("field", ["layer_count", "kv_head_count", "cell_bytes", "block_tokens", "parts"])
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_must_be_positive(field: str, value: int) -> None:
    sizes = {"layer_count": 1, "kv_head_count": 1, "cell_bytes": 1, "block_tokens": 1, field: value}
    with pytest.raises(UnsupportedLayout, match=field):
        SlotLayout(**sizes)


@given(st.sampled_from([1, 2, 4, 6, 12]), st.integers(1, 4), st.integers(1, 6), st.integers(0, 1 << 24))
def test_each_head_of_a_block_is_written_by_exactly_one_rank(
    heads: int, slots_a_head: int, more: int, slot: int
) -> None:
    """However many heads a rank holds, and however many ranks hold the same ones."""
    layout = SlotLayout(2, heads * slots_a_head, 8, 16)
    for shard_count in (count for count in range(1, heads + 1) if heads % count == 0):
        rank_count = shard_count * more
        shares = [layout.share(rank, rank_count, shard_count) for rank in range(rank_count)]
        written = sorted(head for share in shares if share.writes(slot) for head in share.heads)
        assert written == list(range(layout.kv_head_count))


def test_replicas_take_turns_over_the_slots() -> None:
    shares = [SlotLayout(2, 1, 8, 16).share(rank, 4) for rank in range(4)]
    assert [[share.writes(slot) for share in shares].index(True) for slot in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
