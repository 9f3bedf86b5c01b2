"""Whom a shard meets before it needs them, and when."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from kvservice.core.directory.meetings import (
    AGAIN_SECONDS,
    MEETINGS_MAX,
    OVERDUE_SECONDS,
    PAUSE_SECONDS_FIRST,
    PAUSE_SECONDS_MAX,
    SETTLE_SECONDS,
    SPREAD_SECONDS,
    Meeting,
    Meetings,
)
from kvservice.core.messages import Holder
from kvservice.testing.builders import make_holder
from kvservice.units import NodeId

A, B = make_holder("a"), make_holder("b")
LATER = 2.0  # every meeting of a few nodes is due then


def made(peers_max: int = 64) -> Meetings:
    return Meetings(NodeId("me"), peers_max, Counter())


def hear(meetings: Meetings, *holders: Holder, is_here: bool = True, now: float = 0.0) -> None:
    for holder in holders:
        meetings.heard(holder, is_here, now)


def names(found: list[Meeting]) -> set[str]:
    return {meeting.holder.node_id for meeting in found}


def nodes(count: int) -> list[Holder]:
    return [make_holder(f"n{number}") for number in range(count)]


def test_a_named_node_is_met_once() -> None:
    meetings = made()
    hear(meetings, A)
    (meeting,) = meetings.due(LATER)
    assert meeting.holder == A
    meetings.ended(meeting.number, True, LATER)
    hear(meetings, A, now=LATER)
    assert not meetings.has_news and meetings.due(LATER + 100) == []
    assert meetings.next_deadline() is None and meetings.counters["peers_met"] == 1


def test_a_node_does_not_meet_itself() -> None:
    meetings = made()
    hear(meetings, make_holder("me"))
    assert meetings.next_deadline() is None and meetings.due(LATER) == []


def test_with_no_peers_wanted_nobody_is_met() -> None:
    meetings = made(0)
    hear(meetings, A)
    meetings.asked(A.node_id, 0.0)
    assert meetings.next_deadline() is None and meetings.due(LATER) == []


def test_news_are_gathered_for_a_moment() -> None:
    meetings = made()
    hear(meetings, A, now=5.0)
    assert meetings.next_deadline() == 5.0 + SETTLE_SECONDS
    assert meetings.due(5.0) == []
    hear(meetings, B, now=5.0 + SETTLE_SECONDS / 2)
    assert meetings.next_deadline() == 5.0 + SETTLE_SECONDS


def test_only_a_few_meetings_are_under_way_at_once() -> None:
    meetings = made()
    hear(meetings, *nodes(10))
    first = meetings.due(LATER)
    assert len(first) == MEETINGS_MAX and meetings.due(LATER) == [] and meetings.next_deadline() is None
    meetings.ended(first[0].number, True, LATER)
    second = meetings.due(LATER)
    assert len(second) == 1 and not names(second) & names(first)


def test_meetings_are_spread_by_the_number_of_nodes() -> None:
    """A node that joins a large cluster is not met by all at one moment."""
    joiner, moments = make_holder("joiner"), []
    for own in range(50):
        meetings = Meetings(NodeId(f"o{own}"), 100, Counter())
        hear(meetings, *nodes(49), is_here=True)
        while found := meetings.due(100.0):
            for meeting in found:
                meetings.ended(meeting.number, True, 100.0)
        hear(meetings, joiner, now=200.0)
        found = meetings.due(200.0 + SETTLE_SECONDS)
        moments.append(200.0 if found else meetings.next_deadline() or 0.0)
    assert min(moments) >= 200.0 and max(moments) <= 200.0 + 50 * SPREAD_SECONDS
    busiest = max(sum(at <= moment < at + 0.1 for moment in moments) for at in moments)
    assert busiest < 25, f"{busiest} of 50 nodes within a tenth of a second"


def test_at_most_so_many_peers_are_met_those_asked_last_first() -> None:
    meetings = made(3)
    hear(meetings, *nodes(50))
    for name in ("n7", "n8", "n9", "n10"):
        meetings.asked(NodeId(name), 0.0)
    found = meetings.due(LATER)
    assert names(found) == {"n8", "n9", "n10"}
    for meeting in found:
        meetings.ended(meeting.number, True, LATER)
    assert meetings.due(LATER + 100) == [] and meetings.next_deadline() is None


def test_nodes_choose_different_peers_of_a_large_cluster() -> None:
    chosen = []
    for own in ("x", "y"):
        meetings = Meetings(NodeId(own), MEETINGS_MAX, Counter())
        hear(meetings, *nodes(100))
        chosen.append(names(meetings.due(LATER)))
    assert chosen[0] != chosen[1]


def test_a_peer_asked_again_is_no_news() -> None:
    meetings = made()
    meetings.asked(A.node_id, 0.0)
    meetings.due(LATER)
    meetings.asked(A.node_id, LATER)
    assert not meetings.has_news


def test_a_failed_meeting_is_tried_again_after_longer_and_longer() -> None:
    meetings = made()
    hear(meetings, A)
    now, pauses = LATER, []
    for _ in range(9):
        (meeting,) = meetings.due(now)
        meetings.ended(meeting.number, False, now)
        due = meetings.next_deadline()
        assert due is not None and meetings.due(due - 0.001) == []
        pauses.append(due - now)
        now = due
    assert pauses[:3] == [PAUSE_SECONDS_FIRST, 2 * PAUSE_SECONDS_FIRST, 4 * PAUSE_SECONDS_FIRST]
    assert max(pauses) == PAUSE_SECONDS_MAX and meetings.counters["meetings_failed"] == 9


def test_a_new_boot_of_a_peer_is_met_at_once() -> None:
    meetings = made()
    hear(meetings, A)
    (meeting,) = meetings.due(LATER)
    meetings.ended(meeting.number, False, LATER)
    again = make_holder("a", A.epoch + 1)
    hear(meetings, again, now=LATER)
    assert [m.holder for m in meetings.due(LATER + LATER)] == [again]
    hear(meetings, A, is_here=False, now=9.0)
    assert not meetings.has_news, "what the directory said of an earlier boot does not count any more"


def test_the_answer_of_an_earlier_boot_is_ignored() -> None:
    meetings = made()
    hear(meetings, A)
    (old,) = meetings.due(LATER)
    hear(meetings, make_holder("a", A.epoch + 1), now=LATER)
    meetings.ended(old.number, True, LATER)
    assert len(meetings.due(LATER + LATER)) == 1
    meetings.check_invariants()


def test_a_hidden_node_is_not_met_until_it_counts_again() -> None:
    meetings = made()
    hear(meetings, A, B)
    hear(meetings, A, is_here=False)
    assert names(meetings.due(LATER)) == {"b"}
    hear(meetings, make_holder("unknown"), is_here=False)
    hear(meetings, A, now=LATER)
    assert names(meetings.due(LATER + LATER)) == {"a"}


def test_a_node_hidden_after_the_plan_is_left_out() -> None:
    meetings = made()
    hear(meetings, A)
    meetings.due(SETTLE_SECONDS)
    hear(meetings, A, is_here=False, now=SETTLE_SECONDS)
    assert meetings.due(SETTLE_SECONDS) == []


def test_a_node_that_returns_is_met_again_but_not_too_often() -> None:
    """Its connection may have broken. A directory that hides it again and again costs little."""
    meetings = made()
    hear(meetings, A)
    (meeting,) = meetings.due(LATER)
    meetings.ended(meeting.number, True, LATER)
    hear(meetings, A, is_here=False, now=LATER)
    hear(meetings, A, now=LATER)
    assert meetings.due(LATER + 1) == []
    assert meetings.next_deadline() == LATER + AGAIN_SECONDS
    assert names(meetings.due(LATER + AGAIN_SECONDS)) == {"a"}


def test_a_node_dropped_for_newer_ones_may_come_back() -> None:
    """Ray gives a node a new name at each start: what is known of nodes is bounded."""
    meetings = made()
    hear(meetings, A)
    (old,) = meetings.due(LATER)
    hear(meetings, *nodes(1024), now=LATER)
    meetings.ended(old.number, True, LATER)
    hear(meetings, A, now=LATER)
    meetings.check_invariants()
    assert len(meetings.due(LATER + 100)) == MEETINGS_MAX


def test_an_overdue_meeting_is_told_from_a_slow_one() -> None:
    meetings = made()
    hear(meetings, A)
    meetings.check_progress(0.0)
    meetings.due(LATER)
    meetings.check_progress(LATER + OVERDUE_SECONDS)
    try:
        meetings.check_progress(LATER + OVERDUE_SECONDS + 1)
    except AssertionError as error:
        assert "a" in str(error)
    else:
        raise AssertionError("it is late")


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7), st.integers(1, 3)), max_size=60), st.integers(1, 5))
def test_whatever_is_heard_each_wanted_peer_is_met_in_the_end(
    steps: list[tuple[int, int, int]], peers_max: int
) -> None:
    """No order of events loses a peer, meets one twice at once, or more than are wanted."""
    meetings, now, running = made(peers_max), 0.0, []
    last: dict[str, tuple[Holder, bool]] = {}
    for kind, number, epoch in steps:
        holder = make_holder(f"n{number}", epoch)
        known = last.get(holder.node_id)
        if kind == 0 and (known is None or epoch >= known[0].epoch):
            last[holder.node_id] = (holder, True)
        elif kind == 1 and known is not None and epoch >= known[0].epoch:
            last[holder.node_id] = (holder, False)
        if kind in (0, 1):
            meetings.heard(holder, kind == 0, now)
        elif kind == 2:
            meetings.asked(holder.node_id, now)
        elif kind == 3 and running:
            meetings.ended(running.pop(number % len(running)).number, epoch > 1, now)
        else:
            now += epoch
            running += meetings.due(now)
        meetings.check_invariants()
    met: set[NodeId] = set()
    for meeting in running:
        meetings.ended(meeting.number, False, now)
    for _ in range(200):
        now += 1.0
        for meeting in meetings.due(now):
            met.add(meeting.holder.node_id)
            meetings.ended(meeting.number, True, now)
        meetings.check_invariants()
    assert meetings.next_deadline() is None and meetings.due(now) == []
    here = {holder for holder, is_here in last.values() if is_here}
    assert met <= {holder.node_id for holder in here} and len(met) <= peers_max
