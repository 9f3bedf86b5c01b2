"""Two engine processes on one GPU and their worker: one copies the blocks that the other lent it, by CUDA IPC."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kvservice.copying.engine.link import Copies, WorkerLink
from kvservice.copying.message import CopyRow, Direction
from kvservice.core.segment.geometry import slot_index
from kvservice.discovery import find_copy_workers
from kvservice.memory.segment import Segment
from kvservice.testing.eventually import eventually
from kvservice.units import Generation
from tests.gpu.device import block_bytes, kv_cache
from tests.gpu.slots import KEY, SLOT, segment, write_header
from tests.gpu.test_worker import linked, worker

pytestmark = pytest.mark.gpu

LENDER = """
import sys
from pathlib import Path
import torch
from kvservice.core.segment.geometry import Geometry
from kvservice.memory.segment import Segment
from kvservice.copying.message import CopyRow
from kvservice.units import Generation, SlotIndex
from tests.gpu.device import kv_cache
from tests.gpu.slots import KEY
from tests.gpu.test_worker import linked

made = Segment.attach(Path(sys.argv[2]), Geometry(int(sys.argv[3]), int(sys.argv[4])))
cache = kv_cache("lbnh", seed=5)
device = sys.argv[5] or None  # of the worker that the blocks are lent to, when that is not this engine's
with linked(cache, Path(sys.argv[1]), made, device) as (link, mark):
    def lend():
        lent = link.lend([CopyRow(7, SlotIndex(0), Generation(0), KEY)], mark())
        lent.lent.synchronize()
        return lent
    lent = lend()
    print("lent", flush=True)
    for line in sys.stdin:
        if line == "taken\\n":
            eventually(lambda: lent.is_taken, "a reader")
            print("taken", flush=True)
        if line == "recall\\n":
            link.recall(lent)
            eventually(lambda: lent.is_over, "the recall")
            cache[:, 7] = 0  # the block is the engine's again
            torch.cuda.synchronize()
            print("recalled", flush=True)
        if line == "lend\\n":
            lent = lend()
            print("lent", flush=True)
"""


class LendingEngine:
    """The other engine, in a process of its own."""

    def __init__(self, directory: Path, made: Segment, worker_device: str = "") -> None:
        geometry = [str(made.geometry.slab_bytes), str(made.geometry.slab_count), worker_device]
        self.process = subprocess.Popen(
            [sys.executable, "-c", LENDER, str(directory), str(made.path), *geometry],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=Path(__file__).parents[2],
        )
        self.wait("lent")

    def wait(self, answer: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == answer + "\n"

    def ask(self, command: str, answer: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.wait(answer)

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


class Reader:
    """This process, with a sealed slot of the same key whose bytes are others: where a block came from shows."""

    def __init__(self, made: Segment, link: WorkerLink, mark: Callable[[], int], cache: torch.Tensor) -> None:
        self.link, self.mark, self.cache = link, mark, cache
        made.payload(slot_index(0, 0), SLOT.payload_bytes)[:] = b"\x11" * SLOT.payload_bytes
        write_header(made, slot_index(0, 0), 2)

    def load(self) -> Copies:
        ticket = self.link.submit(Direction.LOAD, [CopyRow(20, slot_index(0, 0), Generation(2), KEY)], may_borrow=True)
        assert ticket is not None
        self.link.flush(self.mark())
        ticket.synchronize()
        assert ticket.succeeded()
        return ticket

    def is_from_slot(self) -> bool:
        return block_bytes(self.cache, 20) == b"\x11" * SLOT.payload_bytes


@contextlib.contextmanager
def engines(reader_device: int = 0) -> Iterator[tuple[LendingEngine, Reader]]:
    """The lender is on the first GPU. The worker is the reader's."""
    torch.cuda.set_device(reader_device)
    cache = kv_cache("blhn", seed=6)
    with worker(reader_device) as (_, directory), segment() as made, linked(cache, directory, made) as (link, mark):
        [record] = find_copy_workers(directory)
        lender = LendingEngine(directory, made, record.device if reader_device else "")
        try:
            yield lender, Reader(made, link, mark, cache)
        finally:
            lender.close()
            torch.cuda.set_device(0)


def test_lent_block_is_read_from_its_engine_until_recalled() -> None:
    wanted = kv_cache("lbnh", seed=5)[:, 7]
    with engines() as (lender, reader):
        assert reader.load().borrowed == 1
        assert torch.equal(reader.cache[:, 20], wanted)
        lender.ask("taken", "taken")
        lender.ask("recall", "recalled")
        assert reader.load().borrowed == 0 and reader.is_from_slot()
        lender.ask("lend", "lent")
        assert reader.load().borrowed == 1 and not reader.cache[:, 20].any()


def test_block_is_copied_from_the_memory_of_another_gpu() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU, this needs two")
    wanted = kv_cache("lbnh", seed=5)[:, 7].cpu()
    with engines(reader_device=1) as (lender, reader):
        assert reader.load().borrowed == 1
        assert torch.equal(reader.cache[:, 20].cpu(), wanted)
        lender.ask("recall", "recalled")
        assert reader.load().borrowed == 0 and reader.is_from_slot()


def test_block_of_a_killed_engine_is_copied_from_its_slot() -> None:
    with engines() as (lender, reader):
        assert reader.load().borrowed == 1
        lender.process.kill()
        lender.process.wait(30)
        eventually(lambda: reader.load().borrowed == 0, "the worker to notice")
        assert reader.is_from_slot()
