"""Loans between engines: a recall ends with the last reader, and a copy from a lender that left does not count."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, cast

import numpy as np
import pytest

from kvservice.copying.device import HostDevice, HostKV
from kvservice.copying.memory import SharedMemory
from kvservice.copying.worker.loans import DirectPath, Lender, Loans
from kvservice.core.segment.copy_runs import CopyTemplate, RegionLayout
from kvservice.core.segment.layout import SlotLayout
from kvservice.testing.eventually import eventually

HEADS, TOKENS, CELL, BLOCKS = 2, 4, 16, 8
SLOT = SlotLayout(1, HEADS, TOKENS * CELL, TOKENS)


def lender() -> Lender:
    return Lender(cast(Any, None), cast(Any, None))


def test_recall_is_answered_when_the_last_reader_is_through() -> None:
    loans, one, answers = Loans(), lender(), []
    loans.lend(one, 1, [(b"a", 1), (b"b", 2), (b"c", 3)])
    first, second = loans.borrow([b"a", b"b"], [one]), loans.borrow([b"b"], [one])
    loans.recall(one, 1, lambda: answers.append("returned"))
    assert loans.borrow([b"b"], [one]) == [None], "a recalled block is lent no more"
    loans.give_back([loan for loan in first if loan])
    assert not answers
    loans.recall(one, 1, lambda: answers.append("asked again"))
    assert not answers, "somebody still reads"
    loans.give_back([loan for loan in second if loan])
    assert answers == ["returned", "asked again"]
    loans.recall(one, 1, lambda: answers.append("at once"))
    assert answers[2:] == ["at once"] and loans.is_empty


def test_key_lent_twice_is_read_until_both_loans_end() -> None:
    """Each loan ends by itself."""
    loans, one, answers = Loans(), lender(), []
    loans.lend(one, 1, [(b"a", 1)])
    loans.lend(one, 2, [(b"a", 1), (b"b", 2)])
    reading = loans.borrow([b"a"], [one])
    assert reading[0] is not None and reading[0].lending.keys == (b"a",)
    loans.recall(one, 2, lambda: answers.append(2))
    assert answers == [2], "nobody reads this one"
    loans.recall(one, 1, lambda: answers.append(1))
    assert answers == [2], "its block is being read"
    loans.give_back([reading[0]])
    assert answers == [2, 1] and loans.is_empty


def test_copy_counts_only_when_its_lender_was_there_to_its_end() -> None:
    loans, gone, stays = Loans(), lender(), lender()
    loans.lend(gone, 1, [(b"a", 1)])
    loans.lend(stays, 1, [(b"b", 2)])
    borrowed = [loan for loan in loans.borrow([b"a", b"b"], [gone, stays]) if loan]
    dropping = threading.Thread(target=loans.drop, args=(gone,))
    dropping.start()
    eventually(lambda: not borrowed[0].lending.is_good, "the lender to be dropped")
    assert dropping.is_alive(), "memory is being read"
    loans.give_back(borrowed)
    dropping.join(5)
    assert not dropping.is_alive()
    assert [loan.lending.is_good for loan in borrowed] == [False, True]
    loans.lend(gone, 2, [(b"a", 1)])
    assert loans.borrow([b"a"], [gone]) == [None], "one that is gone lends no more"


def test_recalled_loan_does_not_count_when_its_lender_leaves() -> None:
    loans, one = Loans(), lender()
    loans.lend(one, 1, [(b"a", 1)])
    borrowed = [loan for loan in loans.borrow([b"a"], [one]) if loan]
    loans.recall(one, 1, lambda: None)
    dropping = threading.Thread(target=loans.drop, args=(one,))
    dropping.start()
    eventually(lambda: not borrowed[0].lending.is_good, "the lender to be dropped")
    loans.give_back(borrowed)
    dropping.join(5)
    assert not dropping.is_alive() and loans.is_empty


def test_lender_hears_once_that_its_blocks_were_taken() -> None:
    loans, one, taken = Loans(), lender(), []
    loans.lend(one, 1, [(b"a", 1)], on_taken=lambda: taken.append(1))
    [loan] = loans.borrow([b"a"], [one])
    assert loan is not None
    loans.give_back([loan])
    for _ in range(2):
        loans.taken([loan.lending])
    assert taken == [1]


def test_nobody_borrows_from_himself() -> None:
    loans, mine, other = Loans(), lender(), lender()
    loans.lend(mine, 1, [(b"a", 1)])
    assert loans.lenders_of([b"a"], mine) == set()
    loans.lend(other, 1, [(b"a", 5)])
    assert loans.lenders_of([b"a"], mine) == {other}
    [loan] = loans.borrow([b"a"], [other])
    assert loan is not None and loan.block == 5


@pytest.fixture
def rank() -> Iterator[Any]:
    """Makes (an engine's rank that holds these heads, its bytes `[block, head, token and cell]`)."""
    with ExitStack() as stack:

        def make(first: int, heads: int, value: int) -> tuple[Lender, Any]:
            size = TOKENS * CELL
            memory = SharedMemory.make(BLOCKS * heads * size)
            stack.callback(memory.close)
            held = np.frombuffer(memory.buffer, np.uint8).reshape(BLOCKS, heads, size)
            held[:] = value
            region = RegionLayout(
                memory.byte_count,
                BLOCKS,
                (0,),
                parts=1,
                heads=heads,
                tokens=TOKENS,
                cell_bytes=CELL,
                block_stride=heads * size,
                part_stride=0,
                head_stride=size,
                token_stride=CELL,
                first_head=first,
            )
            return Lender(HostKV(memory), CopyTemplate(region, SLOT)), held

        yield make


def test_rank_borrows_from_the_rank_that_holds_the_same_heads(rank: Any) -> None:
    loans = Loans()
    for first in range(HEADS):
        one, _ = rank(first, 1, first + 1)
        loans.lend(one, first, [(b"a", 3)])
    for first in range(HEADS):
        reader, held = rank(first, 1, 0)
        path = DirectPath(loans, HostDevice(), reader)
        assert path.copy([b"a", b"b"], [5, 6]) == ([True, False], TOKENS * CELL)
        assert (held[5] == first + 1).all() and not np.delete(held, 5, axis=0).any()
        path.close()
    whole, held = rank(0, HEADS, 0)
    path = DirectPath(loans, HostDevice(), whole)
    assert path.copy([b"a"], [5]) == ([False], 0) and not held.any()
