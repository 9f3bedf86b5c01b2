"""Copies in the engine's own process on the stand-in driver: the same batched copies that a copy worker makes. Each
rule, and for each a planted mistake that the same check must notice."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from kvservice.connector.plan import CopyEntry, PoolInfo
from kvservice.connector.worker import copier as copier_module
from kvservice.connector.worker.block_copier import BlockCopier
from kvservice.connector.worker.copier import CudaCopier, Ticket
from kvservice.copying.cuda.driver import Driver
from kvservice.copying.message import Direction
from kvservice.core.segment.geometry import slot_index
from kvservice.core.segment.refs import BlockRef
from kvservice.memory.segment import Segment
from kvservice.testing.eventually import eventually
from kvservice.units import Generation
from tests.gpu.slots import HEADS, KEY, SLOT, payload, same, segment
from tests.stand_in_driver.engine import Cache, Controls, Count, cache_of, call, stand_in_environment
from tests.stand_in_driver.torch_cuda import FakeStream, install, tensors


@dataclass
class Engine:
    cache: Cache
    made: Segment
    copier: CudaCopier

    def copy(self, direction: Direction, *pairs: tuple[int, int]) -> Ticket:
        """(block, slot) each."""
        entries = [CopyEntry(block, BlockRef(slot_index(0, slot), Generation(1)), KEY) for block, slot in pairs]
        return self.copier.run(direction, entries)

    def slot(self, index: int) -> bytes:
        return payload(self.made, slot_index(0, index))


@contextlib.contextmanager
def engine(driver: Driver, monkeypatch: pytest.MonkeyPatch, order: str = "blhn") -> Iterator[Engine]:
    """An engine whose pool is pinned."""
    with cache_of(driver, order) as cache, segment() as made:
        install(cache, monkeypatch)
        blocks = BlockCopier(tensors(cache), range(HEADS))
        copier = CudaCopier(blocks)
        memory = blocks.bind(made.buffer, SLOT)
        copier.adopt(memory, PoolInfo(str(made.path), made.geometry, made.epoch, SLOT, bytes(16)))
        it = Engine(cache, made, copier)
        assert copier._pinning is not None
        copier._pinning.used()
        eventually(lambda: copier._pinning.covers(made.geometry.segment_bytes), "the pool pinned")  # type: ignore[union-attr]
        try:
            yield it
        finally:
            for stream in copier._streams.values():
                stream.synchronize()
            copier.release()
            copier.close()
            del memory
            blocks.unbind()


def ended(ticket: Ticket) -> None:
    eventually(ticket.query, "the end of the copies")


def check_copies_wait_for_the_engines_kernels(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(driver, monkeypatch) as it:
        it.cache.kernel(7, 30_000)
        ended(it.copy(Direction.STORE, (3, 0)))
        assert same(it.slot(0), b"\x07" * SLOT.payload_bytes)


def check_blocks_are_the_engines_again_only_when_copied(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(driver, monkeypatch) as it:
        wanted = it.cache.block(3)
        call("stand_in_set", b"DELAY_US", ctypes.c_long(30_000))
        ticket = it.copy(Direction.STORE, (3, 0))
        call("stand_in_set", b"DELAY_US", ctypes.c_long(0))
        ended(ticket)
        it.cache.kernel(9, 0)  # the engine computes another request's block there
        it.copier._streams[Direction.STORE].synchronize()
        assert same(it.slot(0), wanted)


@pytest.mark.parametrize("order", ["blhn", "lbhn"])
def test_engine_copies_by_one_batch_a_step(
    driver: Driver, controls: Controls, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    with engine(driver, monkeypatch, order) as it:
        batches, mistakes = controls.count(Count.BATCHES), controls.count(Count.MISTAKES)
        wanted = [it.cache.block(block) for block in (5, 0, 31)]
        ended(it.copy(Direction.STORE, (5, 9), (0, 4), (31, 5)))
        assert same([it.slot(index) for index in (9, 4, 5)], wanted)
        ended(it.copy(Direction.LOAD, (20, 9), (21, 4), (22, 5)))
        assert same([it.cache.block(block) for block in (20, 21, 22)], wanted)
        assert controls.count(Count.BATCHES) == batches + 2
        assert it.copier.take_counters() == {"copy_batched_blocks": 6}
        assert controls.count(Count.MISTAKES) == mistakes


def test_copies_wait_for_the_engines_kernels(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    check_copies_wait_for_the_engines_kernels(driver, monkeypatch)


def test_engines_thread_does_not_wait_for_copies(
    driver: Driver, controls: Controls, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(driver, monkeypatch) as it:
        controls.set("DELAY_US", 1_500_000, otherwise=200)
        started = time.monotonic()
        ticket = it.copy(Direction.STORE, (3, 0))
        assert time.monotonic() - started < 1.2 and not ticket.query()
        ticket.synchronize()
        assert ticket.query() and same(it.slot(0), it.cache.block(3))


def test_block_is_reused_only_when_it_is_copied(
    driver: Driver, controls: Controls, monkeypatch: pytest.MonkeyPatch
) -> None:
    controls.set("DELAY_US", 0, otherwise=200)
    check_blocks_are_the_engines_again_only_when_copied(driver, monkeypatch)


@pytest.mark.parametrize(
    ("mistake", "check"),
    [
        ("the engine's work is not awaited", check_copies_wait_for_the_engines_kernels),
        ("a ticket says that copies ended when they began", check_blocks_are_the_engines_again_only_when_copied),
    ],
)
def test_planted_mistake_in_process_is_noticed(
    driver: Driver,
    controls: Controls,
    monkeypatch: pytest.MonkeyPatch,
    mistake: str,
    check: Callable[[Driver, pytest.MonkeyPatch], None],
) -> None:
    controls.set("DELAY_US", 0, otherwise=200)
    if "awaited" in mistake:
        monkeypatch.setattr(FakeStream, "wait_event", lambda self, event: None)
    else:
        monkeypatch.setattr(copier_module._Recorded, "query", lambda self: True)
    with pytest.raises(AssertionError):
        check(driver, monkeypatch)


@pytest.mark.parametrize("why", ["small runs", "an old driver", "not pinned", "ROCm"])
def test_other_copies_go_through_the_tensors(driver: Driver, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    if why == "an old driver":
        monkeypatch.setattr(Driver, "has_batch_copy", False)
    if why == "ROCm":
        monkeypatch.setattr(torch.version, "hip", "7.0")
        monkeypatch.setattr(copier_module, "Driver", None)  # there is none to ask
    taken: list[int] = []
    monkeypatch.setattr(
        copier_module, "copy_entries", lambda blocks, pool, way, entries: taken.extend(one.block_id for one in entries)
    )
    with engine(driver, monkeypatch, "lbnh" if why == "small runs" else "blhn") as it:
        if why == "not pinned":
            monkeypatch.setattr(it.copier._pinning, "covers", lambda end: False)
        ended(it.copy(Direction.STORE, (3, 0), (4, 1)))
        assert taken == [3, 4] and it.copier.take_counters() == {}


WRONG_DEVICE = """
import sys
from kvservice.copying.cuda.copies import CudaCopies
from kvservice.copying.cuda.driver import Driver
from kvservice.copying.cuda.pinning import Pinning
from kvservice.core.segment.copy_runs import CopyTemplate
from tests.gpu.slots import SLOT, payload, segment
from tests.stand_in_driver.engine import Cache, gather

own, other = Driver.of_device("1"), Driver.of_device("0")
own.bind()
cache = Cache(own, "lbnh")
wanted = cache.block(2)
if sys.argv[1] == "planted":
    own.bind = other.bind
with segment() as made:
    other.bind()  # as another library on this thread may do
    pinning = Pinning(made.address, made.geometry, own.pin, own.unpin, own.bind)
    pinning._thread.join(30)
    copies = CudaCopies(own, cache.address, made.address, pinning, gather)
    offset = made.geometry.payload_offset(0, SLOT.payload_bytes)
    copies.store(CopyTemplate(cache.layout, SLOT).expand([2], [offset]))
    print("same bytes" if payload(made, 0) == wanted else "other bytes")
"""


@pytest.mark.parametrize(("mistake", "said"), [("none", "same bytes"), ("planted", "")])
def test_copies_run_on_the_gpu_of_the_engine(library_path: str, mistake: str, said: str) -> None:
    """Whichever GPU the thread used last. On the wrong one the kernel reaches for memory that is not its own."""
    done = subprocess.run(
        [sys.executable, "-c", WRONG_DEVICE, mistake],
        env=stand_in_environment(DEVICES=2),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == said, done.stderr[-2000:]
    assert ("a kernel touched what is not memory of its GPU" in done.stderr) == (mistake == "planted")
