"""One contract, every transport."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvservice.core.segment.geometry import plan_geometry
from kvservice.memory.segment import Segment, segment_path
from kvservice.testing.fake_transport import FakeNetwork
from kvservice.testing.transport_contract import Pair, TransportContract
from kvservice.transfer.nixl import NixlTransport, nixl_available
from kvservice.transfer.shm import SharedMemoryTransport
from kvservice.units import MiB


@pytest.fixture
def segments() -> Iterator[tuple[Segment, Segment]]:
    made = [
        Segment.create(
            segment_path(f"contract{uuid.uuid4().hex[:6]}", node, Path("/dev/shm")), plan_geometry(24 * MiB), node
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


class TestSharedMemory(TransportContract):
    @pytest.fixture
    def pair(self, segments: tuple[Segment, Segment]) -> Iterator[Pair]:
        reader, source = (SharedMemoryTransport(segment) for segment in segments)
        yield from ended(Pair(reader, segments[0], source, segments[1]))


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
