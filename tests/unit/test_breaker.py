"""When a peer or a store that fails is asked again."""

from __future__ import annotations

from kvservice.breaker import FAILURES_TO_OPEN, OPEN_SECONDS_FIRST, OPEN_SECONDS_MAX, Breaker


def broken() -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES_TO_OPEN):
        assert breaker.allows(0.0)
        breaker.failed(0.0)
    return breaker


def test_a_few_failures_in_a_row_open_it() -> None:
    breaker = broken()
    assert not breaker.allows(OPEN_SECONDS_FIRST / 2) and breaker.allows(OPEN_SECONDS_FIRST)


def test_the_pause_doubles_up_to_a_bound() -> None:
    breaker = broken()
    breaker.failed(0.0)
    assert not breaker.allows(1.5 * OPEN_SECONDS_FIRST) and breaker.allows(2 * OPEN_SECONDS_FIRST)
    for _ in range(2000):
        breaker.failed(0.0)
    assert breaker.allows(OPEN_SECONDS_MAX)


def test_after_a_pause_one_caller_tries_it() -> None:
    breaker = broken()
    now = OPEN_SECONDS_FIRST
    assert [breaker.admits(now, 5.0) for _ in range(3)] == [True, False, False]
    assert breaker.admits(now + 5.0, 5.0), "the trial was lost"
    breaker.succeeded()
    assert all(breaker.admits(now, 5.0) for _ in range(3))


def test_a_trial_that_fails_counts_once() -> None:
    """Others may fail beside it, which began before the opening."""
    breaker = broken()
    now = OPEN_SECONDS_FIRST
    assert breaker.admits(now, 5.0)
    assert [breaker.failed_once(now + 1.0) for _ in range(3)] == [True, False, False]
    now += 1.0
    assert not breaker.allows(now + 1.5 * OPEN_SECONDS_FIRST) and breaker.allows(now + 2 * OPEN_SECONDS_FIRST)


def test_calls_that_fail_after_the_opening_do_not_count() -> None:
    breaker = Breaker()
    found = [breaker.failed_once(0.0) for _ in range(FAILURES_TO_OPEN + 5)]
    assert found == [number == FAILURES_TO_OPEN for number in range(1, len(found) + 1)]
    assert breaker.failures == FAILURES_TO_OPEN and breaker.allows(OPEN_SECONDS_FIRST)
