"""Blocks of several KV cache groups of an engine in one slot: every byte in its place, on any device path."""

from __future__ import annotations

import pytest
import torch

from kvservice.connector.worker.block_copier import BlockCopier, GroupedBlockCopiers
from kvservice.core.segment.layout import SlotLayout
from kvservice.errors import UnsupportedLayout

BLOCKS, HEADS, TOKENS, WIDTH = 6, 2, 8, 4


def layers(count: int, tokens: int = TOKENS) -> list[torch.Tensor]:
    """`[block, head, token, K‖V]` of each layer; no two values alike."""
    return list(torch.randn(count, BLOCKS, HEADS, tokens, WIDTH).unbind(0))


def payload(segment: memoryview, layout: SlotLayout, slot: int) -> torch.Tensor:
    start = slot * layout.payload_bytes
    return torch.frombuffer(segment[start : start + layout.payload_bytes], dtype=torch.float32)


@pytest.mark.parametrize("staged", [False, True])
def test_groups_of_one_spec_lie_layer_behind_layer_in_one_slot(staged: bool) -> None:
    layout = SlotLayout(3, HEADS, TOKENS * WIDTH * 4, TOKENS)
    one, two = layers(2), layers(1)
    grouped = GroupedBlockCopiers(
        [
            (BlockCopier(one, range(HEADS), staged=staged, layers_behind=1), layout),
            (BlockCopier(two, range(HEADS), staged=staged, first_layer=2), layout),
        ]
    )
    segment = memoryview(bytearray(layout.payload_bytes))
    grouped.bind(segment, layout)
    grouped.of(0).store(1, 0)
    grouped.of(1).store(4, 0)
    wanted = torch.stack([one[0][1], one[1][1], two[0][4]])
    assert torch.equal(payload(segment, layout, 0), wanted.reshape(-1))
    grouped.of(1).load(0, 5)
    grouped.of(0).load(0, 0)
    assert torch.equal(two[0][5], two[0][4])
    assert torch.equal(one[1][0], one[1][1])
    grouped.unbind()


@pytest.mark.parametrize("staged", [False, True])
def test_parts_of_a_slot_are_blocks_one_after_the_other(staged: bool) -> None:
    """In each layer."""
    layout = SlotLayout(2, HEADS, TOKENS * WIDTH * 4, 2 * TOKENS, parts=2)
    tensors = layers(2)
    copier = BlockCopier(tensors, range(HEADS), staged=staged)
    segment = memoryview(bytearray(layout.payload_bytes))
    copier.bind(segment, layout)
    copier.store(2, 0, 0)
    copier.store(5, 0, 1)
    wanted = torch.stack([torch.stack([layer[block] for block in (2, 5)]) for layer in tensors])
    assert torch.equal(payload(segment, layout, 0), wanted.reshape(-1))
    copier.load(0, 1, 1)
    assert torch.equal(tensors[1][1], tensors[1][5])
    copier.unbind()


def test_groups_that_do_not_fill_the_slot_are_refused() -> None:
    layout = SlotLayout(3, HEADS, TOKENS * WIDTH * 4, TOKENS)
    with pytest.raises(UnsupportedLayout):
        BlockCopier(layers(2), range(HEADS)).bind(memoryview(bytearray(layout.payload_bytes)), layout)
