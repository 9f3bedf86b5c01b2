"""When blocks are lent, when they are asked back, and that none is given up before every worker has let go of it."""

from __future__ import annotations

from collections import Counter

from kvservice.connector.cache_groups import NOWHERE
from kvservice.connector.plan import StepPlan
from kvservice.connector.scheduler.loan_book import FREE_SHARE_MIN, REPORT_SECONDS_MAX, LoanBook
from kvservice.units import BlockKey
from tests.unit.connector.line import Pins

KEYS = [BlockKey(bytes([index]) * 16) for index in range(3)]
SECONDS = 5.0


class Desk:
    def __init__(self, workers: int = 1, seconds: float = SECONDS) -> None:
        self.counters: Counter[str] = Counter()
        self.pins = Pins()
        self.book = LoanBook(seconds, workers, self.counters)
        self.book.pin_with(self.pins)

    def step(self, now: float, *, is_starved: bool = False) -> StepPlan:
        plan = StepPlan()
        self.book.begin_step(plan, now, is_starved=is_starved)
        self.book.check_invariants()
        return plan

    def lend(self, now: float = 0.0) -> int:
        self.book.lend(KEYS, [7, 8, 9])
        [plan] = self.step(now).lends
        assert plan.blocks == tuple(zip((7, 8, 9), KEYS, strict=True))
        return plan.loan_id


def test_a_block_that_a_window_has_left_is_not_lent() -> None:
    desk = Desk()
    desk.book.lend(KEYS, [NOWHERE, 8, 9])
    [plan] = desk.step(0.0).lends
    assert plan.blocks == ((8, KEYS[1]), (9, KEYS[2])) and desk.pins.pinned == {8: 1, 9: 1}


def test_lent_blocks_are_pinned_until_all_workers_let_go() -> None:
    """They are pinned before they are lent."""
    desk = Desk(workers=2)
    desk.book.lend(KEYS, [7, 8, 9, 10])
    assert desk.pins.pinned == {7: 1, 8: 1, 9: 1} and desk.book.is_pending(0.0)
    [plan] = desk.step(0.0).lends
    for _ in range(3):
        desk.book.returned([(plan.loan_id, 111)])
    assert desk.pins.pinned, "one worker said it three times, the other never"
    desk.book.returned([(plan.loan_id, 222), (99, 222)])
    assert not desk.pins.pinned and desk.book.is_empty and not desk.book.is_pending(0.0)
    desk.book.returned([(plan.loan_id, 222)])
    assert desk.counters["loan_blocks"] == desk.counters["loan_blocks_returned"] == 3


def test_untaken_loan_is_recalled_until_it_is_back() -> None:
    """The first recall comes after its time; more follow."""
    desk = Desk()
    loan = desk.lend()
    assert desk.step(SECONDS - 0.1).recalls == []
    assert desk.step(SECONDS).recalls == desk.step(SECONDS + 1).recalls == [loan]
    assert desk.pins.pinned
    assert desk.book.is_pending(SECONDS) and not desk.book.is_pending(SECONDS + REPORT_SECONDS_MAX)
    desk.book.returned([(loan, 1)])
    assert desk.step(SECONDS + 2).recalls == [] and not desk.pins.pinned


def test_engine_that_needs_blocks_recalls_and_lends_no_more() -> None:
    desk = Desk()
    loan = desk.lend()
    desk.pins.free = FREE_SHARE_MIN / 2
    assert desk.step(0.1).recalls == [loan]
    desk.book.lend(KEYS, [1, 2, 3])
    assert desk.step(0.2).lends == [] and desk.counters["loans_not_made"] == 1
    desk.book.returned([(loan, 1)])
    desk.pins.free = 0.5
    starving = desk.lend(1.0)
    assert desk.step(1.1, is_starved=True).recalls == [starving]
    assert desk.counters["loans_recalled_early"] == 2


def test_same_block_lent_for_two_handoffs_stays_pinned_for_each() -> None:
    desk = Desk()
    first, second = desk.lend(), desk.lend()
    desk.book.returned([(first, 1)])
    assert desk.pins.pinned == {7: 1, 8: 1, 9: 1}
    desk.book.returned([(second, 1)])
    assert not desk.pins.pinned


def test_nothing_is_lent_when_switched_off_or_without_pins() -> None:
    off = Desk(seconds=0.0)
    off.book.lend(KEYS, [7, 8, 9])
    assert off.book.is_empty and not off.pins.pinned
    book = LoanBook(SECONDS, 1, Counter())
    book.lend(KEYS, [7, 8, 9])
    assert book.is_empty
