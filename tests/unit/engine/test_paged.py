"""Blocks of K and V: where a token's numbers lie, what is copied, and what is refused."""

from __future__ import annotations

import pytest
import torch

from kvservice.connector.worker.block_copier import BlockCopier
from kvservice.core.segment.layout import SlotLayout
from kvservice.engine.paged import Batch, KVShape, PagedKV, TokenSpan, swap_blocks

SHAPE = KVShape(layer_count=3, head_count=2, key_width=5, value_width=3, block_tokens=4, dtype=torch.float32)
CPU = torch.device("cpu")


def filled(block_count: int = 8) -> PagedKV:
    kv = PagedKV(SHAPE, block_count)
    kv.storage.copy_(torch.arange(kv.storage.numel(), dtype=torch.float32).view(kv.storage.shape))
    return kv


def pairs(*found: tuple[int, int]) -> torch.Tensor:
    return torch.tensor(found, dtype=torch.int64).reshape(-1, 2)


def test_slots_follow_the_block_table() -> None:
    span = TokenSpan(range(4), 12, [10, 15, 23, 8])
    assert span.slots(4).tolist() == [40, 41, 42, 43, 60, 61, 62, 63, 92, 93, 94, 95, 32, 33, 34, 35]
    assert TokenSpan([0], 9, [10, 15, 23, 8], first=5).slots(4).tolist() == [61, 62, 63, 92, 93]
    with pytest.raises(AssertionError, match="a block for every token"):
        TokenSpan(range(5), 12, [10, 15, 23, 8]).slots(4)


def test_batch_pads_shorter_rows_on_their_left() -> None:
    batch = Batch.of([TokenSpan([7, 8], 4, [3, 0]), TokenSpan([9, 9], 1, [2])], 4, CPU)
    assert batch.past == 4
    assert batch.positions.tolist() == [[4, 5], [1, 2]]
    assert batch.write.tolist() == [[0, 1], [9, 10]]
    assert batch.read.tolist() == [[12, 13, 14, 15, 0, 1], [10, 10, 10, 8, 9, 10]]
    assert batch.mask.tolist() == [[1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]]


def test_what_is_written_to_slots_is_read_from_them() -> None:
    kv = filled()
    before = kv.storage.clone()
    slots = torch.tensor([[5, 30], [9, 0]])
    keys, values = torch.randn(2, 2, 2, 5), torch.randn(2, 2, 2, 3)
    kv.write(1, slots, keys, values)
    read_keys, read_values = kv.read(1, slots.flip(0))
    assert torch.equal(read_keys, keys.flip(0))
    assert torch.equal(read_values, values.flip(0))
    assert torch.equal(kv.storage[7, 1, :, 2], torch.cat((keys, values), -1)[0, :, 1]), "slot 30 is place 2 of block 7"
    changed = (kv.storage != before).any(dim=(2, 4)).nonzero().tolist()
    assert changed == [[0, 1, 0], [1, 1, 1], [2, 1, 1], [7, 1, 2]], "(block, layer, place)"


def test_block_is_what_a_slot_of_the_pool_holds() -> None:
    """The connector's block copier takes the layers as they are, and the bytes of a block are those of its slot."""
    kv = filled()
    layout = SlotLayout(SHAPE.layer_count, SHAPE.head_count, SHAPE.cell_bytes, SHAPE.block_tokens)
    assert layout.payload_bytes == SHAPE.block_bytes
    segment = bytearray(2 * SHAPE.block_bytes)
    copier = BlockCopier(kv.layers, range(SHAPE.head_count))
    copier.bind(memoryview(segment), layout)
    copier.store(5, SHAPE.block_bytes)
    assert segment[SHAPE.block_bytes :] == kv.storage[5].numpy().tobytes()
    copier.load(SHAPE.block_bytes, 2)
    assert torch.equal(kv.storage[2], kv.storage[5])
    copier.unbind()


def test_memory_may_be_given() -> None:
    memory = torch.zeros(2 * SHAPE.block_bytes, dtype=torch.uint8)
    PagedKV(SHAPE, 2, memory=memory).storage[1] = 1.0
    assert memory.view(torch.float32).sum() == SHAPE.block_bytes / 4
    with pytest.raises(ValueError, match="3 blocks take"):
        PagedKV(SHAPE, 3, memory=memory)
    with pytest.raises(ValueError, match="at least one block"):
        PagedKV(SHAPE, 0)


def test_copies_of_blocks_are_of_what_was_there_before() -> None:
    """Block 4 is both copied and written: 6 gets what it held."""
    kv = filled()
    before = kv.storage.clone()
    kv.copy_blocks(pairs((1, 4), (4, 6)))
    assert torch.equal(kv.storage, before[[0, 1, 2, 3, 1, 5, 4, 7]])
    kv.copy_blocks(pairs())
    assert torch.equal(kv.storage, before[[0, 1, 2, 3, 1, 5, 4, 7]])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (pairs((1, 8)), "not all among 0 to 7"),
        (pairs((-1, 2)), "not all among 0 to 7"),
        (pairs((1, 3), (2, 3)), "written twice"),
        (torch.tensor([[1, 2]], dtype=torch.int32), "int64"),
        (torch.tensor([1, 2]), r"\(n, 2\)"),
    ],
)
def test_pairs_that_are_none_are_refused(wrong: torch.Tensor, said: str) -> None:
    kv = filled()
    before = kv.storage.clone()
    with pytest.raises(ValueError, match=said):
        kv.copy_blocks(wrong)
    assert torch.equal(kv.storage, before)


def test_swap_between_two_pools_of_the_host_is_refused() -> None:
    with pytest.raises(ValueError, match="Invalid device combination: cpu to cpu"):
        swap_blocks(filled(), PagedKV(SHAPE, 8), pairs((0, 1)))
