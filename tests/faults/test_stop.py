"""`stop()` returns, whatever meets it: of the announcements, of a busy shard, of a process that is told to end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvservice.client.shard import ShardClient
from kvservice.config import ServiceConfig
from kvservice.core.directory.announce import Announcer
from kvservice.core.messages import Holder
from kvservice.errors import KVServiceError
from kvservice.lookup.announce_pump import AnnouncePump
from kvservice.lookup.server import LookupServer
from kvservice.memory import segment
from kvservice.shard.process import HURRY_SECONDS, started
from kvservice.shard.server import ShardServer
from kvservice.shard.server_config import DEV_SHM, ShardServerConfig
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually_async
from kvservice.units import BootEpoch, MiB, NodeId
from tests.failpoints import Failpoints
from tests.faults.rounds import rounds
from tests.integration.engine import Engine, attached, chain

pytestmark = pytest.mark.faults

BUSY_ROUNDS = rounds(3, failed_before=2 / 60)
STOP_SECONDS = 30.0  # far more than stop() takes on a busy machine, and far less than for ever
CATCH_UP_SECONDS = 5.0  # what a busy machine adds


@pytest.mark.parametrize("turns", range(6))
async def test_announcements_stop_however_soon_after_a_kick(tmp_path: Path, turns: int) -> None:
    server = LookupServer(f"unix:{tmp_path}/l.sock")
    address = await server.start()
    holder = Holder(NodeId("n"), "127.0.0.1:1", BootEpoch(5))
    pump = AnnouncePump(Announcer(1, list), [address], lambda: holder, 1.0, lambda: None)
    run = asyncio.ensure_future(pump.run())
    await eventually_async(
        lambda: server.numbers().gauges["nodes_alive"], "the announcement before the first heartbeat"
    )
    await asyncio.sleep(0.05)
    pump.kick()
    for _ in range(turns):
        await asyncio.sleep(0)
    stop = asyncio.ensure_future(pump.stop(leaving=True))
    done, _ = await asyncio.wait([stop], timeout=STOP_SECONDS)
    assert done, f"stop() {turns} turns of the loop after a kick never returns"
    await asyncio.wait([run], timeout=STOP_SECONDS)
    assert run.done()
    await server.stop()


@pytest.mark.timeout(60 + 10 * BUSY_ROUNDS)
@pytest.mark.parametrize(("writers", "blocks"), [(1, 1), (4, 4)])
async def test_a_shard_stops_while_engines_store(tmp_path: Path, writers: int, blocks: int) -> None:
    lookup = LookupServer(f"unix:{tmp_path}/l.sock")
    address = await lookup.start()
    for number in range(BUSY_ROUNDS):
        root = tmp_path / str(number)
        service = ServiceConfig(service=f"stop{writers}", pool_bytes=16 * MiB, runtime_dir=str(root), transport="shm")
        shard = ShardServer(ShardServerConfig(service, NodeId(f"n{number}"), (address,)))
        await shard.start()
        is_over = asyncio.Event()
        busy = [asyncio.ensure_future(store(root, is_over, first, blocks)) for first in range(writers)]
        await asyncio.sleep(0.25 + 0.0131 * (number % 7))
        stop = asyncio.ensure_future(shard.stop(leaving=True))
        done, _ = await asyncio.wait([stop], timeout=STOP_SECONDS)
        assert done, f"round {number}: stop() of a busy shard never returns"
        assert stop.result(), f"round {number}: a part of the shard did not end"
        is_over.set()
        await asyncio.wait(busy, timeout=STOP_SECONDS)
        assert not list(DEV_SHM.glob(f"kvservice-stop{writers}-*"))
    await lookup.stop()


async def store(root: Path, is_over: asyncio.Event, first: int, blocks: int) -> None:
    engine = await Engine.attach(ShardClient(str(next(root.glob("*/*/shard.sock")))))
    number = first
    try:
        while not is_over.is_set():
            number += 1000
            await engine.store(chain(number, blocks))
            await asyncio.sleep(0.0005)
    except KVServiceError:
        pass  # the shard is gone
    finally:
        engine.let_go()


@contextmanager
def one_node(points: Failpoints | None = None, drain_seconds: float = 0.0) -> Iterator[LocalCluster]:
    environment = {} if points is None else points.environment
    with LocalCluster(
        nodes=1,
        lookup_partitions=1,
        transport="shm",
        pool_bytes=8 * MiB,
        drain_seconds=drain_seconds,
        environment=environment,
    ) as cluster:
        yield cluster


def ended(cluster: LocalCluster, seconds: float) -> int:
    """The exit code of the shard, which has left no file."""
    code = cluster.exit_code("n0", seconds + CATCH_UP_SECONDS)
    assert not list(DEV_SHM.glob(f"kvservice-{cluster.service}-*"))
    assert not list(cluster.root.glob("**/shard.sock")), "nothing that an engine could find"
    return code


async def test_sigterm_ends_a_busy_shard_process() -> None:
    with one_node(drain_seconds=1.0) as cluster:
        is_over = asyncio.Event()
        busy = [asyncio.ensure_future(store(cluster.root, is_over, first, 2)) for first in range(2)]
        await asyncio.sleep(0.5)
        os.kill(cluster.pid("n0"), signal.SIGTERM)
        assert await asyncio.to_thread(ended, cluster, 1.0 + STOP_SECONDS) == 0
        is_over.set()
        await asyncio.gather(*busy)


async def test_a_start_that_takes_minutes_can_be_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Kubernetes does with a pod that is deleted while its pool is reserved. It waits less long than that takes, and
    what a killed process has reserved stays in the node's memory."""
    reserve, pieces = os.posix_fallocate, []

    def slowly(descriptor: int, start: int, size: int) -> None:
        reserve(descriptor, start, size)
        pieces.append(start)
        time.sleep(0.05)

    monkeypatch.setattr(segment, "PIECE_BYTES", MiB)
    monkeypatch.setattr(os, "posix_fallocate", slowly)
    service = ServiceConfig(service="stopstart", pool_bytes=2048 * MiB, runtime_dir=str(tmp_path), transport="shm")
    asked = SimpleNamespace(to_end=asyncio.Event())
    start = asyncio.ensure_future(started(ShardServer(ShardServerConfig(service, NodeId("n0"), ())), asked))  # type: ignore[arg-type]
    await eventually_async(lambda: len(pieces) > 2, "the first pieces of the pool")
    asked.to_end.set()
    assert await asyncio.wait_for(start, CATCH_UP_SECONDS) is None
    await eventually_async(lambda: not list(DEV_SHM.glob("kvservice-stopstart-*")), "no memory that is kept")
    assert len(pieces) < 200 and not list(tmp_path.glob("**/shard.sock"))


async def test_a_second_sigterm_ends_the_waiting_for_a_reader() -> None:
    with one_node(drain_seconds=120.0) as cluster:
        engine = await attached(cluster.socket("n0"))
        await engine.store(chain(1, 4))
        await engine.acquire(chain(1, 4))  # and never releases
        os.kill(cluster.pid("n0"), signal.SIGTERM)
        await eventually_async(lambda: asyncio.to_thread(lambda: cluster.stats("n0").draining), "the shard to drain")
        began = time.monotonic()
        os.kill(cluster.pid("n0"), signal.SIGTERM)
        await asyncio.to_thread(ended, cluster, HURRY_SECONDS)
        assert time.monotonic() - began < 60.0
        engine.let_go()


@pytest.mark.parametrize("signals", [1, 2])
async def test_a_thread_that_hangs_does_not_keep_a_shard_from_ending(tmp_path: Path, signals: int) -> None:
    points = Failpoints(tmp_path)
    with one_node(points) as cluster:
        engine = await attached(cluster.socket("n0"))
        points.arm("shard.digest")
        sealing = asyncio.ensure_future(engine.store(chain(1, 1)))
        await asyncio.to_thread(points.hit, "shard.digest")
        for _ in range(signals):
            os.kill(cluster.pid("n0"), signal.SIGTERM)
            await asyncio.sleep(0.2)
        assert await asyncio.to_thread(ended, cluster, STOP_SECONDS if signals == 1 else HURRY_SECONDS) == 1
        await asyncio.gather(sealing, return_exceptions=True)
        engine.let_go()
