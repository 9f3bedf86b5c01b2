"""NIXL between processes: what a killed, stopped or disconnected peer does to the reader. Over UCX's TCP, where reads
are asynchronous; UCX's shared memory finishes them within the post."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvservice.breaker import OPEN_SECONDS_FIRST
from kvservice.core.events import PullResult
from kvservice.core.segment.digest import digest_payload
from kvservice.core.segment.geometry import plan_geometry
from kvservice.core.segment.header import SlotHeader
from kvservice.core.segment.refs import BlockHandle
from kvservice.errors import TransferError
from kvservice.memory.segment import Segment, segment_path
from kvservice.testing.eventually import NotInTime, eventually
from kvservice.transfer.base import Copy, PeerHandle, TransferOutcome
from kvservice.transfer.job import PullItem, PullJob
from kvservice.transfer.nixl import (
    _CRC_BYTES,
    _DESCRIPTION,
    DESCRIPTION_MAGIC,
    NixlTransport,
    _crc,
    load_nixl,
    make_agent,
    nixl_available,
)
from kvservice.transfer.puller import Puller
from kvservice.transfer.ways import pack_ways
from kvservice.units import BlockKey, BootEpoch, Generation, MiB, NodeId, SlotIndex, SpanRoute

pytestmark = [pytest.mark.nixl, pytest.mark.skipif(not nixl_available(), reason="NIXL is not installed")]

GEOMETRY = plan_geometry(140 * MiB, 64 * MiB)
PAYLOAD = MiB
BLOCKS = 120
START = 2 * MiB
SLOTS = [SlotIndex(slab << 16 | i) for slab in (0, 1) for i in range(BLOCKS // 2)]
WAIT_SECONDS = 20.0


def block_key(index: int) -> BlockKey:
    return BlockKey(index.to_bytes(16, "big"))


def serve(path: str) -> None:
    """The peer's process: a segment full of sealed blocks, described on one line."""
    segment = Segment.create(Path(path), GEOMETRY, "peer")
    for slab in (0, 1):
        segment.assign_slab(slab, PAYLOAD)
    for index, slot in enumerate(SLOTS):
        payload = segment.payload(slot, PAYLOAD)
        payload[:] = bytes([index + 1]) * PAYLOAD
        key = block_key(index)
        digest = digest_payload(payload, key)
        segment.write_header(slot, SlotHeader(segment.epoch, Generation(2), key, PAYLOAD, SpanRoute(0), digest, index))
    transport = NixlTransport(segment, "peer")
    print("@" + transport.describe().hex(), flush=True)
    sys.stdin.read()


@dataclass
class Peer:
    process: subprocess.Popen[bytes]
    description: bytes
    path: Path

    def handles(self) -> list[BlockHandle]:
        segment = Segment.attach(self.path, GEOMETRY)
        found = [(slot, segment.read_header(slot)) for slot in SLOTS]
        segment.close()
        return [BlockHandle(h.key, slot, h.generation, h.length, h.digest, h.position) for slot, h in found if h]


@pytest.fixture
def peer() -> Iterator[Peer]:
    path = segment_path(f"nixl{uuid.uuid4().hex[:6]}", "peer", Path("/dev/shm"))
    process = subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import serve; serve({str(path)!r})"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "UCX_TLS": "tcp"},
    )
    assert process.stdout is not None
    line = next(line for line in process.stdout if line.startswith(b"@"))
    yield Peer(process, bytes.fromhex(line[1:].decode().strip()), path)
    process.kill()
    process.wait()
    process.stdout.close()
    path.unlink(missing_ok=True)


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[Segment]:
    monkeypatch.setenv("UCX_TLS", "tcp")
    path = segment_path(f"nixl{uuid.uuid4().hex[:6]}", "reader", Path("/dev/shm"))
    segment = Segment.create(path, GEOMETRY, "reader")
    for slab in (0, 1):
        segment.assign_slab(slab, PAYLOAD)
    yield segment
    segment.unlink()
    segment.close()


def written(segment: Segment) -> int:
    return int(np.count_nonzero(np.frombuffer(segment.buffer, np.uint8)[START:]))


def read_from_stopped(transport: NixlTransport, peer: Peer) -> PeerHandle:
    """Connect, warm the connection up, stop the peer and leave a read of 32 MiB in flight."""
    handle = transport.connect(peer.description)
    transport.post_read(handle, [Copy(START, START, 4096)])
    assert finish(transport) == [TransferOutcome.DONE]
    os.kill(peer.process.pid, signal.SIGSTOP)
    transport.post_read(handle, [Copy(START + i * MiB, START + i * MiB, MiB) for i in range(32)])
    return handle


def finish(transport: NixlTransport, seconds: float = WAIT_SECONDS) -> list[TransferOutcome]:
    """What ended meanwhile; nothing when nothing did."""
    with contextlib.suppress(NotInTime):
        return eventually(lambda: [completion.outcome for completion in transport.poll()], "a completion", seconds)
    return []


def test_disconnected_read_is_reported_when_nothing_writes(peer: Peer, reader: Segment) -> None:
    transport = NixlTransport(reader, "reader")
    transport.disconnect(read_from_stopped(transport, peer))
    assert finish(transport, 0.5) == [], "reported as ended although the peer can still send the bytes"
    os.kill(peer.process.pid, signal.SIGCONT)
    assert finish(transport) == [TransferOutcome.FAILED]
    after = written(reader)
    time.sleep(0.3)
    assert written(reader) == after
    transport.close()


def test_peer_can_be_connected_again_once_its_reads_have_ended(peer: Peer, reader: Segment) -> None:
    transport = NixlTransport(reader, "reader")
    transport.disconnect(read_from_stopped(transport, peer))
    with pytest.raises(TransferError, match="still in flight"):
        transport.connect(peer.description)
    os.kill(peer.process.pid, signal.SIGCONT)
    finish(transport)
    transport.post_read(transport.connect(peer.description), [Copy(START, START, MiB)])
    assert finish(transport) == [TransferOutcome.DONE]
    transport.close()


def test_no_peer_shuts_others_out_by_the_name_of_its_agent(peer: Peer, reader: Segment) -> None:
    """All metadata has the word UCX in it."""
    transport, liar = NixlTransport(reader, "reader"), make_agent(load_nixl()[0], "UCX")
    metadata = liar.get_agent_metadata()
    head = _DESCRIPTION.pack(DESCRIPTION_MAGIC, START, MiB, 0)[:-_CRC_BYTES]
    transport.connect(head + _crc(head, metadata) + metadata)
    handle = transport.connect(peer.description)
    transport.post_read(handle, [Copy(START, START, 4096)])
    assert finish(transport) == [TransferOutcome.DONE]
    transport.close()


def test_no_peer_ends_a_read_by_naming_its_agent(peer: Peer, reader: Segment) -> None:
    """NIXL forgets the reads of an agent that is added again, and they still write what they were to write."""
    transport = NixlTransport(reader, "reader")
    handle = read_from_stopped(transport, peer)
    magic, base, length, _ = _DESCRIPTION.unpack_from(peer.description)
    metadata = peer.description[_DESCRIPTION.size :]
    head = _DESCRIPTION.pack(magic, base + PAYLOAD, length, 0)[:-_CRC_BYTES]
    with pytest.raises(TransferError, match="names an agent"):
        transport.connect(head + _crc(head, metadata) + metadata)
    assert finish(transport, 0.5) == [], "reported as ended although the peer can still send the bytes"
    os.kill(peer.process.pid, signal.SIGCONT)
    assert finish(transport) == [TransferOutcome.DONE]
    transport.post_read(handle, [Copy(START, START, MiB)])
    assert finish(transport) == [TransferOutcome.DONE]
    transport.close()


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_peer_that_cannot_be_reached_costs_few_sockets(peer: Peer, reader: Segment) -> None:
    """UCX keeps one for each attempt, and every request that needs the peer would make one."""
    transport = NixlTransport(reader, "reader")
    peer.process.kill()
    peer.process.wait()
    before = open_files()
    for _ in range(50):
        with pytest.raises(TransferError):
            transport.connect(peer.description)
    assert open_files() - before <= 5
    time.sleep(OPEN_SECONDS_FIRST)
    with pytest.raises(TransferError, match="NIXL cannot reach"):
        transport.connect(peer.description)
    transport.close()


def test_closed_transport_writes_nothing_any_more(peer: Peer, reader: Segment) -> None:
    transport = NixlTransport(reader, "reader")
    read_from_stopped(transport, peer)
    transport.close()
    after = written(reader)
    os.kill(peer.process.pid, signal.SIGCONT)
    time.sleep(0.5)
    assert written(reader) == after


@dataclass
class Pull:
    puller: Puller
    done: queue.SimpleQueue[tuple[PullResult, ...]]
    writes_ended: queue.SimpleQueue[int]

    def submit(self, peer: Peer, handles: list[BlockHandle], seconds: float) -> None:
        epoch = BootEpoch(1)
        items = tuple(PullItem(handle, slot) for handle, slot in zip(handles, SLOTS, strict=False))
        deadline = time.monotonic() + seconds
        job = PullJob(
            1, NodeId("peer"), epoch, pack_ways({"nixl": peer.description}), GEOMETRY, PAYLOAD, items, deadline
        )
        self.puller.submit(job, lambda _, results: self.done.put(results), self.writes_ended.put)


@pytest.fixture
def pull(reader: Segment) -> Iterator[Pull]:
    puller = Puller(reader, lambda: NixlTransport(reader, "reader"))
    puller.start()
    yield Pull(puller, queue.SimpleQueue(), queue.SimpleQueue())
    puller.close()


def test_all_blocks_of_a_healthy_peer_arrive_verified(peer: Peer, reader: Segment, pull: Pull) -> None:
    pull.submit(peer, peer.handles(), WAIT_SECONDS)
    assert pull.done.get(timeout=WAIT_SECONDS) == (PullResult.OK,) * BLOCKS
    for index, slot in enumerate(SLOTS):
        assert bytes(reader.payload(slot, PAYLOAD)) == bytes([index + 1]) * PAYLOAD
    assert pull.puller.counters()["nixl_bytes"] == BLOCKS * PAYLOAD


def test_killed_peer_fails_the_pull_well_before_the_deadline(peer: Peer, pull: Pull) -> None:
    handles = peer.handles()
    pull.submit(peer, handles[:1], WAIT_SECONDS)
    assert pull.done.get(timeout=WAIT_SECONDS) == (PullResult.OK,)
    os.kill(peer.process.pid, signal.SIGSTOP)
    pull.submit(peer, handles, 60.0)
    time.sleep(0.2)
    peer.process.kill()
    results = pull.done.get(timeout=WAIT_SECONDS)
    assert set(results) <= {PullResult.FAILED, PullResult.STUCK}
    if PullResult.STUCK in results:
        assert pull.writes_ended.get(timeout=WAIT_SECONDS) == 1
    pull.submit(peer, handles[:3], 60.0)
    assert pull.done.get(timeout=WAIT_SECONDS) == (PullResult.FAILED,) * 3, "a dead peer fails at once"


def test_stopped_peer_makes_destinations_stuck_until_it_goes_on(peer: Peer, pull: Pull) -> None:
    handles = peer.handles()
    pull.submit(peer, handles[:1], WAIT_SECONDS)
    assert pull.done.get(timeout=WAIT_SECONDS) == (PullResult.OK,)
    os.kill(peer.process.pid, signal.SIGSTOP)
    pull.submit(peer, handles, 0.5)
    results = pull.done.get(timeout=WAIT_SECONDS)
    assert PullResult.STUCK in results
    assert PullResult.OK not in results
    with pytest.raises(queue.Empty):
        pull.writes_ended.get(timeout=0.3)
    os.kill(peer.process.pid, signal.SIGCONT)
    assert pull.writes_ended.get(timeout=WAIT_SECONDS) == 1
