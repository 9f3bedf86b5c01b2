"""Blocks that one engine lends to another, through a real copy worker: taken where they are lent, from the slot where
not, and never a byte that the lender has changed since. Whoever ends in between, nothing stays lent."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvservice.connector.plan import LendPlan, StepPlan, StepReport
from kvservice.connector.worker.peer_copy_workers import PeerCopyWorkers
from kvservice.connector.worker.remote_copier import RemoteCopier
from kvservice.connector.worker.worker_loans import WorkerLoans
from kvservice.copying.copies import HostCopies
from kvservice.copying.device import HOST, HostDevice, HostKV, KVMemory
from kvservice.copying.engine.link import Copies, KVOffer, Lent, WorkerLink
from kvservice.copying.message import ROWS_MAX, CopyOutcome, CopyRow, Direction
from kvservice.copying.worker.server import CopyWorker, CopyWorkerConfig
from kvservice.core.segment.copy_runs import Descriptors
from kvservice.core.segment.geometry import slot_index
from kvservice.testing.eventually import eventually
from kvservice.units import BlockKey, NodeId, SlotIndex
from tests.integration.test_copy_worker import BLOCKS, LAYERS, SLOT, WEDGE_SECONDS, Bench, Worker, row

LENT = (7, 3, 12)  # blocks of the lender
KEYS = [BlockKey(bytes([index + 1]) * 16) for index in range(len(LENT))]
TARGETS = (20, 21, 22)  # blocks of the reader

LENDER = """
import sys
from pathlib import Path
from tests.integration.test_loans import lend
from tests.integration.test_copy_worker import Bench

bench = Bench(Path(sys.argv[1]))
bench.follow()
bench.segment.unlink()  # this process is killed
lend(bench)
print("lent", flush=True)
sys.stdin.readline()
"""


class GatedCopies(HostCopies):
    """Copies between engines that wait in the middle, once their bytes are read, while the gate is closed."""

    gate: GatedDevice

    def load(self, runs: Descriptors) -> None:
        super().load(runs)
        self.gate.reading.release()
        assert self.gate.open.wait(30)


class GatedDevice(HostDevice):
    def __init__(self) -> None:
        self.open = threading.Event()
        self.reading = threading.Semaphore(0)

    def direct(self, target: KVMemory, source: KVMemory) -> GatedCopies:
        assert isinstance(target, HostKV) and isinstance(source, HostKV)
        copies = GatedCopies(target.shared, source.shared)
        copies.gate = self
        return copies


def lent_rows() -> list[CopyRow]:
    return [row(block, 0, 0, key) for block, key in zip(LENT, KEYS, strict=True)]


def wanted_rows() -> list[CopyRow]:
    return [row(block, slot_index(0, i), 2, key) for i, (block, key) in enumerate(zip(TARGETS, KEYS, strict=True))]


def seal_other_bytes(bench: Bench) -> None:
    """Sealed slots of these keys, with bytes of their own: where a block came from shows."""
    for index, key in enumerate(KEYS):
        bench.segment.payload(slot_index(0, index), SLOT.payload_bytes)[:] = bytes([0xE0 + index]) * SLOT.payload_bytes
        bench.header(slot_index(0, index), 2, key)


def from_slots(reader: Bench) -> bool:
    return [reader.block(block) for block in TARGETS] == [
        reader.payload(SlotIndex(slot_index(0, index))) for index in range(len(TARGETS))
    ]


def lend(lender: Bench) -> Lent:
    lent = lender.link.lend(lent_rows())
    assert lent is not None
    lent.lent.synchronize()
    return lent


def load(reader: Bench) -> Copies:
    return reader.copy(Direction.LOAD, *wanted_rows(), may_borrow=True)


def recall(lender: Bench, lent: Lent) -> None:
    lender.link.recall(lent)
    eventually(lambda: lent.is_over, "the loan to be given back")


def idle_link() -> WorkerLink:
    """In the place of one that was closed."""
    return WorkerLink(KVOffer(HOST, {}, {}))


def runs(pid: int) -> bool:
    """Whether any thread of the process is neither stopped nor dead."""
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # this thread has ended since it was listed
            if path.read_text().rsplit(")", 1)[1].split()[0] not in "TZX":
                return True
    return False


@contextlib.contextmanager
def engines(root: Path, count: int = 2, wedge_seconds: float = 60.0) -> Iterator[list[Bench]]:
    """The first is a lender, the others have nothing in their KV cache. A link kills a worker that hangs, and some of
    these tests are the worker themselves."""
    made = [Bench(root, wedge_seconds) for _ in range(count)]
    try:
        for bench in made[1:]:
            bench.bytes[:] = 0
            seal_other_bytes(bench)
        for bench in made:
            bench.follow()
        yield made
    finally:
        for bench in made:
            bench.close()


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvl-") as folder:  # short: it holds sockets
        yield Path(folder)


@pytest.fixture
def worker(root: Path) -> Iterator[Worker]:
    started = Worker(root)
    yield started
    started.end()


@pytest.fixture
def gate(root: Path, request: pytest.FixtureRequest) -> Iterator[tuple[GatedDevice, CopyWorker]]:
    """A worker in this process, beside one of another device if there is a `worker`; in the end nothing is lent or read
    there any more."""
    device = GatedDevice()
    if "worker" in request.fixturenames:
        device.name = "cpu-b"
    server = CopyWorker(CopyWorkerConfig("s", NodeId("n"), root), device)
    server.start()
    yield device, server
    device.open.set()
    eventually(lambda: server.state()["engines"] == 0, "the engines to be gone")
    assert server.loans.is_empty
    server.stop()


def test_lent_blocks_come_from_the_engine_others_from_slots(root: Path, worker: Worker) -> None:
    with engines(root) as (lender, reader):
        lent = lender.link.lend(lent_rows()[:2])
        assert lent is not None
        lent.lent.synchronize()
        not_asked = reader.copy(Direction.LOAD, *wanted_rows())
        not_asked.synchronize()
        assert not_asked.borrowed == 0 and from_slots(reader)
        ticket = load(reader)
        ticket.synchronize()
        assert ticket.succeeded() and ticket.borrowed == 2
        assert [reader.block(20), reader.block(21)] == [lender.block(7), lender.block(3)]
        assert reader.block(22) == reader.payload(slot_index(0, 2))
        assert not np.delete(reader.bytes.reshape(LAYERS, BLOCKS, -1), TARGETS, axis=1).any()
        eventually(lambda: lent.is_taken, "the lender to hear that they were taken")
        recall(lender, lent)


def test_lent_block_whose_slot_is_gone_fails_the_load(root: Path, worker: Worker) -> None:
    with engines(root) as (lender, reader):
        recalled = lend(lender)
        reader.header(slot_index(0, 1), 4, KEYS[1])
        ticket = load(reader)
        ticket.synchronize()
        assert not ticket.succeeded() and reader.count("copy_worker_stale") == 1
        recall(lender, recalled)


def test_block_that_was_changed_after_its_recall_is_not_read(root: Path, worker: Worker) -> None:
    with engines(root) as (lender, reader):
        recall(lender, lend(lender))
        lender.bytes[:] = 0xAA
        ticket = load(reader)
        ticket.synchronize()
        assert ticket.succeeded() and ticket.borrowed == 0 and from_slots(reader)
        own = lend(reader)
        to_itself = load(reader)
        to_itself.synchronize()
        assert to_itself.borrowed == 0, "an engine borrows from itself"
        recall(reader, own)


def test_recall_waits_for_readers_under_way_and_for_no_others(root: Path, gate: tuple[GatedDevice, CopyWorker]) -> None:
    with engines(root, 3) as (lender, first, second):
        lent, device = lend(lender), gate[0]
        reading = load(first)
        assert device.reading.acquire(timeout=10)
        lender.link.recall(lent)
        eventually(lambda: not gate[1].loans._open, "the recall at the worker")  # the reader has a line of its own
        late = load(second)
        late.synchronize()
        assert late.succeeded() and late.borrowed == 0 and from_slots(second), "a recalled block was lent again"
        assert not lent.is_over and not reading.query()
        device.open.set()
        reading.synchronize()
        assert reading.succeeded() and reading.borrowed == 3
        assert [first.block(block) for block in TARGETS] == [lender.block(block) for block in LENT]
        eventually(lambda: lent.is_over, "the recall")


def test_two_readers_share_a_loan_and_one_recall_ends_it(root: Path, gate: tuple[GatedDevice, CopyWorker]) -> None:
    with engines(root, 3) as (lender, *readers):
        lent, device = lend(lender), gate[0]
        tickets = [load(reader) for reader in readers]
        assert all(device.reading.acquire(timeout=10) for _ in tickets), "one reader waits for the other"
        lender.link.recall(lent)
        device.open.set()
        for ticket, reader in zip(tickets, readers, strict=True):
            ticket.synchronize()
            assert ticket.borrowed == 3
            assert [reader.block(block) for block in TARGETS] == [lender.block(block) for block in LENT]
        eventually(lambda: lent.is_over, "the recall")


def test_blocks_of_a_lender_that_left_are_read_from_slots_again(
    root: Path, gate: tuple[GatedDevice, CopyWorker]
) -> None:
    with engines(root) as (lender, reader):
        lent, (device, server) = lend(lender), gate
        ticket = load(reader)
        assert device.reading.acquire(timeout=10)
        leaving = threading.Thread(target=lender.link.close)  # it waits for the worker
        leaving.start()
        eventually(lambda: not server.loans.lenders_of(KEYS, reader=object()), "the worker to notice")  # type: ignore[arg-type]
        assert not lent.is_over, "somebody reads the memory"
        device.open.set()
        ticket.synchronize()
        assert ticket.succeeded() and ticket.borrowed == 0 and from_slots(reader)
        leaving.join(10)
        assert lent.is_over
        lender.link = idle_link()


def test_lender_killed_while_it_is_read(root: Path, gate: tuple[GatedDevice, CopyWorker]) -> None:
    device, server = gate
    with engines(root) as (_, reader):
        lender = subprocess.Popen(
            [sys.executable, "-c", LENDER, str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert lender.stdout is not None and lender.stdin is not None
        assert lender.stdout.readline() == "lent\n"
        ticket = load(reader)
        assert device.reading.acquire(timeout=10)
        lender.kill()
        lender.wait(10)
        eventually(lambda: not server.loans.lenders_of(KEYS, reader=object()), "the worker to notice")  # type: ignore[arg-type]
        device.open.set()
        ticket.synchronize()
        assert ticket.succeeded() and ticket.borrowed == 0 and from_slots(reader)
        after = load(reader)
        after.synchronize()
        assert after.succeeded() and after.borrowed == 0
        lender.stdin.close()
        lender.stdout.close()


def test_reader_that_ends_midway_holds_no_lent_block(root: Path, gate: tuple[GatedDevice, CopyWorker]) -> None:
    with engines(root) as (lender, reader):
        lent, device = lend(lender), gate[0]
        load(reader)
        assert device.reading.acquire(timeout=10)
        leaving = threading.Thread(target=reader.link.close)
        leaving.start()
        lender.link.recall(lent)
        time.sleep(0.05)
        assert not lent.is_over, "its copy is still under way"
        device.open.set()
        eventually(lambda: lent.is_over, "the recall")
        leaving.join(10)
        reader.link = idle_link()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_loans_end_when_the_worker_dies_or_is_killed(root: Path, worker: Worker, number: signal.Signals) -> None:
    """It is killed when it does not answer."""
    with engines(root, 1, WEDGE_SECONDS) as (lender,):
        lent = lend(lender)
        worker.signal(number)
        eventually(lambda: not runs(worker.process.pid), "every thread of the worker to feel the signal")
        started = time.monotonic()
        lender.link.recall(lent)
        eventually(lambda: lent.is_over, "the end of the loan")
        assert time.monotonic() - started < WEDGE_SECONDS + 3
        assert worker.process.wait(5) == -signal.SIGKILL, "the worker could still have read"
        assert lender.link.lend(lent_rows()) is None
        lender.link.recall(lent)


def test_long_lending_is_taken_with_its_last_message(root: Path, worker: Worker) -> None:
    many = [BlockKey(index.to_bytes(16, "big")) for index in range(ROWS_MAX + 5)]
    with engines(root) as (lender, reader):
        lent = lender.link.lend([row(index % BLOCKS, 0, 0, key) for index, key in enumerate(many)])
        assert lent is not None
        lent.lent.synchronize()
        for key, taken in ((many[0], False), (many[-1], True)):
            reader.header(slot_index(0, 9), 2, key)
            ticket = reader.copy(Direction.LOAD, row(1, slot_index(0, 9), 2, key), may_borrow=True)
            ticket.synchronize()
            assert ticket.borrowed == 1
            eventually(lambda taken=taken: lent.is_taken or not taken, "the lender to hear")
            assert lent.is_taken == taken
        recall(lender, lent)


# -- the connector's worker half ----


class Loaning:
    """WorkerLoans of one engine, and what they reported."""

    def __init__(self, bench: Bench, peers: PeerCopyWorkers | None = None) -> None:
        self.loans = WorkerLoans(RemoteCopier(bench.link, None, peers=peers))  # type: ignore[arg-type]
        self.returned: list[int] = []

    def follow(self, *, lends: tuple[int, ...] = (), recalls: tuple[int, ...] = ()) -> None:
        blocks = tuple(zip(LENT, KEYS, strict=True))
        self.loans.follow(StepPlan(lends=[LendPlan(one, blocks) for one in lends], recalls=list(recalls)))

    def poll(self) -> list[int]:
        report = StepReport()
        self.loans.report(report)
        self.returned += [loan_id for loan_id, _ in report.returned]
        return self.returned


def borrowed_by(reader: Bench) -> int:
    ticket = load(reader)
    ticket.synchronize()
    assert ticket.succeeded()
    return ticket.borrowed


def test_taken_loan_is_returned_and_an_untaken_one_recalled(root: Path, worker: Worker) -> None:
    """The first one is returned unasked."""
    with engines(root) as (lender, reader):
        one = Loaning(lender)
        one.follow(lends=(1,))
        eventually(lambda: borrowed_by(reader) == 3, "the blocks to be lent")
        eventually(lambda: one.poll() == [1], "the loan to come back")
        one.follow(lends=(2,))
        time.sleep(0.05)
        assert one.poll() == [1], "nobody took it, nobody asked for it"
        one.follow(recalls=(2, 7))
        eventually(lambda: sorted(one.poll()) == [1, 2, 7], "what was recalled, and what was never made")
        assert borrowed_by(reader) == 0
        time.sleep(0.05)
        assert sorted(one.poll()) == [1, 2, 7], "said once"


def test_loan_comes_back_when_the_worker_dies(root: Path, worker: Worker) -> None:
    """It comes back at once when there is no worker."""
    with engines(root, 1) as (lender,):
        one = Loaning(lender)
        one.follow(lends=(1,))
        assert one.poll() == []
        worker.signal(signal.SIGKILL)
        eventually(lambda: one.poll() == [1], "the loan to come back")
        one.follow(lends=(2,))
        assert one.poll() == [1, 2]


def test_blocks_are_lent_to_the_engines_of_other_devices_as_well(
    root: Path, worker: Worker, gate: tuple[GatedDevice, CopyWorker]
) -> None:
    device, server = gate
    device.open.set()
    with engines(root, 1) as (lender,):
        peers = PeerCopyWorkers(lender.offer)
        reader = Bench(root, 60.0, device.name)
        reader.bytes[:] = 0
        seal_other_bytes(reader)
        reader.follow()
        try:
            one = Loaning(lender, peers)
            peers.follow(lender.directory, lender.pool())
            eventually(lambda: [link.is_ready for link in peers.links()] == [True], "the other device's worker")
            one.follow(lends=(1,))
            eventually(lambda: borrowed_by(reader) == 3, "the blocks to be lent there")
            assert [reader.block(block) for block in TARGETS] == [lender.block(block) for block in LENT]
            eventually(lambda: one.poll() == [1], "the loan to come back from both")
            assert borrowed_by(reader) == 0 and from_slots(reader)
            [link] = peers.links()
            refused = link.submit(Direction.STORE, [row(0, slot_index(0, 9), 1)])
            link.flush()
            assert refused is not None
            refused.synchronize()
            assert refused.outcome is CopyOutcome.REFUSED, "that worker copies for the engine, without its slots' lock"
            one.follow(lends=(2,))
            eventually(lambda: borrowed_by(reader) == 3, "the blocks to be lent again")
            peers.close()
            assert not server.loans.lenders_of(KEYS, reader=object()), "a lender that is gone"  # type: ignore[arg-type]
            one.follow(recalls=(2,))  # whether it heard before it left that they were taken is a race
            eventually(lambda: one.poll() == [1, 2], "the loan to come back")
        finally:
            peers.close()
            reader.close()
