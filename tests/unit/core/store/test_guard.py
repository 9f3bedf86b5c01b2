"""Rules of core.store.guard: the rule whose shadow finds most is followed."""

from __future__ import annotations

from kvservice.core.store.guard import Rule, RuleGuard


def play(guard: RuleGuard, prompts: int, lru: int, s3_fifo: int, worth: int) -> list[int]:
    """Prompts of 100 blocks. Returns after which of them the rule changed."""
    found = {Rule.LRU: lru, Rule.S3_FIFO: s3_fifo, Rule.WORTH: worth}
    return [number for number in range(prompts) if guard.compare(100, found)]


def test_lru_rules_until_another_rule_has_found_more() -> None:
    guard = RuleGuard()
    assert guard.hit_rates == dict.fromkeys(Rule, 0.0)
    assert play(guard, 300, 50, 50, 50) == [] and guard.rule is Rule.LRU
    assert len(play(guard, 10, 50, 60, 100)) == 1 and guard.rule is Rule.WORTH


def test_of_three_the_best_is_followed() -> None:
    guard = RuleGuard()
    play(guard, 100, 50, 60, 55)
    assert guard.rule is Rule.S3_FIFO and guard.switches == 1
    assert guard.hit_rates == {Rule.LRU: 0.5, Rule.S3_FIFO: 0.6, Rule.WORTH: 0.55}


def test_a_small_lead_changes_nothing() -> None:
    guard = RuleGuard()
    play(guard, 1000, 50, 50, 50)
    assert play(guard, 1, 10, 15, 20) == [], "a ten thousandth of what was asked for"


def test_a_rule_is_left_when_it_falls_behind_and_taken_again() -> None:
    guard = RuleGuard()
    play(guard, 100, 50, 40, 60)
    assert guard.rule is Rule.WORTH
    assert play(guard, 200, 50, 40, 40) and guard.rule is Rule.LRU
    assert play(guard, 300, 50, 40, 60) and guard.rule is Rule.WORTH and guard.switches == 3


def test_what_was_found_long_ago_counts_less() -> None:
    slow, fast = RuleGuard(), RuleGuard()
    for guard in (slow, fast):
        play(guard, 1000, 50, 40, 60)
    fast.fade(40.0)
    assert len(play(fast, 50, 60, 40, 50)) == 1 and not play(slow, 50, 60, 40, 50)
    assert 0.5 < fast.hit_rates[Rule.WORTH] < fast.hit_rates[Rule.LRU] < 0.7
