"""Tiers are found without waiting for a disk that does not answer."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from kvservice.config import ServiceConfig
from kvservice.errors import TierError
from kvservice.pool import tier_specs
from kvservice.pool.coders import Coders
from kvservice.pool.tier_factory import tier_makers
from kvservice.pool.tier_specs import DiskWalk, find_tiers, marks_beside, names_beside


async def test_a_disk_that_does_not_answer_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    def free_bytes(place: Path, walk: DiskWalk) -> int:
        answers.wait()
        return 1

    monkeypatch.setattr(tier_specs, "free_bytes", free_bytes)
    monkeypatch.setattr(tier_specs, "FREE_SECONDS", 0.05)
    settings = ServiceConfig(disk_path=str(tmp_path), objects_url="memory:///")
    disk, objects = await find_tiers(settings, "s/n")
    assert "before the next start: it did not answer within" in disk.unusable and not objects.unusable
    assert not marks_beside((disk, objects)) and not names_beside((disk, objects))
    answers.set()


async def test_a_disk_that_goes_on_answering_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has so many files that to count them takes longer than a disk may be silent."""

    def free_bytes(place: Path, walk: DiskWalk) -> int:
        for _ in range(10):
            time.sleep(0.02)
            walk.files += 1
        return 7

    monkeypatch.setattr(tier_specs, "free_bytes", free_bytes)
    monkeypatch.setattr(tier_specs, "FREE_SECONDS", 0.1)
    (spec,) = await find_tiers(ServiceConfig(disk_path=str(tmp_path)), "s/n")
    assert spec.budget_bytes == 7


async def test_a_disk_that_cannot_be_asked_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def free_bytes(place: Path, walk: DiskWalk) -> int:
        raise PermissionError(13, "Permission denied", str(place))

    monkeypatch.setattr(tier_specs, "free_bytes", free_bytes)
    (disk,) = await find_tiers(ServiceConfig(disk_path="/root/secret"), "s/n")
    assert disk.unusable == "/root/secret/s/n is not used before the next start: Permission denied"
    with pytest.raises(TierError, match=disk.unusable):
        tier_makers((disk,), Coders())[disk.name]()


async def test_a_disk_with_a_size_is_not_asked(tmp_path: Path) -> None:
    (spec,) = await find_tiers(ServiceConfig(disk_path=str(tmp_path / "none"), disk_bytes=1 << 30), "s/n")
    assert (spec.budget_bytes, spec.place) == (1 << 30, str(tmp_path / "none" / "s/n"))


async def test_a_disk_whose_marks_cannot_be_read_is_not_used(tmp_path: Path) -> None:
    """Also when the settings say how much to use. A start reads what was cleared before it opens any tier."""
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "n.marks").mkdir()  # reading it fails, as on a disk that is gone
    settings = ServiceConfig(disk_path=str(tmp_path), disk_bytes=1 << 30)
    (disk,) = await find_tiers(settings, "s/n")
    assert disk.unusable.endswith("Is a directory")
