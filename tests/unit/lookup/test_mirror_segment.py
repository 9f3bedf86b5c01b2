"""The file of a node's mirror: owner-only, taken piece by piece, removed or swept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvservice.core.directory.key_table import ROWS_MIN
from kvservice.core.directory.mirror import MirrorEvent, MirrorWriter, keys_that_fit, mirror_bytes, mirror_rows
from kvservice.core.messages import Holder
from kvservice.discovery import MIRROR_NAME
from kvservice.errors import SegmentError, ServiceConflict
from kvservice.lookup.mirror_file import MirrorSegment, mirror_path
from kvservice.lookup.mirror_reader import MirroredLookup, NodeMirror
from kvservice.lookup.mirror_writer import DirectoryMirror, pieces_of
from kvservice.memory.segment import remove_stale, segment_path
from kvservice.units import BootEpoch, NodeId
from kvservice.wire.v1 import common_pb2, lookup_pb2

ROWS = 8192
SIZE = mirror_bytes(ROWS)


def file_of(folder: Path, node: str = "n0") -> Path:
    return mirror_path(segment_path("s", NodeId(node), folder))


def test_mirror_is_private_and_takes_memory_as_it_is_reserved(tmp_path: Path) -> None:
    segment = MirrorSegment.create(file_of(tmp_path), SIZE)
    status = segment.path.stat()
    assert status.st_mode & 0o777 == 0o600 and status.st_size == SIZE
    assert segment.reserved_bytes <= status.st_blocks * 512 < SIZE
    assert segment.reserve(SIZE)
    assert segment.path.stat().st_blocks * 512 >= SIZE
    segment.close()
    segment.close()
    segment.unlink()
    assert not list(tmp_path.iterdir())


def test_second_owner_is_refused(tmp_path: Path) -> None:
    """What nobody owns is replaced or swept."""
    first = MirrorSegment.create(file_of(tmp_path), SIZE)
    with pytest.raises(ServiceConflict):
        MirrorSegment.create(first.path, SIZE)
    assert remove_stale(tmp_path, "kvservice-s-") == []
    first.close()
    second = MirrorSegment.create(first.path, SIZE)
    assert second.inode != first.inode, "readers of the old one must not see it change"
    second.close()
    assert remove_stale(tmp_path, "kvservice-s-") == [first.path]


def test_what_is_no_mirror_is_not_attached(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(SIZE))
    other.chmod(0o600)
    for path in (other, tmp_path / "absent"):
        with pytest.raises(SegmentError):
            MirrorSegment.attach(path)


def test_reader_waits_for_a_mirror_and_follows_the_next(tmp_path: Path) -> None:
    link = tmp_path / MIRROR_NAME
    mirror = NodeMirror(tmp_path)
    lookup = MirroredLookup(mirror, clock=lambda: 100.0)
    assert lookup.live(1) == (None, []) and lookup.counters["mirror_fallback_absent"] == 1
    readers = []
    for boot in (1, 2):
        segment = MirrorSegment.create(file_of(tmp_path), SIZE)
        writer = MirrorWriter(segment.buffer, 1, epoch=boot)
        link.unlink(missing_ok=True)
        link.symlink_to(segment.path)
        writer.begin(0)
        writer.apply(0, MirrorEvent(snapshot_end=True), 200.0)
        reader = mirror.reader(200.0 + 10 * boot)
        assert reader is not None and reader.epoch == boot
        readers.append(reader)
        writer.close()
        segment.close()
    segment.unlink()
    assert mirror.reader(230.0) is None
    assert readers[0] is not readers[1]
    mirror.close()


@pytest.mark.parametrize("comes_back", [False, True])
def test_what_is_forgotten_during_a_lookup_is_no_miss(tmp_path: Path, comes_back: bool) -> None:
    """A stream begins anew between the look at its feed and the read, and has maybe become live again."""
    segment = MirrorSegment.create(file_of(tmp_path), SIZE)
    (tmp_path / MIRROR_NAME).symlink_to(segment.path)
    writer = MirrorWriter(segment.buffer, 1, epoch=1)
    writer.allow_rows(ROWS_MIN)
    event = MirrorEvent(Holder(NodeId("a"), "a:1", BootEpoch(1)), bytes(16))
    lookup = MirroredLookup(NodeMirror(tmp_path), clock=lambda: 100.0)
    writer.begin(0)
    writer.apply(0, event, 100.0)
    writer.apply(0, MirrorEvent(snapshot_end=True), 100.0)
    reader, live = lookup.live(1)
    assert reader is not None and live == [True] and lookup.resolve(reader, bytes(16))
    writer.begin(0)
    if comes_back:
        writer.apply(0, MirrorEvent(snapshot_end=True), 100.0)
    assert lookup.resolve(reader, bytes(16)) is None and lookup.counters["mirror_fallback_syncing"] == 1
    lookup.set_mirror(None)
    writer.close()
    segment.close()


def test_mirror_of_other_partitions_is_not_used(tmp_path: Path) -> None:
    segment = MirrorSegment.create(file_of(tmp_path), SIZE)
    MirrorWriter(segment.buffer, 2, epoch=1).close()
    (tmp_path / MIRROR_NAME).symlink_to(segment.path)
    lookup = MirroredLookup(NodeMirror(tmp_path), clock=lambda: 100.0)
    assert lookup.live(3) == (None, []) and lookup.counters["mirror_fallback_other_partitions"] == 1
    reader, live = lookup.live(2)
    assert reader is not None and live == [False, False] and lookup.counters["mirror_fallback_never"] == 2
    lookup.set_mirror(None)
    segment.close()


def test_mirror_that_cannot_be_made_is_none_and_leaves_nothing(tmp_path: Path) -> None:
    link = tmp_path / "link"
    for size, folder in ((0, tmp_path), (1 << 20, tmp_path), (SIZE, tmp_path / "absent")):
        assert DirectoryMirror.open(file_of(folder), link, ["a:1"], size, epoch=1) is None
    assert not list(tmp_path.iterdir())


def test_large_event_is_taken_in_pieces_that_add_up_to_it() -> None:
    node = common_pb2.NodeInfo(node_id="a", peer_address="a:1", epoch=1)
    added, removed = os.urandom(16 * 5000), os.urandom(16 * 3000)
    pieces = pieces_of(lookup_pb2.WatchEvent(node=node, added=added, removed=removed, reset=True))
    assert b"".join(piece.added for piece in pieces) == added
    assert b"".join(piece.removed for piece in pieces) == removed
    assert [piece.reset for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert max(len(piece.added) + len(piece.removed) for piece in pieces) <= 16 * 2048
    first_removed = next(index for index, piece in enumerate(pieces) if piece.removed)
    assert not any(piece.added for piece in pieces[first_removed:]), "removals come after additions"
    assert pieces_of(lookup_pb2.WatchEvent()) == [MirrorEvent()]


def test_default_size_holds_ten_million_blocks() -> None:
    from kvservice.config import MIRROR_BYTES

    assert keys_that_fit(mirror_rows(MIRROR_BYTES)) >= 10_000_000


def test_mirror_of_a_dead_ray_node_is_swept_with_its_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvservice.actors import leftovers

    memory, runtime = tmp_path / "memory", tmp_path / "runtime"
    memory.mkdir()
    monkeypatch.setattr(leftovers, "DEV_SHM", memory)
    links = []
    for node in ("0123456789ab", "ba9876543210"):
        MirrorSegment.create(file_of(memory, node), SIZE).close()
        links.append(runtime / "s" / node / MIRROR_NAME)
        links[-1].parent.mkdir(parents=True)
        links[-1].symlink_to(file_of(memory, node))
    removed = leftovers.remove_leftovers("s", [NodeId("ba9876543210")], runtime)
    assert removed == [file_of(memory, "0123456789ab"), links[0]]
    assert links[1].exists() and not links[0].parent.exists()
