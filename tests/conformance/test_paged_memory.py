"""The memory of paged attention, as vLLM's first block manager and scheduler had it, and walk-throughs of it tell it.

A sequence has a table of blocks, blocks are shared and copied before they are written, and when the device is full, a
group of sequences moves to the host and comes back. Each test retells one passage with its numbers. Where the passage
is wrong, the test says so and holds the reference engine to what is right.
"""

from __future__ import annotations

import pytest
import torch

from kvservice.core.block.keys import chain_hashes
from kvservice.engine.blocks import BlockAllocator, PagedMemory, PagedSequence, Room, padded, slot_mapping
from kvservice.engine.paged import KVShape, PagedKV, swap_blocks
from kvservice.engine.schedule import GroupState, Next, Scheduler, Step, SwapEstimate
from kvservice.units import div_ceil

BLOCK = 4
ALWAYS_SWAP = (float("inf"), 1.0)  # bytes a second, tokens a second


def memory(device: list[int], host: list[int], *, watermark: float = 0.0) -> PagedMemory:
    return PagedMemory(BlockAllocator("device", device), BlockAllocator("host", host), BLOCK, watermark=watermark)


def grown(paged: PagedMemory, count: int) -> PagedSequence:
    """A sequence of `count` tokens, all of them computed."""
    sequence = PagedSequence(0, list(range(count)))
    paged.append(sequence, count)
    paged.written(sequence, count)
    return sequence


class TwoRequests:
    """A fills two blocks and B three. The device has no more, so A's next token takes B's blocks."""

    def __init__(self, host: list[int]) -> None:
        self.memory = memory([1, 2, 10, 15, 23], host)
        self.scheduler = Scheduler(self.memory, SwapEstimate(1, *ALWAYS_SWAP), tokens_max=64, sequences_max=4)
        self.a = self.scheduler.add("A", range(7), length_max=100)
        self.b = self.scheduler.add("B", range(100, 111), length_max=100)

    def step(self) -> Step:
        step = self.scheduler.schedule()
        self.scheduler.commit({chunk.group.request_id: [Next(0, 7)] for chunk in step.chunks if chunk.samples})
        self.scheduler.free_finished()
        return step


def test_block_table_and_slots() -> None:
    """Sixteen tokens in blocks of four, with the table [10, 15, 23, 8]: the slot of a token is its block times four and
    its place in the block. Tables of a batch are padded with zeros to one width. A table grows with its sequence.

    The passage also draws addresses 160 to 128, which are a block's number times 16: with blocks of 4 they are wrong.
    """
    paged = memory([10, 15, 23, 8], [])
    sequence = grown(paged, 8)
    assert sequence.table == [10, 15]
    sequence.tokens += range(8, 16)
    assert paged.append(sequence, 16) == []
    assert sequence.table == [10, 15, 23, 8]
    assert slot_mapping(sequence.table, 0, 16, BLOCK) == [
        *(40, 41, 42, 43),
        *(60, 61, 62, 63),
        *(92, 93, 94, 95),
        *(32, 33, 34, 35),
    ]
    batch = torch.tensor(padded([[10, 15, 23, 8], [2, 7, 19], [31, 12, 4, 18, 25]], width=6))
    assert batch.tolist() == [[10, 15, 23, 8, 0, 0], [2, 7, 19, 0, 0, 0], [31, 12, 4, 18, 25, 0]]


def test_three_hundred_tokens() -> None:
    """300 tokens in blocks of 16 lie in 19 blocks, 0 to 18. With {0: 100, 1: 200, 18: 50} in the table, token 0 is in
    slot 1600, token 16 in 3200 and token 288 in 800. Chunks of 256 tokens have the lengths 256 and 44; 18 blocks of 16
    are full and have names, one of 256 is.
    """
    table = [100, 200, *range(300, 316), 50]
    assert len(table) == div_ceil(300, 16) == 19
    slots = slot_mapping(table, 0, 300, 16)
    assert [slots[token] for token in (0, 15, 16, 31, 288, 299)] == [1600, 1615, 3200, 3215, 800, 811]
    tokens = list(range(300))
    assert [len(tokens[begin : begin + 256]) for begin in range(0, 300, 256)] == [256, 44]
    assert len(chain_hashes(tokens, 16)) == 18
    assert 300 - 18 * 16 == 12, "tokens without a name"
    assert len(chain_hashes(tokens, 256)) == 1


def test_swap_chain() -> None:
    """A sequence with the blocks [10, 15, 23] is swapped out to the host's free blocks [4, 5, 6]: the pairs are
    (10, 4), (15, 5) and (23, 6), the table holds the host's numbers, and the device has three free blocks more.

    The passage adds a group to the queue of the swapped once for each of its sequences: here a group has one state.
    """
    two = TwoRequests([4, 5, 6])
    two.step()
    two.step()
    assert (two.a.sequences[0].table, two.b.sequences[0].table) == ([1, 2], [10, 15, 23])
    assert two.memory.device.free_count == 0
    step = two.step()
    (swap,) = step.swap_out
    assert (swap.request_id, swap.pairs) == ("B", [(10, 4), (15, 5), (23, 6)])
    assert two.b.sequences[0].table == [4, 5, 6]
    assert two.b.state is GroupState.SWAPPED
    assert two.memory.device.free_count == 3 - 1, "three more, of which A has got one"
    assert (step.swap_in, two.a.sequences[0].table) == ([], [1, 2, 10])
    two.scheduler.abort("A")
    two.scheduler.free_finished()
    step = two.step()
    (swap,) = step.swap_in
    assert [host for host, _ in swap.pairs] == [4, 5, 6]
    assert (step.swap_out, two.b.state) == ([], GroupState.RUNNING)
    assert [chunk.sequence for chunk in step.decode] == two.b.sequences, "it goes on in the same step"
    assert two.memory.host.free_count == 3


def test_a_full_host_means_computing_again() -> None:
    """Where the host has too few free blocks, a group is not swapped: its blocks are freed, and it waits.

    The passage raises an error when the host is full and calls it "not supported by the CPU". Here nothing fails.
    """
    two = TwoRequests([4, 5])
    two.step()
    two.step()
    step = two.step()
    assert (step.swap_out, step.preempted) == ([], [two.b])
    assert (two.b.state, two.b.sequences[0].table) == (GroupState.WAITING, [])
    assert (two.memory.host.free_count, two.memory.device.free_count) == (2, 3 - 1)


def test_bytes_of_all_layers_come_back_elsewhere() -> None:
    """What the pairs say is enough to move a block in every layer, there and back to other blocks."""
    shape = KVShape(3, 2, 8, 8, BLOCK, torch.float32)
    kv, spare = PagedKV(shape, 32), PagedKV(shape, 8)
    two = TwoRequests([4, 5, 6])
    two.step()
    two.step()
    before = torch.rand(3, *kv.storage.shape[1:])
    kv.storage[two.b.sequences[0].table] = before
    (out,) = two.step().swap_out
    for source, target in out.pairs:
        spare.storage[target] = kv.storage[source]
    kv.storage.zero_()
    two.scheduler.abort("A")
    two.scheduler.free_finished()
    (back,) = two.step().swap_in
    for source, target in back.pairs:
        kv.storage[target] = spare.storage[source]
    table = two.b.sequences[0].table[:3]
    assert table != [10, 15, 23]
    assert torch.equal(kv.storage[table], before)


def test_fork() -> None:
    """A fork of [10, 15, 23], whose last block holds two tokens of four, counts on all three blocks. The first token
    that the second sequence adds copies block 23 to 8; the first keeps [10, 15, 23]."""
    paged = memory([10, 15, 23, 8], [])
    first = grown(paged, 10)
    second = paged.fork(first, 1)
    assert second.table == first.table == [10, 15, 23]
    assert [paged.device.refs(block) for block in first.table] == [2, 2, 2]
    second.tokens.append(99)
    assert paged.append(second, 11) == [(23, 8)]
    assert (first.table, second.table) == ([10, 15, 23], [10, 15, 8])
    assert {block: paged.device.refs(block) for block in (10, 15, 23, 8)} == {10: 2, 15: 2, 23: 1, 8: 1}
    first.tokens.append(98)
    assert paged.append(first, 11) == [], "nobody else counts on block 23 any more"


def test_watermark() -> None:
    """Of 100 blocks 1 % stays free when a sequence is admitted. With 5 free, 4 are given out now, 5 later, and 101
    never."""
    paged = memory(list(range(100)), [], watermark=0.01)
    for _ in range(95):
        paged.device.allocate()
    assert paged.can_allocate(4) is Room.OK
    assert paged.can_allocate(5) is Room.LATER
    assert paged.can_allocate(101) is Room.NEVER


def test_bad_devices() -> None:
    """A swap from host to host is refused with "Invalid device combination": one of the two has to be a GPU."""
    pools = [PagedKV(KVShape(1, 1, 4, 4, BLOCK, torch.float32), 2) for _ in range(2)]
    with pytest.raises(ValueError, match="Invalid device combination: cpu to cpu"):
        swap_blocks(pools[0], pools[1], torch.tensor([[0, 1]]))
