"""A real shard with a disk tier is killed at every step of the tier, loses its memory, and starts again.

Whatever it was in the middle of: blocks that the disk has are found and verified as they are read, none is wrong, and
everything can be stored and read again. The machine's memory is lost with it, so what is read comes from the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvservice.core.messages import AcquireResult
from kvservice.errors import KVServiceError
from kvservice.memory.segment import segment_path
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually_async
from kvservice.units import BlockKey, MiB, NodeId
from tests.failpoints import Failpoints
from tests.integration.engine import Engine, attached, chain
from tests.integration.test_two_nodes import leave

BLOCKS = 8
CALL_SECONDS = 20.0
_seeds = itertools.count(1)


@dataclass
class DiskNode:
    cluster: LocalCluster
    failpoints: Failpoints
    disk: Path

    async def engine(self) -> Engine:
        """Attached to the shard once its disk is open: what is sealed before that is not written."""

        def is_open() -> bool:
            return [tier.state for tier in self.cluster.stats("n0").tiers] == ["open"]

        engine = await attached(self.cluster.socket("n0"))
        await eventually_async(is_open, "the disk to be open")
        return engine

    async def restart(self) -> None:
        """Kill the shard, lose its memory, and start it."""
        await asyncio.to_thread(self.lose)
        await asyncio.to_thread(self.cluster.start_shard, "n0")

    def lose(self) -> None:
        """Kill the shard, and lose its memory."""
        self.cluster.kill("n0", signal.SIGKILL)
        segment_path(self.cluster.service, NodeId("n0")).unlink()

    def flip(self, key: BlockKey) -> None:
        """Change a bit of a block's file."""
        (path,) = [path for path in self.files() if path.stem == key.hex()]
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    def files(self) -> list[Path]:
        return list(self.disk.rglob("*.safetensors"))

    async def written(self, count: int) -> None:
        await eventually_async(lambda: len(self.files()) >= count, f"{count} files on the disk")


@contextlib.contextmanager
def with_disks(folder: Path, nodes: int = 1, disk_bytes: int = 64 * MiB) -> Iterator[DiskNode]:
    """Each node has a folder of its own on one disk."""
    points = Failpoints(folder / "failpoints")
    points.folder.mkdir()
    disk = folder / "disk"
    disk.mkdir()
    environment = {
        **points.environment,
        "KVSERVICE_DISK_PATH": str(disk),
        "KVSERVICE_DISK_BYTES": str(disk_bytes),
        "KVSERVICE_DISK_WRITE": "stored",
    }
    with LocalCluster(nodes, 1, mirror_bytes=0, environment=environment) as cluster:
        yield DiskNode(cluster, points, disk)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[DiskNode]:
    with with_disks(tmp_path) as found:
        yield found


async def test_a_restart_finds_its_blocks_on_the_disk(node: DiskNode) -> None:
    keys, engine = chain(next(_seeds), BLOCKS), await node.engine()
    await engine.store(keys)
    await node.written(BLOCKS)
    await node.restart()
    await leave(engine)
    engine = await node.engine()
    await asyncio.to_thread(node.cluster.wait_until_known, keys)  # announced as found
    assert len((await engine.read_all(keys)).blocks) == BLOCKS, "each was verified as it was read"
    await leave(engine)


async def test_a_peer_reads_what_only_another_nodes_disk_has(tmp_path: Path) -> None:
    keys = chain(next(_seeds), BLOCKS)
    with with_disks(tmp_path, nodes=2) as node:
        engine = await node.engine()
        await engine.store(keys)
        await node.written(BLOCKS)
        await node.restart()
        await leave(engine)
        reader = await attached(node.cluster.socket("n1"))

        async def read() -> AcquireResult | None:
            """Nothing as long as the directory names the boot that is gone. Every byte is compared."""
            found = await reader.read_all(keys, timeout=CALL_SECONDS)
            return found if found.blocks else None

        found = await eventually_async(read, "the disk's blocks on the other node", CALL_SECONDS)
        assert (len(found.blocks), found.fetched_count) == (BLOCKS, BLOCKS)
        assert node.cluster.stats("n0").counters["tier_disk_read_blocks"] == BLOCKS
        await leave(reader)


@pytest.mark.slow
async def test_a_flipped_file_is_a_miss_and_is_computed_anew(node: DiskNode) -> None:
    keys, engine = chain(next(_seeds), BLOCKS), await node.engine()
    await engine.store(keys)
    await node.written(BLOCKS)
    await asyncio.to_thread(node.lose)
    node.flip(keys[2])
    await asyncio.to_thread(node.cluster.start_shard, "n0")
    await leave(engine)
    engine = await node.engine()
    await asyncio.to_thread(node.cluster.wait_until_known, keys)
    assert len((await engine.read_all(keys)).blocks) == 2
    await engine.store(keys, start=2)
    assert len((await engine.read_all(keys)).blocks) == BLOCKS
    await leave(engine)


@pytest.mark.slow
async def test_a_shard_killed_while_it_erases_forgets_the_file(tmp_path: Path) -> None:
    """The file is gone, and the index has it still: a miss, and stored again."""
    count = 40
    first, second = chain(next(_seeds), count), chain(next(_seeds), count)
    with with_disks(tmp_path, disk_bytes=4 * MiB) as node:  # room for 60 blocks of 64 KiB with their headers
        engine = await node.engine()
        await engine.store(first)
        await node.written(count)
        node.failpoints.arm("tier.erase")
        await engine.store(second)
        await asyncio.to_thread(node.failpoints.hit, "tier.erase")
        await node.restart()
        await leave(engine)
        engine = await node.engine()
        for keys in (first, second):
            begin = len((await engine.read_all(keys)).blocks)  # compares every byte that is promised
            await engine.store(keys, start=begin)
            assert len((await engine.read_all(keys)).blocks) == count
        books = node.cluster.accounting("n0")
        assert books.balanced, books.violation
        await leave(engine)


@pytest.mark.slow
async def test_a_shard_killed_while_it_writes_its_index_keeps_all(node: DiskNode) -> None:
    """Each start writes the index anew: the old one counts until the new one is whole."""
    keys, engine = chain(next(_seeds), BLOCKS), await node.engine()
    await engine.store(keys)
    await node.written(BLOCKS)
    await asyncio.to_thread(node.lose)
    node.failpoints.arm("tier.anew")
    await asyncio.to_thread(node.cluster.start_shard, "n0", wait=False)
    await asyncio.to_thread(node.failpoints.hit, "tier.anew")
    await asyncio.to_thread(node.cluster.kill, "n0", signal.SIGKILL)
    await asyncio.to_thread(node.cluster.start_shard, "n0")
    await leave(engine)
    engine = await node.engine()
    assert len((await engine.read_all(keys)).blocks) == BLOCKS
    assert not list(node.disk.rglob("index.new")), "a draft of the index stayed"
    await leave(engine)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["tier.write", "tier.rename", "tier.index", "tier.read"])
async def test_a_shard_killed_in_its_tier_serves_no_wrong_byte(node: DiskNode, place: str) -> None:
    keys, engine = chain(next(_seeds), BLOCKS), await node.engine()
    if place == "tier.read":
        await engine.store(keys)
        await node.written(BLOCKS)
        await node.restart()
        await leave(engine)
        engine = await node.engine()
        await asyncio.to_thread(node.cluster.wait_until_known, keys)
    node.failpoints.arm(place)
    work = engine.read_all(keys) if place == "tier.read" else engine.store(keys)
    under_way = asyncio.ensure_future(work)
    await asyncio.to_thread(node.failpoints.hit, place)
    await node.restart()
    with contextlib.suppress(KVServiceError):
        await asyncio.wait_for(under_way, CALL_SECONDS)
    await leave(engine)
    engine = await node.engine()
    begin = len((await engine.read_all(keys)).blocks)  # compares every byte that is promised
    if begin < BLOCKS:
        await engine.store(keys, start=begin)
    await node.written(BLOCKS)
    await node.restart()
    await leave(engine)
    engine = await node.engine()
    await asyncio.to_thread(node.cluster.wait_until_known, keys)
    assert len((await engine.read_all(keys)).blocks) == BLOCKS
    assert not list(node.disk.rglob("new/*")), "a file that was being written stayed"
    books = node.cluster.accounting("n0")
    assert books.balanced, books.violation
    await leave(engine)
