"""Loans between engines: a recall ends with the last reader, and a copy from a lender that left does not count."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from kvservice.mover.loans import Lender, Loans


def lender() -> Lender:
    return Lender(cast(Any, None), cast(Any, None))


def test_recall_is_answered_when_the_last_reader_is_through() -> None:
    loans, one, reader, answers = Loans(), lender(), lender(), []
    loans.lend(one, [(b"a", 1), (b"b", 2), (b"c", 3)], 0)
    first, second = loans.borrow([b"a", b"b"], reader), loans.borrow([b"b"], reader)
    assert first is not None and second is not None
    loans.recall(one, [b"a", b"b", b"c", b"never lent"], lambda: answers.append("returned"))
    assert loans.borrow([b"b"], reader) is None, "a recalled block is lent no more"
    assert loans.give_back(first) and not answers
    assert loans.give_back(second) and answers == ["returned"]
    loans.recall(one, [b"a"], lambda: answers.append("at once"))
    assert answers == ["returned", "at once"]


def test_copy_counts_only_when_every_loan_was_good_to_its_end() -> None:
    loans, gone, stays, reader = Loans(), lender(), lender(), lender()
    loans.lend(gone, [(b"a", 1)], 0)
    loans.lend(stays, [(b"b", 2)], 0)
    borrowed = loans.borrow([b"a", b"b"], reader)
    assert borrowed is not None
    dropping = threading.Thread(target=loans.drop, args=(gone,))
    dropping.start()
    while borrowed[0].is_good:
        threading.Event().wait(0.001)
    assert dropping.is_alive(), "memory is being read"
    assert not loans.give_back(borrowed)
    dropping.join(5)
    assert not dropping.is_alive()
    assert loans.borrow([b"a"], reader) is None
    again = loans.borrow([b"b"], reader)
    assert again is not None and loans.give_back(again)


@pytest.mark.parametrize("lenders", [1, 2])
def test_nobody_borrows_from_himself(lenders: int) -> None:
    loans, mine = Loans(), lender()
    loans.lend(mine, [(b"a", 1)], 0)
    for _ in range(lenders - 1):
        loans.lend(lender(), [(b"a", 5)], 0)
    found = loans.borrow([b"a"], mine)
    assert (found is None) == (lenders == 1)
    assert found is None or [loan.block for loan in found] == [5]
