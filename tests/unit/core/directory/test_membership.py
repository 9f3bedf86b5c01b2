"""Rules of core.directory.membership: what an announcement may do, and what silence does."""

from __future__ import annotations

import pytest

from kvservice.core.directory import membership as m
from kvservice.core.directory.membership import (
    AnnounceEffect,
    AnnounceOutcome,
    Membership,
    MemberState,
)
from kvservice.core.messages import Holder
from kvservice.core.transitions import InvalidTransition
from kvservice.errors import Exhausted, Forbidden
from kvservice.units import BootEpoch, NodeId


def node(name: str = "a", epoch: int = 1, address: str = "h:1") -> Holder:
    return Holder(NodeId(name), address, BootEpoch(epoch))


def hear(
    table: Membership, sequence: int, now: float = 0.0, who: Holder | None = None, flags: str = ""
) -> AnnounceEffect:
    """flags: b begin, e end, l leaving."""
    effect = table.hear(
        who or node(), sequence, full_begin="b" in flags, full_end="e" in flags, leaving="l" in flags, now=now
    )
    table.check_invariants()
    return effect


def state(table: Membership, name: str = "a") -> MemberState:
    member = table.get(NodeId(name))
    assert member is not None
    return member.state


def synced(sequence: int = 1) -> Membership:
    table = Membership()
    assert hear(table, sequence, flags="be").outcome is AnnounceOutcome.APPLIED
    return table


def test_unknown_node_must_announce_in_full() -> None:
    table = Membership()
    assert hear(table, 7).outcome is AnnounceOutcome.RESYNC
    assert table.get(NodeId("a")) is None, "a refused stranger takes no room"


def test_full_announcement_forgets_what_was_before() -> None:
    table = synced()
    assert hear(table, 2, flags="b") == AnnounceEffect(AnnounceOutcome.APPLIED, forget=True, apply=True)
    assert state(table) is MemberState.SYNCING
    assert hear(table, 3) == AnnounceEffect(AnnounceOutcome.APPLIED, apply=True)
    assert state(table) is MemberState.SYNCING
    hear(table, 4, flags="e")
    assert state(table) is MemberState.ALIVE


def test_full_announcement_may_jump_ahead_in_sequence() -> None:
    table = synced()
    assert hear(table, 50, flags="be").apply
    assert hear(table, 51).apply


def test_gap_asks_for_resync_and_changes_nothing() -> None:
    table = synced()
    assert hear(table, 3) == AnnounceEffect(AnnounceOutcome.RESYNC)
    assert hear(table, 2).apply, "the one that was expected still is"


@pytest.mark.parametrize("flags", ["", "e"])
def test_last_sequence_again_is_acknowledged_not_applied(flags: str) -> None:
    table = Membership()
    hear(table, 1, flags="b")
    hear(table, 2, flags=flags)
    assert hear(table, 2, flags=flags) == AnnounceEffect(AnnounceOutcome.APPLIED)


@pytest.mark.parametrize("flags", ["b", "be"])
def test_full_announcement_of_the_last_sequence_is_applied(flags: str) -> None:
    table = synced()
    assert hear(table, 1, flags=flags) == AnnounceEffect(AnnounceOutcome.APPLIED, forget=True, apply=True)
    assert state(table) is (MemberState.ALIVE if "e" in flags else MemberState.SYNCING)


def test_full_announcement_of_the_farewell_is_refused() -> None:
    """It has the sequence of the farewell."""
    table = synced()
    hear(table, 2, flags="l")
    assert hear(table, 2, flags="be") == AnnounceEffect(AnnounceOutcome.RESYNC)
    assert state(table) is MemberState.DEAD


@pytest.mark.parametrize("flags", ["", "b", "be", "e", "l"])
def test_replay_of_an_older_sequence_is_never_applied(flags: str) -> None:
    table = synced(5)
    hear(table, 6)
    assert hear(table, 5, flags=flags) == AnnounceEffect(AnnounceOutcome.RESYNC)
    assert state(table) is MemberState.ALIVE


@pytest.mark.parametrize("flags", ["", "b", "be", "l"])
def test_older_epoch_is_told_to_stop(flags: str) -> None:
    table = Membership()
    hear(table, 1, who=node(epoch=2), flags="be")
    assert hear(table, 99, who=node(epoch=1), flags=flags) == AnnounceEffect(AnnounceOutcome.STALE_EPOCH)


def test_older_epoch_is_told_to_stop_after_the_newer_left() -> None:
    table = Membership()
    hear(table, 1, who=node(epoch=2), flags="be")
    hear(table, 2, who=node(epoch=2), flags="l")
    assert hear(table, 1, who=node(epoch=1), flags="be").outcome is AnnounceOutcome.STALE_EPOCH


def test_newer_epoch_forgets_the_older_one_at_once() -> None:
    """It does so even before it announces in full."""
    table = synced(9)
    assert hear(table, 1, who=node(epoch=2)) == AnnounceEffect(AnnounceOutcome.RESYNC, forget=True)
    assert not table.is_visible(NodeId("a"))
    assert table._members[NodeId("a")].holder.epoch == 2
    assert hear(table, 2, who=node(epoch=2), flags="be").apply


def test_leaving_is_honoured_whatever_was_missed() -> None:
    table = synced()
    assert hear(table, 9, flags="l") == AnnounceEffect(AnnounceOutcome.APPLIED, forget=True)
    assert state(table) is MemberState.DEAD
    assert hear(table, 9, flags="l") == AnnounceEffect(AnnounceOutcome.APPLIED), "said twice"
    assert hear(table, 10).outcome is AnnounceOutcome.RESYNC
    assert hear(table, 11, flags="be").apply, "it may come back"


def test_replay_of_an_announcement_brings_nobody_back() -> None:
    table = synced(1)
    hear(table, 2, flags="l")
    assert hear(table, 1, flags="be") == AnnounceEffect(AnnounceOutcome.RESYNC)
    assert state(table) is MemberState.DEAD


def test_silent_node_is_hidden_then_forgotten() -> None:
    table = Membership(hide_seconds=3, forget_seconds=30)
    hear(table, 1, now=10, flags="be")
    assert table.expire(12.9) == [] and table.is_visible(NodeId("a"))
    assert table.expire(13.0) == [] and not table.is_visible(NodeId("a"))
    assert table.expire(39.9) == []
    assert [member.holder.node_id for member in table.expire(40.0)] == ["a"]
    assert state(table) is MemberState.DEAD


def test_hidden_node_comes_back_with_its_next_heartbeat() -> None:
    table = Membership(hide_seconds=3, forget_seconds=30)
    hear(table, 1, flags="be")
    table.expire(5)
    assert state(table) is MemberState.SUSPECT
    assert hear(table, 2, now=6) == AnnounceEffect(AnnounceOutcome.APPLIED, apply=True)
    assert table.is_visible(NodeId("a"))


def test_full_announcement_that_stalls_goes_on_where_it_stopped() -> None:
    table = Membership(hide_seconds=3, forget_seconds=30)
    hear(table, 1, flags="b")
    table.expire(5)
    assert state(table) is MemberState.STALLED
    hear(table, 2, now=6)
    assert state(table) is MemberState.SYNCING


def test_refused_announcement_is_no_sign_of_life() -> None:
    table = Membership(hide_seconds=3, forget_seconds=30)
    hear(table, 1, flags="be")
    hear(table, 5, now=2.9)
    table.expire(3)
    assert not table.is_visible(NodeId("a")), "a node that was not understood must not look current"


def test_forgotten_node_must_announce_in_full() -> None:
    table = Membership(hide_seconds=3, forget_seconds=30)
    hear(table, 1, flags="be")
    table.expire(31)
    assert hear(table, 2, now=31).outcome is AnnounceOutcome.RESYNC
    assert hear(table, 3, now=31, flags="be").apply


def test_new_address_is_taken_over() -> None:
    table = synced()
    version = table.version
    hear(table, 2, who=node(address="h:2"))
    member = table.get(NodeId("a"))
    assert member is not None and member.holder.peer_address == "h:2"
    assert table.version > version


def test_number_of_nodes_is_bounded_but_the_dead_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(m, "MEMBERS_MAX", 2)
    table = Membership()
    for name in ("a", "b"):
        hear(table, 1, who=node(name), flags="be")
    with pytest.raises(Exhausted):
        hear(table, 1, who=node("c"), flags="be")
    hear(table, 2, who=node("a"), flags="l")
    assert hear(table, 1, who=node("c"), flags="be").apply
    assert table.get(NodeId("a")) is None


def test_a_node_may_miss_two_signs_of_life_however_rare_they_are() -> None:
    assert m.patience(0.1) == m.patience(1.0) == (m.HIDE_SECONDS, m.FORGET_SECONDS)
    hide, forget = m.patience(10.0)
    table = Membership(hide, forget)
    hear(table, 1, flags="be", now=0.0)
    assert table.expire(29.0) == [] and table.is_visible(NodeId("a"))
    table.expire(31.0)
    assert not table.is_visible(NodeId("a"))
    assert table.expire(299.0) == [] and len(table.expire(301.0)) == 1


def test_each_state_has_a_way_in_and_a_way_out() -> None:
    for target in MemberState:
        assert target in m.TRANSITIONS.values()
        assert any(source is target for source, _ in m.TRANSITIONS)


def test_transition_not_in_the_table_is_a_bug() -> None:
    table = synced()
    member = table.get(NodeId("a"))
    assert member is not None
    with pytest.raises(InvalidTransition):
        table._move(member, m.MemberEvent.EXPIRE)


def test_invariants_notice_a_missed_deadline() -> None:
    table = synced()
    table._next_deadline = 1e9
    with pytest.raises(AssertionError, match="too late"):
        table.check_invariants()


def test_a_node_belongs_to_its_announcer_until_forgotten() -> None:
    table = Membership(hide_seconds=3, forget_seconds=30)

    def hear(epoch: int, proof: bytes, now: float, *, leaving: bool = False) -> AnnounceOutcome:
        node = Holder(NodeId("n"), "a:1", BootEpoch(epoch))
        return table.hear(
            node, 1, full_begin=not leaving, full_end=not leaving, leaving=leaving, now=now, proof=proof
        ).outcome

    assert hear(5, b"owner", 0.0) is AnnounceOutcome.APPLIED
    table.expire(20.0)  # hidden, and still the owner's
    for epoch, leaving in ((5, False), (9, False), (9, True)):
        with pytest.raises(Forbidden, match="another process"):
            hear(epoch, b"thief", 20.0, leaving=leaving)
    assert table._members[NodeId("n")].holder.epoch == 5 and table.counters["announce_forbidden"] == 3
    assert hear(6, b"owner", 21.0) is AnnounceOutcome.APPLIED
    assert hear(5, b"owner", 21.0) is AnnounceOutcome.STALE_EPOCH, "of one owner the older boot is a zombie"
    table.expire(60.0)
    assert hear(1 << 60, b"thief", 61.0) is AnnounceOutcome.APPLIED
    table.expire(100.0)
    assert hear(7, b"owner", 101.0) is AnnounceOutcome.APPLIED, "a forged epoch does not outlive the forger"
    table.check_invariants()
