"""A disk tier whose process is killed, whose file system is full, cannot be written or gives errors."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kvservice.cli.lifecycle import _remove_blocks
from kvservice.config import ServiceConfig
from kvservice.core.events import PullResult
from kvservice.core.segment.digest import digest_payload
from kvservice.errors import TierError
from kvservice.pool.tiers import TierPhase
from kvservice.shard.server import ShardServer
from kvservice.shard.server_config import ShardServerConfig
from kvservice.testing.eventually import eventually_async
from kvservice.testing.tier_contract import OK, StartedTier, some
from kvservice.testing.unique import unique_name
from kvservice.tier.base import WriteResult
from kvservice.tier.block_files import TierFolder, name_of
from kvservice.tier.disk import DiskTier
from kvservice.tier.folder_check import check_folder
from kvservice.units import BlockKey, MiB, NodeId
from tests.faults.disk_writer import BLOCKS, payload_of

KILLS = 3


@pytest.mark.processes
def test_a_killed_process_leaves_whole_blocks(tmp_path: Path) -> None:
    """At any moment: what the next start finds is read with the bytes of one round, and the lock is free."""
    seen = 0
    for kill in range(KILLS):
        command = [sys.executable, "-m", "tests.faults.disk_writer", str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            for _ in range(kill + 1):
                assert writer.stdout.readline(), "the writer ended"
            writer.send_signal(signal.SIGKILL)
        tier = StartedTier(DiskTier(tmp_path))
        try:
            assert len(tier.found) >= BLOCKS - 2, "blocks were erased one by one, and the rest is there"
            for block in tier.found:
                ((result, payload),) = tier.read(block)
                assert result is OK
                assert digest_payload(payload, block.key) == block.digest
                number = block.position
                assert payload == payload_of(number, int.from_bytes(payload[:4], "big"))
                seen += 1
            assert list((tmp_path / "new").iterdir()) == []
        finally:
            tier.close()
        assert check_folder(tmp_path).is_sound
    assert seen >= KILLS * (BLOCKS - 2)


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    if request.param == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(mounted)]
    else:
        if not shutil.which("mkfs.ext4"):
            pytest.skip("there is no mkfs.ext4")
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(16 * MiB)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True, capture_output=True)
        command = ["mount", "-o", "loop", str(image), str(mounted)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this process may not mount {request.param}: {done.stderr.strip()}")
    yield mounted / "blocks"
    subprocess.run(["umount", str(mounted)], check=True)


def fill(path: Path) -> None:
    """Write until the file system has no room."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(4096)) == 4096:
            pass


def test_a_full_file_system_is_full_and_loses_nothing(small_disk: Path) -> None:
    tier = StartedTier(DiskTier(small_disk))
    try:
        items = [some(number, 1 * MiB) for number in range(24)]
        results = [tier.write(item)[0] for item in items]
        assert results.count(WriteResult.FULL) >= 8 and set(results) == {WriteResult.OK, WriteResult.FULL}
        kept = [item for item, result in zip(items, results, strict=True) if result is WriteResult.OK]
        assert tier.read(*(block for block, _ in kept)) == [(OK, payload) for _, payload in kept]
        assert list((small_disk / "new").iterdir()) == [], "no half file takes room"
        tier.tier.erase([block.key for block, _ in kept[:4]])
        again = [some(number, 1 * MiB) for number in range(50, 52)]
        assert tier.write(*again) == (WriteResult.OK, WriteResult.OK), "erasing passes writing, and made room"
    finally:
        tier.close()
    tier = StartedTier(DiskTier(small_disk))
    assert len(tier.found) == len(kept) - 4 + 2
    while tier.write(some(len(tier.found) + 100 + len(kept), 1 * MiB))[0] is WriteResult.OK:
        kept.append(items[0])
    tier.close()
    (small_disk.parent / "filler").write_bytes(b"")
    fill(small_disk.parent / "filler")
    full = StartedTier(DiskTier(small_disk))
    full.close()
    assert len(full.found) >= 8, "a disk that is full at the start gives up a few blocks, not all of them"


def test_a_write_waits_for_room_that_is_being_made(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread finds the disk full while another one still erases."""
    tier = StartedTier(DiskTier(small_disk))
    items = [some(number, 1 * MiB) for number in range(24)]
    results = [tier.write(item)[0] for item in items]
    erasing, may_go_on, real = threading.Event(), threading.Event(), TierFolder.remove

    def slow(folder: TierFolder, key: BlockKey) -> bool:
        erasing.set()
        assert may_go_on.wait(10)
        return real(folder, key)

    monkeypatch.setattr(TierFolder, "remove", slow)
    tier.tier.erase([items[0][0].key])
    assert results[0] is WriteResult.OK and erasing.wait(10)
    threading.Timer(0.3, may_go_on.set).start()  # by then the write has found no room
    assert tier.write(some(50, 1 * MiB)) == (WriteResult.OK,)
    tier.close()


def test_a_folder_that_cannot_be_written_is_refused(small_disk: Path) -> None:
    """Root may write what the mode forbids, so the file system itself is made read-only."""
    StartedTier(DiskTier(small_disk)).close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk.parent)], check=True)
    with pytest.raises(TierError, match=r"Read-only file system.*set disk_path"):
        DiskTier(small_disk).start()


def test_files_that_vanish_are_misses(tmp_path: Path) -> None:
    tier, items = StartedTier(DiskTier(tmp_path)), [some(number) for number in range(3)]
    tier.write(*items)
    (tmp_path / name_of(items[0][0].key)).unlink()
    shutil.rmtree(tmp_path / name_of(items[1][0].key)[:2])
    assert [result for result, _ in tier.read(*(block for block, _ in items))] == [PullResult.STALE] * 3
    assert tier.write(items[1]) == (WriteResult.FAILED,)
    tier.close()
    tier = StartedTier(DiskTier(tmp_path))
    assert tier.found == [] and tier.write(items[1]) == (WriteResult.OK,)
    tier.close()


def has_open_tier(server: ShardServer) -> bool:
    return [status.phase for status in server.pool.tier_states()] == [TierPhase.OPEN]


async def test_blocks_stay_on_disk_unless_the_service_goes_down() -> None:
    """A node that stops finds its blocks again; `kvservice down` removes them."""
    with tempfile.TemporaryDirectory(prefix="kvs-") as root:
        settings = ServiceConfig(
            service=f"t{unique_name()}",
            pool_bytes=4 * MiB,
            runtime_dir=f"{root}/run",
            slab_bytes=1 << 20,
            transport="shm",
            allow_plaintext=True,
            disk_path=f"{root}/disk",
            disk_bytes=64 * MiB,
        )
        folder = Path(root, "disk", settings.service, "n0")
        block, payload = some(1)
        earlier = StartedTier(DiskTier(folder))
        earlier.write((block, payload))
        earlier.close()
        for forget in (False, True):
            server = ShardServer(ShardServerConfig(settings, NodeId("n0")))
            await server.start()
            try:
                await eventually_async(partial(has_open_tier, server), "the disk tier")
            finally:
                assert await server.stop(forget_disk=forget)
            assert (folder / name_of(block.key)).exists() is not forget
        assert not folder.exists()


def test_down_removes_what_nodes_of_this_machine_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for node in ("prod/n0", "prod/n1", "other/n0"):
        tier = StartedTier(DiskTier(tmp_path / node))
        tier.write(some(1))
        tier.close()
    (tmp_path / "prod" / "n0.names").touch()
    removed = _remove_blocks(tmp_path / "prod")
    assert removed == [tmp_path / "prod" / "n0", tmp_path / "prod" / "n1"]
    assert f"removed 1 block on disk from {tmp_path / 'prod' / 'n0'}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    assert _remove_blocks(tmp_path / "prod") == []


def test_down_says_the_name_of_a_folder_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What stands in brackets was taken for markup, and left out."""
    StartedTier(DiskTier(tmp_path / "[ssd]" / "n0")).close()
    assert _remove_blocks(tmp_path / "[ssd]") == [tmp_path / "[ssd]" / "n0"]
    assert f"from {tmp_path}/[ssd]/n0\n" in capsys.readouterr().err
