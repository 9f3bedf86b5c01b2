"""A slot that somebody may still write is nobody else's: over restarts that keep the blocks, detaches, lost streams.

Each attack has a worker that checked its slots, wrote half of them and then stood still. What it writes later must not
turn up in a block of somebody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from kvservice.client.shard import ShardClient
from kvservice.config import ServiceConfig
from kvservice.core import events as ev
from kvservice.core.messages import SealStatus
from kvservice.core.segment.geometry import Geometry
from kvservice.core.segment.header_checks import is_as_promised, is_reserved
from kvservice.core.segment.refs import BlockRef
from kvservice.errors import Unavailable
from kvservice.memory.liveness import claim, hold
from kvservice.memory.segment import Segment
from kvservice.pool import vanished
from kvservice.pool.runtime import PoolRuntime
from kvservice.pool.runtime_ports import PoolConfig
from kvservice.shard.server import ShardServer
from kvservice.shard.server_config import ShardServerConfig
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually_async
from kvservice.testing.unique import unique_name
from kvservice.units import BlockKey, BootEpoch, MiB, NodeId
from tests.faults.rounds import rounds
from tests.integration.engine import LAYOUT, Engine, attached, chain, content, spec

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3600)]

SIZE = LAYOUT.payload_bytes
SLOTS = 15  # of a slab of one MiB, which is the whole pool
MANY = 1000  # rounds of a campaign


class PausedCopy:
    """A worker that passed its checks and wrote the first half of each slot."""

    def __init__(self, segment: Segment, epoch: BootEpoch, refs: list[BlockRef]) -> None:
        assert all(is_reserved(segment.header_bytes(ref.slot), epoch, ref, SIZE) for ref in refs)
        self._views = [segment.payload(ref.slot, SIZE) for ref in refs]
        for view in self._views:
            view[: SIZE // 2] = b"\xe1" * (SIZE // 2)

    def go_on(self) -> None:
        for view in self._views:
            view[SIZE // 2 :] = b"\xe1" * (SIZE - SIZE // 2)


async def fill(pool_engine: Engine, seed: int) -> tuple[BlockKey, ...]:
    """Store as many blocks as the pool takes."""
    keys = chain(seed, SLOTS)
    statuses = await pool_engine.store(keys)
    assert set(statuses) <= {SealStatus.SEALED}
    return keys[: len(statuses)]


async def wrong_blocks(engine: Engine, keys: tuple[BlockKey, ...]) -> int:
    """Promised, accepted by both checks of a header, and not what was stored."""
    if not keys:
        return 0
    result = await engine.acquire(keys, timeout=1.0)
    assert len(result.blocks) == len(keys)
    wrong = 0
    for key, ref in zip(keys, result.blocks, strict=True):
        header = engine.segment.header_bytes(ref.slot)
        assert is_as_promised(header, engine.attachment.epoch, ref, key, SIZE)
        wrong += bytes(engine.segment.payload(ref.slot, SIZE)) != content(key)
    await engine.pool.release(engine.id, [result.lease_id])
    return wrong


async def no_slot_rests(pool: PoolRuntime) -> None:
    await eventually_async(lambda: not pool.accounting()[0]["quarantined"], "the slots to come back")


@pytest.fixture
def root() -> Iterator[Path]:
    found = Path(tempfile.mkdtemp(prefix="kvs-"))
    yield found
    shutil.rmtree(found, ignore_errors=True)


@pytest.fixture(autouse=True)
def often_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vanished, "POLL_SECONDS", 0.01)


@contextlib.asynccontextmanager
async def small_pool() -> AsyncIterator[PoolRuntime]:
    path = Path(f"/dev/shm/kvservice-test{unique_name()}-n")
    pool = await PoolRuntime.open(PoolConfig(NodeId("n"), path, Geometry(1 << 20, 1)))
    try:
        yield pool
    finally:
        await pool.close()
        pool.unlink()


# -- a restart that keeps the blocks ----


async def test_a_copy_paused_over_a_restart_writes_no_others_block(root: Path) -> None:
    """The runtime directory is of no account: every other round it is removed while the shard is down."""
    number = rounds(20, failed_before=1.0, campaign=MANY)
    service = f"t{unique_name()}"
    settings = ServiceConfig(
        service=service, pool_bytes=4 * MiB, runtime_dir=str(root), slab_bytes=1 << 20, transport="shm"
    )
    config = ShardServerConfig(settings, NodeId("n"))
    server = ShardServer(config)
    await server.start()
    try:
        for played in range(number):
            slow = await Engine.attach(server.pool)
            refs = await slow.pool.reserve(slow.id, 4)
            copy = PausedCopy(slow.segment, slow.attachment.epoch, refs)
            await server.stop(leaving=True, keep_segment=True)
            if played % 2:
                shutil.rmtree(root / service, ignore_errors=True)
            server = ShardServer(config)
            await server.start()
            await asyncio.sleep(0.03)  # a few looks at who may write
            assert server.pool.accounting()[0]["quarantined"] == len(refs)
            other = await Engine.attach(server.pool)
            keys = await fill(other, played)
            copy.go_on()
            assert await wrong_blocks(other, keys) == 0, f"round {played}"
            slow.let_go()
            await no_slot_rests(server.pool)
            await server.pool.detach(other.attachment.attachment_id)
            other.let_go()
    finally:
        await server.stop()


@pytest.mark.parametrize("what", ["its slot's header", "its slab's header", "another block's header", "nothing"])
async def test_an_unreadable_header_after_a_restart_may_be_written(what: str) -> None:
    """A flipped bit hides that a slot is being written. Whoever is paused there keeps the old memory to write into."""
    path = Path(f"/dev/shm/kvservice-test{unique_name()}-n")
    config = PoolConfig(NodeId("n"), path, Geometry(1 << 20, 1))
    pool = await PoolRuntime.open(config)
    try:
        slow = await Engine.attach(pool)
        stored = chain(1, 2)
        await slow.store(stored)
        refs = await pool.reserve(slow.id, 4)
        copy = PausedCopy(slow.segment, slow.attachment.epoch, refs)
        before = slow.segment.epoch
        at = slow.segment.geometry.header_offset(refs[0].slot)
        if what == "its slab's header":
            at = slow.segment.geometry.slab_offset(0)
        elif what == "another block's header":
            slot = next(slot for slot, _, header in slow.segment.scan() if header.is_stable)
            at = slow.segment.geometry.header_offset(slot)
        if what != "nothing":
            slow.segment.buffer[at + 12] ^= 1
        await pool.close()
        pool = await PoolRuntime.open(config)
        assert pool.epoch > before
        assert pool.accounting()[0]["quarantined"] == (len(refs) if what == "nothing" else 0)
        other = await Engine.attach(pool)
        keys = await fill(other, 2)
        copy.go_on()
        assert await wrong_blocks(other, keys) == 0
        slow.let_go()
        await no_slot_rests(pool)
        other.let_go()
    finally:
        await pool.close()
        pool.unlink()


async def test_a_restored_copy_of_the_segment_gives_no_wrong_bytes() -> None:
    """A backup that is moved back, or a disk after a power failure: headers and payloads are of different moments."""
    path = Path(f"/dev/shm/kvservice-test{unique_name()}-n")
    config = PoolConfig(NodeId("n"), path, Geometry(1 << 20, 1))
    pool = await PoolRuntime.open(config)
    try:
        engine = await Engine.attach(pool)
        keys = chain(1, 5)
        await engine.store(keys)
        slow = await Engine.attach(pool)
        copy = PausedCopy(slow.segment, slow.attachment.epoch, await pool.reserve(slow.id, 4))
        backup = path.with_name(path.name + ".backup")
        shutil.copyfile(path, backup)
        backup.chmod(0o600)
        slot = next(slot for slot, _, header in engine.segment.scan() if header.key == keys[-1])
        with backup.open("r+b") as file:
            file.seek(engine.segment.geometry.payload_offset(slot, SIZE))
            file.write(b"\xe1" * (SIZE // 2))
        backup.replace(path)
        assert not pool.is_linked()
        before = pool.epoch
        pool.retire()
        await pool.close()
        pool = await PoolRuntime.open(config)
        assert pool.epoch > before
        assert pool.accounting()[0]["sealed"] == 4
        await no_slot_rests(pool)
        other = await Engine.attach(pool)
        filled = await fill(other, 2)
        copy.go_on()
        assert await wrong_blocks(other, filled) == 0
        for each in (engine, slow, other):
            each.let_go()
    finally:
        await pool.close()
        pool.unlink()


async def test_a_damaged_header_costs_one_block_without_writers() -> None:
    """The engine has ended, so nobody can write any slot."""
    path = Path(f"/dev/shm/kvservice-test{unique_name()}-n")
    config = PoolConfig(NodeId("n"), path, Geometry(1 << 20, 1))
    pool = await PoolRuntime.open(config)
    try:
        engine = await Engine.attach(pool)
        await engine.store(chain(1, 5))
        slot = next(slot for slot, _, header in engine.segment.scan() if header.is_stable)
        engine.segment.buffer[engine.segment.geometry.header_offset(slot) + 12] ^= 1
        engine.let_go()
        await pool.close()
        pool = await PoolRuntime.open(config)
        assert pool.accounting()[0]["sealed"] == 4
    finally:
        await pool.close()
        pool.unlink()


def test_a_stopped_engine_keeps_its_slots_over_a_restart() -> None:
    """The same with processes: SIGSTOP in the middle of a copy, SIGTERM to a shard that keeps its blocks."""
    for played in range(rounds(1, failed_before=1.0, campaign=20)):
        asyncio.run(_stopped_process(played))


async def _stopped_process(played: int) -> None:
    with LocalCluster(
        nodes=1, lookup_partitions=0, pool_bytes=4 << 20, slab_bytes=1 << 20, keep_segment=True
    ) as cluster:
        slow = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.keep_writer", cluster.socket("n0")],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
        )
        assert slow.stdout is not None and slow.stdin is not None
        assert slow.stdout.readline() == "paused\n"
        slow.send_signal(signal.SIGSTOP)
        cluster.kill("n0", signal.SIGTERM)
        cluster.start_shard("n0")
        assert cluster.accounting("n0").slots["quarantined"] == 4
        other = await attached(cluster.socket("n0"))
        keys = await fill(other, played)
        slow.send_signal(signal.SIGCONT)
        slow.stdin.write("go on\n")
        slow.stdin.flush()
        assert slow.stdout.readline() == "wrote\n"
        assert await wrong_blocks(other, keys) == 0
        slow.communicate()
        await eventually_async(lambda: not cluster.accounting("n0").slots["quarantined"], "the slots to come back")
        other.let_go()
        await other.pool.close()


# -- the end of an attachment ----


@pytest.mark.parametrize("how", ["detached", "lost"])
async def test_a_copy_that_outlives_its_attachment_hits_no_block(how: str) -> None:
    """Its scheduler left in order, or its stream broke, while a copier was in the middle of a batch."""
    async with small_pool() as pool:
        for played in range(rounds(20, failed_before=1.0, campaign=MANY)):
            slow = await Engine.attach(pool)
            refs = await pool.reserve(slow.id, SLOTS)
            copy = PausedCopy(slow.segment, slow.attachment.epoch, refs)
            await (pool.detach(slow.attachment.attachment_id) if how == "detached" else _lose(pool, slow))
            other = await Engine.attach(pool)
            await asyncio.sleep(0.02)
            keys = await fill(other, played)
            copy.go_on()
            assert await wrong_blocks(other, keys) == 0, f"round {played}"
            slow.let_go()
            await no_slot_rests(pool)
            await pool.detach(other.attachment.attachment_id)
            other.let_go()


async def _lose(pool: PoolRuntime, engine: Engine) -> None:
    pool.attachment_lost(engine.attachment.attachment_id)


async def test_a_worker_that_comes_late_writes_into_no_others_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its first step was under way when the stream broke. The shard is slow between its look and what it does then."""
    handle = PoolRuntime._dispatch

    def slowly(self: PoolRuntime, event: ev.Event) -> None:
        if isinstance(event, ev.EngineGone):
            time.sleep(0.003)
        handle(self, event)

    monkeypatch.setattr(PoolRuntime, "_dispatch", slowly)
    chance = random.Random(7)
    outcomes = {True: 0, False: 0}  # by whether the worker found its slots still its own
    async with small_pool() as pool:
        for played in range(rounds(20, failed_before=0.66, campaign=MANY)):
            engine_spec = spec()
            attachment = await pool.attach(engine_spec, lambda reason: None)
            refs = await pool.reserve(attachment.attachment_id, SLOTS)
            mapped = Segment.attach(Path(attachment.segment_path), attachment.geometry)
            may_end = threading.Event()
            delay = chance.uniform(0.0, 0.006)
            may_write: list[bool] = []

            def work(
                mapped: Segment = mapped,
                epoch: BootEpoch = attachment.epoch,
                refs: list[BlockRef] = refs,
                engine_id: bytes = engine_spec.engine_id,
                may_end: threading.Event = may_end,
                delay: float = delay,
                may_write: list[bool] = may_write,
            ) -> None:
                time.sleep(delay)
                try:
                    lock = hold(mapped, engine_id, epoch)
                except Unavailable:
                    may_write.append(False)
                    return
                may_write.append(all(is_reserved(mapped.header_bytes(ref.slot), epoch, ref, SIZE) for ref in refs))
                if may_write[0]:
                    copy = PausedCopy(mapped, epoch, refs)
                    may_end.wait()
                    copy.go_on()
                lock.release()

            worker = threading.Thread(target=work)
            worker.start()
            pool.attachment_lost(attachment.attachment_id)
            await eventually_async(lambda: bool(may_write), "the worker to have looked")  # noqa: B023
            outcomes[may_write[0]] += 1
            other = await Engine.attach(pool)
            await asyncio.sleep(0.02)
            keys = await fill(other, played)
            may_end.set()
            worker.join()
            assert await wrong_blocks(other, keys) == 0, f"round {played}"
            await no_slot_rests(pool)
            await pool.detach(other.attachment.attachment_id)
            other.let_go()
            mapped.close()
    if sum(outcomes.values()) >= MANY:
        assert min(outcomes.values()) > MANY // 100, f"the race was not run: {outcomes}"


def _take_back_for_ever(path: str, stop: Event) -> None:
    segment = Segment.attach(Path(path), Geometry(1 << 20, 1))
    while not stop.is_set():
        with claim(segment, b"e" * 16):
            pass


def test_a_held_lock_is_seen_whatever_the_shard_does() -> None:
    """Two processes: one holds and lets go, the other one looks and acts, as fast as both can."""
    path = Path(f"/dev/shm/kvservice-test{unique_name()}-n")
    segment = Segment.create(path, Geometry(1 << 20, 1), "n")
    mapped, shard = (Segment.attach(path, Geometry(1 << 20, 1)) for _ in range(2))
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    busy = context.Process(target=_take_back_for_ever, args=(str(path), stop))
    busy.start()
    try:
        for played in range(rounds(200, failed_before=0.045, campaign=4 * MANY)):
            lock = hold(mapped, b"e" * 16, segment.epoch)
            with claim(shard, b"e" * 16) as is_free:
                assert not is_free, f"round {played}: believed gone while it holds its lock"
            lock.release()
    finally:
        stop.set()
        busy.join()
        for each in (mapped, shard, segment):
            each.close()
        path.unlink()


# -- what stays ----


async def test_engines_that_came_and_went_leave_no_file(root: Path) -> None:
    service = f"t{unique_name()}"
    settings = ServiceConfig(service=service, pool_bytes=16 * MiB, runtime_dir=str(root), transport="shm")
    server = ShardServer(ShardServerConfig(settings, NodeId("n")))
    await server.start()
    try:
        before = _files(root)
        for _ in range(rounds(25, failed_before=1.0)):
            engine = await Engine.attach(ShardClient(str(root / service / "n" / "shard.sock")))
            await engine.pool.reserve(engine.id, 2)
            engine.let_go()
            await engine.pool.close()
        assert _files(root) == before
        await no_slot_rests(server.pool)
    finally:
        await server.stop()


def _files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}
