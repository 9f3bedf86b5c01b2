"""What a mirror does with nodes that it has no room for. Its other rules are in tests/property/test_mirror.py."""

from __future__ import annotations

import pytest

from kvservice.core.block.keys import pack_keys
from kvservice.core.directory import mirror
from kvservice.core.directory.key_table import BlockTable
from kvservice.core.directory.mirror import Feed, MirrorEvent, MirrorReader, MirrorWriter, mirror_bytes
from kvservice.core.messages import Holder, HolderRun
from kvservice.testing.builders import make_chain, make_holder
from kvservice.units import BootEpoch, NodeId

CHAIN = make_chain(2)
ROWS = 64


@pytest.fixture
def memory() -> memoryview:
    return memoryview(bytearray(mirror_bytes(ROWS)))


def live_writer(memory: memoryview, partition_count: int = 1) -> MirrorWriter:
    writer = MirrorWriter(memory, partition_count, epoch=1)
    writer.allow_rows(ROWS)
    for partition in range(partition_count):
        writer.begin(partition)
        writer.apply(partition, MirrorEvent(snapshot_end=True), 0.0)
    return writer


def test_more_nodes_than_it_has_numbers_make_a_part_full(memory: memoryview, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lookup partition is asked instead, for that part alone."""
    monkeypatch.setattr(mirror, "NODES_MAX", 3)
    writer = live_writer(memory, partition_count=2)
    for number in range(3):
        writer.apply(0, MirrorEvent(make_holder(f"n{number}"), pack_keys(CHAIN), reset=True), 1.0)
    assert [writer.feed(partition) for partition in (0, 1)] == [Feed.LIVE, Feed.LIVE]
    writer.apply(0, MirrorEvent(make_holder("one too many"), pack_keys(CHAIN), reset=True), 1.0)
    assert [writer.feed(partition) for partition in (0, 1)] == [Feed.FULL, Feed.LIVE]
    writer.check_invariants()


def test_a_node_whose_names_are_too_long_is_not_named(memory: memoryview) -> None:
    """Its blocks are a miss here, and others are found as before."""
    writer = live_writer(memory)
    long = Holder(NodeId("n" * mirror.NODE_BYTES), "a:1", BootEpoch(1))
    writer.apply(0, MirrorEvent(long, pack_keys(CHAIN[:1]), reset=True), 1.0)
    writer.apply(0, MirrorEvent(make_holder("n1"), pack_keys(CHAIN[1:]), reset=True), 1.0)
    assert writer.counters["mirror_names_too_long"] == 1
    runs = MirrorReader(memory.toreadonly()).resolve(pack_keys(CHAIN))
    assert runs is not None and [(run.start, run.count) for run in runs] == [(1, 1)]


def test_a_node_with_a_long_name_is_written_once(memory: memoryview) -> None:
    """Readers forget all that they have read when a node is written, and every event of a node would do that."""
    writer, reader = live_writer(memory), MirrorReader(memory.toreadonly())
    long = Holder(NodeId("n" * mirror.NODE_BYTES), "a:1", BootEpoch(1))
    writer.apply(0, MirrorEvent(long, pack_keys(CHAIN[:1]), reset=True), 1.0)
    written = reader._written
    writer.apply(0, MirrorEvent(long, pack_keys(CHAIN[1:])), 2.0)
    assert reader._written == written
    writer.apply(0, MirrorEvent(long, reset=True), 3.0)
    assert writer.counters["mirror_names_too_long"] == 1


def test_a_mirror_says_how_much_of_it_is_in_use(memory: memoryview) -> None:
    """Whoever reserves its memory keeps ahead of what the next event may need."""
    writer = live_writer(memory)
    assert 0 < writer.rows_needed <= writer.rows_ahead <= writer.rows_allowed == ROWS
    writer.apply(0, MirrorEvent(make_holder("n1"), pack_keys(CHAIN), reset=True), 1.0)
    reader = MirrorReader(memory.toreadonly())
    assert writer.key_count == reader.key_count == len(CHAIN)
    assert mirror.TABLE_AT < reader.used_bytes <= len(memory)
    assert writer.age(0, 3.5) == 2.5
    reader.close()
    writer.close()


def test_more_sets_of_holders_than_it_has_room_for_are_unknown(
    memory: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lookup partition is asked about their keys."""
    monkeypatch.setattr(mirror, "SETS_MAX", 3)
    writer = live_writer(memory)
    writer.apply(0, MirrorEvent(make_holder("a"), pack_keys(CHAIN), reset=True), 1.0)
    writer.apply(0, MirrorEvent(make_holder("b"), pack_keys(CHAIN[:1]), reset=True), 1.0)
    assert MirrorReader(memory.toreadonly()).resolve(pack_keys(CHAIN)) is not None
    writer.apply(0, MirrorEvent(make_holder("c"), pack_keys(CHAIN[1:]), reset=True), 1.0)
    assert writer.counters["mirror_sets_not_named"]
    assert MirrorReader(memory.toreadonly()).resolve(pack_keys(CHAIN)) is None


def test_a_number_that_gets_another_meaning_is_read_again(memory: memoryview, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader in another process takes no lock: the writer may use a number anew before its set is read."""
    writer, reader = live_writer(memory), MirrorReader(memory.toreadonly())
    writer.apply(0, MirrorEvent(make_holder("a"), CHAIN[0]), 1.0)
    read = mirror.number_runs

    def slow_read(table: BlockTable, packed: bytes) -> list[tuple[int, int]]:
        monkeypatch.setattr(mirror, "number_runs", read)
        found = read(table, packed)
        writer.apply(0, MirrorEvent(make_holder("b"), CHAIN[0]), 1.0)
        writer.apply(0, MirrorEvent(make_holder("c"), CHAIN[1]), 1.0)
        return found

    monkeypatch.setattr(mirror, "number_runs", slow_read)
    assert reader.resolve(CHAIN[0]) == [HolderRun(0, 1, (make_holder("a"), make_holder("b")))]


class LateWords:
    """The head of a mirror whose writer is stopped between a set's record and the version that tells of it."""

    def __init__(self, words: memoryview, memory: memoryview, number: int) -> None:
        self._words, self._memory = words, memory
        self._record = slice(
            mirror.SETS_AT + number * mirror.SET_BYTES, mirror.SETS_AT + (number + 1) * mirror.SET_BYTES
        )
        self._before = bytes(memory[self._record])

    def __getitem__(self, index: int) -> int:
        return int(self._words[index])

    def __setitem__(self, index: int, value: int) -> None:
        if index != mirror._SETS_VERSION or bytes(self._memory[self._record]) == self._before:
            self._words[index] = value


def test_a_number_whose_meaning_is_being_written_is_read_again(
    memory: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The set of a key that has gone to another one is written, and its version is not there yet."""
    writer, reader = live_writer(memory), MirrorReader(memory.toreadonly())
    key, other, *rest = make_chain(4)
    a, b, c = map(make_holder, "abc")
    for holder, keys in ((a, [key, rest[0]]), (b, rest), (c, rest[1:])):
        writer.apply(0, MirrorEvent(holder, pack_keys(keys)), 1.0)
    read, number = mirror.number_runs, mirror.number_runs(writer._table, key)[0][1]

    def slow_read(table: BlockTable, packed: bytes) -> list[tuple[int, int]]:
        monkeypatch.setattr(mirror, "number_runs", read)
        found = read(table, packed)
        writer.apply(0, MirrorEvent(b, key), 1.0)  # nothing else has its number now
        writer._words = LateWords(writer._words, memory, number)  # type: ignore[assignment]
        writer.apply(0, MirrorEvent(c, other), 1.0)
        return found

    monkeypatch.setattr(mirror, "number_runs", slow_read)
    assert reader.resolve(key) == [HolderRun(0, 1, (a, b))]
    assert read(writer._table, other) == [(0, number)], "it has the number that the key had"


def test_numbers_that_never_rest_are_unknown(memory: memoryview, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lookup partition is asked, rather than told a wrong node."""
    writer, reader = live_writer(memory), MirrorReader(memory.toreadonly())
    read = mirror.number_runs

    def slow_read(table: BlockTable, packed: bytes) -> list[tuple[int, int]]:
        found = read(table, packed)
        writer.apply(0, MirrorEvent(make_holder("a"), packed), 1.0)
        writer.apply(0, MirrorEvent(make_holder("a"), b"", packed), 1.0)
        return found

    monkeypatch.setattr(mirror, "number_runs", slow_read)
    assert reader.resolve(CHAIN[0]) is None


def test_changes_cost_a_long_lookup_one_piece_each(memory: memoryview, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each key has holders of its own, a busy writer changes some of them whenever many are read."""
    writer, reader = live_writer(memory), MirrorReader(memory.toreadonly())
    chain = make_chain(3 * mirror.PIECE_KEYS + 1)
    names = [make_holder(f"n{bit}") for bit in range(8)]
    for bit, holder in enumerate(names):
        writer.apply(0, MirrorEvent(holder, pack_keys([key for i, key in enumerate(chain) if i >> bit & 1])), 1.0)
    packed, other = pack_keys(chain), make_chain(1, "other")[0]
    expected, read, reads = reader.resolve(packed), mirror.number_runs, [0]

    def busy_read(table: BlockTable, packed: bytes) -> list[tuple[int, int]]:
        found = read(table, packed)
        reads[0] += 1
        if len(packed) > len(pack_keys(chain[: mirror.PIECE_KEYS])) or reads[0] % 2:
            writer.apply(0, MirrorEvent(make_holder("x"), other), 1.0)
            writer.apply(0, MirrorEvent(make_holder("x"), removed=other), 1.0)
        return found

    monkeypatch.setattr(mirror, "number_runs", busy_read)
    assert reader.resolve(packed) == expected
    assert expected is not None and len(expected) == len(chain) - 1 and reads[0] <= 9


def test_a_change_between_pieces_is_in_what_is_read_later(memory: memoryview, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that were read before the change are not given the meanings of after it."""
    monkeypatch.setattr(mirror, "PIECE_KEYS", 2)
    writer, reader = live_writer(memory), MirrorReader(memory.toreadonly())
    chain, a, b, c, d = make_chain(4), *map(make_holder, "abcd")
    for holder, key in zip((a, b, c, d), chain, strict=True):
        writer.apply(0, MirrorEvent(holder, key), 1.0)
    name = reader._name

    def slow_name(number: int) -> tuple[Holder, ...] | None:
        found = name(number)
        if found == (c,):
            monkeypatch.setattr(reader, "_name", name)
            writer.apply(0, MirrorEvent(d, removed=chain[3]), 1.0)
            writer.apply(0, MirrorEvent(b, chain[0]), 1.0)  # the number that the last key had
        return found

    monkeypatch.setattr(reader, "_name", slow_name)
    assert reader.resolve(pack_keys(chain)) == [HolderRun(i, 1, (holder,)) for i, holder in enumerate((a, b, c))]
    assert reader.resolve(chain[0]) == [HolderRun(0, 1, (a, b))]
