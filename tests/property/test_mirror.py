"""A mirror fed by the changes of lookup partitions answers what they answer, whatever its streams went through."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvservice.core.block.keys import pack_keys
from kvservice.core.directory.directory import Change, Directory
from kvservice.core.directory.membership import FORGET_SECONDS, AnnounceOutcome
from kvservice.core.directory.mirror import (
    NODES_AT,
    PARTITIONS_MAX,
    STALE_SECONDS,
    Feed,
    MirrorEvent,
    MirrorReader,
    MirrorWriter,
    keys_that_fit,
    mirror_bytes,
    mirror_rows,
)
from kvservice.core.messages import Holder, HolderRun
from kvservice.errors import VersionMismatch
from kvservice.units import BlockKey, BootEpoch, NodeId

PARTITIONS = 2
NAMES = ("a", "b", "c")
names, partitions = st.sampled_from(NAMES), st.integers(0, PARTITIONS - 1)


def keys(*numbers: int) -> list[BlockKey]:
    return [BlockKey(number.to_bytes(16, "big")) for number in numbers]


# Keys of a partition are its own, as routes see to it.
KEYS = [keys(*range(p * 1000, p * 1000 + 40)) for p in range(PARTITIONS)]
some_keys = st.lists(st.integers(0, 39), max_size=40, unique=True)


def node(name: str, epoch: int = 1, port: int = 1) -> Holder:
    return Holder(NodeId(name), f"{name}:{port}", BootEpoch(epoch))


def events_of(change: Change) -> MirrorEvent:
    return MirrorEvent(change.node, change.added, change.removed, change.reset, change.hidden)


def mirror(rows: int = 64, partition_count: int = 1) -> tuple[MirrorWriter, MirrorReader]:
    buffer = memoryview(bytearray(mirror_bytes(rows)))
    writer = MirrorWriter(buffer, partition_count, epoch=1)
    writer.allow_rows(rows)
    return writer, MirrorReader(buffer.toreadonly())


@dataclass
class Partition:
    """One partition of the directory, and the stream that leads from it to the mirror."""

    directory: Directory = field(default_factory=Directory)
    snapshot_row: int | None = None  # a snapshot is under way, this is its next piece
    sequences: dict[str, int] = field(default_factory=dict)


class MirrorMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.now, self.told = 0.0, True
        self.epochs = dict.fromkeys(NAMES, 1)
        self.ports = dict.fromkeys(NAMES, 1)
        self.partitions = [Partition() for _ in range(PARTITIONS)]
        self.writer, self.reader = mirror(512, PARTITIONS)
        for partition in range(PARTITIONS):
            for first, name in enumerate(NAMES):
                self.announce(partition, name, list(range(first * 10, first * 10 + 20)), [])
            self.stream_breaks_and_begins_anew(partition)
        self.a_piece_of_the_snapshot(1000)

    def announce(self, partition: int, name: str, added: list[int], removed: list[int], **flags: bool) -> None:
        part = self.partitions[partition]
        part.sequences[name] = part.sequences.get(name, 0) + 1
        chosen = KEYS[partition]
        outcome = part.directory.apply(
            node(name, self.epochs[name], self.ports[name]),
            part.sequences[name],
            [chosen[i] for i in added],
            [chosen[i] for i in removed],
            now=self.now,
            **flags,
        )
        if outcome is AnnounceOutcome.RESYNC:
            self.announce(partition, name, added, removed, full_begin=True, full_end=True)

    @rule(partition=partitions, name=names, added=some_keys, removed=some_keys)
    def change(self, partition: int, name: str, added: list[int], removed: list[int]) -> None:
        self.announce(partition, name, added, removed)

    @rule(partition=partitions, name=names, added=some_keys)
    def announce_in_full(self, partition: int, name: str, added: list[int]) -> None:
        self.announce(partition, name, added, [], full_begin=True, full_end=True)

    @rule(partition=partitions, name=names)
    def leave(self, partition: int, name: str) -> None:
        self.announce(partition, name, [], [], leaving=True)

    @rule(name=names)
    def restart(self, name: str) -> None:
        self.epochs[name] += 1

    @rule(name=names)
    def move(self, name: str) -> None:
        self.ports[name] += 1

    @rule(seconds=st.sampled_from([0.5, 2.0, 4.0, FORGET_SECONDS + 1]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for part in self.partitions:
            part.directory.expire(self.now)

    @rule()
    def sweep(self) -> None:
        self.writer.sweep()
        for part in self.partitions:
            part.directory.sweep(10)

    @rule(partition=partitions)
    def stream_breaks_and_begins_anew(self, partition: int) -> None:
        part = self.partitions[partition]
        part.directory.changes.clear()
        part.directory.record_changes = True
        part.snapshot_row = 0
        self.writer.begin(partition)
        for summary in part.directory.nodes(self.now):
            self.writer.apply(partition, MirrorEvent(summary.node, reset=True, hidden=not summary.visible), self.now)

    @precondition(lambda self: any(part.snapshot_row is not None for part in self.partitions))
    @rule(limit=st.integers(1, 50))
    def a_piece_of_the_snapshot(self, limit: int) -> None:
        for partition, part in enumerate(self.partitions):
            if part.snapshot_row is None:
                continue
            known = {summary.node.node_id: summary for summary in part.directory.nodes(self.now)}
            held, part.snapshot_row = part.directory.snapshot(part.snapshot_row, limit)
            for name, packed in held.items():
                event = MirrorEvent(known[name].node, packed, hidden=part.directory.is_hidden(name))
                self.writer.apply(partition, event, self.now)
            if part.snapshot_row is None:
                self.writer.apply(partition, MirrorEvent(snapshot_end=True), self.now)

    @rule()
    def changes_wait(self) -> None:
        """Until the next step."""
        self.told = False

    @invariant()
    def changes_arrive(self) -> None:
        if not self.told:
            self.told = True
            return
        for partition, part in enumerate(self.partitions):
            if part.snapshot_row is None:
                for change in part.directory.changes:
                    self.writer.apply(partition, events_of(change), self.now)
                part.directory.changes.clear()

    @invariant()
    def mirror_answers_what_the_directory_answers(self) -> None:
        self.writer.check_invariants()
        for partition, part in enumerate(self.partitions):
            if self.reader.feed(partition, 0.0) is Feed.LIVE and not part.directory.changes:
                runs = part.directory.resolve(KEYS[partition], self.now)
                if not part.directory.changes:
                    assert self.reader.resolve(pack_keys(KEYS[partition])) == runs

    def teardown(self) -> None:
        for partition in range(PARTITIONS):
            self.stream_breaks_and_begins_anew(partition)
        while any(part.snapshot_row is not None for part in self.partitions):
            self.a_piece_of_the_snapshot(20)
        self.changes_arrive()
        self.mirror_answers_what_the_directory_answers()
        while self.writer.sweep():
            self.writer.check_invariants()
        self.mirror_answers_what_the_directory_answers()


TestMirror = MirrorMachine.TestCase
TestMirror.settings = settings(max_examples=25, stateful_step_count=40)


def test_partition_that_was_silent_for_long_is_stale() -> None:
    """Each partition is judged by itself."""
    writer, reader = mirror(partition_count=2)
    assert [reader.feed(partition, 0.0) for partition in (0, 1)] == [Feed.NEVER] * 2
    for partition in (0, 1):
        writer.begin(partition)
        assert reader.feed(partition, 10.0) is Feed.SYNCING
        writer.apply(partition, MirrorEvent(snapshot_end=True), 10.0)
    writer.apply(1, MirrorEvent(), 10.0 + STALE_SECONDS)
    late = 10.1 + STALE_SECONDS
    assert [reader.feed(partition, late) for partition in (0, 1)] == [Feed.STALE, Feed.LIVE]
    assert writer.age(0, late) == pytest.approx(0.1 + STALE_SECONDS)


def test_the_last_partition_has_room_before_what_follows() -> None:
    """No further partition is read."""
    buffer = memoryview(bytearray(mirror_bytes(64)))
    writer = MirrorWriter(buffer, PARTITIONS_MAX, epoch=1)
    writer.allow_rows(64)
    follows = bytes(buffer[NODES_AT:])
    writer.begin(PARTITIONS_MAX - 1)
    writer.apply(PARTITIONS_MAX - 1, MirrorEvent(snapshot_end=True), 10.0)
    assert MirrorReader(buffer.toreadonly()).feed(PARTITIONS_MAX - 1, 10.0) is Feed.LIVE
    assert buffer[NODES_AT:] == follows
    buffer[24:32] = (PARTITIONS_MAX + 1).to_bytes(8, "little")
    with pytest.raises((ValueError, VersionMismatch), match="mirror"):
        MirrorReader(buffer.toreadonly())


def test_partition_that_does_not_fit_is_full_until_anew() -> None:
    writer, reader = mirror()
    writer.begin(0)
    fits = keys_that_fit(64)
    writer.apply(0, MirrorEvent(node("a"), pack_keys(keys(*range(fits)))), 1.0)
    writer.apply(0, MirrorEvent(snapshot_end=True), 1.0)
    assert reader.feed(0, 1.0) is Feed.LIVE
    writer.apply(0, MirrorEvent(node("a"), pack_keys(keys(*range(fits, 2 * fits + 200)))), 1.0)
    writer.apply(0, MirrorEvent(snapshot_end=True), 1.0)
    assert reader.feed(0, 1.0) is Feed.FULL
    while writer.sweep():
        writer.check_invariants()
    writer.begin(0)
    writer.apply(0, MirrorEvent(node("a"), pack_keys(keys(7))), 1.0)
    writer.apply(0, MirrorEvent(snapshot_end=True), 1.0)
    assert reader.feed(0, 1.0) is Feed.LIVE
    assert reader.resolve(pack_keys(keys(6, 7))) == [HolderRun(1, 1, (node("a"),))]


def test_record_that_is_torn_names_nobody() -> None:
    buffer = memoryview(bytearray(mirror_bytes(64)))
    writer, reader = MirrorWriter(buffer, 1, epoch=1), MirrorReader(buffer.toreadonly())
    writer.begin(0)
    writer.apply(0, MirrorEvent(node("a"), pack_keys(keys(1))), 1.0)
    at = bytes(buffer).index(b"a:1")
    buffer[at : at + 1] = b"x"
    assert reader.resolve(pack_keys(keys(1))) == []


@pytest.mark.parametrize("seed", range(10))
def test_reader_of_torn_memory_answers_or_gives_up(seed: int) -> None:
    noise = random.Random(seed)
    buffer = bytearray(mirror_bytes(64))
    writer = MirrorWriter(memoryview(buffer), 2, epoch=1)
    asked = keys(*range(600))
    for name in NAMES:
        writer.apply(0, MirrorEvent(node(name), pack_keys(asked[noise.randrange(300) :][:200])), 1.0)
    reader = MirrorReader(memoryview(buffer).toreadonly())
    for _ in range(40):
        for _ in range(200):
            buffer[noise.choice((noise.randrange(4096, len(buffer)), noise.randrange(8192, 9800)))] = noise.randrange(
                256
            )
        for words in (16, 17):  # as a writer says that records changed
            buffer[8 * words] = noise.randrange(256)
        runs = reader.resolve(pack_keys(asked))
        assert runs is None or all(0 <= run.start < run.start + run.count <= 600 for run in runs)
        assert isinstance(reader.feed(0, 1.0), Feed)


def test_holders_beyond_what_a_set_can_name_are_left_out() -> None:
    writer, reader = mirror()
    writer.begin(0)
    for number in range(100):
        writer.apply(0, MirrorEvent(node(f"n{number:03}"), pack_keys(keys(1))), 1.0)
    (run,) = reader.resolve(pack_keys(keys(1))) or ()
    assert 20 < len(run.holders) < 100


def test_other_memory_is_refused() -> None:
    good = memoryview(bytearray(mirror_bytes(64)))
    MirrorWriter(good, 1, epoch=1)
    MirrorReader(good)
    for at, value in ((0, 0), (8, 9), (24, 0), (32, 255), (36, 1)):
        other = bytearray(good)
        other[at] = value
        with pytest.raises((ValueError, VersionMismatch), match="mirror"):
            MirrorReader(memoryview(other))
    with pytest.raises(ValueError, match="small"):
        MirrorReader(good[:4096])


def test_mirror_of_so_many_bytes_holds_the_most_keys_that_fit() -> None:
    assert mirror_rows(1 << 20) == 0
    for size in (8 << 20, 512 << 20, 1 << 30):
        rows = mirror_rows(size)
        assert mirror_bytes(rows) <= size < mirror_bytes(2 * rows)
    assert keys_that_fit(mirror_rows(512 << 20)) > 10_000_000
