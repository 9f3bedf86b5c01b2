"""Rules of core.directory.announce: what is said, in which order, and what is said again."""

from __future__ import annotations

import random

import pytest

from kvservice.core.actions import Announce, Retract
from kvservice.core.block.keys import unpack_keys
from kvservice.core.directory import announce
from kvservice.core.directory.announce import Announcer, Update
from kvservice.core.directory.directory import Directory
from kvservice.core.directory.membership import AnnounceOutcome
from kvservice.testing.builders import make_holder
from kvservice.units import BlockKey, SpanRoute
from tests.settled import is_synced

EPOCH = 77


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


class Shard:
    """A shard's inventory and its announcer."""

    def __init__(self, *numbers: int, partitions: int = 1) -> None:
        self.held = {key(number): SpanRoute(number) for number in numbers}
        self.announcer = Announcer(partitions, lambda: list(self.held.items()))

    def add(self, number: int) -> None:
        self.held[key(number)] = SpanRoute(number)
        self.announcer.change([Announce(key(number), SpanRoute(number))])

    def remove(self, number: int) -> None:
        del self.held[key(number)]
        self.announcer.change([Retract(key(number), SpanRoute(number))])

    def exchange(
        self, outcome: AnnounceOutcome = AnnounceOutcome.APPLIED, epoch: int = EPOCH, partition: int = 0
    ) -> Update:
        """One update, sent and answered."""
        update = self.announcer.next_update(partition)
        assert update is not None
        self.announcer.check_invariants()
        self.announcer.on_reply(partition, outcome, epoch)
        self.announcer.check_invariants()
        return update

    def synced(self) -> Shard:
        while not is_synced(self.announcer, 0):
            self.exchange()
        return self


def test_first_word_is_a_full_announcement_even_of_nothing() -> None:
    assert Shard().exchange() == Update(1, full_begin=True, full_end=True)
    update = Shard(4, 5).exchange()
    assert set(update.added) == {key(4), key(5)} and update.full_begin and update.full_end


def test_full_announcement_goes_in_bounded_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announce, "UPDATE_KEYS_MAX", 3)
    shard = Shard(*range(7))
    pieces = [shard.exchange() for _ in range(3)]
    assert [(piece.full_begin, piece.full_end) for piece in pieces] == [(True, False), (False, False), (False, True)]
    assert [len(piece.added) for piece in pieces] == [3, 3, 1]
    assert {k for piece in pieces for k in piece.added} == set(shard.held)
    assert shard.announcer.next_update(0) is None


def test_change_waits_until_the_full_announcement_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announce, "UPDATE_KEYS_MAX", 2)
    shard = Shard(*range(4))
    shard.exchange()
    for number in range(4):
        shard.remove(number)
    piece = shard.exchange()
    assert piece.full_end and not piece.removed, "a removal must not overtake the piece that adds its key"
    assert {k for _ in range(2) for k in shard.exchange().removed} == {key(n) for n in range(4)}


def test_only_one_update_is_on_its_way() -> None:
    shard = Shard().synced()
    shard.add(1)
    assert shard.announcer.next_update(0) is not None
    shard.add(2)
    assert shard.announcer.next_update(0) is None
    shard.announcer.on_reply(0, AnnounceOutcome.APPLIED, EPOCH)
    assert shard.exchange().added == (key(2),)


def test_last_word_about_a_key_wins() -> None:
    shard = Shard(1).synced()
    shard.add(2)
    shard.remove(2)
    shard.remove(1)
    shard.add(1)
    assert shard.exchange() == Update(2, (key(1),), (key(2),))


def test_update_without_answer_is_sent_again_unchanged() -> None:
    shard = Shard().synced()
    shard.add(1)
    first = shard.announcer.next_update(0)
    shard.announcer.on_failure(0)
    shard.remove(1)
    assert shard.announcer.next_update(0) is first
    shard.announcer.on_reply(0, AnnounceOutcome.APPLIED, EPOCH)
    assert shard.exchange().removed == (key(1),)


def test_heartbeat_carries_what_there_is_to_say() -> None:
    shard = Shard().synced()
    assert shard.announcer.heartbeat(0) == Update(2)
    shard.announcer.on_failure(0)
    shard.add(1)
    assert shard.announcer.heartbeat(0) == Update(2), "the one without an answer comes first"
    shard.announcer.on_reply(0, AnnounceOutcome.APPLIED, EPOCH)
    assert shard.announcer.heartbeat(0) == Update(3, (key(1),))


def test_resync_is_answered_with_everything() -> None:
    shard = Shard(1).synced()
    shard.add(2)
    shard.add(3)
    shard.exchange(AnnounceOutcome.RESYNC)
    shard.remove(3)
    update = shard.exchange()
    assert update.full_begin and set(update.added) == {key(1), key(2)} and not update.removed
    assert shard.announcer.next_update(0) is None, "the inventory had the pending changes"


def test_sequences_grow_over_a_resync() -> None:
    shard = Shard().synced()
    shard.add(1)
    assert shard.exchange(AnnounceOutcome.RESYNC).sequence == 2
    assert shard.exchange().sequence == 3


def test_another_lookup_epoch_is_answered_with_everything() -> None:
    shard = Shard(1).synced()
    shard.add(2)
    shard.exchange(epoch=EPOCH + 1)
    update = shard.exchange(epoch=EPOCH + 1)
    assert update.full_begin and set(update.added) == {key(1), key(2)}
    shard.add(3)
    shard.exchange(epoch=EPOCH + 1)
    assert is_synced(shard.announcer, 0)


def test_refused_full_announcement_jumps_past_earlier_ones() -> None:
    shard = Shard()
    heard = 5_000
    for _ in range(20):
        update = shard.announcer.next_update(0)
        assert update is not None and update.full_begin
        if update.sequence > heard:
            return
        shard.announcer.on_reply(0, AnnounceOutcome.RESYNC, EPOCH)
    pytest.fail("never passed the sequences of the announcer before it")


def test_fenced_announcer_stays_silent() -> None:
    shard = Shard().synced()
    shard.add(1)
    shard.exchange(AnnounceOutcome.STALE_EPOCH)
    assert shard.announcer.fenced
    shard.add(2)
    assert shard.announcer.next_update(0) is None
    with pytest.raises(AssertionError, match="silent"):
        shard.announcer.heartbeat(0)


def test_partitions_get_their_own_keys_and_resync_alone() -> None:
    shard = Shard(*range(10), partitions=3)
    updates = [shard.exchange(partition=partition) for partition in range(3)]
    assert {key(n) for n in range(0, 10, 3)} == set(updates[0].added)
    shard.add(10)
    assert shard.announcer.next_update(0) is None
    shard.exchange(AnnounceOutcome.RESYNC, partition=1)
    assert shard.exchange(partition=1).full_begin
    assert shard.announcer.next_update(2) is None


def test_one_look_at_the_inventory_serves_all_who_want_it() -> None:
    """With half a million blocks a look takes half a second, in which the shard answers nobody."""
    held, looks = {key(number): SpanRoute(number) for number in range(9)}, 0

    def inventory() -> list[tuple[BlockKey, SpanRoute]]:
        nonlocal looks
        looks += 1
        return list(held.items())

    announcer = Announcer(3, inventory)
    first = announcer.next_update(0)
    announcer.change([Announce(key(9), SpanRoute(9)), Announce(key(10), SpanRoute(10)), Retract(key(1), SpanRoute(1))])
    announcer.check_invariants()
    updates = [first, announcer.next_update(1), announcer.next_update(2)]
    assert [set(update.added) for update in updates if update] == [{key(n) for n in range(p, 9, 3)} for p in range(3)]
    assert all(update.full_begin and update.full_end for update in updates if update) and looks == 1
    announcer.on_reply(1, AnnounceOutcome.APPLIED, EPOCH)
    assert announcer.next_update(1) == Update(2, (key(10),), (key(1),)), "what has changed since the look"


def test_farewell_is_final_until_everything_is_said_again() -> None:
    shard = Shard(1).synced()
    shard.add(2)
    assert shard.announcer.farewell(0) == Update(2, leaving=True)
    update = shard.exchange()
    assert update.full_begin and update.sequence == 3


def test_too_many_pending_changes_become_a_full_announcement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announce, "PENDING_MAX", 5)
    shard = Shard().synced()
    for number in range(6):
        shard.add(number)
    update = shard.exchange()
    assert update.full_begin and len(update.added) == 6


def test_without_lookup_partitions_nothing_is_kept() -> None:
    shard = Shard(partitions=0)
    shard.add(1)
    shard.announcer.check_invariants()
    assert shard.announcer.partition_count == 0


def test_invariants_notice_damage() -> None:
    shard = Shard().synced()
    shard.announcer._streams[0].in_flight = True
    with pytest.raises(AssertionError, match="on its way"):
        shard.announcer.check_invariants()


def test_changes_beyond_the_limit_wait_for_the_answer_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The full announcement that replaces them comes after it."""
    monkeypatch.setattr(announce, "PENDING_MAX", 3)
    shard = Shard(1).synced()
    shard.add(2)
    under_way = shard.announcer.next_update(0)
    assert under_way is not None and under_way.added == (key(2),)
    for number in range(3, 9):
        shard.add(number)
    assert shard.announcer.next_update(0) is None
    shard.announcer.on_reply(0, AnnounceOutcome.APPLIED, EPOCH)
    update = shard.exchange()
    assert update.full_begin and set(update.added) == {key(number) for number in range(1, 9)}


@pytest.mark.parametrize("seed", range(40))
def test_partitions_that_restart_know_all_in_the_end(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes, lost answers and restarts come between the pieces of full announcements."""
    monkeypatch.setattr(announce, "UPDATE_KEYS_MAX", 3)
    monkeypatch.setattr(announce, "PENDING_MAX", 6)
    chance = random.Random(seed)
    shard = Shard(*range(20), partitions=3)
    announcer, node = shard.announcer, make_holder()
    directories = [Directory() for _ in range(3)]
    epochs = [1, 1, 1]

    def talk(partition: int, *, may_be_lost: bool) -> None:
        update = announcer.heartbeat(partition)
        announcer.check_invariants()
        flags = {"full_begin": update.full_begin, "full_end": update.full_end}
        outcome = directories[partition].apply(node, update.sequence, update.added, update.removed, now=0.0, **flags)
        if may_be_lost and chance.random() < 0.2:
            announcer.on_failure(partition)
        else:
            announcer.on_reply(partition, outcome, epochs[partition])

    for _ in range(200):
        partition, number = chance.randrange(3), chance.randrange(40)
        if chance.random() < 0.05:
            directories[partition] = Directory()
            epochs[partition] += 1
        elif chance.random() < 0.5:
            talk(partition, may_be_lost=True)
        elif key(number) in shard.held:
            shard.remove(number)
        else:
            shard.add(number)
        announcer.check_invariants()
    for partition, directory in enumerate(directories):
        for _ in range(40):
            talk(partition, may_be_lost=False)
        assert is_synced(announcer, partition)
        mine = {block for block, route in shard.held.items() if route % 3 == partition}
        packed, more = directory.snapshot(0, 1 << 20)
        assert more is None and set(unpack_keys(packed.get(node.node_id, b""))) == mine
