"""Copy descriptors against the plainest model there is: every element by its strides, one at a time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.core.segment.copy_runs import (
    BYTES_MAX,
    CopyTemplate,
    Descriptors,
    DirectTemplate,
    RegionLayout,
    merge_runs,
    through_staging,
)
from kvservice.core.segment.layout import SlotLayout
from kvservice.errors import InvalidRequest, UnsupportedLayout

NAMES = "lbphn"  # layer, block, part, head, token; the cell is innermost


@st.composite
def layouts(draw: st.DrawFn) -> tuple[RegionLayout, SlotLayout]:
    """A region whose dimensions lie in any order, with or without a gap at its start."""
    order = draw(st.permutations(NAMES))
    size = {name: draw(st.integers(1, 3)) for name in NAMES}
    cell = draw(st.integers(1, 3))
    gap = draw(st.integers(0, 5))
    stride, step = {}, cell
    for name in reversed(order):
        stride[name] = step
        step *= size[name]
    first_head, rest = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    region = RegionLayout(
        region_bytes=gap + step,
        block_count=size["b"],
        layer_offsets=tuple(gap + layer * stride["l"] for layer in range(size["l"])),
        parts=size["p"],
        heads=size["h"],
        tokens=size["n"],
        cell_bytes=cell,
        block_stride=stride["b"],
        part_stride=stride["p"],
        head_stride=stride["h"],
        token_stride=stride["n"],
        first_head=first_head,
    )
    tokens, parts = size["n"] * size["p"], draw(st.integers(1, 3))
    slot = SlotLayout(size["l"], first_head + size["h"] + rest, tokens * cell, tokens * parts, parts)
    return region, slot


def model(region: RegionLayout, slot: SlotLayout, blocks: list[int], payloads: list[int]) -> dict[int, int]:
    """Engine byte -> segment byte."""
    found: dict[int, int] = {}
    for block, payload in zip(blocks, payloads, strict=True):
        for layer, part, head, token, byte in itertools.product(
            range(len(region.layer_offsets)),
            range(region.parts),
            range(region.heads),
            range(region.tokens),
            range(region.cell_bytes),
        ):
            engine = (
                region.layer_offsets[layer]
                + block * region.block_stride
                + part * region.part_stride
                + head * region.head_stride
                + token * region.token_stride
                + byte
            )
            inside = ((part * region.tokens) + token) * region.cell_bytes + byte
            found[engine] = payload + layer * slot.layer_bytes + (region.first_head + head) * slot.cell_bytes + inside
    return found


def bytes_of(runs: Descriptors) -> dict[int, int]:
    found: dict[int, int] = {}
    for engine, segment, length in zip(runs.engine, runs.segment, runs.lengths, strict=True):
        assert not found.keys() & set(range(engine, engine + length)), "an engine byte is in two runs"
        found.update(zip(range(engine, engine + length), range(segment, segment + length), strict=True))
    return found


@given(layouts(), st.data())
def test_runs_are_exactly_the_bytes_of_the_blocks(given_layouts: tuple[RegionLayout, SlotLayout], data: st.DataObject):
    region, slot = given_layouts
    blocks = data.draw(st.lists(st.integers(0, region.block_count - 1), unique=True, max_size=region.block_count))
    places = data.draw(st.permutations(range(8 * slot.parts)))[: len(blocks)]  # any part of any of eight slots
    payloads = [place // slot.parts * slot.payload_bytes + place % slot.parts * slot.part_bytes for place in places]
    runs = CopyTemplate(region, slot).expand(blocks, payloads)
    assert bytes_of(runs) == model(region, slot, blocks, payloads)
    joined = merge_runs(runs.engine, runs.segment, runs.lengths)
    assert joined.engine.size == runs.engine.size, "two neighbours are still one run"
    assert runs.byte_count == len(blocks) * len(region.layer_offsets) * region.heads * slot.cell_bytes


@given(layouts(), st.data())
def test_whole_slots_come_in_the_order_of_their_bytes(
    given_layouts: tuple[RegionLayout, SlotLayout], data: st.DataObject
) -> None:
    """So that a digest over the runs is the digest of the slot, whoever merged them."""
    region, slot = given_layouts
    template = CopyTemplate(region, slot)
    count = region.block_count // slot.parts
    blocks = data.draw(st.permutations(range(region.block_count)))[: count * slot.parts]
    places = data.draw(st.permutations(range(8)))[:count]
    payloads = [place * slot.payload_bytes for place in places]
    runs, ends = template.expand_by_slot(blocks, payloads[: len(blocks) // slot.parts])
    parts = [payload + part * slot.part_bytes for payload in payloads for part in range(slot.parts)]
    assert bytes_of(runs) == model(region, slot, blocks, parts)
    begin = 0
    for payload, end in zip(payloads, ends.tolist(), strict=True):
        segment, lengths = runs.segment[begin:end], runs.lengths[begin:end]
        assert (segment[1:] >= segment[:-1] + lengths[:-1]).all() and segment[0] >= payload
        if template.fills_slots:
            assert segment[0] == payload and lengths.sum() == slot.payload_bytes
            assert (segment[1:] == segment[:-1] + lengths[:-1]).all()
        begin = end
    assert begin == runs.lengths.size
    assert template.fills_slots == (region.heads == slot.kv_head_count)


@given(layouts(), st.integers(0, 64))
def test_rounds_through_a_small_buffer_carry_the_same_bytes(
    given_layouts: tuple[RegionLayout, SlotLayout], spare: int
) -> None:
    region, slot = given_layouts
    blocks = list(range(region.block_count))
    runs = CopyTemplate(region, slot).expand(blocks, [block * slot.payload_bytes for block in reversed(blocks)])
    limit = int(runs.lengths.max()) + spare
    found: dict[int, int] = {}
    for gathered, carried in through_staging(runs, limit):
        assert int((carried.engine + carried.lengths).max()) <= limit
        to_segment = bytes_of(carried)
        found |= {engine: to_segment[buffer] for engine, buffer in bytes_of(gathered).items()}
    assert found == bytes_of(runs)


def reordered(region: RegionLayout, order: list[str]) -> RegionLayout:
    """The same blocks in another physical order."""
    counts = (len(region.layer_offsets), region.block_count, region.parts, region.heads, region.tokens)
    size = dict(zip(NAMES, counts, strict=True))
    stride, step = {}, region.cell_bytes
    for name in reversed(order):
        stride[name] = step
        step *= size[name]
    offsets = tuple(layer * stride["l"] for layer in range(size["l"]))
    return RegionLayout(
        step,
        size["b"],
        offsets,
        size["p"],
        size["h"],
        size["n"],
        region.cell_bytes,
        stride["b"],
        stride["p"],
        stride["h"],
        stride["n"],
        region.first_head,
    )


@given(layouts(), st.permutations(NAMES), st.data())
def test_direct_copy_is_a_store_and_a_load_without_the_slot(
    given_layouts: tuple[RegionLayout, SlotLayout], order: list[str], data: st.DataObject
) -> None:
    region, slot = given_layouts
    other = reordered(region, order)
    blocks = data.draw(st.lists(st.integers(0, region.block_count - 1), unique=True, min_size=1))
    targets = data.draw(st.permutations(range(region.block_count)))[: len(blocks)]
    payloads = [index * slot.payload_bytes for index in range(len(blocks))]
    to_slot = model(region, slot, blocks, payloads)
    from_slot = {segment: engine for engine, segment in model(other, slot, targets, payloads).items()}
    runs = DirectTemplate(CopyTemplate(region, slot), CopyTemplate(other, slot)).expand(blocks, targets)
    assert bytes_of(runs) == {from_slot[segment]: engine for engine, segment in to_slot.items()}


def test_direct_copy_between_ranks_with_other_heads_is_refused() -> None:
    slot = SlotLayout(1, 2, 32, 2)
    first, second = (CopyTemplate(RegionLayout(96, 3, (0,), 1, 1, 2, 16, 32, 0, 0, 16, head), slot) for head in (0, 1))
    with pytest.raises(UnsupportedLayout):
        DirectTemplate(first, second)


def test_neighbouring_blocks_in_neighbouring_slots_are_one_copy() -> None:
    cell, layers, tokens = 64, 4, 8
    block = cell * layers * tokens
    region = RegionLayout(
        block * 10, 10, tuple(layer * cell * tokens for layer in range(layers)), 1, 1, tokens, cell, block, 0, 0, cell
    )
    template = CopyTemplate(region, SlotLayout(layers, 1, cell * tokens, tokens))
    assert template.lengths.tolist() == [block]
    runs = template.expand([5, 4, 3], [2 * block, block, 0])
    assert (runs.engine.tolist(), runs.segment.tolist(), runs.lengths.tolist()) == ([3 * block], [0], [3 * block])


@pytest.mark.parametrize("block", [-1, 3])
def test_block_outside_the_region_is_refused(block: int) -> None:
    region = RegionLayout(96, 3, (0,), 1, 1, 2, 16, 32, 0, 0, 16)
    with pytest.raises(InvalidRequest):
        CopyTemplate(region, SlotLayout(1, 1, 32, 2)).expand([0, block], [0, 32])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"region_bytes": 95}, UnsupportedLayout),
        ({"layer_offsets": [-16]}, UnsupportedLayout),
        ({"block_stride": -32}, UnsupportedLayout),
        ({"block_count": 0}, UnsupportedLayout),
        ({"tokens": 1 << 40}, UnsupportedLayout),
        ({"heads": 1.5}, InvalidRequest),
        ({"heads": True}, InvalidRequest),
        ({"layer_offsets": "0"}, InvalidRequest),
        ({"colour": 3}, InvalidRequest),
    ],
)
def test_layout_that_leaves_its_region_is_refused(change: dict[str, object], error: type[Exception]) -> None:
    """It comes from another process."""
    fields = RegionLayout(96, 3, (0,), 1, 1, 2, 16, 32, 0, 0, 16).fields()
    assert RegionLayout.of(fields).fields() == fields
    with pytest.raises(error):
        RegionLayout.of({**fields, **change})


def test_slot_of_another_shape_is_refused() -> None:
    region = RegionLayout(96, 3, (0,), 1, 1, 2, 16, 32, 0, 0, 16, first_head=1)
    for slot in (SlotLayout(2, 2, 32, 2), SlotLayout(1, 2, 16, 2), SlotLayout(1, 1, 32, 2)):
        with pytest.raises(UnsupportedLayout):
            CopyTemplate(region, slot)
    assert np.array_equal(CopyTemplate(region, SlotLayout(1, 2, 32, 2)).slot, [32])


def test_a_layout_beyond_any_memory_is_refused() -> None:
    with pytest.raises(UnsupportedLayout, match="larger than any memory"):
        RegionLayout(BYTES_MAX + 1, 3, (0,), 1, 1, 2, 16, 32, 0, 0, 16)
