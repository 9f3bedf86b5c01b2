"""Whose clock is not that of the others."""

from __future__ import annotations

from kvservice.client.clocks import ClockReading, clock_problems


def test_each_clock_that_is_not_that_of_the_middle_is_named() -> None:
    readings = [ClockReading(name, ahead, 0.01) for name, ahead in (("a", 100.0), ("b", 103.0), ("c", -20.0))]
    (said,) = clock_problems(readings)
    assert said.startswith("the clock of node c is 120 s behind that of node a")
    assert list(clock_problems(readings[:2])) == [] == list(clock_problems([]))


def test_of_two_clocks_the_one_that_is_ahead_is_named() -> None:
    (said,) = clock_problems([ClockReading("a", 0.0, 0.01), ClockReading("b", 6.0, 0.01)])
    assert said.startswith("the clock of node b is 6 s ahead of that of node a")


def test_a_slow_answer_is_no_wrong_clock() -> None:
    late = ClockReading.of("late", wall_seconds=1000.0, asked_at=1000.0, heard_at=1012.0)
    assert (late.ahead_seconds, late.slack_seconds) == (-6.0, 6.0)
    assert list(clock_problems([late, ClockReading("there", 0.0, 0.0)])) == []
