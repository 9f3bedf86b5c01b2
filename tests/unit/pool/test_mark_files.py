"""Rules of pool.mark_files: marks outlive a restart, and a damaged file is a clear of everything."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvservice.core.block.marks import Mark, MarkKind
from kvservice.errors import Unavailable
from kvservice.pool import mark_files
from kvservice.pool.mark_files import MarkFiles

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


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    with pytest.raises(Unavailable, match="cannot be kept"):
        MarkFiles([tmp_path / "plain" / "marks"]).keep(MARKS)


def test_a_file_that_cannot_be_read_is_a_clear_of_everything(tmp_path: Path) -> None:
    """As on a disk that fails, so that a pool starts."""
    assert MarkFiles([tmp_path], lambda: 7.0).load() == (Mark(MarkKind.EVERYTHING, 7.0),)


async def test_a_disk_that_hangs_does_not_hold_a_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mark_files, "KEEP_SECONDS", 0.05)
    ends = threading.Event()
    monkeypatch.setattr(mark_files, "write_private", lambda path, data: ends.wait())
    with pytest.raises(Unavailable, match="not kept after"):
        await MarkFiles([tmp_path / "marks"]).keep_in_time(MARKS)
    ends.set()
