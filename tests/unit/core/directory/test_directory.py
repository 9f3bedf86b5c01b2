"""Rules of core.directory.directory: runs, forgetting by masking, sweeping."""

from __future__ import annotations

import random

import pytest

from kvservice.core.actions import Announce, Retract
from kvservice.core.block.keys import pack_keys, unpack_keys
from kvservice.core.directory import announce
from kvservice.core.directory import directory as directory_module
from kvservice.core.directory.announce import Announcer, Update
from kvservice.core.directory.directory import Change, Directory
from kvservice.core.directory.membership import FORGET_SECONDS, AnnounceOutcome
from kvservice.core.messages import Holder
from kvservice.units import BlockKey, BootEpoch, NodeId, SpanRoute
from tests.settled import is_synced


def node(name: str, epoch: int = 1) -> Holder:
    return Holder(NodeId(name), f"{name}:1", BootEpoch(epoch))


def keys(*numbers: int) -> list[BlockKey]:
    return [BlockKey(number.to_bytes(16, "big")) for number in numbers]


A, B, C = node("a"), node("b"), node("c")


def directory_with(**held: range) -> Directory:
    directory = Directory()
    for name, numbers in held.items():
        outcome = directory.apply(node(name), 1, keys(*numbers), full_begin=True, full_end=True, now=0.0)
        assert outcome is AnnounceOutcome.APPLIED
    return directory


def asked(directory: Directory, numbers: range, now: float = 0.0) -> list[tuple[int, int, str]]:
    directory.check_invariants()
    runs = directory.resolve(keys(*numbers), now)
    return [(run.start, run.count, "".join(holder.node_id for holder in run.holders)) for run in runs]


def sweep_all(directory: Directory, limit: int = 1000) -> None:
    while directory.sweep(limit):
        directory.check_invariants()


def test_keys_nobody_holds_are_in_no_run() -> None:
    directory = directory_with(a=range(2, 4))
    assert asked(directory, range(6)) == [(2, 2, "a")]
    assert asked(directory, range(10, 20)) == []
    assert asked(directory, range(0)) == []


def test_runs_have_the_same_holders_throughout() -> None:
    directory = directory_with(a=range(6), b=range(4, 10))
    assert asked(directory, range(12)) == [(0, 4, "a"), (4, 2, "ab"), (6, 4, "b")]


def test_runs_that_differ_only_in_dead_holders_are_one() -> None:
    directory = directory_with(a=range(10), b=range(3, 5))
    directory.apply(B, 2, leaving=True, now=0.0)
    assert asked(directory, range(10)) == [(0, 10, "a")]


def test_removal_comes_after_addition_in_one_update() -> None:
    directory = directory_with(a=range(3))
    directory.apply(A, 2, keys(7, 8), keys(8, 0), now=0.0)
    assert asked(directory, range(9)) == [(1, 2, "a"), (7, 1, "a")]


def test_removing_what_one_does_not_hold_leaves_others_alone() -> None:
    directory = directory_with(a=range(3), b=range(0))
    directory.apply(B, 2, (), keys(0, 1, 99), now=0.0)
    assert asked(directory, range(3)) == [(0, 3, "a")]


def test_removing_many_keys_that_nobody_holds_changes_nothing() -> None:
    directory = directory_with(a=range(3))
    directory.apply(A, 2, [], keys(*range(10, 100)), now=0.0)
    assert asked(directory, range(100)) == [(0, 3, "a")]


def test_repeated_update_does_not_resurrect_a_removed_key() -> None:
    directory = directory_with(a=range(1))
    directory.apply(A, 2, keys(5), now=0.0)
    directory.apply(A, 3, (), keys(5), now=0.0)
    assert directory.apply(A, 2, keys(5), now=0.0) is AnnounceOutcome.RESYNC
    assert directory.apply(A, 1, keys(5), full_begin=True, now=0.0) is AnnounceOutcome.RESYNC
    assert asked(directory, range(9)) == [(0, 1, "a")]


def test_second_announcer_of_a_boot_is_no_repetition() -> None:
    directory = directory_with(a=range(3))
    assert directory.apply(A, 1, keys(7), full_begin=True, full_end=True, now=0.0) is AnnounceOutcome.APPLIED
    assert asked(directory, range(9)) == [(7, 1, "a")]
    assert directory.apply(A, 1, keys(7), full_begin=True, full_end=True, now=0.0) is AnnounceOutcome.APPLIED, (
        "and repeated"
    )
    assert asked(directory, range(9)) == [(7, 1, "a")]
    sweep_all(directory)
    assert asked(directory, range(9)) == [(7, 1, "a")] and len(directory) == 1


def test_full_announcement_shows_its_own_keys_only() -> None:
    """New keys show as they come; old ones do not show any more."""
    directory = directory_with(a=range(10), b=range(3))
    directory.apply(A, 2, keys(20), full_begin=True, now=0.0)
    assert asked(directory, range(30)) == [(0, 3, "b"), (20, 1, "a")]
    directory.apply(A, 3, keys(21), full_end=True, now=0.0)
    assert asked(directory, range(30)) == [(0, 3, "b"), (20, 2, "a")]


def test_key_announced_after_a_full_one_survives_the_sweep() -> None:
    directory = directory_with(a=range(10))
    directory.sweep(3)
    directory.apply(A, 2, keys(*range(5)), full_begin=True, full_end=True, now=0.0)
    directory.sweep(3)
    directory.apply(A, 3, keys(9), now=0.0)
    sweep_all(directory, 3)
    assert asked(directory, range(10)) == [(0, 5, "a"), (9, 1, "a")]
    assert len(directory) == 6


def test_restarted_node_loses_its_keys_at_once() -> None:
    directory = directory_with(a=range(10), b=range(2))
    assert directory.apply(node("a", 2), 1, now=0.0) is AnnounceOutcome.RESYNC
    assert asked(directory, range(10)) == [(0, 2, "b")]
    assert directory.apply(A, 2, keys(1), now=0.0) is AnnounceOutcome.STALE_EPOCH


def test_silent_node_is_hidden_by_time_and_comes_back_whole() -> None:
    directory = directory_with(a=range(10))
    assert asked(directory, range(10), now=2.9) == [(0, 10, "a")]
    assert asked(directory, range(10), now=3.0) == []
    directory.apply(A, 2, now=4.0)
    assert asked(directory, range(10), now=4.0) == [(0, 10, "a")]


def test_forgotten_node_is_swept_a_few_keys_at_a_time() -> None:
    directory = directory_with(a=range(100), b=range(10))
    directory.expire(2.0)
    directory.apply(B, 2, now=29.0)
    directory.expire(30.5)
    assert asked(directory, range(100), now=30.5) == [(0, 10, "b")]
    steps = 0
    while looked_at := directory.sweep(7):
        assert looked_at <= 7
        directory.check_invariants()
        steps += 1
    assert steps >= 100 // 7
    assert len(directory) == 10 and not directory._holders.retired


def test_bit_of_a_forgotten_node_is_reused_after_the_sweep() -> None:
    directory = directory_with(a=range(50))
    directory.apply(A, 2, leaving=True, now=0.0)
    directory.apply(C, 1, keys(60), full_begin=True, full_end=True, now=0.0)
    assert asked(directory, range(50)) == [], "another node must not inherit keys"
    sweep_all(directory, 8)
    directory.apply(B, 1, keys(61), full_begin=True, full_end=True, now=0.0)
    assert asked(directory, range(62)) == [(60, 1, "c"), (61, 1, "b")]
    assert directory._holders.bit_count == 2, "bits are reused after the sweep"


def test_bits_do_not_grow_with_restarts() -> None:
    directory = Directory()
    for epoch in range(1, 200):
        directory.apply(node("a", epoch), 1, keys(*range(5)), full_begin=True, full_end=True, now=0.0)
        sweep_all(directory)
    assert directory._holders.bit_count <= 2


def test_node_retired_during_a_sweep_waits_for_the_next_one() -> None:
    directory = directory_with(a=range(20), b=range(10, 30))
    directory.apply(A, 2, leaving=True, now=0.0)
    directory.sweep(5)
    directory.apply(B, 2, leaving=True, now=0.0)
    sweep_all(directory, 5)
    assert len(directory) == 0 and not directory._holders.retired


def test_more_than_sixty_four_nodes_fit() -> None:
    directory = Directory()
    for number in range(150):
        directory.apply(node(f"n{number:03}"), 1, keys(1, number + 10), full_begin=True, full_end=True, now=0.0)
    runs = directory.resolve(keys(1, 159), 0.0)
    assert [len(run.holders) for run in runs] == [150, 1]
    assert runs[1].holders[0].node_id == "n149"


def test_full_directory_drops_and_counts_instead_of_growing() -> None:
    directory = Directory(key_count_max=5)
    directory.apply(A, 1, keys(*range(8)), full_begin=True, full_end=True, now=0.0)
    assert len(directory) == 5 and directory.all_counters()["keys_dropped_full"] == 3
    directory.apply(A, 2, keys(20), now=0.0)
    assert len(directory) == 5


def test_new_address_shows_in_answers() -> None:
    directory = directory_with(a=range(2))
    directory.resolve(keys(0), 0.0)
    directory.apply(Holder(NodeId("a"), "moved:2", BootEpoch(1)), 2, now=0.0)
    assert directory.resolve(keys(0), 0.0)[0].holders[0].peer_address == "moved:2"


def test_stats_count_blocks_per_node() -> None:
    directory = directory_with(a=range(5), b=range(3))
    directory.apply(A, 2, keys(1, 2, 9), keys(0), now=1.0)
    found = {summary.node.node_id: summary for summary in directory.nodes(3.5)}
    assert (found["a"].block_count, found["b"].block_count) == (5, 3)
    assert (found["a"].visible, found["b"].visible) == (True, False)
    assert found["a"].heartbeat_age_seconds == 2.5


def test_changes_are_recorded_for_watchers_only() -> None:
    directory = directory_with(a=range(2))
    assert directory.changes == []
    directory.record_changes = True
    directory.apply(A, 2, now=0.0)
    assert directory.changes == [], "a heartbeat is no news"
    directory.apply(A, 3, keys(4), now=0.0)
    directory.apply(A, 3, keys(4), now=0.0)
    directory.apply(A, 4, keys(5), full_begin=True, full_end=True, now=0.0)
    directory.apply(B, 1, full_begin=True, full_end=True, now=0.0)
    directory.expire(30.0)
    assert directory.changes[:3] == [
        Change(A, pack_keys(keys(4))),
        Change(A, pack_keys(keys(5)), reset=True),
        Change(B, reset=True),
    ]
    assert set(directory.changes[3:]) == {Change(node, reset=True, hidden=True) for node in (A, B)}


def test_who_leaves_is_said_to_count_no_more() -> None:
    directory = directory_with(a=range(2))
    directory.record_changes = True
    directory.apply(A, 2, leaving=True, now=0.0)
    assert directory.changes == [Change(A, reset=True, hidden=True)]


def test_watchers_hear_of_nodes_that_hide_return_or_move() -> None:
    directory = directory_with(a=range(2))
    directory.record_changes = True
    directory.expire(2.9)
    assert directory.changes == []
    directory.expire(3.0)
    assert directory.changes == [Change(A, hidden=True)]
    directory.apply(A, 2, now=4.0)
    moved = Holder(NodeId("a"), "moved:2", BootEpoch(1))
    directory.apply(moved, 3, now=4.0)
    assert directory.changes[1:] == [Change(A), Change(moved)]


def test_snapshot_is_by_node_and_without_forgotten_ones() -> None:
    directory = directory_with(a=range(3), b=range(2, 4), c=range(4))
    directory.apply(C, 2, leaving=True, now=0.0)
    found: dict[str, set[BlockKey]] = {}
    row: int | None = 0
    while row is not None:
        held, row = directory.snapshot(row, 2)
        for name, packed in held.items():
            found.setdefault(name, set()).update(unpack_keys(packed))
    assert found == {"a": set(keys(0, 1, 2)), "b": set(keys(2, 3))}


@pytest.mark.parametrize("broken", ["count", "bit", "mask"])
def test_invariants_notice_damage(broken: str) -> None:
    directory = directory_with(a=range(3))
    if broken == "count":
        directory._block_counts[NodeId("a")] = 2
    elif broken == "bit":
        directory._holders._free_bits.append(0)
    else:
        directory._holders.table.put(keys(0)[0], directory._holders._number(1 << 9))
    with pytest.raises(AssertionError):
        directory.check_invariants()


def test_losing_a_node_touches_none_of_its_keys_at_that_moment() -> None:
    directory = directory_with(a=range(1000))
    directory.apply(A, 2, leaving=True, now=0.0)
    assert directory.resolve(keys(*range(64)), 0.0) == []
    assert len(directory) == 1000 and directory._holders.retired, "that is for the sweep"


def test_keys_lost_with_their_node_are_remembered() -> None:
    """The reason is remembered before the sweep and after it."""
    directory = directory_with(a=range(3), b=range(2, 4), c=range(4, 6))
    directory.apply(A, 2, leaving=True, now=1.0)
    directory.apply(node("c", epoch=2), 1, keys(4), full_begin=True, full_end=True, now=2.0)
    directory.expire(2.9)
    directory.apply(node("c", epoch=2), 2, now=20.0)
    directory.expire(40.0)  # b fell silent
    directory.apply(node("c", epoch=2), 3, now=40.0)
    left, silent = ("a", "drain", 1.0), ("b", "owner_died", 40.0)
    wanted = {0: left, 1: left, 2: silent, 3: silent, 5: ("c", "restarted", 2.0)}
    for _ in range(2):
        found = directory.find_lost(keys(*range(7)), 41.0, 41.0)
        told = {
            int.from_bytes(key, "big"): (eviction.caused_by, eviction.cause.value, eviction.at)
            for key, eviction in found.items()
        }
        assert told.keys() == wanted.keys()
        assert {number: one for number, one in told.items() if number != 2} == {
            number: one for number, one in wanted.items() if number != 2
        }
        assert told[2][0] in ("a", "b")  # both had it
        sweep_all(directory)
    directory.apply(B, 2, keys(3), full_begin=True, full_end=True, now=42.0)
    (again,) = directory.find_lost(keys(3), 43.0, 43.0).values()  # stored again, but that tells nothing about before
    assert (again.cause.value, again.at) == ("owner_died", 40.0)
    assert directory.find_lost(keys(3), 43.0, 39.0) == {}


# -- messages of an earlier boot, and clocks that jump ----


def deliver(directory: Directory, who: Holder, update: Update, now: float = 0.0) -> AnnounceOutcome:
    return directory.apply(
        who,
        update.sequence,
        update.added,
        update.removed,
        full_begin=update.full_begin,
        full_end=update.full_end,
        leaving=update.leaving,
        now=now,
    )


def talk(announcer: Announcer, directory: Directory, who: Holder, now: float = 0.0) -> list[Update]:
    """Say everything there is to say, and at least that the node lives. Returns what was said."""
    said: list[Update] = []
    while not said or not is_synced(announcer, 0):
        update = announcer.next_update(0) or announcer.heartbeat(0)
        announcer.on_reply(0, deliver(directory, who, update, now), 7)
        said.append(update)
    return said


@pytest.mark.parametrize("seed", range(20))
def test_words_of_an_earlier_boot_change_nothing_of_the_next(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches, heartbeats and the farewell, doubled and in any order, before and between those of the next boot."""
    monkeypatch.setattr(announce, "UPDATE_KEYS_MAX", 3)
    rng, directory = random.Random(seed), Directory()
    held = dict.fromkeys(keys(*range(8)), SpanRoute(0))
    earlier = Announcer(1, lambda: list(held.items()))
    old, new = node("a", 1), node("a", 2)
    said = talk(earlier, directory, old)
    earlier.change([*(Announce(key, SpanRoute(0)) for key in keys(8, 9)), Retract(keys(0)[0], SpanRoute(0))])
    said += talk(earlier, directory, old)
    said.append(earlier.farewell(0))
    late = said * 2
    rng.shuffle(late)
    later = Announcer(1, lambda: [(key, SpanRoute(0)) for key in keys(*range(20, 26))])
    while not is_synced(later, 0) or late:
        if late and rng.random() < 0.7:
            directory.check_invariants()
            deliver(directory, old, late.pop())
        elif (update := later.next_update(0) or later.heartbeat(0)) is not None:
            later.on_reply(0, deliver(directory, new, update), 7)
    talk(later, directory, new)
    assert not later.fenced
    assert asked(directory, range(30)) == [(20, 6, "a")]


def test_a_jump_of_the_clock_is_healed_by_heartbeats() -> None:
    """The clock of a directory jumped by hours; after a heartbeat of each node it has everything back."""
    directory, hours = Directory(), 36_000.0
    ranges = {"a": range(4), "b": range(2, 6)}
    held = {name: dict.fromkeys(keys(*numbers), SpanRoute(0)) for name, numbers in ranges.items()}
    announcers = {name: Announcer(1, own.items) for name, own in held.items()}
    for name, announcer in announcers.items():
        talk(announcer, directory, node(name))
    directory.expire(hours)
    assert asked(directory, range(6), hours) == []
    for name, announcer in announcers.items():
        announcer.heartbeat(0)
        announcer.on_failure(0)  # its answer came hours late
        talk(announcer, directory, node(name), hours)
    assert asked(directory, range(6), hours) == [(0, 2, "a"), (2, 2, "ab"), (4, 2, "b")]


def test_more_sets_of_holders_than_are_remembered_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "ANSWERS_MAX", 2)
    directory = directory_with(a=range(4), b=range(1, 4), c=range(2, 4))
    wanted = [(0, 1, "a"), (1, 1, "ab"), (2, 2, "abc")]
    assert [asked(directory, range(4)) for _ in range(3)] == [wanted] * 3


def test_a_node_is_found_by_its_id_while_it_is_alive() -> None:
    directory = directory_with(a=range(2))
    assert directory.find_node(A.node_id, 0.0) == A
    assert directory.find_node(B.node_id, 0.0) is None
    assert directory.find_node(A.node_id, FORGET_SECONDS + 1.0) is None
