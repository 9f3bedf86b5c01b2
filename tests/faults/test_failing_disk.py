"""A disk tier on a file system whose calls fail: real errors, from the kernel. Nothing wrong is served."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvservice.core.events import PullResult
from kvservice.core.tier.tier_block import TierBlock
from kvservice.errors import TierError
from kvservice.testing.eventually import eventually
from kvservice.testing.tier_contract import OK, StartedTier, some
from kvservice.tier.base import WriteResult
from kvservice.tier.block_files import name_of
from kvservice.tier.disk import DiskTier
from kvservice.tier.folder_check import check_folder
from kvservice.units import MiB
from tests.faults.failing_disk import LIBRARY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.skipif(not LIBRARY.exists(), reason="libfuse is not there: make .venv-fuse/.installed"),
]
START_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Disk:
    below: Path  # where the files really are
    blocks: Path
    _faults: Path

    def fail(self, call: str, error: int = errno.EIO) -> None:
        (self._faults / call).write_text(str(error))

    def heal(self) -> None:
        for fault in self._faults.iterdir():
            fault.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    below, mounted, faults = (tmp_path / name for name in ("below", "mounted", "faults"))
    for folder in (below, mounted, faults):
        folder.mkdir()
    command = [sys.executable, "-m", "tests.faults.failing_disk", str(below), str(mounted), str(faults)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as program:
        try:
            eventually(lambda: os.path.ismount(mounted) or program.poll() is not None, "the mount", START_SECONDS)
            if program.poll() is not None:
                pytest.skip(f"FUSE cannot be used here: {program.stderr.read() if program.stderr else ''}")
            yield Disk(below / "blocks", mounted / "blocks", faults)
        finally:
            for fault in faults.iterdir():
                fault.unlink()
            subprocess.run(["umount", "-l", str(mounted)], check=False, capture_output=True)
            program.kill()


@pytest.fixture
def tier(disk: Disk) -> Iterator[StartedTier]:
    tier = StartedTier(DiskTier(disk.blocks))
    yield tier
    disk.heal()
    tier.close()


def test_a_disk_without_faults_keeps_its_blocks(disk: Disk, tier: StartedTier) -> None:
    items = [some(number, 1 * MiB) for number in range(4)]
    assert set(tier.write(*items)) == {WriteResult.OK}
    assert tier.read(*(block for block, _ in items)) == [(OK, payload) for _, payload in items]
    assert (disk.below / name_of(items[0][0].key)).stat().st_size == 1 * MiB + 4096


@pytest.mark.parametrize("call", ["open", "read"])
def test_a_failed_read_is_a_miss_and_the_block_stays(disk: Disk, tier: StartedTier, call: str) -> None:
    block, payload = some(1, 1 * MiB)
    tier.write((block, payload))
    disk.fail(call)
    assert tier.result_of(block) is PullResult.FAILED
    assert tier.tier.counters()["reads_failed"] == 1
    disk.heal()
    assert tier.read(block) == [(OK, payload)], "an error of the drive says nothing about the file"


@pytest.mark.parametrize("call", ["create", "write", "rename"])
def test_a_failed_write_leaves_nothing(disk: Disk, tier: StartedTier, call: str) -> None:
    item = some(1, 1 * MiB)
    disk.fail(call)
    assert tier.write(item) == (WriteResult.FAILED,)
    assert tier.tier.counters()["writes_failed"] == 1
    assert list((disk.below / "new").iterdir()) == [] and not (disk.below / name_of(item[0].key)).exists()
    disk.heal()
    assert tier.write(item) == (WriteResult.OK,) and tier.read(item[0]) == [(OK, item[1])]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_without_room_or_quota_the_disk_is_full(disk: Disk, tier: StartedTier, error: int) -> None:
    disk.fail("write", error)
    assert tier.write(some(1, 1 * MiB)) == (WriteResult.FULL,)


@pytest.mark.parametrize("fault", ["short", "flip"])
def test_bytes_that_are_not_the_blocks_are_never_served(disk: Disk, tier: StartedTier, fault: str) -> None:
    block, payload = some(1, 1 * MiB)
    tier.write((block, payload))
    disk.fail(fault)
    assert tier.result_of(block) in {PullResult.FAILED, PullResult.STALE, PullResult.CORRUPT}
    disk.heal()
    assert tier.write((block, payload)) == (WriteResult.OK,) and tier.read(block) == [(OK, payload)]


def test_a_file_that_cannot_be_erased_is_counted(disk: Disk, tier: StartedTier) -> None:
    block, payload = some(1, 1 * MiB)
    tier.write((block, payload))
    disk.fail("unlink")
    tier.tier.erase([block.key])
    eventually(lambda: tier.tier.counters().get("erases_failed") == 1, "the count")
    disk.heal()
    tier.close()
    assert [found.key for found in _blocks(disk)] == [block.key], "it is found again, as a block like any other"


def test_what_could_not_be_erased_goes_with_the_next_erase(disk: Disk, tier: StartedTier) -> None:
    items = [some(number, 4096) for number in range(40)]
    tier.write(*items)
    disk.fail("unlink", errno.EDQUOT)
    tier.tier.erase([block.key for block, _ in items[:30]])
    eventually(lambda: tier.tier.counters().get("erases_failed") == 30, "the count")
    disk.fail("rename")
    assert tier.write(items[2]) == (WriteResult.FAILED,), "its old file stays, and is still to go"
    disk.heal()
    assert tier.write(*items[:2]) == (WriteResult.OK,) * 2, "these are wanted again"
    for block, _ in items[30:32]:
        tier.tier.erase([block.key])
    kept = {block.key for block, _ in (*items[:2], *items[32:])}
    there = {block.key: disk.below / name_of(block.key) for block, _ in items}
    eventually(lambda: {key for key, path in there.items() if path.exists()} == kept, "the others are erased")
    tier.close()
    assert {block.key for block in _blocks(disk)} == kept and check_folder(disk.blocks).is_sound


def test_a_disk_that_answers_nothing_holds_up_only_its_reader(disk: Disk, tier: StartedTier) -> None:
    block, payload = some(1, 1 * MiB)
    tier.write((block, payload))
    disk.fail("late")
    reader = threading.Thread(target=tier.read, args=(block,))
    reader.start()
    tier.tier.counters()
    assert reader.is_alive()
    disk.heal()
    reader.join(START_SECONDS)
    assert not reader.is_alive() and tier.read(block) == [(OK, payload)]


@pytest.mark.parametrize(("call", "error"), [("write", errno.EIO), ("flip", errno.EIO), ("create", errno.EROFS)])
def test_a_disk_that_keeps_no_bytes_is_refused_at_the_start(disk: Disk, call: str, error: int) -> None:
    disk.fail(call, error)
    with pytest.raises(TierError, match="disk"):
        DiskTier(disk.blocks).start()
    disk.heal()
    StartedTier(DiskTier(disk.blocks)).close()


def test_a_lost_index_costs_nothing_but_a_scan(disk: Disk) -> None:
    first = StartedTier(DiskTier(disk.blocks))
    items = [some(number, 4096) for number in range(8)]
    first.write(*items[:4])
    disk.fail("write")
    disk.fail("truncate")
    first.tier.erase([items[0][0].key])
    eventually(lambda: first.tier.counters()["index_failed"] > 0, "the index")
    disk.heal()
    first.write(*items[4:])
    first.close()
    assert {block.key for block in _blocks(disk)} == {block.key for block, _ in items[1:]}
    assert check_folder(disk.blocks).is_sound


def test_an_index_goes_on_when_a_full_disk_has_room_again(disk: Disk) -> None:
    first = StartedTier(DiskTier(disk.blocks))
    items = [some(number, 4096) for number in range(8)]
    first.write(*items[:4])
    disk.fail("write", errno.ENOSPC)
    first.tier.erase([items[0][0].key])
    eventually(lambda: first.tier.counters().get("erased") == 1, "the block is erased")
    disk.heal()
    first.write(*items[4:])
    first.close()
    second = StartedTier(DiskTier(disk.blocks))
    second.close()
    assert {block.key for block in second.found} == {block.key for block, _ in items[1:]}
    assert second.tier.counters()["found_scanned"] == 0, "no header was read"


def _blocks(disk: Disk) -> list[TierBlock]:
    tier = StartedTier(DiskTier(disk.blocks))
    tier.close()
    return tier.found
