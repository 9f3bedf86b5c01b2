"""Block tables, reference counts, the prefix map, copies on write and swaps: who counts on which block."""

from __future__ import annotations

import pytest

from kvservice.core.block.keys import chain_hashes
from kvservice.engine.blocks import (
    RELEASED,
    BlockAllocator,
    PagedMemory,
    PagedSequence,
    Room,
    padded,
    slot_mapping,
)
from kvservice.errors import Exhausted, InvalidRequest


def memory(blocks: int = 8, host: int = 8, size: int = 4, **more: float) -> PagedMemory:
    settings = {"watermark": 0.0, **more}
    return PagedMemory(
        BlockAllocator("device", range(blocks)),
        BlockAllocator("host", range(100, 100 + host)),
        size,
        watermark=settings["watermark"],
        window=int(settings.get("window", 0)),
    )


def computed(paged: PagedMemory, tokens: range | list[int], sequence_id: int = 0) -> PagedSequence:
    sequence = PagedSequence(sequence_id, list(tokens))
    paged.share_prefix(sequence)
    paged.append(sequence, len(sequence.tokens))
    paged.written(sequence, len(sequence.tokens))
    return sequence


def test_blocks_come_in_order_and_freed_ones_again() -> None:
    allocator = BlockAllocator("device", [10, 15, 23])
    assert [allocator.allocate() for _ in range(3)] == [10, 15, 23]
    with pytest.raises(Exhausted, match="all 3 are in use"):
        allocator.allocate()
    allocator.free(15)
    assert (allocator.allocate(), allocator.free_count) == (15, 0)
    allocator.check_invariants()


def test_a_shared_block_is_free_after_the_last() -> None:
    allocator = BlockAllocator("device", [3])
    block = allocator.share(allocator.allocate())
    allocator.free(block)
    assert (allocator.refs(block), allocator.free_count) == (1, 0)
    allocator.free(block)
    assert allocator.free_count == 1
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(block)


def test_a_freed_block_is_found_until_it_is_reused() -> None:
    allocator = BlockAllocator("device", range(2))
    (name,) = chain_hashes([1, 2], 2)
    block = allocator.allocate()
    allocator.name(block, name)
    allocator.free(block)
    assert allocator.find(name) == block
    assert allocator.allocate() == 1, "a block without a name is given out first"
    assert allocator.find(name) == block
    assert allocator.allocate() == block
    assert allocator.find(name) is None


def test_of_two_blocks_with_one_content_one_is_found() -> None:
    allocator = BlockAllocator("device", range(2))
    (name,) = chain_hashes([1, 2], 2)
    for _ in range(2):
        allocator.name(allocator.allocate(), name)
    assert allocator.find(name) == 0
    allocator.forget([0])
    assert allocator.find(name) is None
    allocator.check_invariants()


def test_a_pinned_block_is_not_given_out() -> None:
    paged = memory(blocks=2)
    sequence = computed(paged, range(8))
    paged.device.pin(sequence.table[:1])
    paged.free(sequence)
    assert paged.device.free_share() == 0.5
    assert paged.device.allocate() == 1
    paged.device.unpin([0])
    assert paged.device.allocate() == 0


def test_slots_follow_the_table() -> None:
    assert slot_mapping([7, 2], 2, 6, 4) == [30, 31, 8, 9]
    with pytest.raises(IndexError):
        slot_mapping([7, 2], 0, 9, 4)
    with pytest.raises(IndexError, match="behind the sliding window"):
        slot_mapping([RELEASED, 2], 3, 5, 4)


def test_tables_are_padded_to_the_longest() -> None:
    assert padded([[1], [2, 3]]) == [[1, 0], [2, 3]]
    assert padded([[1], [2, 3]], width=3, fill=9) == [[1, 9, 9], [2, 3, 9]]
    assert padded([]) == []


def test_an_equal_prefix_shares_full_blocks() -> None:
    paged = memory()
    first = computed(paged, range(10))
    second = computed(paged, [*range(8), 99, 98], 1)
    assert second.table[:2] == first.table[:2]
    assert second.table[2] != first.table[2], "a part of a block has no name"
    paged.check_invariants([first, second])


def test_the_last_token_is_always_computed() -> None:
    paged = memory()
    computed(paged, range(8))
    assert paged.share_prefix(PagedSequence(1, list(range(8)))) == 4
    assert paged.share_prefix(PagedSequence(2, list(range(9)))) == 8


def test_salts_share_nothing() -> None:
    paged = memory()
    computed(paged, range(8))
    assert paged.match(PagedSequence(1, list(range(9)), root=b"salt")) == []


def test_the_beginning_of_a_block_is_shared_too() -> None:
    paged = memory()
    first = computed(paged, range(7))
    second = PagedSequence(1, [*range(7), 50, 51])
    assert paged.share_prefix(second) == 7
    assert second.table == first.table
    assert paged.append(second, 9) == [(1, 2)], "the first sequence may go on in its block"
    assert second.table == [0, 2, 3]
    third = PagedSequence(2, [*range(6), 50, 51])
    assert paged.share_prefix(third) == 4, "nothing ended after six tokens"
    paged.check_invariants([first, second, third])


def test_a_free_tail_is_written_in_place() -> None:
    paged = memory()
    paged.free(computed(paged, range(7)))
    second = PagedSequence(1, [*range(7), 50, 51])
    assert paged.share_prefix(second) == 7
    assert paged.append(second, 9) == []
    assert paged.share_prefix(PagedSequence(2, list(range(9)))) == 4, "its old name is gone"


def test_a_tail_that_is_written_has_another_name() -> None:
    paged = memory()
    sequence = computed(paged, range(5))
    for token in (5, 6):
        sequence.tokens.append(token)
        assert paged.append(sequence, token + 1) == []
        paged.written(sequence, token + 1)
    assert paged.share_prefix(PagedSequence(1, [0, 1, 2, 3, 4, 9])) == 4
    assert paged.share_prefix(PagedSequence(2, list(range(8)))) == 7


def test_names_go_on_with_the_new_tokens() -> None:
    paged = memory()
    sequence = computed(paged, range(6))
    assert paged.hashes(sequence) == chain_hashes(list(range(6)), 4)
    sequence.tokens += range(6, 12)
    assert paged.hashes(sequence) == chain_hashes(list(range(12)), 4)


def test_the_last_writer_of_a_fork_copies_nothing() -> None:
    paged = memory(blocks=4)
    first = computed(paged, range(6))
    forks = [first, paged.fork(first, 1), paged.fork(first, 2)]
    for number, sequence in enumerate(forks):
        sequence.tokens.append(number)
    ends = [(sequence, 7) for sequence in forks]
    assert (paged.appends(ends), paged.can_append(ends)) == (2, True)
    assert [len(paged.append(*end)) for end in ends] == [1, 1, 0]
    assert len({sequence.table[1] for sequence in forks}) == 3
    paged.check_invariants(forks)


def test_append_without_room_changes_nothing() -> None:
    paged = memory(blocks=2)
    sequence = computed(paged, range(8))
    sequence.tokens += [1]
    with pytest.raises(Exhausted):
        paged.append(sequence, 9)
    assert len(sequence.table) == 2
    paged.check_invariants([sequence])


def test_a_group_is_swapped_with_what_it_shares() -> None:
    paged = memory(host=3)
    first = computed(paged, range(6))
    second = paged.fork(first, 1)
    second.tokens += range(3)
    paged.append(second, 9)
    stranger = computed(paged, range(5), 2)
    group = [first, second]
    assert (first.table, second.table, stranger.table) == ([0, 1], [0, 2, 3], [0, 4])
    assert not paged.can_swap_out([first, second, stranger])
    assert paged.swap_out(group) == [(0, 100), (1, 101), (2, 102)], "block 3 holds nothing yet"
    assert (first.table, second.table) == ([100, 101], [100, 102])
    assert paged.device.refs(0) == 1, "the stranger keeps the block that it shares"
    paged.check_invariants([*group, stranger])
    assert [source for source, _ in paged.swap_in(group)] == [100, 101, 102]
    assert first.table[0] == second.table[0] != 0
    paged.check_invariants([*group, stranger])


def test_a_swap_without_room_changes_nothing() -> None:
    paged = memory(host=1)
    sequence = computed(paged, range(8))
    table = list(sequence.table)
    assert not paged.can_swap_out([sequence])
    with pytest.raises(Exhausted, match="2 blocks do not fit into 1 free ones on host"):
        paged.swap_out([sequence])
    assert (sequence.table, sequence.on_host) == (table, False)
    paged.check_invariants([sequence])


def test_swapping_in_needs_room_to_go_on() -> None:
    paged = memory(blocks=3)
    sequence = computed(paged, range(8))
    sequence.tokens.append(1)
    paged.swap_out([sequence])
    assert paged.can_swap_in([sequence]) is Room.OK
    other = computed(paged, range(50, 51), 1)
    assert paged.can_swap_in([sequence]) is Room.LATER
    paged.free(other)
    sequence.tokens += range(4)
    assert paged.can_swap_in([sequence]) is Room.NEVER


def test_blocks_behind_the_window_are_released() -> None:
    paged = memory(window=5)
    sequence = computed(paged, range(8))
    # The next token, number 8, reads the tokens 4 to 8.
    assert (sequence.table[0], paged.first_token(sequence)) == (RELEASED, 4)
    assert paged.device.free_count == 7
    assert paged.match(PagedSequence(1, list(range(9)))) == [0, 1], "they can be found until they are given out"
    assert paged.swap_out([sequence]) == [(1, 100)]
    assert sequence.table == [RELEASED, 100]
    paged.check_invariants([sequence])


@pytest.mark.parametrize("wrong", [{"size": 0}, {"watermark": 1.0}, {"watermark": -0.1}, {"window": -1}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest):
        memory(**wrong)  # type: ignore[arg-type]
