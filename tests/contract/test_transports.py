"""One contract, every transport."""

from __future__ import annotations

import fcntl
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvservice.core.events import PullResult
from kvservice.core.segment.geometry import plan_geometry
from kvservice.errors import TransferError
from kvservice.memory import runs
from kvservice.memory.segment import Segment, segment_path
from kvservice.testing.eventually import eventually
from kvservice.testing.fake_transport import FakeNetwork
from kvservice.testing.transport_contract import PAYLOAD_BYTES, Pair, PullContract, PullPair, TransportContract
from kvservice.transfer import mapped
from kvservice.transfer.mapped import MappedPeer
from kvservice.transfer.nixl import NixlTransport, nixl_available
from kvservice.transfer.puller import Puller
from kvservice.transfer.ways import pack_ways, unpack_ways
from kvservice.units import MiB, NodeId, SlotIndex


@pytest.fixture
def segments() -> Iterator[tuple[Segment, Segment]]:
    made = [
        Segment.create(
            segment_path(f"contract{uuid.uuid4().hex[:6]}", node, Path("/dev/shm")),
            plan_geometry(24 * MiB, 12 * MiB),
            node,
        )
        for node in ("reader", "source")
    ]
    yield made[0], made[1]
    for segment in made:
        segment.unlink()
        segment.close()


def ended(pair: Pair) -> Iterator[Pair]:
    yield pair
    pair.reader.close()
    pair.source.close()


class TestFake(TransportContract):
    @pytest.fixture
    def pair(self, segments: tuple[Segment, Segment]) -> Iterator[Pair]:
        network = FakeNetwork()
        yield from ended(Pair(network.transport(segments[0]), segments[0], network.transport(segments[1]), segments[1]))


@pytest.mark.nixl
@pytest.mark.skipif(not nixl_available(), reason="NIXL is not installed")
class TestNixl(TransportContract):
    @pytest.fixture
    def pair(self, segments: tuple[Segment, Segment]) -> Iterator[Pair]:
        reader, source = (NixlTransport(segment, "contract") for segment in segments)
        yield from ended(Pair(reader, segments[0], source, segments[1]))

    def test_idle_transport_costs_next_to_no_cpu(self, pair: Pair) -> None:
        """NIXL's progress threads would spin on a core each; a ratio of CPU to wall time, so load does not matter."""
        pair.connect()
        used, started = time.process_time(), time.monotonic()
        time.sleep(1.0)
        assert time.process_time() - used < 0.3 * (time.monotonic() - started)


def pulling(segments: tuple[Segment, Segment], makes: Callable[[Segment], Puller]) -> Iterator[PullPair]:
    for segment in segments:
        segment.assign_slab(0, PAYLOAD_BYTES)
    pullers = [makes(segment) for segment in segments]
    for puller in pullers:
        puller.start()
    yield PullPair(pullers[0], *segments, pullers[1].describe())
    for puller in pullers:
        puller.close()


class TestPullsByFake(PullContract):
    @pytest.fixture
    def pulls(self, segments: tuple[Segment, Segment]) -> Iterator[PullPair]:
        network = FakeNetwork()
        yield from pulling(
            segments, lambda segment: Puller(segment, lambda: network.transport(segment), maps_peers=False)
        )


@pytest.mark.nixl
@pytest.mark.skipif(not nixl_available(), reason="NIXL is not installed")
class TestPullsByNixl(PullContract):
    @pytest.fixture
    def pulls(self, segments: tuple[Segment, Segment]) -> Iterator[PullPair]:
        yield from pulling(
            segments, lambda segment: Puller(segment, lambda: NixlTransport(segment, "contract"), maps_peers=False)
        )


class TestPullsOfMappedPeers(PullContract):
    """Of shards of one machine and user. What may happen to a file happens to the mapping."""

    @pytest.fixture(params=["one pass", "no compiler"])
    def pulls(
        self, segments: tuple[Segment, Segment], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[PullPair]:
        if request.param == "no compiler":
            monkeypatch.setattr(runs, "_native", None)
        else:
            assert runs.in_one_pass(), "the compiled copy is missing from this installation: make install builds it"
        yield from pulling(segments, lambda segment: Puller(segment, None))

    def test_a_segment_cut_short_fails_the_pull_and_nothing_else(self, pulls: PullPair) -> None:
        """An access beyond the end of a mapped file is SIGBUS, which would end the shard."""
        handles = [pulls.publish(slot) for slot in range(100)]
        assert pulls.pull(handles) == [PullResult.OK] * 100
        size = pulls.source.geometry.segment_bytes
        for left in (pulls.source.geometry.payload_offset(SlotIndex(50), PAYLOAD_BYTES) + 100, 0):
            os.truncate(pulls.source.path, left)
            assert pulls.pull(handles) == [PullResult.FAILED] * 100
        os.truncate(pulls.source.path, size)
        assert pulls.pull(handles) == [PullResult.FAILED] * 100, "its control page is gone"

    def test_a_file_with_a_hole_is_no_hit(self, pulls: PullPair) -> None:
        handles = [pulls.publish(slot) for slot in range(3)]
        assert pulls.pull(handles) == [PullResult.OK] * 3
        end = pulls.source.geometry.payload_offset(SlotIndex(1), PAYLOAD_BYTES)
        os.truncate(pulls.source.path, end)
        os.truncate(pulls.source.path, pulls.source.geometry.segment_bytes)
        assert pulls.pull(handles) == [PullResult.OK, PullResult.CORRUPT, PullResult.CORRUPT]

    def test_a_removed_segment_is_let_go(self, pulls: PullPair) -> None:
        """Its memory is freed only when nobody maps it, and its node may need the room."""
        handles = [pulls.publish(slot) for slot in range(2)]
        assert pulls.pull(handles) == [PullResult.OK] * 2
        known = pulls.puller._connections._peers[NodeId("peer")].handle
        assert isinstance(known, MappedPeer)
        pulls.source.unlink()
        eventually(lambda: known._is_closed, "the end of the mapping")
        assert pulls.pull(handles) == [PullResult.FAILED] * 2

    def test_a_segment_in_place_of_the_peers_is_not_read(self, pulls: PullPair) -> None:
        handles = [pulls.publish(slot) for slot in range(2)]
        pulls.source.unlink()
        other = Segment.create(pulls.source.path, pulls.source.geometry, "source", epoch_floor=pulls.source.epoch)
        try:
            assert other.epoch == pulls.source.epoch
            assert pulls.pull(handles) == [PullResult.FAILED] * 2
        finally:
            other.unlink()
            other.close()

    def test_a_mapping_is_only_for_reading(self, pulls: PullPair) -> None:
        """This side cannot damage its peer's blocks, whatever its faults."""
        assert pulls.pull([pulls.publish(0)]) == [PullResult.OK]
        known = pulls.puller._connections._peers[NodeId("peer")].handle
        assert isinstance(known, MappedPeer)
        assert fcntl.fcntl(known._descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        if known._map is not None:
            with pytest.raises(TypeError, match="readonly"):
                known._map[0:1] = b"x"

    @pytest.mark.skipif(not nixl_available(), reason="NIXL is not installed")
    @pytest.mark.nixl
    def test_a_peer_that_cannot_be_mapped_is_read_by_nixl(
        self, segments: tuple[Segment, Segment], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As one of another machine, or one whose file another namespace hides."""
        for hidden in (False, True):
            pair = pulling(segments, lambda segment: Puller(segment, lambda: NixlTransport(segment, "contract")))
            pulls = next(pair)
            handles = [pulls.publish(slot) for slot in range(2)]
            with monkeypatch.context() as patched:
                if hidden:
                    patched.setattr(mapped, "epoch_of", lambda descriptor: None)
                assert pulls.pull(handles) == [PullResult.OK] * 2
            way = "nixl" if hidden else "shm"
            assert pulls.puller.name == "shm+nixl"
            assert pulls.puller.counters()[f"{way}_bytes"] == 2 * PAYLOAD_BYTES
            assert list(pair) == []


def test_a_record_of_ways_is_what_it_was_or_nothing() -> None:
    ways = {"shm": b"a file", "nixl": bytes(range(256)), "": b""}
    record = pack_ways(ways)
    assert unpack_ways(record) == ways and unpack_ways(pack_ways({})) == {}
    for length in range(len(record)):
        with pytest.raises(TransferError):
            unpack_ways(record[:length])
    for place in range(len(record)):
        with pytest.raises(TransferError):
            unpack_ways(record[:place] + bytes([record[place] ^ 1]) + record[place + 1 :])
