"""Rules of tier.disk: the contract of a tier, with each way to read and write files, and what a folder may hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvservice.testing.tier_contract import StartedTier, TierContract
from kvservice.tier.block_files import name_of
from kvservice.tier.disk import DiskTier
from kvservice.tier.disk_io import DiskIO
from kvservice.transfer.nixl import nixl_available
from kvservice.units import BlockKey


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
