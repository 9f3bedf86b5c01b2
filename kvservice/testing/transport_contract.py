"""The rules that every Transport must keep, and those of every way in which a puller reads a peer.

Subclass, give it a `pair` or a `pulls` fixture, and pytest runs the rules against it."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from kvservice.core.events import PullResult
from kvservice.core.segment.digest import digest_payload
from kvservice.core.segment.header import SlotHeader
from kvservice.core.segment.refs import BlockHandle
from kvservice.errors import TransferError
from kvservice.memory.segment import Segment
from kvservice.transfer.base import Completion, Copy, PeerHandle, TransferOutcome, Transport
from kvservice.transfer.job import PullItem, PullJob
from kvservice.transfer.puller import Puller
from kvservice.units import BlockKey, BootEpoch, Generation, NodeId, SlotIndex, SpanRoute

# For a transfer, which takes milliseconds; a busy machine gets more. Then the rule fails.
WAIT_SECONDS = 10.0


@dataclass(slots=True)
class Pair:
    """A reader with its own segment, and the segment and transport of the peer that it reads from."""

    reader: Transport
    reader_segment: Segment
    source: Transport
    source_segment: Segment

    def connect(self) -> PeerHandle:
        return self.reader.connect(self.source.describe())

    def wait(self, count: int = 1) -> list[Completion]:
        """Poll until this many completions came."""
        found: list[Completion] = []
        deadline = time.monotonic() + WAIT_SECONDS
        while len(found) < count and time.monotonic() < deadline:
            found += self.reader.poll()
        return found


class TransportContract:
    """Offsets lie past the first MiB, where a fresh segment holds only payload space."""

    start = 2 << 20

    def fill(self, segment: Segment, offset: int, length: int) -> bytes:
        data = os.urandom(length)
        segment.buffer[offset : offset + length] = data
        return data

    def test_done_means_all_bytes_of_all_runs_are_visible(self, pair: Pair) -> None:
        peer = pair.connect()
        runs = [Copy(self.start + i * 131_072, self.start + (63 - i) * 131_072, 70_000 + i) for i in range(64)]
        wanted = {c.local_offset: self.fill(pair.source_segment, c.remote_offset, c.length) for c in runs}
        transfer = pair.reader.post_read(peer, runs)
        assert [(c.transfer, c.outcome) for c in pair.wait()] == [(transfer, TransferOutcome.DONE)]
        for run in runs:
            got = bytes(pair.reader_segment.buffer[run.local_offset : run.local_offset + run.length])
            assert got == wanted[run.local_offset]

    def test_each_transfer_is_reported_exactly_once(self, pair: Pair) -> None:
        peer = pair.connect()
        copies = [Copy(self.start, self.start + i * 4096, 4096) for i in range(20)]
        transfers = {pair.reader.post_read(peer, [copy]) for copy in copies}
        reported = [c.transfer for c in pair.wait(20)]
        assert sorted(reported) == sorted(transfers)
        assert pair.reader.poll() == []

    @pytest.mark.parametrize("where", ["remote", "local"])
    def test_runs_outside_a_segment_are_refused_before_anything_moves(self, pair: Pair, where: str) -> None:
        peer = pair.connect()
        size = pair.source_segment.geometry.segment_bytes
        for offset, length in ((size - 10, 11), (size, 1), (-1, 5), (0, 0)):
            bad = Copy(offset, self.start, length) if where == "remote" else Copy(self.start, offset, length)
            with pytest.raises(TransferError):
                pair.reader.post_read(peer, [Copy(self.start, self.start, 64), bad])
        assert pair.reader.poll() == []

    def test_junk_descriptions_are_refused(self, pair: Pair) -> None:
        good = pair.source.describe()
        for junk in (b"", b"junk", good[:-3] + b"\xff\xff\xff", b"\0" * 64, good[:20], os.urandom(400)):
            if junk == good:
                continue
            with pytest.raises(TransferError):
                pair.reader.connect(junk)

    def test_unknown_peers_are_refused(self, pair: Pair) -> None:
        with pytest.raises(TransferError):
            pair.reader.post_read(PeerHandle(10_000), [Copy(self.start, self.start, 64)])

    def test_disconnect_ends_open_transfers_and_is_idempotent(self, pair: Pair) -> None:
        peer = pair.connect()
        transfer = pair.reader.post_read(peer, [Copy(self.start, self.start, 1 << 20)])
        pair.reader.disconnect(peer)
        pair.reader.disconnect(peer)
        assert [c.transfer for c in pair.wait()] == [transfer]
        with pytest.raises(TransferError):
            pair.reader.post_read(peer, [Copy(self.start, self.start, 64)])

    def test_description_is_small_and_stable(self, pair: Pair) -> None:
        assert 0 < len(pair.source.describe()) <= 64 << 10
        assert pair.source.describe() == pair.source.describe()

    def test_close_is_idempotent(self, pair: Pair) -> None:
        pair.connect()
        pair.reader.close()
        pair.reader.close()
        assert pair.source.describe()


PAYLOAD_BYTES = 65_536  # of a block
FIRST_SLOT = 20  # of the reader's slots, so that no block comes to the place that it has at its peer


@dataclass(slots=True)
class PullPair:
    """A puller with its segment, and the segment that it reads. Slab 0 of both has slots of PAYLOAD_BYTES."""

    puller: Puller
    reader: Segment
    source: Segment
    description: bytes  # of the source's puller
    ended: queue.SimpleQueue[tuple[PullResult, ...]] = field(default_factory=queue.SimpleQueue)

    def publish(self, slot: int, generation: int = 2) -> BlockHandle:
        """Write a sealed block with bytes of its own into the source, as its shard does."""
        data, key = os.urandom(PAYLOAD_BYTES), BlockKey(os.urandom(16))
        self.source.payload(SlotIndex(slot), PAYLOAD_BYTES)[:] = data
        handle = BlockHandle(key, SlotIndex(slot), Generation(generation), len(data), digest_payload(data, key), slot)
        self.write_header(handle)
        return handle

    def write_header(self, handle: BlockHandle) -> None:
        fields = (handle.generation, handle.key, handle.length, SpanRoute(0), handle.digest, handle.position)
        self.source.write_header(handle.slot, SlotHeader(self.source.epoch, *fields))

    def pull(self, handles: Sequence[BlockHandle], epoch: int | None = None) -> list[PullResult]:
        items = tuple(PullItem(handle, SlotIndex(FIRST_SLOT + place)) for place, handle in enumerate(handles))
        boot, deadline = BootEpoch(epoch or self.source.epoch), time.monotonic() + WAIT_SECONDS
        job = PullJob(1, NodeId("peer"), boot, self.description, self.source.geometry, PAYLOAD_BYTES, items, deadline)
        self.puller.submit(job, lambda _, results: self.ended.put(results), lambda _: None)
        return list(self.ended.get(timeout=2 * WAIT_SECONDS))

    def arrived(self, count: int) -> list[bytes]:
        return [bytes(self.reader.payload(SlotIndex(FIRST_SLOT + place), PAYLOAD_BYTES)) for place in range(count)]


class PullContract:
    """What is trusted does not depend on the way in which a peer is read."""

    def test_blocks_arrive_whole_in_their_own_slots(self, pulls: PullPair) -> None:
        """As many as take two threads, and one."""
        for count in (100, 1):
            handles = [pulls.publish(slot) for slot in range(count)]
            wanted = [bytes(pulls.source.payload(handle.slot, PAYLOAD_BYTES)) for handle in handles]
            assert pulls.pull(handles[::-1]) == [PullResult.OK] * count
            assert pulls.arrived(count) == wanted[::-1]

    def test_bytes_without_their_digest_are_corrupt(self, pulls: PullPair) -> None:
        handles = [pulls.publish(slot) for slot in range(3)]
        pulls.source.payload(SlotIndex(1), PAYLOAD_BYTES)[4321] ^= 1
        assert pulls.pull(handles) == [PullResult.OK, PullResult.CORRUPT, PullResult.OK]

    def test_a_slot_of_another_generation_is_stale(self, pulls: PullPair) -> None:
        """Also with the same bytes under the same key."""
        handles = [pulls.publish(slot) for slot in range(2)]
        pulls.write_header(handles[0]._replace(generation=Generation(4)))
        assert pulls.pull(handles) == [PullResult.STALE, PullResult.OK]

    def test_a_peer_that_restarts_is_read_in_its_new_boot_only(self, pulls: PullPair) -> None:
        """Its memory is the same, and so are the bytes."""
        handles = [pulls.publish(slot) for slot in range(2)]
        assert pulls.pull(handles) == [PullResult.OK] * 2
        pulls.source.epoch = BootEpoch(pulls.source.epoch + 1)
        pulls.source.write_control("source")
        pulls.write_header(handles[0])
        assert pulls.pull(handles, epoch=pulls.source.epoch - 1) == [PullResult.STALE, PullResult.OK]
        assert pulls.pull(handles) == [PullResult.OK, PullResult.STALE]

    def test_a_slot_outside_of_the_peer_is_not_read(self, pulls: PullPair) -> None:
        handle = pulls.publish(0)
        assert pulls.pull([handle._replace(slot=SlotIndex(500 << 16))]) == [PullResult.FAILED]
        assert pulls.pull([handle]) == [PullResult.OK]
