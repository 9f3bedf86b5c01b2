"""At every seam a part of another version is refused, with both versions and what to do in the message."""

from __future__ import annotations

import json
import re
import tempfile
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from kvservice.auth.tenants import parse_tenants
from kvservice.client.peer import PeerClient
from kvservice.client.shard import ShardClient
from kvservice.config import ServiceConfig
from kvservice.connector.scheduler.handoff import parse_transfer_params
from kvservice.copying.device import HOST, HostDevice
from kvservice.copying.engine import link
from kvservice.copying.engine.link import KVOffer, WorkerLink
from kvservice.copying.message import VERSION as LINK_VERSION
from kvservice.copying.message import PoolSource
from kvservice.copying.worker.server import CopyWorker, CopyWorkerConfig
from kvservice.core.directory.key_table import ROWS_MIN
from kvservice.core.directory.mirror import LAYOUT, MirrorReader, MirrorWriter, mirror_bytes
from kvservice.core.segment.geometry import Geometry
from kvservice.core.segment.header import SLOT_VERSION
from kvservice.discovery import (
    CopyWorkerRecord,
    ShardRecord,
    find_shards,
    node_directory,
    read_copy_worker,
    write_copy_worker,
    write_record,
)
from kvservice.errors import InvalidRequest, KVServiceError, VersionMismatch
from kvservice.lookup.server import LookupServer
from kvservice.memory.segment import Segment
from kvservice.shard.server import ShardServer
from kvservice.shard.server_config import ShardServerConfig
from kvservice.testing.builders import make_spec
from kvservice.testing.eventually import eventually
from kvservice.testing.unique import unique_name
from kvservice.units import BootEpoch, MiB, NodeId
from kvservice.wire.status import error_from_rpc
from kvservice.wire.v1 import lookup_pb2, lookup_pb2_grpc
from kvservice.wire.versions import OLDEST_SPOKEN, PROTOCOL_VERSION, check_version

OTHERS = (OLDEST_SPOKEN - 1, PROTOCOL_VERSION + 1)  # 0 is what a part sends that states no version
CALL_SECONDS = 10.0


def both(theirs: int, ours: int = PROTOCOL_VERSION) -> str:
    return rf"has version {theirs}, and this process knows version {ours}: upgrade the older"


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvs-") as folder:
        yield Path(folder)


@pytest.fixture
async def shard(root: Path) -> AsyncIterator[ShardServer]:
    settings = ServiceConfig(
        service=f"versions{unique_name()}",
        pool_bytes=4 * MiB,
        runtime_dir=str(root),
        slab_bytes=MiB,
        transport="shm",
    )
    server = ShardServer(ShardServerConfig(settings, NodeId("n")))
    yield server
    await server.stop(leaving=True)


def test_a_server_speaks_its_version_and_the_one_before() -> None:
    for spoken in range(OLDEST_SPOKEN, PROTOCOL_VERSION + 1):
        check_version(spoken, "the engine")
    for other in OTHERS:
        with pytest.raises(VersionMismatch, match=both(other)) as refused:
            check_version(other, "the engine")
        assert refused.value.attributes == {"theirs": other, "ours": PROTOCOL_VERSION}


@pytest.mark.parametrize("version", OTHERS)
async def test_a_shard_refuses_an_engine(
    shard: ShardServer, root: Path, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    await shard.start()
    monkeypatch.setattr("kvservice.client.shard.PROTOCOL_VERSION", version)
    client = ShardClient(str(next(root.glob("*/*/shard.sock"))))
    with pytest.raises(VersionMismatch, match=both(version)):
        await client.attach(make_spec(), lambda reason: None)
    await client.close()


@pytest.mark.parametrize("version", OTHERS)
async def test_a_shard_refuses_a_shard(shard: ShardServer, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = await shard.start()
    monkeypatch.setattr("kvservice.client.peer.PROTOCOL_VERSION", version)
    client = PeerClient("shm", NodeId("other"))
    with pytest.raises(VersionMismatch, match=both(version)):
        await client.handshake(holder, CALL_SECONDS)
    await client.close()


@pytest.mark.parametrize("version", OTHERS)
@pytest.mark.parametrize("method", ["Announce", "Watch"])
async def test_a_lookup_partition_refuses_a_shard(root: Path, method: str, version: int) -> None:
    """Before it looks at anything else: these messages are wrong in other ways, too."""
    server = LookupServer(f"unix:{root}/lookup.sock")
    address = await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = lookup_pb2_grpc.LookupServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            if method == "Announce":
                await stub.Announce(lookup_pb2.AnnounceRequest(protocol_version=version), timeout=CALL_SECONDS)
            else:
                await stub.Watch(lookup_pb2.WatchRequest(protocol_version=version), timeout=CALL_SECONDS).read()
    error: KVServiceError = error_from_rpc(refused.value, method)
    assert isinstance(error, VersionMismatch)
    with pytest.raises(VersionMismatch, match=both(version)):
        raise error
    await server.stop(0)


def test_a_copy_worker_refuses_an_engine(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine goes on with copies of its own, and says why."""
    monkeypatch.setattr(link, "VERSION", LINK_VERSION + 1)
    worker = CopyWorker(CopyWorkerConfig("s", NodeId("n"), root), HostDevice())
    worker.start()
    engine = WorkerLink(KVOffer(HOST, {}, {}, None))
    try:
        pool = PoolSource(1, "/dev/shm/none", Geometry(MiB, 1), BootEpoch(1), make_spec().layout, bytes(16))
        engine.follow(node_directory("s", NodeId("n"), root), pool)
        eventually(lambda: engine.take_counters().get("copy_worker_refused"), "the refusal")
    finally:
        engine.close()
        worker.stop()
    assert re.search(both(LINK_VERSION + 1, LINK_VERSION), caplog.text)


def test_a_segment_of_another_version_is_not_mapped(root: Path) -> None:
    path, geometry = root / "segment", Geometry(MiB, 1)
    segment = Segment.create(path, geometry, "n")
    segment.close()
    with path.open("r+b") as file:
        control = bytearray(file.read(64))
        control[56:60] = (SLOT_VERSION + 1).to_bytes(4, "little")
        control[60:] = zlib.crc32(control[:60]).to_bytes(4, "little")
        file.seek(0)
        file.write(control)
    with pytest.raises(VersionMismatch, match=both(SLOT_VERSION + 1, SLOT_VERSION)):
        Segment.attach(path, geometry)


def test_a_mirror_of_another_layout_is_not_read() -> None:
    memory = bytearray(mirror_bytes(ROWS_MIN))
    MirrorWriter(memoryview(memory), 1, epoch=1)
    MirrorReader(memoryview(memory))
    memory[8] = LAYOUT + 1
    with pytest.raises(VersionMismatch, match=both(LAYOUT + 1, LAYOUT)):
        MirrorReader(memoryview(memory))


def test_a_tenants_file_of_another_version_is_not_taken() -> None:
    with pytest.raises(ValueError, match="its version is 2, and this shard reads version 1"):
        parse_tenants({"version": 2, "tenants": []})


def test_hand_off_parameters_of_another_version_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="version is 2, and this engine knows 1 only"):
        parse_transfer_params({"kvservice": {"version": 2, "role": "prefill"}})


def test_a_record_of_a_later_version_is_read(root: Path) -> None:
    """An engine finds the shard first, and is told of its version when it attaches: so records only gain fields."""
    record = ShardRecord("s", NodeId("n"), "/none", "unix:/none", 1, BootEpoch(1))
    path = write_record(record, root)
    path.write_text(json.dumps({**json.loads(path.read_text()), "added later": 1}))
    assert find_shards("s", root, live_only=False) == [record]
    worker = CopyWorkerRecord("s", NodeId("n"), "cpu", "/none", 1)
    path = write_copy_worker(worker, path.parent)
    path.write_text(json.dumps({**json.loads(path.read_text()), "added later": 1}))
    assert read_copy_worker(path) == worker
