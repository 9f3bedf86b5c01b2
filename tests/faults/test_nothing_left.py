"""What a start that fails, an engine that is killed and a segment that somebody removes leave behind: nothing, and a
service that goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvservice.client.shard import ShardClient
from kvservice.config import ServiceConfig
from kvservice.core.block.marks import Mark, MarkKind
from kvservice.core.drain.sender import DrainPhase
from kvservice.discovery import (
    KEPT_NAMES,
    ShardRecord,
    keep_epoch,
    keep_secret,
    kept_memory,
    node_directory,
    write_record,
)
from kvservice.errors import ConfigError, SegmentError, TransferError, Unavailable
from kvservice.lookup.server import LookupServer
from kvservice.memory.segment import Segment
from kvservice.pool.runtime import PoolRuntime
from kvservice.private_files import is_listening, make_directory
from kvservice.session.session import Session
from kvservice.shard import server as module
from kvservice.shard.server import ShardServer
from kvservice.shard.server_config import DEV_SHM, ShardServerConfig
from kvservice.testing.eventually import eventually_async
from kvservice.testing.unique import unique_name
from kvservice.units import BootEpoch, GiB, MiB, NodeId
from tests.faults.rounds import rounds
from tests.integration.engine import Engine, chain, spec

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]

TOO_MUCH = 100_000 * GiB  # whoever is asked to reserve it says so


@pytest.fixture
def root() -> Iterator[Path]:
    found = Path(tempfile.mkdtemp(prefix="kvs-"))
    yield found
    shutil.rmtree(found, ignore_errors=True)


@pytest.fixture
def config(root: Path) -> Iterator[ShardServerConfig]:
    service = f"t{unique_name()}"
    settings = ServiceConfig(
        service=service,
        pool_bytes=4 * MiB,
        runtime_dir=str(root),
        slab_bytes=1 << 20,
        transport="shm",
        heartbeat_seconds=0.1,
        allow_plaintext=True,
    )
    yield ShardServerConfig(settings, NodeId("n"))
    for path in DEV_SHM.glob(f"kvservice-{service}-*"):
        path.unlink()


@pytest.fixture
def taken_port() -> Iterator[int]:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        yield listener.getsockname()[1]


def everything(config: ShardServerConfig) -> set[str]:
    files = {str(path) for path in Path(config.settings.runtime_dir).rglob("*")}
    return files | {str(path) for path in DEV_SHM.glob(f"kvservice-{config.settings.service}-*")}


def changed(config: ShardServerConfig, **settings: object) -> ShardServerConfig:
    """Not checked as settings are: what is wrong is for the server to refuse."""
    return replace(config, settings=config.settings.model_copy(update=settings))


def files_of(config: ShardServerConfig) -> Path:
    return Path(config.settings.runtime_dir) / config.settings.service / "n"


# -- a machine that has run out of something ----


@contextlib.contextmanager
def no_room_on_disk() -> Iterator[None]:
    """Files may be made, and nothing may be written to them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("what", ["secret", "epoch", "record"])
def test_a_full_disk_is_said_and_gets_no_halves_of_files(root: Path, what: str) -> None:
    record = ShardRecord("s", NodeId("n"), "", "", 1, BootEpoch(1), ())
    directory = node_directory("s", NodeId("n"), root)
    make_directory(directory)
    keeping: dict[str, Callable[[], object]] = {
        "secret": lambda: keep_secret(directory, b"new"),
        "epoch": lambda: keep_epoch(directory, BootEpoch(2)),
        "record": lambda: write_record(record, root),
    }
    (directory / what).write_bytes(b"as before")
    with no_room_on_disk(), pytest.raises(ConfigError, match="cannot"):
        keeping[what]()
    assert [path.name for path in directory.iterdir()] == [what]
    assert (directory / what).read_bytes() == b"as before"


class _NoThreads(ThreadPoolExecutor):
    refused = 0

    def submit(self, *arguments: Any, **options: Any) -> Any:
        self.refused += 1
        raise RuntimeError("can't start new thread")


async def test_without_threads_the_shard_goes_on_and_says_it_once(
    config: ShardServerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    server, loop, threads = ShardServer(config), asyncio.get_running_loop(), _NoThreads()
    await server.start()
    try:
        loop.set_default_executor(threads)
        await eventually_async(lambda: threads.refused >= 5, "it does not look after its files")
        loop.set_default_executor(ThreadPoolExecutor())
        assert [record.getMessage() for record in caplog.records].count("runtime_files_failed") == 1
        assert server.pool.fenced is None
    finally:
        await server.stop()
    assert everything(config) == set()


# -- a start that fails ----


@pytest.mark.parametrize("what", ["port", "plaintext", "certificates", "transport", "tenants"])
async def test_a_wrong_start_is_refused_before_memory_is_reserved(
    config: ShardServerConfig, taken_port: int, root: Path, what: str
) -> None:
    config = changed(config, pool_bytes=TOO_MUCH)
    config = {
        "port": replace(config, peer_port=taken_port),
        "plaintext": replace(changed(config, allow_plaintext=False), peer_host="0.0.0.0"),
        "certificates": changed(config, tls_dir=str(root / "none")),
        "transport": changed(config, transport="pigeon"),
        "tenants": changed(config, tenants_file=str(root / "none.json")),
    }[what]
    before = everything(config)
    with pytest.raises(ConfigError):
        await ShardServer(config).start()
    assert everything(config) == before


def _breaks(*arguments: object, **options: object) -> None:
    raise TransferError("no such device")


@pytest.mark.parametrize("what", ["memory", "transport", "a listener"])
async def test_a_start_that_fails_later_leaves_nothing(
    config: ShardServerConfig, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    if what == "memory":
        config = changed(config, pool_bytes=TOO_MUCH)
    elif what == "transport":
        monkeypatch.setattr(module, "Puller", _breaks)
    else:
        monkeypatch.setattr(module, "listen", _breaks)
    with pytest.raises(SegmentError if what == "memory" else TransferError):
        await ShardServer(config).start()
    assert everything(config) == set()
    monkeypatch.undo()
    if what != "memory":
        server = ShardServer(config)
        await server.start()
        await server.stop()


async def test_a_start_that_fails_keeps_the_kept_blocks(
    config: ShardServerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ShardServer(config)
    await server.start()
    engine = await Engine.attach(server.pool)
    await engine.store(chain(1, 5))
    engine.let_go()
    await server.stop(keep_segment=True)
    monkeypatch.setattr(module, "listen", _breaks)
    with pytest.raises(TransferError):
        await ShardServer(config).start()
    monkeypatch.undo()
    server = ShardServer(config)
    await server.start()
    assert server.pool.accounting()[0]["sealed"] == 5
    await server.stop()
    assert everything(config) == set()


async def test_kept_memory_keeps_its_marks_and_is_named(config: ShardServerConfig, root: Path) -> None:
    """A node that was away asks this one what was cleared meanwhile, also after this one's orderly restart."""
    config = replace(config, segment_dir=root)
    directory = node_directory(config.settings.service, config.node_id, root)
    server = ShardServer(config)
    await server.start()
    mark = Mark(MarkKind.EVERYTHING, time.time())
    await server.pool.clears.clear([mark])
    await server.stop(keep_segment=True)
    assert {path.name for path in directory.iterdir()} == set(KEPT_NAMES)
    assert kept_memory(config.settings.service, root)[config.node_id].parent == root
    server = ShardServer(config)
    await server.start()
    assert [each.at for each in await server.pool.clears.take([])] == [mark.at]
    assert not kept_memory(config.settings.service, root), "the record says it now"
    await server.stop()
    assert not directory.exists()


def test_a_shard_whose_port_is_taken_leaves_nothing(config: ShardServerConfig, taken_port: int) -> None:
    settings = config.settings
    words = ["shard", "--service", settings.service, "--node", "n", "--pool-bytes", "256MiB", "--port", str(taken_port)]
    own = {"KVSERVICE_ALLOW_PLAINTEXT": "1", "KVSERVICE_RUNTIME_DIR": settings.runtime_dir}
    ended = subprocess.run(
        [sys.executable, "-m", "kvservice", *words],
        capture_output=True,
        text=True,
        env={**os.environ, **own},
        timeout=120,
    )
    assert ended.returncode != 0
    assert str(taken_port) in ended.stderr
    assert everything(config) == set()


# -- an embedded pool ----

EMBEDDED = """
import asyncio, sys
from kvservice.connector.options import ConnectorOptions
from kvservice.session.pool_choice import choose_pool
from kvservice.memory.segment import Segment
from tests.integration.engine import Engine, spec

async def main():
    choice = choose_pool(ConnectorOptions.parse({"mode": "embedded", "memory": "64MiB"}), spec())
    engine = await Engine.attach(await choice.open(), choice.spec)
    print(engine.attachment.segment_path, engine.segment.geometry.slab_bytes, engine.segment.geometry.slab_count)
    sys.stdout.flush()
    sys.stdin.read()

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_embedded_pool_leaves_nothing_however_it_ends(number: signal.Signals) -> None:
    """Other tests use /dev/shm meanwhile, and pools without a name cannot be seen there. So one round of many must show
    it; an engine that leaves its memory does so in each of them."""
    seen = []
    for _ in range(20):
        held, left = memory_of_an_engine_that_ends(number)
        if held > 32 * MiB and left < MiB:
            return
        seen.append(f"{held / MiB:.0f} MiB held, {left / MiB:.0f} left")
    pytest.fail("; ".join(seen))


def memory_of_an_engine_that_ends(number: signal.Signals) -> tuple[int, int]:
    """Bytes that /dev/shm had less while the engine ran, and after it has ended by this signal."""
    free = os.statvfs(DEV_SHM).f_bavail
    page = os.statvfs(DEV_SHM).f_frsize
    engine = subprocess.Popen(
        [sys.executable, "-c", EMBEDDED], stdout=subprocess.PIPE, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert engine.stdout is not None
    assert engine.stdout.readline().startswith(b"/proc/")
    mapped = [line for line in Path(f"/proc/{engine.pid}/maps").read_text().splitlines() if str(DEV_SHM) in line]
    assert mapped
    assert all(line.endswith("(deleted)") for line in mapped), "its memory has a name, which a killed engine leaves"
    held = (free - os.statvfs(DEV_SHM).f_bavail) * page
    engine.send_signal(number)
    engine.communicate(timeout=60)
    return held, (free - os.statvfs(DEV_SHM).f_bavail) * page


# -- a segment that somebody removes ----


@contextlib.asynccontextmanager
async def serving(config: ShardServerConfig) -> AsyncIterator[ShardServer]:
    server = ShardServer(config)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def epoch_of(server: ShardServer) -> int:
    """0 while there is no pool."""
    try:
        return int(server.pool.epoch)
    except Unavailable:
        return 0


async def test_a_removed_segment_is_made_again_and_engines_return(config: ShardServerConfig) -> None:
    segment = DEV_SHM / f"kvservice-{config.settings.service}-n"
    async with serving(config) as server:
        session = Session(lambda: _client(str(files_of(config) / "shard.sock")), spec(), lambda: True)
        await asyncio.to_thread(session.start, 20.0)
        for played in range(rounds(2, failed_before=1.0, campaign=10)):
            await eventually_async(lambda: session.attachment is not None, "the engine to attach")
            attachment = session.attachment
            assert attachment is not None
            mapped = Segment.attach(Path(attachment.segment_path), attachment.geometry)
            before = server.pool.epoch
            segment.unlink()
            await eventually_async(lambda: epoch_of(server) > before, "a new segment")  # noqa: B023
            assert segment.exists()
            assert server.stats().counters["segments_replaced"] == played + 1
            assert mapped.current_epoch() == 0, "whoever has the old one mapped is told"
            mapped.close()
            await eventually_async(
                lambda: session.attachment is not None and session.attachment.epoch > before,  # noqa: B023
                "the engine to attach again",
            )
        engine = await Engine.attach(server.pool)
        keys = chain(2, 3)
        await engine.store(keys)
        assert len((await engine.read_all(keys)).blocks) == 3
        engine.let_go()
        await asyncio.to_thread(session.close)
    assert everything(config) == set()


async def has_no_room(*_: object, **__: object) -> PoolRuntime:
    raise SegmentError("no room")


async def waits_for_room(*_: object, **__: object) -> PoolRuntime:
    await asyncio.Event().wait()
    raise AssertionError("never set")


async def lose_segment(server: ShardServer, config: ShardServerConfig) -> None:
    (DEV_SHM / f"kvservice-{config.settings.service}-n").unlink()
    await eventually_async(lambda: epoch_of(server) == 0, "the old pool to end")


async def test_a_shard_ends_while_its_segment_is_replaced(
    config: ShardServerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(config) as server:
        monkeypatch.setattr(PoolRuntime, "open", has_no_room)
        await lose_segment(server, config)
        assert (await server.drain(30.0)).phase is DrainPhase.GONE
        assert await server.stop()
        assert everything(config) == set()


async def test_a_shard_without_pool_leaves_the_files_of_another(
    config: ShardServerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(config) as server:
        with monkeypatch.context() as patched:
            patched.setattr(PoolRuntime, "open", waits_for_room)
            await lose_segment(server, config)
            await eventually_async(lambda: not is_listening(str(files_of(config) / "shard.sock")), "its listener's end")
        async with serving(config):
            there = everything(config)
            assert await server.stop()
            assert everything(config) == there
    assert everything(config) == set()


async def _client(path: str) -> ShardClient:
    return ShardClient(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
async def test_a_new_segment_waits_for_the_room_of_the_old_one(config: ShardServerConfig, tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(tmp_path)], check=True)
    try:
        config = replace(changed(config, pool_bytes=8 * MiB), segment_dir=tmp_path)
        async with serving(config) as server:
            attachment = await server.pool.attach(spec(), lambda reason: None)
            mapped = Segment.attach(Path(attachment.segment_path), attachment.geometry)
            before = server.pool.epoch
            Path(attachment.segment_path).unlink()
            await eventually_async(lambda: epoch_of(server) == 0, "the shard to notice")
            await asyncio.sleep(0.3)
            assert epoch_of(server) == 0, "there is no room beside what an engine has mapped"
            mapped.close()
            await eventually_async(lambda: epoch_of(server) > before, "a new segment")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


# -- boot epochs ----


@pytest.mark.parametrize("loses", ["nothing", "the segment", "the segment and its clock an hour"])
async def test_boot_epochs_grow_whatever_the_clock_says(config: ShardServerConfig, loses: str) -> None:
    now = time.time() + (3600 if loses.endswith("hour") else 0)
    epochs = []
    for _ in range(3):
        server = ShardServer(config, wall_clock=lambda: now)  # noqa: B023
        epochs.append(int((await server.start()).epoch))
        await server.stop(leaving=False)  # as a crash: it says no farewell
        if loses != "nothing":
            (DEV_SHM / f"kvservice-{config.settings.service}-n").unlink()
        if loses.endswith("hour"):
            now -= 3600
    assert epochs == sorted(set(epochs)), epochs


async def test_a_node_that_is_back_within_a_second_has_a_new_epoch(config: ShardServerConfig) -> None:
    """It keeps no record of the last one. Peers took its new memory for the old one, and could not read it."""
    epochs = []
    for now in (1_000.1, 1_000.6):
        server = ShardServer(config, wall_clock=lambda: now)  # noqa: B023
        epochs.append(int((await server.start()).epoch))
        await server.stop()
        assert not files_of(config).exists()
    assert epochs[0] < epochs[1]


@pytest.mark.parametrize("text", ["", "no number", "-5", "9" * 30, str(1 << 63), "\x00\xff", "1" * 5000])
async def test_a_damaged_epoch_record_keeps_no_shard_from_starting(config: ShardServerConfig, text: str) -> None:
    epochs = []
    for _ in range(2):
        server = ShardServer(config)
        epochs.append(int((await server.start()).epoch))
        engine = await Engine.attach(ShardClient(str(files_of(config) / "shard.sock")))
        engine.let_go()
        await engine.pool.close()
        await server.stop(leaving=False)
        (files_of(config) / "epoch").write_text(text, errors="surrogateescape")
    assert epochs[0] < epochs[1] < 2 * epochs[0]


async def test_the_directory_takes_a_node_back_whose_clock_went_back(config: ShardServerConfig, root: Path) -> None:
    lookup = LookupServer(f"unix:{root}/lookup/0.sock")
    config = replace(config, lookup_addresses=(await lookup.start(),))
    try:
        for ahead in (3600, 0):
            server = ShardServer(config, wall_clock=lambda: time.time() + ahead)  # noqa: B023
            await server.start()
            await asyncio.sleep(1.0)  # many heartbeats: it would have been told by now that it is not the newest
            heard = [member.holder.epoch for member in lookup._directory._membership.members()]
            assert heard == [server.pool.epoch]
            assert not server.pool.state.draining
            await server.stop(leaving=False)
            (DEV_SHM / f"kvservice-{config.settings.service}-n").unlink()
    finally:
        await lookup.stop()
