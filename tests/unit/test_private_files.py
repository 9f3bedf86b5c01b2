"""Files that are replaced so that neither a reader nor a loss of power leaves half of them."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from kvservice.private_files import write_private


@pytest.mark.parametrize("number", [0, errno.EINVAL])
def test_a_replaced_file_has_its_name_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Some file systems sync no directories."""
    path, synced = tmp_path / "marks", list[tuple[bool, bytes]]()
    write_private(path, b"old")

    def sync(descriptor: int) -> None:
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        synced.append((is_directory, path.read_bytes()))
        if is_directory and number:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", sync)
    write_private(path, b"new")
    assert synced == [(False, b"old"), (True, b"new")]
    assert [each.name for each in tmp_path.iterdir()] == ["marks"]


def test_names_that_cannot_be_written_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", sync)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        write_private(tmp_path / "marks", b"new")
