"""Turns: time is shared by tenant and then by connection, and whoever was silent does not wait behind a flood."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvservice.shard.turns import REST_SECONDS, Queuer, Turns

LONG = 0.001  # seconds of a turn


def flood(turns: Turns[str], lines: list[Queuer[str]], seconds: float, cost: dict[str, float]) -> Counter[str]:
    """Everybody always has more to do. The time that each got."""
    got: Counter[str] = Counter()
    for line in lines:
        turns.wait(line)
    while sum(got.values()) < seconds:
        line = turns.next()
        assert line is not None
        got[line.who] += cost[line.who]  # type: ignore[assignment]
        turns.spent(line, cost[line.who], more=True)
    return got


@given(st.lists(st.integers(1, 20), min_size=2, max_size=8))
def test_connections_of_a_tenant_get_equal_time(costs: list[int]) -> None:
    """Not equal turns: whoever asks long questions gets fewer of them."""
    turns, cost = Turns[str](), {str(number): factor * LONG for number, factor in enumerate(costs)}
    got = flood(turns, [turns.join(name, "tenant") for name in cost], 1.0, cost)
    assert max(got.values()) - min(got.values()) <= 2 * max(cost.values()) + REST_SECONDS


@given(st.integers(1, 20), st.integers(1, 20))
def test_a_tenant_with_many_connections_gets_no_more_time(many: int, few: int) -> None:
    turns, cost = Turns[str](), {"a": LONG, "b": LONG}
    lines = [turns.join("a", "a") for _ in range(many)] + [turns.join("b", "b") for _ in range(few)]
    got = flood(turns, lines, 1.0, cost)
    assert abs(got["a"] - got["b"]) <= 2 * LONG + REST_SECONDS


@given(st.integers(0, 3), st.floats(0.1, 100.0))
def test_who_comes_back_is_next_and_cannot_save_up(others: int, silent: float) -> None:
    """It is served before the flood goes on, but not for as long as it was silent."""
    turns = Turns[str]()
    lines = [turns.join(f"flood{number}", "loud") for number in range(others + 1)]
    quiet = turns.join("quiet", "quiet")
    flood(turns, lines, silent / 100, {line.who: LONG for line in lines})
    turns.wait(quiet)
    assert turns.next() is quiet
    turns.spent(quiet, LONG, more=True)
    served = 0
    while (line := turns.next()) is quiet:
        served += 1
        turns.spent(line, LONG, more=True)
    assert served <= REST_SECONDS / LONG + 2


def test_nobody_is_served_who_does_not_wait() -> None:
    turns = Turns[str]()
    line = turns.join("a", "tenant")
    assert turns.next() is None and not turns
    turns.wait(line)
    turns.wait(line)
    assert turns.next() is line
    turns.spent(line, LONG, more=False)
    assert turns.next() is None and not turns


def test_a_tenant_whose_connections_left_is_forgotten() -> None:
    turns = Turns[str]()
    for number in range(5):
        waiting, served = turns.join(f"{number}", "gone"), turns.join("served", "gone")
        turns.wait(waiting)
        turns.leave(served)
        turns.leave(waiting)
        assert turns.next() is waiting, "its turn finds nothing to do"
        turns.spent(waiting, LONG, more=False)
    assert not turns._tenants and not turns


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["wait", "turn", "idle"])), max_size=60))
def test_everybody_who_waits_is_served_in_the_end(steps: list[tuple[str, str]]) -> None:
    turns = Turns[str]()
    lines = {name: turns.join(name, tenant) for name, tenant in zip("abc", "xxy", strict=True)}
    waiting: set[str] = set()
    for name, what in steps:
        if what == "wait":
            turns.wait(lines[name])
            waiting.add(name)
        elif (line := turns.next()) is not None:
            assert line.who in waiting
            turns.spent(line, LONG, more=what == "turn")
            waiting -= set() if what == "turn" else {line.who}
    while (line := turns.next()) is not None:
        waiting.remove(line.who)
        turns.spent(line, LONG, more=False)
    assert not waiting
