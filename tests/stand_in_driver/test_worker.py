"""A worker process on the stand-in and this process as its engine. Each rule of its copies, and for each a planted
mistake that the same check must notice."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvservice.copying.cuda.driver import Driver
from kvservice.copying.engine.link import Copies, WorkerLink
from kvservice.copying.message import CopyOutcome, CopyRow, Direction
from kvservice.copying.process import STATUS_WEDGED
from kvservice.core.segment.geometry import slot_index
from kvservice.memory.segment import Segment
from kvservice.units import Generation
from tests.gpu.slots import BLOCKS, KEY, ORDERS, SLOT, payload, same, segment, write_header
from tests.stand_in_driver.build import ROOT
from tests.stand_in_driver.engine import (
    EVENTS,
    WEDGE_SECONDS,
    Cache,
    cache_of,
    copy,
    linked,
    stand_in_environment,
    worker,
)


@dataclass
class Bench:
    """An engine, its cache, a segment, and the link to a worker."""

    cache: Cache
    made: Segment
    link: WorkerLink
    mark: Callable[[], int]
    directory: Path
    process: subprocess.Popen[str]

    def store(self, block: int, index: int, generation: int = 1) -> Copies:
        write_header(self.made, slot_index(0, index), generation)
        return copy(self.link, self.mark, Direction.STORE, self.row(block, index, 1))

    def load(self, block: int, index: int, *, may_borrow: bool = False) -> Copies:
        ticket = self.link.submit(Direction.LOAD, [self.row(block, index, 2)], may_borrow=may_borrow)
        assert ticket is not None
        self.link.flush(self.mark())
        ticket.synchronize()
        return ticket

    def slot(self, index: int) -> bytes:
        return payload(self.made, slot_index(0, index))

    @staticmethod
    def row(block: int, index: int, generation: int) -> CopyRow:
        return CopyRow(block, slot_index(0, index), Generation(generation), KEY)


@contextlib.contextmanager
def bench(
    driver: Driver, order: str = "blhn", plant: str = "", wedge_seconds: float = WEDGE_SECONDS, **settings: int
) -> Iterator[Bench]:
    with (
        cache_of(driver, order) as cache,
        worker(plant, wedge_seconds, **settings) as (process, directory),
        segment() as made,
        linked(cache, directory, made, wedge_seconds) as (link, mark),
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == "pinned\n"  # before it, copies go another way, which is also right
        yield Bench(cache, made, link, mark, directory, process)


# -- rules, each with a name for the mistake that breaks it ----


def check_blocks_go_through_the_worker_and_come_back(driver: Driver, order: str = "lbnh", plant: str = "") -> None:
    with bench(driver, order, plant) as it:
        wanted = [it.cache.block(block) for block in range(8)]
        for index in range(8):
            write_header(it.made, slot_index(0, index), 1)
        stored = copy(it.link, it.mark, Direction.STORE, *(it.row(index, index, 1) for index in range(8)))
        assert stored.succeeded()
        assert same([it.slot(index) for index in range(8)], wanted)
        for index in range(8):
            write_header(it.made, slot_index(0, index), 2)
        loaded = copy(it.link, it.mark, Direction.LOAD, *(it.row(20 + index, index, 2) for index in range(8)))
        assert loaded.succeeded()
        assert same([it.cache.block(20 + index) for index in range(8)], wanted)


def check_copy_has_ended_when_the_engine_is_told(driver: Driver, plant: str = "") -> None:
    with bench(driver, "blhn", plant, DELAY_US=400_000) as it:
        assert it.store(4, 0).succeeded()
        assert same(it.slot(0), it.cache.block(4))


def check_store_waits_for_the_kernels_that_write_the_block(driver: Driver, plant: str = "") -> None:
    with bench(driver, "lbhn", plant) as it:
        for attempt in range(EVENTS + 2):  # more than the ring of events
            it.cache.kernel(attempt + 1, 30_000)
            assert it.store(3, attempt).succeeded()
            assert same(it.slot(attempt), bytes([attempt + 1]) * SLOT.payload_bytes)


LENDER = """
import sys
from pathlib import Path
from kvservice.core.segment.geometry import Geometry
from kvservice.memory.segment import Segment
from kvservice.copying.cuda.driver import Driver
from kvservice.copying.message import CopyRow
from kvservice.testing.eventually import eventually
from kvservice.units import Generation, SlotIndex
from tests.gpu.slots import KEY
from tests.stand_in_driver.engine import Cache, linked

driver = Driver.of_device("0")
driver.bind()
made = Segment.attach(Path(sys.argv[2]), Geometry(int(sys.argv[3]), int(sys.argv[4])))
cache = Cache(driver, "lbnh", seed=5)
with linked(cache, Path(sys.argv[1]), made) as (link, mark):
    cache.kernel(9, 2_000_000)  # still runs when the block is lent, and when it is read
    lent = link.lend([CopyRow(7, SlotIndex(0), Generation(0), KEY)], mark())
    lent.lent.synchronize()
    print("lent", flush=True)
    sys.stdin.readline()
    link.recall(lent)
    eventually(lambda: lent.is_over, "the recall")
    print("recalled", flush=True)
    sys.stdin.readline()
"""


def check_lent_block_is_read_when_the_lender_has_computed_it(driver: Driver, plant: str = "") -> None:
    with bench(driver, "blhn", plant) as it:
        it.made.payload(slot_index(0, 0), SLOT.payload_bytes)[:] = b"\x11" * SLOT.payload_bytes
        write_header(it.made, slot_index(0, 0), 2)
        where = [str(it.directory), str(it.made.path)]
        where += [str(it.made.geometry.slab_bytes), str(it.made.geometry.slab_count)]
        lender = subprocess.Popen(
            [sys.executable, "-c", LENDER, *where],
            env=stand_in_environment(),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert lender.stdin is not None and lender.stdout is not None
        try:
            assert lender.stdout.readline() == "lent\n"
            assert it.load(20, 0, may_borrow=True).borrowed == 1
            assert same(it.cache.block(20), b"\x09" * SLOT.payload_bytes)
            lender.stdin.write("recall\n")
            assert lender.stdout.readline() == "recalled\n"
            assert it.load(20, 0, may_borrow=True).borrowed == 0
            assert same(it.cache.block(20), b"\x11" * SLOT.payload_bytes)
        finally:
            lender.kill()
            lender.wait(20)
            lender.stdin.close()
            lender.stdout.close()


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_go_through_the_worker_and_come_back(driver: Driver, order: str) -> None:
    check_blocks_go_through_the_worker_and_come_back(driver, order)


def test_copy_has_ended_when_the_engine_is_told(driver: Driver) -> None:
    check_copy_has_ended_when_the_engine_is_told(driver)


def test_store_waits_for_the_kernels_that_write_the_block(driver: Driver) -> None:
    check_store_waits_for_the_kernels_that_write_the_block(driver)


def test_lent_block_is_read_when_the_lender_has_computed_it(driver: Driver) -> None:
    check_lent_block_is_read_when_the_lender_has_computed_it(driver)


@pytest.mark.parametrize(
    ("mistake", "check"),
    [
        ("stores_in_any_order", check_blocks_go_through_the_worker_and_come_back),
        ("copies_are_not_awaited", check_copy_has_ended_when_the_engine_is_told),
        ("staging_is_reused_early", check_blocks_go_through_the_worker_and_come_back),
        ("engine_is_not_awaited", check_store_waits_for_the_kernels_that_write_the_block),
        ("offset_is_forgotten", check_blocks_go_through_the_worker_and_come_back),
        ("lender_is_not_awaited", check_lent_block_is_read_when_the_lender_has_computed_it),
    ],
)
def test_planted_mistake_is_noticed(driver: Driver, mistake: str, check: Callable[..., None]) -> None:
    with pytest.raises(AssertionError):
        check(driver, plant=mistake)


# -- what goes wrong around copies ----


def test_stale_slot_is_not_written(driver: Driver) -> None:
    with bench(driver) as it:
        assert it.store(0, 0, generation=3).outcome is CopyOutcome.STALE
        assert same(it.slot(0), bytes(SLOT.payload_bytes))


def test_memory_that_cannot_be_pinned_is_copied_all_the_same(driver: Driver) -> None:
    with bench(driver, PIN_FAILS_AT=1) as it:
        assert it.store(4, 0).succeeded()
        assert same(it.slot(0), it.cache.block(4))


def test_killed_worker_ends_every_copy(driver: Driver) -> None:
    with bench(driver) as it:
        it.process.send_signal(signal.SIGSTOP)
        ticket = it.link.submit(Direction.STORE, [it.row(block, block, 1) for block in range(BLOCKS)])
        assert ticket is not None
        it.link.flush(it.mark())
        it.process.kill()
        ticket.synchronize()
        assert not ticket.succeeded()


def test_worker_whose_copy_hangs_ends(driver: Driver) -> None:
    with bench(driver, wedge_seconds=2.0, HANGS_AT=1) as it:
        assert not it.store(0, 0).succeeded()
        assert it.process.wait(20) in (STATUS_WEDGED, -signal.SIGKILL), "by itself or by its engine, who is first"
