"""Rules of pool.mark_files: marks outlive a restart, and a damaged file is a clear of everything."""

from __future__ import annotations

import threading
import zlib
from pathlib import Path

import pytest

from kvservice.core.block.marks import Mark, MarkKind, pack_marks
from kvservice.errors import Unavailable
from kvservice.pool import mark_files
from kvservice.pool.mark_files import MarkFiles
from kvservice.testing.eventually import eventually_async

MARKS = (Mark(MarkKind.TENANT, 1.0, "acme"), Mark(MarkKind.MODEL, 2.0, "llama"))


def test_what_is_kept_is_found_in_every_file(tmp_path: Path) -> None:
    paths = (tmp_path / "marks", tmp_path / "disk" / "n0.marks")
    assert MarkFiles(paths).load() == ()
    MarkFiles(paths).keep(MARKS)
    assert [MarkFiles([path]).load() for path in paths] == [MARKS, MARKS]
    assert not [path for path in tmp_path.rglob(".*")], "no draft is left"


def test_a_damaged_file_is_a_clear_of_everything(tmp_path: Path) -> None:
    (tmp_path / "marks").write_bytes(b"KVSMARKS and then nothing of sense")
    assert MarkFiles([tmp_path / "marks"], lambda: 7.0).load() == (Mark(MarkKind.EVERYTHING, 7.0),)


def test_marks_of_another_version_are_a_clear_of_everything(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = bytearray(pack_marks(MARKS))
    data[8] += 1
    (tmp_path / "marks").write_bytes(data[:-4] + zlib.crc32(data[:-4]).to_bytes(4, "little"))
    assert MarkFiles([tmp_path / "marks"], lambda: 7.0).load() == (Mark(MarkKind.EVERYTHING, 7.0),)
    assert [vars(record)["reason"] for record in caplog.records] == ["damaged, or of another version"]


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """And it keeps the marks from no other file, which may be the one that outlives the pool."""
    (tmp_path / "plain").write_text("")
    paths = (tmp_path / "plain" / "marks", tmp_path / "disk" / "n0.marks")
    with pytest.raises(Unavailable, match=f"cannot be kept everywhere: {paths[0]}"):
        MarkFiles(paths).keep(MARKS)
    assert MarkFiles(paths[1:]).load() == MARKS


def test_marks_beside_an_unused_disk_are_said_to_be_lost(tmp_path: Path) -> None:
    """The disk comes back at a later start, with blocks that were cleared meanwhile. The other files are written."""
    with pytest.raises(Unavailable, match="everywhere: /disk/n0 cannot be used: Not a directory"):
        MarkFiles([tmp_path / "marks"], unusable=["/disk/n0 cannot be used: Not a directory"]).keep(MARKS)
    assert MarkFiles([tmp_path / "marks"]).load() == MARKS


def test_a_file_that_cannot_be_read_is_a_clear_of_everything(tmp_path: Path) -> None:
    """As on a disk that fails, so that a pool starts."""
    assert MarkFiles([tmp_path], lambda: 7.0).load() == (Mark(MarkKind.EVERYTHING, 7.0),)


async def test_a_disk_that_hangs_does_not_hold_a_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mark_files, "KEEP_SECONDS", 0.05)
    may_go_on, real = threading.Event(), mark_files.write_private

    def slow(path: Path, data: bytes) -> None:
        may_go_on.wait()
        real(path, data)

    monkeypatch.setattr(mark_files, "write_private", slow)
    files = MarkFiles([tmp_path / "marks"])
    for marks in (MARKS[:1], MARKS):
        with pytest.raises(Unavailable, match="not kept after"):
            await files.keep_in_time(marks)
    may_go_on.set()
    await eventually_async(lambda: files.load() == MARKS, "both have gone on, and the newest marks are kept")
    monkeypatch.setattr(mark_files, "KEEP_SECONDS", 5.0)
    await files.keep_in_time(MARKS)
    assert files.load() == MARKS
