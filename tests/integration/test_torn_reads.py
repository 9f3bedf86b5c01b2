"""Reads of slots that another process reuses meanwhile, through the code that loads them into an engine.

No lease protects these reads, as if the shard had died or the promise had ended: all that is left are the checks of
the worker half around each copy. `verify_load` is its default, `sampled`: the digest is looked at for one block in
sixteen, so the headers alone must refuse the rest. KVSERVICE_TORN_READS sets how many reads are to be accepted.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvservice.client.shard import ShardClient
from kvservice.connector.options import Verify
from kvservice.connector.worker.half import Copying, WorkerHalf
from kvservice.core.messages import SealItem
from kvservice.core.segment.geometry import slot_index
from kvservice.core.segment.refs import BlockRef
from kvservice.memory.segment import Segment
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.unique import unique_name
from kvservice.units import BlockKey, MiB, SpanRoute
from tests.integration.engine import LAYOUT as SMALL
from tests.integration.engine import Engine, chain, content, spec
from tests.integration.loader import Loader
from tests.integration.slot_writer import GEOMETRY, KEYS, LAYOUT

READS = int(os.environ.get("KVSERVICE_TORN_READS", "100000"))
SECONDS_MAX = 10.0 if "KVSERVICE_TORN_READS" not in os.environ else 3600.0
READS_MIN = 2_000  # in that time, however busy the machine is
LOADS = 16  # of one step
EDGE = 64  # bytes; a read is called torn when one end is of the right block and the whole is not
ROOT = Path(__file__).resolve().parents[2]
CONTENTS = {key: content(key, LAYOUT.payload_bytes) for key in KEYS}


class Trusting(WorkerHalf):
    """Forgets to look again after the copy."""

    def _is_sound(self, load: Copying) -> bool:
        return load.ticket.succeeded()


@pytest.fixture
def segment() -> Iterator[Segment]:
    """Of a pool whose slots another process reuses all the time."""
    path = Path(f"/dev/shm/kvservice-torn{unique_name()}-n")
    command = [sys.executable, "-m", "tests.integration.slot_writer", str(path)]
    writer = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        mapped = Segment.attach(path, GEOMETRY)
        yield mapped
        mapped.close()
        written, _ = writer.communicate(timeout=20)
        assert int(written) > 0
        print(f"{written.strip()} blocks written meanwhile")
    finally:
        writer.kill()
        writer.communicate()
        path.unlink(missing_ok=True)


class Reader:
    """Loads whatever is sealed at the moment into an engine's tensors, and judges every byte."""

    def __init__(self, segment: Segment, kind: type[WorkerHalf]) -> None:
        self._loader = Loader(segment, LAYOUT, LOADS, Verify.SAMPLED, kind)
        self._segment = segment
        self._random = random.Random(1)
        self._slots = [slot_index(0, i) for i in range(GEOMETRY.slots_per_slab(LAYOUT.payload_bytes))]
        self._before = [self._loader.row(place) for place in range(LOADS)]
        self.counts: Counter[str] = Counter()

    def step(self) -> None:
        """One step of an engine: LOADS requests of one block each."""
        wanted: list[tuple[BlockRef, BlockKey]] = []
        while len(wanted) < LOADS:
            slot = self._random.choice(self._slots)
            header = self._segment.read_header(slot)
            if header is not None and header.is_stable:
                wanted.append((BlockRef(slot, header.generation), header.key))
        for place, accepted in enumerate(self._loader.load(wanted)):
            row, right = self._loader.row(place), CONTENTS[wanted[place][1]]
            outcome = "accepted" if accepted else "refused"
            if row == right or row == self._before[place]:  # the latter: refused before it was copied
                self.counts[f"{outcome}_right" if row == right else f"{outcome}_old"] += 1
            else:
                self.counts[f"{outcome}_wrong"] += 1
                self.counts[f"{outcome}_torn"] += row[:EDGE] == right[:EDGE] or row[-EDGE:] == right[-EDGE:]
            self._before[place] = row

    def close(self) -> None:
        self.counts.update(self._loader.counters)
        self._loader.close()


def test_no_read_of_a_slot_that_is_reused_meanwhile_is_accepted(segment: Segment) -> None:
    reader, started = Reader(segment, WorkerHalf), time.monotonic()
    while reader.counts["accepted_right"] < READS and time.monotonic() < started + SECONDS_MAX:
        reader.step()
    while not reader.counts["refused_torn"] and time.monotonic() < started + SECONDS_MAX + 60.0:
        reader.step()
    seconds = time.monotonic() - started
    reader.close()
    print(f"{seconds:.1f} s, {dict(reader.counts)}")
    assert reader.counts["accepted_wrong"] == reader.counts["accepted_old"] == 0
    assert reader.counts["accepted_right"] >= min(READS, READS_MIN)
    assert reader.counts["refused_wrong"] > 0, "no slot was reused during a read: this test sees nothing"
    assert reader.counts["refused_torn"] > 0, "no half of one block and half of another was met"


def test_without_the_second_look_a_reader_takes_wrong_bytes(segment: Segment) -> None:
    """Otherwise the test above could not fail."""
    reader, until = Reader(segment, Trusting), time.monotonic() + 60.0
    while not reader.counts["accepted_wrong"] and time.monotonic() < until:
        reader.step()
    reader.close()
    assert reader.counts["accepted_wrong"] > 0


async def test_a_promise_that_ended_is_refused_after_its_slab_moved() -> None:
    """To blocks of another size, of which it holds fewer: the headers of its other slots looked as if promised."""
    large = replace(spec("large"), layout=replace(SMALL, cell_bytes=8 * SMALL.cell_bytes))
    with LocalCluster(1, 1, pool_bytes=4 * MiB, slab_bytes=1 * MiB, transport="shm") as cluster:
        reader = await Engine.attach(ShardClient(cluster.socket("n0")), spec())
        writer = await Engine.attach(ShardClient(cluster.socket("n0")), large)
        keys = chain(1, 8)
        await reader.store(keys)
        promised = (await reader.acquire(keys)).blocks
        await reader.pool.detach(reader.id)
        for key in chain(2, 12, "large"):
            for ref in await writer.pool.reserve(writer.id, 1):
                writer.segment.payload(ref.slot, large.layout.payload_bytes)[:] = bytes(large.layout.payload_bytes)
                assert await writer.pool.seal(writer.id, [SealItem(ref, key, None, 0, SpanRoute(0))])
        assert cluster.stats("n0").counters["slabs_moved"], "nothing was reused: this test sees nothing"
        loader = Loader(reader.segment, SMALL, len(keys), Verify.OFF)
        accepted = loader.load(list(zip(promised, keys, strict=True)))
        right = [loader.row(place) == content(key) for place, key in enumerate(keys)]
        loader.close()
        for engine in (reader, writer):
            engine.let_go()
            await engine.pool.close()
        assert not any(accepted) and not any(right)
