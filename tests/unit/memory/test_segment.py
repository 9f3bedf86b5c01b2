"""The segment: reserved up front, owned by one process, adopted by the next, refused with numbers."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import signal
import stat
import subprocess
import sys
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvservice.core.segment.geometry import HEADER_BYTES, plan_geometry
from kvservice.core.segment.header import SLOT_VERSION, SlotHeader
from kvservice.errors import SegmentError, ServiceConflict, VersionMismatch
from kvservice.memory import room
from kvservice.memory.room import how_to_make_room, machine_memory
from kvservice.memory.segment import Segment, is_owned, is_segment_of, remove_stale, remove_unowned, segment_path
from kvservice.units import BlockKey, BootEpoch, Generation, GiB, MiB, SlotIndex, SpanRoute

GEOMETRY = plan_geometry(12 * MiB)


@pytest.fixture
def path() -> Iterator[Path]:
    made = segment_path(f"test{uuid.uuid4().hex[:8]}", "node", Path("/dev/shm"))
    yield made
    made.unlink(missing_ok=True)


def header(key: bytes = b"k" * 16) -> SlotHeader:
    return SlotHeader(BootEpoch(1), Generation(2), BlockKey(key), 65536, SpanRoute(7), 99, 3)


def test_all_memory_is_reserved_at_creation(path: Path) -> None:
    """Only the owner may open it."""
    segment = Segment.create(path, GEOMETRY, "node")
    status = path.stat()
    assert status.st_blocks * 512 >= GEOMETRY.segment_bytes
    assert stat.S_IMODE(status.st_mode) == 0o600
    segment.close()


def test_too_small_shared_memory_is_a_clear_error(path: Path) -> None:
    """The error has numbers and a way out."""
    with pytest.raises(
        SegmentError, match=r"too small.*needed.*free.*this machine or container has only .* of memory; lower"
    ) as caught:
        Segment.create(path, plan_geometry(100_000 * GiB), "node")
    assert caught.value.attributes["needed_bytes"] > caught.value.attributes["free_bytes"]  # type: ignore[operator]
    assert not path.exists()


def test_memory_that_others_have_taken_is_a_clear_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel ended the shard, or another process, when a pool took more than what was left."""
    monkeypatch.setattr(room, "free_memory", lambda: 4 * MiB)
    with pytest.raises(SegmentError, match=r"memory is short: .* needed, .* only 4.0 MiB left; .* lower the pool size"):
        Segment.create(path, GEOMETRY, "node")
    assert not path.exists()


def test_memory_that_may_not_be_mapped_is_a_clear_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on address space, as of batch systems. New memory goes, and that of an earlier boot stays."""
    Segment.create(path, GEOMETRY, "node").close()
    fresh = path.with_name(path.name + "-fresh")

    def refuse(descriptor: int, length: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    for make in (
        lambda: Segment.create(path, GEOMETRY, "node"),
        lambda: Segment.create(fresh, GEOMETRY, "node"),
        lambda: Segment.nameless(path.parent, GEOMETRY, "node"),
        lambda: Segment.attach(path, GEOMETRY),
    ):
        with pytest.raises(SegmentError, match=r"cannot map the 11.0 MiB .* address space .* or lower the pool size"):
            make()
    assert path.exists() and not fresh.exists()


def test_the_advised_size_has_room_for_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """And for the mirror, which grows to half a GiB beside the pool."""
    monkeypatch.setattr(room, "machine_memory", lambda: 256 * GiB)
    advice = how_to_make_room(Path("/dev/shm"), needed=100 * GiB, total=24 * GiB, free=20 * GiB)
    assert "size=105G /dev/shm" in advice and "--shm-size" in advice


def test_the_advice_names_what_each_kind_of_pool_is_sized_by() -> None:
    """An embedded pool has no `--pool-bytes`, which the advice named."""
    for needed in (machine_memory(), MiB):
        advice = how_to_make_room(Path("/dev/shm"), needed=needed, total=GiB, free=GiB)
        assert "`pool_bytes`" in advice and "`memory`" in advice


@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_full_tmpfs_fails_at_start_and_not_with_sigbus_later(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tmp_path)], check=True)
    try:
        with pytest.raises(SegmentError, match="too small"):
            Segment.create(tmp_path / "segment", GEOMETRY, "node")
        Segment.create(tmp_path / "small", plan_geometry(6 * MiB), "node").close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_second_owner_is_refused_by_pid(path: Path) -> None:
    segment = Segment.create(path, GEOMETRY, "node")
    with pytest.raises(ServiceConflict, match=f"process {os.getpid()}"):
        Segment.create(path, GEOMETRY, "node")
    segment.close()


@pytest.mark.processes
def test_killed_owner_leaves_its_blocks_to_the_next_boot(path: Path) -> None:
    script = f"""
import sys, time
from pathlib import Path
from kvservice.core.segment.geometry import HEADER_BYTES, plan_geometry
from kvservice.memory.segment import Segment
from tests.unit.memory.test_segment import header, GEOMETRY
s = Segment.create(Path({str(path)!r}), GEOMETRY, "node")
s.assign_slab(1, 65536)
s.write_header(1 << 16, header())
s.payload(1 << 16, 65536)[:] = b"x" * 65536
print(s.epoch, flush=True)
time.sleep(60)
"""
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3])
    assert owner.stdout is not None
    first = int(owner.stdout.readline())
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    segment = Segment.create(path, GEOMETRY, "node")
    assert segment.existed
    assert segment.epoch > first
    assert list(segment.scan()) == [(SlotIndex(1 << 16), 65536, header())]
    assert bytes(segment.payload(SlotIndex(1 << 16), 65536)) == b"x" * 65536
    segment.close()


@pytest.mark.parametrize("change", ["geometry", "node", "truncated", "foreign", "older", "newer"])
def test_foreign_content_is_replaced_not_adopted(path: Path, change: str) -> None:
    first = Segment.create(path, GEOMETRY, "other" if change == "node" else "node")
    first.assign_slab(0, 65536)
    first.write_header(SlotIndex(0), header())
    first.close()
    if change == "truncated":
        os.truncate(path, GEOMETRY.segment_bytes - 4096)
    if change == "foreign":
        path.write_bytes(os.urandom(1 << 20))
    if change in ("older", "newer"):  # the version of the slot headers, which would all read as free
        with path.open("r+b") as file:
            control = bytearray(file.read(64))
            control[56:60] = (SLOT_VERSION + (1 if change == "newer" else -1)).to_bytes(4, "little")
            control[60:] = zlib.crc32(control[:60]).to_bytes(4, "little")
            file.seek(0)
            file.write(control)
        with pytest.raises(VersionMismatch, match=rf"has version \d, and this process knows version {SLOT_VERSION}"):
            Segment.attach(path, GEOMETRY)
    geometry = plan_geometry(14 * MiB) if change == "geometry" else GEOMETRY
    segment = Segment.create(path, geometry, "node", epoch_floor=5)
    assert not segment.existed
    assert segment.epoch == 5
    assert list(segment.scan()) == []
    assert path.stat().st_blocks * 512 >= geometry.segment_bytes
    segment.close()


def test_attach_checks_what_it_maps(path: Path) -> None:
    with pytest.raises(SegmentError, match="cannot open"):
        Segment.attach(path, GEOMETRY)
    owner = Segment.create(path, GEOMETRY, "node")
    engine = Segment.attach(path, GEOMETRY)
    engine.buffer[-1:] = b"z"
    assert bytes(owner.buffer[-1:]) == b"z"
    with pytest.raises(SegmentError, match="expected"):
        Segment.attach(path, plan_geometry(20 * MiB))
    engine.close()
    owner.close()
    path.write_bytes(b"junk" * 100)
    with pytest.raises(SegmentError, match="not a kvservice segment"):
        Segment.attach(path, GEOMETRY)


def test_symlinks_are_not_followed(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    path.symlink_to(target)
    with pytest.raises(SegmentError):
        Segment.create(path, GEOMETRY, "node")
    assert target.read_bytes() == b"precious"


def test_torn_header_reads_as_no_block(path: Path) -> None:
    segment = Segment.create(path, GEOMETRY, "node")
    segment.assign_slab(0, 65536)
    segment.write_header(SlotIndex(0), header())
    offset = GEOMETRY.header_offset(SlotIndex(0))
    for position in range(64):
        byte = segment.buffer[offset + position]
        segment.buffer[offset + position] = byte ^ 0x04
        assert segment.read_header(SlotIndex(0)) is None, f"a flip at {position} went unnoticed"
        segment.buffer[offset + position] = byte
    assert segment.read_header(SlotIndex(0)) == header()
    segment.close()


@pytest.mark.parametrize(("before", "after"), [(65536, 8192), (8192, 65536), (8192, 1 << 20), (8192, 0)])
def test_reassigned_slab_shows_none_of_its_old_headers(path: Path, before: int, after: int) -> None:
    """Also where it has fewer slots than before: an engine may still look at the others, for a promise that ended."""
    segment = Segment.create(path, GEOMETRY, "node")
    segment.assign_slab(0, before)
    slots = [SlotIndex(index) for index in range(GEOMETRY.slots_per_slab(before))]
    for slot in slots:
        segment.write_header(slot, header())
    segment.assign_slab(0, after)
    assert list(segment.scan()) == []
    assert not any(segment.read_header(slot) for slot in slots)
    segment.close()


def test_slab_of_unknown_size_keeps_no_header_when_assigned(path: Path) -> None:
    """A shard that is killed while a slab moves leaves headers of the old size, and no word of that size."""
    with contextlib.closing(Segment.create(path, GEOMETRY, "node")) as killed:
        killed.assign_slab(0, 8192)
        slots = [SlotIndex(index) for index in range(GEOMETRY.slots_per_slab(8192))]
        for slot in slots:
            killed.write_header(slot, header())
        start = GEOMETRY.slab_offset(0)
        killed.buffer[start : start + HEADER_BYTES] = bytes(HEADER_BYTES)
    with contextlib.closing(Segment.create(path, GEOMETRY, "node")) as segment:
        assert segment.existed
        assert list(segment.scan()) == []
        segment.assign_slab(0, 1 << 19)
        assert not any(segment.read_header(slot) for slot in slots)


def test_restarted_owner_shows_in_the_epoch_of_attached_engines(path: Path) -> None:
    owner = Segment.create(path, GEOMETRY, "node")
    engine = Segment.attach(path, GEOMETRY)
    owner.close()
    again = Segment.create(path, GEOMETRY, "node")
    assert engine.current_epoch() == again.epoch == engine.epoch + 1
    engine.close()
    again.close()


def test_only_segments_nobody_owns_are_removed_as_stale(path: Path) -> None:
    owned = Segment.create(path, GEOMETRY, "node")
    dead = path.with_name(path.name + "-dead")
    Segment.create(dead, GEOMETRY, "node").close()
    assert remove_stale(path.parent, path.name) == [dead]
    assert path.exists()
    owned.close()


def test_replacing_a_segment_leaves_old_mappings_alone(path: Path) -> None:
    old = Segment.create(path, GEOMETRY, "node")
    engine = Segment.attach(path, GEOMETRY)
    old.close()
    new = Segment.create(path, plan_geometry(14 * MiB), "node")
    engine.buffer[-4096:] = b"late" * 1024  # SIGBUS if the file had been emptied in place
    assert bytes(new.buffer[-4096:]).count(0) == 4096
    engine.close()
    new.close()


def test_segment_with_holes_is_not_adopted(path: Path) -> None:
    first = Segment.create(path, GEOMETRY, "node")
    first.close()
    with path.open("r+b") as file:
        file.truncate(GEOMETRY.segment_bytes // 2)
        file.truncate(GEOMETRY.segment_bytes)
    segment = Segment.create(path, GEOMETRY, "node")
    assert not segment.existed
    assert segment.epoch > first.epoch
    assert path.stat().st_blocks * 512 >= GEOMETRY.segment_bytes
    segment.close()


def is_held(found: os.stat_result) -> bool:
    """Whether this process maps this file or has it open."""
    mapped = {line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines()}
    opened = set[tuple[int, int]]()
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208  only names are wanted
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
            one = os.fstat(int(descriptor))
            opened.add((one.st_dev, one.st_ino))
    return str(found.st_ino) in mapped or (found.st_dev, found.st_ino) in opened


@pytest.mark.processes
def test_nameless_memory_goes_with_its_last_mapping(tmp_path: Path) -> None:
    """It is attached through its process."""
    directory = Path("/dev/shm")
    segment = Segment.nameless(directory, GEOMETRY, "node")
    found = segment.path.stat()
    assert found.st_nlink == 0 and found.st_dev == directory.stat().st_dev
    assert found.st_blocks * 512 >= GEOMETRY.segment_bytes, "reserved at once, as with a name"
    code = (
        "import sys; from pathlib import Path; from kvservice.core.segment.geometry import Geometry;"
        "from kvservice.memory.segment import Segment;"
        "s = Segment.attach(Path(sys.argv[1]), Geometry(int(sys.argv[2]), int(sys.argv[3])));"
        "s.buffer[-4:] = b'mine'; print(s.epoch)"
    )
    words = [str(segment.path), str(GEOMETRY.slab_bytes), str(GEOMETRY.slab_count)]
    said = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, check=True, text=True)
    assert int(said.stdout) == segment.epoch
    assert bytes(segment.buffer[-4:]) == b"mine"
    engine = Segment.attach(segment.path, GEOMETRY)
    segment.close()
    assert bytes(engine.buffer[-4:]) == b"mine"
    assert is_held(found)
    engine.close()
    assert not is_held(found), "the kernel frees it then"


def test_nameless_memory_is_unlinked_without_harm(tmp_path: Path) -> None:
    """Its descriptor may be that of another file by then."""
    segment = Segment.nameless(Path("/dev/shm"), GEOMETRY, "node")
    number = int(segment.path.name)
    segment.close()
    other = os.open(tmp_path / "other", os.O_CREAT | os.O_WRONLY)
    os.dup2(other, number)
    segment.unlink()
    for each in {other, number}:
        os.close(each)
    assert (tmp_path / "other").exists()


def test_path_of_a_process_that_is_gone_says_what_workers_need() -> None:
    with pytest.raises(SegmentError, match="user and PID namespace"):
        Segment.attach(Path("/proc/4194304/fd/3"), GEOMETRY)


def test_a_pipe_in_the_place_of_a_segment_is_not_waited_for(path: Path) -> None:
    """Any user of the machine can make one there."""
    os.mkfifo(path)
    assert not is_segment_of(path, "node") and not is_owned(path) and not remove_unowned(path)
    for make in (lambda: Segment.create(path, GEOMETRY, "node"), lambda: Segment.attach(path, GEOMETRY)):
        with pytest.raises(SegmentError, match="is no file, as a segment is: remove it"):
            make()
    assert path.is_fifo()


def test_a_link_in_the_place_of_a_segment_is_not_followed(path: Path, tmp_path: Path) -> None:
    Segment.create(tmp_path / "other", GEOMETRY, "node").close()
    path.symlink_to(tmp_path / "other")
    with pytest.raises(SegmentError, match="cannot open"):
        Segment.attach(path, GEOMETRY)


@pytest.mark.parametrize("what", ["nothing", "slab header", "slot header"])
def test_a_segment_with_something_unknown_is_not_understood(path: Path, what: str) -> None:
    """Everything else is."""
    segment = Segment.create(path, GEOMETRY, "node")
    segment.assign_slab(1, 65536)
    segment.write_header(SlotIndex(1 << 16), header())
    segment.clear_header(SlotIndex(1 << 16 | 1))
    if what != "nothing":
        slot = SlotIndex(1 << 16)
        at = GEOMETRY.slab_offset(1) if what == "slab header" else GEOMETRY.header_offset(slot)
        segment.buffer[at + 9] ^= 0x80
    assert segment.is_understood() is (what == "nothing")
    segment.close()
