"""Rules of core.store.guard: worth rules where it finds more than LRU."""

from __future__ import annotations

from kvservice.core.store.guard import RuleGuard


def play(guard: RuleGuard, prompts: int, lru: int, worth: int) -> list[int]:
    """Prompts of 100 blocks. Returns after which of them the rule changed."""
    return [number for number in range(prompts) if guard.compare(100, lru, worth)]


def test_lru_rules_until_worth_has_found_more() -> None:
    guard = RuleGuard()
    assert guard.hit_rates == (0.0, 0.0)
    assert play(guard, 300, 50, 50) == [] and not guard.is_by_worth
    assert len(play(guard, 10, 50, 100)) == 1 and guard.is_by_worth


def test_a_small_lead_changes_nothing() -> None:
    guard = RuleGuard()
    play(guard, 1000, 50, 50)
    assert not guard.compare(100, 10, 20), "a ten thousandth of what was asked for"


def test_worth_is_left_when_it_falls_behind_and_taken_again() -> None:
    guard = RuleGuard()
    play(guard, 100, 50, 60)
    assert guard.is_by_worth
    assert play(guard, 200, 50, 40) and not guard.is_by_worth
    assert play(guard, 300, 50, 60) and guard.is_by_worth and guard.switches == 3


def test_what_was_found_long_ago_counts_less() -> None:
    slow, fast = RuleGuard(), RuleGuard()
    for guard in (slow, fast):
        play(guard, 1000, 50, 60)
    fast.fade(40.0)
    assert len(play(fast, 50, 60, 50)) == 1 and not play(slow, 50, 60, 50)
    lru, worth = fast.hit_rates
    assert 0.5 < worth < lru < 0.7
