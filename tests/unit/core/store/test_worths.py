"""Rules of core.store.worths: worth follows what blocks of a kind do, and little evidence moves little."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvservice.core.store import worths
from kvservice.core.store.kinds import PAUSES
from kvservice.core.store.stretches import Group, Stretch
from kvservice.core.store.worths import AGE_STARTS, AGES, Worths, worth_by_age
from kvservice.units import BlockKey


def search(rates: Sequence[float], first: int) -> float:
    """The best ratio, by trying every horizon."""
    best = uses = ticks = 0.0
    left = 1.0
    for age in range(first, AGES - 1):
        uses += left * rates[age]
        ticks += left * (AGE_STARTS[age + 1] - AGE_STARTS[age]) * (1 - rates[age] / 2)
        left *= 1 - rates[age]
        best = max(best, uses / ticks)
    return best


@pytest.mark.parametrize("seed", range(20))
def test_worth_is_the_best_ratio_of_all_horizons(seed: int) -> None:
    draw = random.Random(seed)
    rates = [draw.random() ** (1 + seed % 4) for _ in range(AGES)]
    found = worth_by_age(rates)
    assert found == pytest.approx([search(rates, age) for age in range(AGES)])


def test_what_comes_back_at_some_age_is_worth_more_near_it() -> None:
    """As in a round of prompts: so the oldest blocks stay, and newcomers pass."""
    rates = [0.0] * AGES
    rates[20] = 0.9
    found = worth_by_age(rates)
    assert found[:21] == sorted(found[:21]) and found[10] < found[20] > found[21] == 0


def test_what_comes_back_soon_or_never_loses_worth_by_waiting() -> None:
    rates = [0.5 / 1.3**age for age in range(AGES)]
    found = worth_by_age(rates)
    assert found[:-1] == sorted(found[:-1], reverse=True)


def stretch_of(group: Group, length: int) -> Stretch:
    group.count += length
    return Stretch([BlockKey(index.to_bytes(16, "big")) for index in range(length)], 0, 1, group)


def live(learnt: Worths, wait: int, ticks: range, returning: float, blocks: int = 10) -> None:
    """Each prompt's blocks are used again after `wait` ticks, or never."""
    draw = random.Random(1)
    kind = 0
    waiting: dict[int, Stretch] = {}
    for tick in ticks:
        learnt.grow_older(tick)
        stretch = waiting.pop(tick - wait, None)
        if stretch is not None and draw.random() < returning:
            learnt.use(stretch)
        group = Group(kind, tick, float(tick))
        waiting[tick] = stretch_of(group, blocks)
        learnt.enter(group)
        learnt.asked(blocks)
        learnt.learn(100)
    learnt.check_invariants()


def learn_all(learnt: Worths, capacity: int) -> list[int]:
    """A whole pass. Returns the kinds of which it computed worths."""
    return list(iter(lambda: learnt.learn(capacity), None))


def test_kinds_are_told_apart_by_what_they_did() -> None:
    learnt = Worths()
    live(learnt, 10, range(1, 1000), returning=0.02)
    other = Worths()
    live(other, 10, range(1, 1000), returning=0.9)
    assert other.table[0][3] > 10 * learnt.table[0][3]


def knows_enough_of(kinds: Sequence[int]) -> Worths:
    """Their worths can be computed, and have not been."""
    learnt = Worths()
    for kind in kinds:
        group = Group(kind, 1, 0.0)
        stretch_of(group, worths.LEARN_MIN)
        learnt.enter(group)
    learnt.asked(len(kinds) * worths.LEARN_MIN)
    return learnt


def test_nothing_is_computed_before_enough_was_counted() -> None:
    learnt = Worths()
    group = Group(0, 1, 0.0)
    stretch_of(group, 5)
    learnt.enter(group)
    learnt.asked(5)
    assert learn_all(learnt, 10) == []
    assert learnt.table[0] == learnt.table[1] == sorted(learnt.table[0], reverse=True), "LRU's order until then"
    stretch_of(group, worths.LEARN_MIN)
    learnt.enter(group)
    assert learn_all(learnt, 10) == [0] and learn_all(learnt, 10) == []


def test_one_call_learns_one_kind() -> None:
    """So that no call takes long. What was counted meanwhile is for the next pass."""
    learnt = knows_enough_of((3, 4, PAUSES))
    for _ in range(3):
        before = list(learnt.table)
        kind = learnt.learn(10)
        assert [number for number, row in enumerate(learnt.table) if row is not before[number]] == [kind]
    assert learn_all(learnt, 10) == []


def test_counts_of_each_kind_fade_once_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worths, "FADE_AFTER", 100)
    learnt = knows_enough_of((3, 4, PAUSES))
    assert sorted(learn_all(learnt, 10)) == [3, 4, PAUSES]
    assert {learnt._reached[kind][0] for kind in (3, 4, PAUSES)} == {worths.LEARN_MIN / 2}


def test_a_change_of_habits_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worths, "FADE_AFTER", 2000)
    learnt = Worths()
    live(learnt, 10, range(1, 500), returning=1.0)
    before = learnt.table[0][2]
    live(learnt, 10, range(500, 2500), returning=0.0)
    assert learnt.table[0][2] < before / 10


def test_groups_without_blocks_grow_no_older() -> None:
    learnt = Worths()
    group, empty, without_tips = Group(0, 1, 0.0), Group(0, 1, 0.0), Group(0, 1, 0.0)
    group.tips.append(stretch_of(group, 1))
    stretch_of(without_tips, 1)
    for entering in (group, empty, without_tips):
        learnt.enter(entering)
    assert learnt.grow_older(3) == [group, group], "the others have nothing to move"
    assert (group.age, empty.age, without_tips.age) == (2, 0, 2)


def test_the_last_age_is_for_ever() -> None:
    learnt = Worths()
    group = Group(0, 1, 0.0)
    group.tips.append(stretch_of(group, 1))
    learnt.enter(group)
    assert learnt.grow_older(1 + AGE_STARTS[-1]) == [group] * (AGES - 1) and group.age == AGES - 1
    assert learnt.grow_older(1 + 10 * AGE_STARTS[-1]) == []
    learnt.check_invariants()


def test_a_large_cache_believes_a_batch_less() -> None:
    """What comes together is one observation, however many blocks it has."""
    small, large = Worths(), Worths()
    for learnt, capacity in ((small, 0), (large, 1_000_000)):
        for number in range(20):
            group = Group(0, number, 0.0)
            stretch_of(group, 30)
            learnt.enter(group)
            learnt.asked(30)
        group = Group(PAUSES, 20, 0.0)
        stretch = stretch_of(group, 3000)
        learnt.enter(group)
        learnt.asked(3000)
        learnt.grow_older(25)
        learnt.use(stretch)
        assert learn_all(learnt, capacity)
    assert small.table[PAUSES][4] > large.table[PAUSES][4]
