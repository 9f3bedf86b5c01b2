"""Rules of tier.disk: the contract of a tier, with each way to read and write files, and what a folder may hold."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvservice.codec.base import Coded, Numbers
from kvservice.codec.coder import Coder
from kvservice.core.block.marks import MARK_SECONDS
from kvservice.core.segment.blockfile import BlockFileHeader
from kvservice.core.tier.tier_block import TierBlock
from kvservice.core.tier.tiers import FULL_SECONDS
from kvservice.errors import CodecError, TierError
from kvservice.testing.eventually import eventually
from kvservice.testing.tier_contract import (
    CORRUPT,
    FAILED,
    OK,
    STALE,
    StartedTier,
    TierContract,
    a_block,
    page_aligned,
    some,
)
from kvservice.tier.base import TierWrite, WriteResult
from kvservice.tier.block_files import TierFolder, name_of, remove_blocks
from kvservice.tier.disk import SUCCEED_SECONDS, DiskTier
from kvservice.tier.disk_io import DiskIO, FileWay
from kvservice.tier.file_io import VectoredIO
from kvservice.tier.mounts import MountPoint
from kvservice.transfer.nixl import nixl_available
from kvservice.units import BlockKey
from tests.unit.tier.damages import Damage, each_damage


class DiskPlace:
    def __init__(self, folder: Path, io: DiskIO) -> None:
        self.folder, self.io = folder, io

    def make(self) -> DiskTier:
        return DiskTier(self.folder, io=self.io)

    def take(self, key: BlockKey) -> bytes | None:
        try:
            return (self.folder / name_of(key)).read_bytes()
        except FileNotFoundError:
            return None

    def put(self, key: BlockKey, data: bytes) -> None:
        (self.folder / name_of(key)).write_bytes(data)


class TestDirect(TierContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> DiskPlace:
        return DiskPlace(tmp_path / "blocks", DiskIO.AUTO)

    def test_it_has_direct_access_or_says_so(self, place: DiskPlace) -> None:
        tier = StartedTier(place.make())
        described = tier.tier.describe()  # type: ignore[attr-defined]
        tier.close()
        if not described["direct"]:
            pytest.skip(f"{described['file_system']} has no direct access: this class ran through the page cache")


class TestBuffered(TierContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> DiskPlace:
        return DiskPlace(tmp_path / "blocks", DiskIO.BUFFERED)


@pytest.mark.skipif(not nixl_available(), reason="NIXL is not installed")
class TestNixlPosix(TierContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> DiskPlace:
        return DiskPlace(tmp_path / "blocks", DiskIO.NIXL_POSIX)

    def test_it_is_what_reads_and_writes(self, place: DiskPlace) -> None:
        tier = StartedTier(place.make())
        assert tier.tier.describe()["disk_io"] == "nixl-posix"  # type: ignore[attr-defined]
        tier.close()


def filled(folder: Path, count: int = 4) -> list[tuple[TierBlock, bytes]]:
    """A folder with so many blocks, whose tier was closed."""
    tier, items = StartedTier(DiskTier(folder)), [some(number) for number in range(count)]
    assert set(tier.write(*items)) == {WriteResult.OK}
    tier.close()
    return items


def found_in(folder: Path) -> list[TierBlock]:
    tier = StartedTier(DiskTier(folder))
    tier.close()
    return sorted(tier.found, key=lambda block: block.key)


def plainly(*items: tuple[TierBlock, bytes]) -> list[TierBlock]:
    """How a start lists these blocks, which no codec stored."""
    return [replace(block, stored_bytes=block.payload_bytes) for block, _ in items]


@pytest.mark.parametrize("index", [None, b"", b"KVSINDEX\x09\0\0\0\x48\0\0\0", b"torn"])
def test_without_its_index_the_headers_are_read(tmp_path: Path, index: bytes | None) -> None:
    items = filled(tmp_path)
    (tmp_path / "index").unlink()
    if index is not None:
        (tmp_path / "index").write_bytes(index)
    assert found_in(tmp_path) == plainly(*items)
    (tmp_path / "index").write_bytes((tmp_path / "index").read_bytes()[:-30])
    assert found_in(tmp_path) == plainly(*items), "the row that is torn is that of a file"


def test_files_that_are_no_block_are_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody counts them, and they would fill the disk."""
    items = filled(tmp_path)
    (tmp_path / "index").unlink()
    paths = [tmp_path / name_of(block.key) for block, _ in items]
    paths[0].write_bytes(paths[0].read_bytes()[:-1])
    paths[1].write_bytes(paths[1].read_bytes().replace(b'"kvservice_block":"1"', b'"kvservice_block":"7"'))
    paths[2].write_bytes(paths[3].read_bytes())
    (tmp_path / "new" / "half").write_bytes(b"x")
    (tmp_path / "00" / "README").write_bytes(b"not ours")
    assert found_in(tmp_path) == plainly(items[3])
    assert [path.exists() for path in paths] == [False, False, False, True]
    assert not (tmp_path / "new" / "half").exists() and (tmp_path / "00" / "README").exists()
    assert any(getattr(record, "versions", None) == [7] for record in caplog.records)


def test_rows_without_a_file_are_forgotten(tmp_path: Path) -> None:
    items = filled(tmp_path)
    (tmp_path / name_of(items[0][0].key)).unlink()
    assert found_in(tmp_path) == plainly(*items[1:])


def test_a_damaged_file_is_removed_when_it_is_read(tmp_path: Path) -> None:
    items = filled(tmp_path, 2)
    path = tmp_path / name_of(items[0][0].key)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    tier = StartedTier(DiskTier(tmp_path))
    assert {block.key for block in tier.found} == {block.key for block, _ in items}, "bytes are verified when read"
    assert [result for result, _ in tier.read(*(block for block, _ in items))] == [CORRUPT, OK]
    assert not path.exists()
    assert tier.result_of(items[0][0]) is STALE
    tier.close()
    assert found_in(tmp_path) == plainly(items[1])


@each_damage
def test_damaged_files_are_never_a_hit(tmp_path: Path, damage: Damage, wanted: Any) -> None:
    ((block, _),) = filled(tmp_path, 1)
    tier = StartedTier(DiskTier(tmp_path))
    path = tmp_path / name_of(block.key)
    path.write_bytes(damage(path.read_bytes()))
    assert tier.result_of(block) is wanted and not path.exists()
    tier.close()


def test_a_link_is_never_followed(tmp_path: Path) -> None:
    items = filled(tmp_path, 2)
    one, other = (tmp_path / name_of(block.key) for block, _ in items)
    one.rename(tmp_path / "elsewhere")
    one.symlink_to(tmp_path / "elsewhere")
    tier = StartedTier(DiskTier(tmp_path))
    assert tier.result_of(items[0][0]) is STALE
    assert tier.result_of(items[1][0]) is OK and other.exists() and (tmp_path / "elsewhere").exists()
    tier.close()


@pytest.mark.parametrize("what", ["contents", "folder"])
def test_a_folder_that_somebody_emptied_is_made_again(tmp_path: Path, what: str) -> None:
    place, items = tmp_path / "blocks", [some(number) for number in range(3)]
    tier = StartedTier(DiskTier(place))
    assert set(tier.write(*items)) == {WriteResult.OK}
    for path in place.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if what == "folder":
        place.rmdir()
    assert tier.result_of(items[0][0]) is STALE
    assert set(tier.write(*items)) == {WriteResult.OK} and tier.result_of(items[0][0]) is OK
    with pytest.raises(TierError, match="another pool of this process"):
        DiskTier(place).start()
    tier.close()
    assert len(found_in(place)) == 3


def test_a_folder_that_another_took_meanwhile_is_left_to_it(tmp_path: Path) -> None:
    """It was removed, and made again by a process that owns it by now."""
    first = StartedTier(DiskTier(tmp_path / "blocks"))
    shutil.rmtree(tmp_path / "blocks")
    second = StartedTier(DiskTier(tmp_path / "blocks"))
    try:
        theirs = some(1)
        assert second.write(theirs) == (WriteResult.OK,)
        for number in range(2, 5):
            assert first.write(some(number)) == (WriteResult.FAILED,)
        assert first.result_of(theirs[0]) is STALE and second.result_of(theirs[0]) is OK
        second.close()
        mine = some(5)
        assert first.write(mine) == (WriteResult.OK,) and first.result_of(mine[0]) is OK, "it is nobody's now"
    finally:
        second.close()
        first.close()


@pytest.mark.parametrize(
    ("place", "name", "number", "is_transient"),
    [
        (os, "mkdir", errno.ENOSPC, True),
        (os, "mkdir", errno.EIO, True),
        (os, "mkdir", errno.EACCES, False),
        (VectoredIO, "write", errno.ENOSPC, True),
        (VectoredIO, "write", errno.EIO, False),  # it does not keep what is written there
    ],
)
def test_a_disk_that_is_full_at_the_start_may_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: object, name: str, number: int, is_transient: bool
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(place, name, fail)
        with pytest.raises(TierError, match=os.strerror(number)) as refused:
            DiskTier(tmp_path / "blocks").start()
        assert refused.value.attributes["transient"] is is_transient
    assert found_in(tmp_path / "blocks") == []


def test_ends_of_prompts_are_found_first(tmp_path: Path) -> None:
    """They are the oldest then, and are evicted first: a hit ends at the first block that is missing."""
    tier = StartedTier(DiskTier(tmp_path))
    items = [some(number, 4096) for number in range(64)]
    places = [31 * number % 64 for number in range(64)]
    tier.write(*((replace(block, position=place), data) for place, (block, data) in zip(places, items, strict=True)))
    tier.close()
    again = StartedTier(DiskTier(tmp_path))
    again.close()
    assert [block.position for block in again.found] == list(reversed(range(64)))


@pytest.mark.parametrize("what", ["index", "files", "both"])
def test_blocks_of_unknown_age_do_not_outlive_the_marks(tmp_path: Path, what: str) -> None:
    """Nobody knows any more what was cleared while the folder was not used."""
    tier = StartedTier(DiskTier(tmp_path))
    block, payload = some(1)
    tier.write((replace(block, stored_at=0.0), payload), some(2))
    tier.close()
    long_ago = time.time() - MARK_SECONDS
    for path in (tmp_path / "index", *tmp_path.glob("*/*.safetensors")):
        if what == "both" or (path.name == "index") == (what == "index"):
            os.utime(path, (long_ago, long_ago))
    known = [found.key for found in found_in(tmp_path)]
    assert (block.key in known) == (what != "both"), "it is only as old as its file, and its folder, say"
    assert some(2)[0].key in known, "the core looks at a time that is known"


def test_the_log_says_when_writes_begin_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And when they succeed again, once: on a full disk some succeed in between."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    caplog.set_level("INFO")
    tier = StartedTier(DiskTier(tmp_path, threads=1))
    with monkeypatch.context() as patch:
        patch.setattr(VectoredIO, "write", fail)
        assert tier.write(some(1), some(2)) == (WriteResult.FULL, WriteResult.FULL)
    for key in (3, 4):
        assert tier.write(some(key)) == (WriteResult.OK,)
        with monkeypatch.context() as patch:
            patch.setattr(VectoredIO, "write", fail)
            assert tier.write(some(5)) == (WriteResult.FULL,)
    later = time.monotonic() + SUCCEED_SECONDS
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert tier.write(some(6), some(7)) == (WriteResult.OK, WriteResult.OK)
    tier.close()
    said = [
        (record.message, getattr(record, "reason", "")) for record in caplog.records if "disk_writes" in record.message
    ]
    assert said == [("disk_writes_fail", "No space left on device"), ("disk_writes_succeed", "")]


def test_a_full_disk_is_told_until_the_pool_tries_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then the pool keeps the tier as small as it was. Only the log said why."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tier = DiskTier(tmp_path, threads=1)
    started = StartedTier(tier)
    with monkeypatch.context() as patch:
        patch.setattr(VectoredIO, "write", fail)
        started.write(some(1))
    assert started.write(some(2)) == (WriteResult.OK,)
    assert tier.write_trouble() == f"{tmp_path}: No space left on device"
    later = time.monotonic() + FULL_SECONDS
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert not tier.write_trouble()
    started.close()


def test_a_folder_is_free_while_a_forked_child_runs_on(tmp_path: Path) -> None:
    """The child has the parent's descriptors, and the parent could not open its own folder again."""
    folder = TierFolder(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[folder._lock])
    try:
        folder.close()
        TierFolder(tmp_path).close()
    finally:
        child.communicate(b"\n")


def test_one_process_owns_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = StartedTier(DiskTier(tmp_path))
    with pytest.raises(TierError, match=r"another pool of this process.*disk_path of its own") as refused:
        DiskTier(tmp_path).start()
    assert refused.value.attributes["transient"], "the other one may be about to end"
    with pytest.raises(TierError, match="another pool of this process"):
        remove_blocks(tmp_path)
    owner = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: owner + 1)
    with pytest.raises(TierError, match=rf"another process \({owner}\)"):
        DiskTier(tmp_path).start()
    tier.close()
    found_in(tmp_path)


def test_files_belong_to_this_user_alone(tmp_path: Path) -> None:
    (block, _), *_ = filled(tmp_path / "blocks", 1)
    path = tmp_path / "blocks" / name_of(block.key)
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent, tmp_path / "blocks")] == [
        0o600,
        0o700,
        0o700,
    ]


def test_a_folder_that_cannot_be_used_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(TierError, match="set disk_path to a folder"):
        DiskTier(tmp_path / "file").start()
    with pytest.raises(TierError, match="set disk_path to a folder"):
        DiskTier(Path("/proc/1/blocks")).start()


def test_all_blocks_are_removed_and_nothing_else(tmp_path: Path) -> None:
    filled(tmp_path / "n0", 3)
    filled(tmp_path / "n1", 2)
    (tmp_path / "n1" / "notes").write_text("mine")
    assert (remove_blocks(tmp_path / "n0"), remove_blocks(tmp_path / "n1")) == (3, 2)
    assert not (tmp_path / "n0").exists()
    assert [path.name for path in (tmp_path / "n1").iterdir()] == ["notes"]
    assert remove_blocks(tmp_path / "n1") == remove_blocks(tmp_path / "none") == 0


def test_gds_that_cannot_be_loaded_gives_way(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where NIXL has it, this test says so, and TierContract should be run with it."""
    tier = StartedTier(DiskTier(tmp_path, io=DiskIO.GDS))
    described = tier.tier.describe()  # type: ignore[attr-defined]
    if described["disk_io"] == "gds":
        pytest.skip("GDS works here")
    assert tier.tier.counters()["io_refused"] >= 1
    assert any(getattr(record, "disk_io", "") == "gds" for record in caplog.records)
    items = [some(number) for number in range(3)]
    tier.write(*items)
    assert tier.read(*(block for block, _ in items)) == [(OK, payload) for _, payload in items]
    tier.close()


class Flaky(VectoredIO):
    """The device fails, when it is told to."""

    errors: ClassVar[dict[str, int]] = {}

    def read(self, descriptor: int, parts: Sequence[memoryview]) -> int:
        if "read" in self.errors:
            raise OSError(self.errors["read"], os.strerror(self.errors["read"]))
        return super().read(descriptor, parts)

    def write(self, descriptor: int, parts: Sequence[memoryview]) -> None:
        super().write(descriptor, parts[:1])
        if "write" in self.errors:
            raise OSError(self.errors["write"], os.strerror(self.errors["write"]))
        super().write(descriptor, parts)


def test_an_error_of_the_device_loses_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvservice.tier.disk_io.VectoredIO", Flaky)
    monkeypatch.setattr(Flaky, "errors", {})
    tier, items = StartedTier(DiskTier(tmp_path)), [some(1), some(2)]
    tier.write(items[0])
    Flaky.errors.update(read=errno.EIO, write=errno.EIO)
    assert tier.result_of(items[0][0]) is FAILED
    assert tier.write(items[1]) == (WriteResult.FAILED,)
    Flaky.errors.update(write=errno.ENOSPC)
    assert tier.write(items[1], items[0]) == (WriteResult.FULL, WriteResult.FULL)
    assert list((tmp_path / "new").iterdir()) == [], "no half file is left"
    Flaky.errors.clear()
    assert tier.read(items[0][0]) == [(OK, items[0][1])], "the file was whole all the while"
    assert tier.result_of(items[1][0]) is STALE
    tier.close()


class Refusing(VectoredIO):
    def write(self, descriptor: int, parts: Sequence[memoryview]) -> None:
        raise OSError(errno.EINVAL, "no direct access")


class Forgetful(VectoredIO):
    def read(self, descriptor: int, parts: Sequence[memoryview]) -> int:
        count = super().read(descriptor, parts)
        parts[-1][0] ^= 1
        return count


def test_direct_access_that_fails_gives_way_or_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = iter([Refusing, VectoredIO, Refusing])
    real = FileWay.__init__

    def planted(way: FileWay, *arguments: Any, **named: Any) -> None:
        real(way, *arguments, **named)
        if not way.refused:
            object.__setattr__(way, "make", next(ways, VectoredIO))

    monkeypatch.setattr(FileWay, "__init__", planted)
    monkeypatch.setattr("kvservice.tier.disk_io.mounts_here", lambda: [MountPoint(Path("/"), "ext4")])
    tier = StartedTier(DiskTier(tmp_path))
    assert tier.tier.describe()["direct"] is False  # type: ignore[attr-defined]
    tier.close()
    with pytest.raises(TierError, match=r"does not keep what is written there.*no direct access"):
        DiskTier(tmp_path, io=DiskIO.DIRECT).start()


def test_a_folder_that_returns_other_bytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvservice.tier.disk_io.VectoredIO", Forgetful)
    with pytest.raises(TierError, match="does not keep what is written there"):
        DiskTier(tmp_path).start()
    monkeypatch.undo()
    assert found_in(tmp_path) == [], "the folder is free again"


class Zipped:
    """A codec as another package may bring it."""

    name = "zipped"

    def encode(self, header: BlockFileHeader, data: memoryview, numbers: Numbers | None) -> Coded | None:
        return Coded(zlib.compress(data, 1))

    def decode(self, header: BlockFileHeader, parameters: str, data: memoryview, target: memoryview) -> None:
        try:
            found = zlib.decompress(data)
        except zlib.error as error:
            raise CodecError(str(error)) from error
        if len(found) != len(target):
            raise CodecError("another length")
        target[:] = found


@pytest.mark.parametrize("size", [8192, 100_001, 1])
def test_a_codec_stands_between_payload_and_file(tmp_path: Path, size: int) -> None:
    """Its bytes have any length, also that of the payload or more; files that are stored plainly are read beside it."""
    plain, half, noise = some(1, size), (b"\0" * (size - size // 2) + os.urandom(size // 2)), some(3, size)
    tier = StartedTier(DiskTier(tmp_path))
    tier.write(plain)
    tier.close()
    block = a_block(2, half)
    tier = StartedTier(DiskTier(tmp_path, coder=Coder([Zipped()])))
    assert set(tier.write((block, half), noise)) == {WriteResult.OK}
    stored = (tmp_path / name_of(block.key)).read_bytes()
    assert tier.stored_bytes[block.key] == len(stored) - 4096
    assert b'"codec":"zipped=' in stored[:4096]
    wanted = [(OK, plain[1]), (OK, half), (OK, noise[1])]
    assert tier.read(plain[0], block, noise[0]) == wanted
    (tmp_path / name_of(block.key)).write_bytes(stored[:-1] + bytes([stored[-1] ^ 255]))
    assert tier.result_of(block) is CORRUPT
    tier.close()
    tier = StartedTier(DiskTier(tmp_path))
    assert tier.result_of(noise[0]) is STALE, "without the codec it is no block"
    tier.close()
    assert found_in(tmp_path) == plainly(plain)


@pytest.mark.parametrize("has_index", [True, False])
def test_a_start_knows_what_each_block_takes(tmp_path: Path, has_index: bool) -> None:
    """The same as was said when it was written."""
    tier = StartedTier(DiskTier(tmp_path, coder=Coder([Zipped()])))
    zeros, noise = bytes(100_000), os.urandom(100_000)
    tier.write((a_block(1, zeros), zeros), (a_block(2, noise), noise))
    tier.close()
    if not has_index:
        (tmp_path / "index").unlink()
    found = {block.key: block.stored_bytes for block in found_in(tmp_path)}
    assert found == tier.stored_bytes
    sizes = {key: (tmp_path / name_of(key)).stat().st_size - 4096 for key in found}
    assert found == sizes and min(sizes.values()) < 1_000 and max(sizes.values()) > 100_000


def test_what_is_written_while_its_old_file_goes_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An erase runs on one thread while another one takes up a write of the same block."""
    started, (block, payload) = StartedTier(DiskTier(tmp_path, threads=2)), some(1)
    assert started.write((block, payload)) == (WriteResult.OK,)
    tier, begun, may_end = started.tier, threading.Event(), threading.Event()
    assert isinstance(tier, DiskTier)
    remove = tier._folder.remove

    def slowly(key: BlockKey) -> bool:
        begun.set()
        assert may_end.wait(30)
        return remove(key)

    monkeypatch.setattr(tier._folder, "remove", slowly)
    tier.erase([block.key])
    assert begun.wait(30)
    answers: list[tuple[WriteResult, ...]] = []
    tier.write(TierWrite(7, ((block, page_aligned(payload)),)), lambda _, results, *sizes: answers.append(results))
    time.sleep(0.05)
    assert not answers, "it is written while its file may still be removed"
    may_end.set()
    eventually(lambda: answers == [(WriteResult.OK,)], "it is written")
    assert started.read(block) == [(OK, payload)]
    started.close()
    assert [found.key for found in found_in(tmp_path)] == [block.key]
