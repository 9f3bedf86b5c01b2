"""Rules of doctor's rows about tiers: they really write, and leave nothing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kvservice.cli.doctor_check import ABSENT, OK, PROBLEM, WARNING, Check
from kvservice.cli.doctor_tiers import Wear, disk_tier, object_store, read_wear
from kvservice.units import MiB


def only(checks: list[Check], name: str) -> Check:
    (found,) = [check for check in checks if check.name == name]
    return found


def test_without_tiers_their_rows_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSERVICE_DISK_PATH", raising=False)
    monkeypatch.delenv("KVSERVICE_OBJECTS_URL", raising=False)
    rows = [*disk_tier(), *object_store()]
    assert [(row.name, row.status) for row in rows] == [("disk_tier", ABSENT), ("object_store", ABSENT)]


def test_a_disk_is_written_and_read_and_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "blocks"
    place.mkdir(mode=0o700)
    monkeypatch.setenv("KVSERVICE_DISK_PATH", str(place))
    rows = list(disk_tier())
    tier = only(rows, "disk_tier")
    assert tier.status in (OK, WARNING) and "a block written and read back" in tier.detail
    assert ("O_DIRECT" in tier.detail) == (tier.status == OK)
    assert "free" in only(rows, "disk_room").detail and only(rows, "disk_wear").status in (OK, WARNING, ABSENT)
    assert not list(place.iterdir())


def test_a_disk_too_small_for_its_setting_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSERVICE_DISK_PATH", str(tmp_path / "later"))
    monkeypatch.setenv("KVSERVICE_DISK_BYTES", "900TiB")
    room = only(list(disk_tier()), "disk_room")
    assert room.status == WARNING and "900.0 TiB" in room.detail and "smaller disk_bytes" in room.advice


def test_blocks_that_lie_there_count_as_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "blocks"
    place.mkdir(mode=0o700)
    (place / "one").write_bytes(bytes(64 * MiB))
    monkeypatch.setenv("KVSERVICE_DISK_PATH", str(place))
    usage = shutil.disk_usage(place)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=usage.total // 2))
    for more, status in ((32 * MiB, OK), (128 * MiB, WARNING)):
        monkeypatch.setenv("KVSERVICE_DISK_BYTES", str(usage.total // 2 + more))
        assert only(list(disk_tier()), "disk_room").status == status


def test_the_way_that_is_set_is_the_way_that_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSERVICE_DISK_PATH", str(tmp_path))
    monkeypatch.setenv("KVSERVICE_DISK_IO", "buffered")
    assert "(buffered)" in only(list(disk_tier()), "disk_tier").detail
    monkeypatch.setenv("KVSERVICE_DISK_IO", "gds")
    row = only(list(disk_tier()), "disk_tier")
    assert row.status == WARNING and "disk_io gds does not work there" in row.detail


def test_a_disk_that_cannot_be_used_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVSERVICE_DISK_PATH", str(tmp_path / "file"))
    (row,) = disk_tier()
    assert row.status == PROBLEM and "cannot be used" in row.detail


def test_wear_is_what_the_device_was_written(tmp_path: Path) -> None:
    number = tmp_path.stat().st_dev
    device = tmp_path / f"{os.major(number)}:{os.minor(number)}"
    assert read_wear(tmp_path, tmp_path) is None
    device.mkdir()
    (device / "stat").write_text("1 2 3 4 5 6 2048 8 9 10 11")
    (device / "size").write_text("4096\n")
    wear = read_wear(tmp_path, tmp_path)
    assert wear is not None and (wear.written_bytes, wear.device_bytes) == (1 << 20, 2 << 20)
    assert Wear(1 << 20, 2 << 20, 43_200).drive_writes_a_day == 1.0


def test_an_object_store_is_reached_or_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSERVICE_OBJECTS_URL", f"file://{tmp_path}")
    (row,) = object_store()
    assert row.status == OK and "written, read and deleted" in row.detail
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    monkeypatch.setenv("KVSERVICE_OBJECTS_URL", "nonsense://bucket")
    (row,) = object_store()
    assert row.status == PROBLEM and "objects_url" in row.advice
