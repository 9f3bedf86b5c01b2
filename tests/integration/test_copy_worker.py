"""A copy worker process on real memory: an engine's KV cache in a memfd, a segment in /dev/shm, a Unix socket between.

What a healthy worker copies is checked byte by byte; what a stopped, killed or stuck one leaves is checked to be an
answer in bounded time and not one byte where it must not be.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvservice.copying.copies import AlreadyEnded
from kvservice.copying.device import HOST, HostDevice
from kvservice.copying.engine.link import ROWS_OUTSTANDING_MAX, Copies, KVOffer, WorkerLink
from kvservice.copying.memory import SharedMemory
from kvservice.copying.message import (
    MESSAGE_BYTES_MAX,
    VERSION,
    CopyOutcome,
    CopyRow,
    Direction,
    Kind,
    MemoryKind,
    PackedJob,
    PoolSource,
    pack_copies,
    pack_json,
    pack_pool,
    pack_rows,
)
from kvservice.copying.process import STATUS_WEDGED
from kvservice.copying.worker import server as server_module
from kvservice.copying.worker.server import CopyWorker, CopyWorkerConfig
from kvservice.core.segment.copy_runs import Descriptors, RegionLayout
from kvservice.core.segment.digest import digest_payload
from kvservice.core.segment.geometry import plan_geometry, slot_index
from kvservice.core.segment.header import SlotHeader
from kvservice.core.segment.layout import SlotLayout
from kvservice.discovery import copy_worker_socket, find_copy_workers, node_directory
from kvservice.errors import ServiceConflict
from kvservice.memory.liveness import claim
from kvservice.memory.segment import Segment
from kvservice.testing.eventually import eventually
from kvservice.testing.unique import unique_name
from kvservice.units import BlockKey, BootEpoch, Generation, MiB, NodeId, SlotIndex, SpanRoute
from tests.fuzz.damage import damaged

LAYERS, HEADS, TOKENS, CELL, BLOCKS = 3, 2, 16, 64, 40
SLOT = SlotLayout(LAYERS, HEADS, TOKENS * CELL, TOKENS)
BLOCK_BYTES = HEADS * TOKENS * CELL  # of a layer
# [layer][block][token][head][K‖V]: a block is many small pieces
LAYOUT = RegionLayout(
    LAYERS * BLOCKS * BLOCK_BYTES,
    BLOCKS,
    tuple(layer * BLOCKS * BLOCK_BYTES for layer in range(LAYERS)),
    parts=1,
    heads=HEADS,
    tokens=TOKENS,
    cell_bytes=CELL,
    block_stride=BLOCK_BYTES,
    part_stride=0,
    head_stride=CELL,
    token_stride=HEADS * CELL,
)
KEY = BlockKey(b"a key of 16 byte")
WEDGE_SECONDS = 1.5
PTRACE_SEIZE, PTRACE_INTERRUPT, WALL = 0x4206, 0x4207, 0x40000000


class Worker:
    """`kvservice copy-worker` for this node directory."""

    def __init__(self, root: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "kvservice", "copy-worker", "--service", "s", "--node", "n"]
        environment = {**os.environ, "KVSERVICE_RUNTIME_DIR": str(root)}
        self.process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        self.first_line = self.process.stdout.readline()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)
        if number == signal.SIGSTOP:  # a thread that runs on another core goes on until it is told
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def end(self) -> int:
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
            self.process.terminate()
        try:
            return self.process.wait(10)
        finally:
            assert self.process.stdout is not None
            self.process.stdout.close()


class Bench:
    """One engine: its memory, a segment, and the link between them."""

    def __init__(self, root: Path, wedge_seconds: float = WEDGE_SECONDS, device: str = HOST) -> None:
        self.root = root
        self.directory = node_directory("s", NodeId("n"), root)
        path = Path(f"/dev/shm/kvservice-test{unique_name()}-n")
        self.segment = Segment.create(path, plan_geometry(16 * MiB), "n")
        self.segment.assign_slab(0, SLOT.payload_bytes)
        self.kv = SharedMemory.make(LAYOUT.region_bytes)
        self.bytes = np.frombuffer(self.kv.buffer, np.uint8)
        self.bytes[:] = np.random.default_rng(7).integers(0, 256, LAYOUT.region_bytes, np.uint8)
        self.engine_id = os.urandom(16)
        memory = {"kind": MemoryKind.MEMFD.value, "bytes": LAYOUT.region_bytes}
        self.offer = KVOffer(device, memory, LAYOUT.fields(), self.kv.descriptor)
        self.link = WorkerLink(self.offer, wedge_seconds)
        self.counters: dict[str, int] = {}

    def close(self) -> None:
        self.link.close()
        del self.bytes
        self.kv.close()
        self.segment.close()
        self.segment.unlink()

    def pool(self, pool_id: int = 1) -> PoolSource:
        return PoolSource(
            pool_id, str(self.segment.path), self.segment.geometry, self.segment.epoch, SLOT, self.engine_id
        )

    @property
    def is_free(self) -> bool:
        """No process of this engine can write."""
        with claim(self.segment, self.engine_id) as is_free:
            return is_free

    def follow(self, pool_id: int = 1, wait: bool = True) -> None:
        self.link.follow(self.directory, self.pool(pool_id))
        if wait:
            eventually(lambda: self.link.is_ready, "the link to be ready")

    def header(self, slot: SlotIndex, generation: int, key: BlockKey = KEY) -> None:
        digest = digest_payload(self.segment.payload(slot, SLOT.payload_bytes), key)
        epoch = BootEpoch(self.segment.epoch)
        self.segment.write_header(
            slot, SlotHeader(epoch, Generation(generation), key, SLOT.payload_bytes, SpanRoute(0), digest, 0)
        )

    def block(self, block: int) -> bytes:
        """The block as it must look in a slot."""
        layers = self.bytes.reshape(LAYERS, BLOCKS, TOKENS, HEADS, CELL)
        return layers[:, block].transpose(0, 2, 1, 3).tobytes()

    def payload(self, slot: SlotIndex) -> bytes:
        return bytes(self.segment.payload(slot, SLOT.payload_bytes))

    def copy(self, direction: Direction, *rows: CopyRow, may_borrow: bool = False) -> Copies:
        ticket = self.link.submit(direction, rows, may_borrow=may_borrow)
        assert ticket is not None
        self.link.flush()
        return ticket

    def count(self, name: str) -> int:
        for counter, count in self.link.take_counters().items():
            self.counters[counter] = self.counters.get(counter, 0) + count
        return self.counters.get(name, 0)


def row(block: int, slot: int, generation: int, key: BlockKey = KEY) -> CopyRow:
    return CopyRow(block, SlotIndex(slot), Generation(generation), key)


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvm-") as folder:  # short: it holds sockets
        yield Path(folder)


@pytest.fixture
def bench(root: Path) -> Iterator[Bench]:
    made = Bench(root)
    yield made
    made.close()


@pytest.fixture
def worker(root: Path) -> Iterator[Worker]:
    started = Worker(root)
    yield started
    started.end()


def test_blocks_go_to_their_slots_and_come_back_byte_for_byte(bench: Bench, worker: Worker) -> None:
    bench.follow()
    slots = [slot_index(0, index) for index in (5, 3, 9)]
    for slot in slots:
        bench.header(slot, 1)
    before = bench.bytes.copy()
    ticket = bench.copy(Direction.STORE, *(row(block, slot, 1) for block, slot in zip((7, 30, 0), slots, strict=True)))
    ticket.synchronize()
    assert ticket.succeeded()
    assert [bench.payload(slot) for slot in slots] == [bench.block(block) for block in (7, 30, 0)]
    assert np.array_equal(bench.bytes, before), "a store wrote the engine's memory"
    for slot in slots:
        bench.header(slot, 2)
    expected = bench.bytes.reshape(LAYERS, BLOCKS, -1).copy()
    expected[:, [20, 21, 22]] = expected[:, [7, 30, 0]]
    ticket = bench.copy(Direction.LOAD, *(row(block, slot, 2) for block, slot in zip((20, 21, 22), slots, strict=True)))
    ticket.synchronize()
    assert ticket.succeeded()
    assert np.array_equal(bench.bytes.reshape(LAYERS, BLOCKS, -1), expected), "another block was written"


def test_an_engine_with_thousands_of_descriptors_is_served(root: Path, worker: Worker) -> None:
    """select() knows those up to 1,023 only."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2048:
        pytest.skip("this process may not open so many files")
    many = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    bench = Bench(root)
    try:
        bench.follow()
        bench.header(slot_index(0, 5), 1)
        ticket = bench.copy(Direction.STORE, row(7, slot_index(0, 5), 1))
        ticket.synchronize()
        assert ticket.succeeded()
        worker.process.kill()
        eventually(lambda: not bench.link.is_ready, "the link is over")
    finally:
        bench.close()
        for descriptor in many:
            os.close(descriptor)


@pytest.mark.parametrize("change", ["generation", "stable", "no header", "epoch"])
def test_slot_that_is_no_longer_reserved_is_not_written(bench: Bench, worker: Worker, change: str) -> None:
    bench.follow()
    good, bad = slot_index(0, 1), slot_index(0, 2)
    bench.header(good, 1)
    bench.header(bad, {"generation": 3, "stable": 2}.get(change, 1))
    if change == "no header":
        bench.segment.clear_header(bad)
    if change == "epoch":
        bench.segment.epoch = BootEpoch(bench.segment.epoch + 1)
        bench.segment.write_control("n")  # the shard was restarted and adopted its segment
    ticket = bench.copy(Direction.STORE, row(0, good, 1), row(1, bad, 2 if change == "stable" else 1))
    ticket.synchronize()
    assert ticket.outcome is CopyOutcome.STALE
    assert bench.payload(bad) == bytes(SLOT.payload_bytes)
    assert bench.count("copy_worker_stale") == 1


@pytest.mark.parametrize("change", ["generation", "key", "being written"])
def test_slot_that_is_not_what_was_promised_is_not_loaded(bench: Bench, worker: Worker, change: str) -> None:
    bench.follow()
    slot = slot_index(0, 1)
    bench.segment.payload(slot, SLOT.payload_bytes)[:] = b"x" * SLOT.payload_bytes
    bench.header(
        slot, {"generation": 4, "being written": 3}.get(change, 2), BlockKey(b"y" * 16) if change == "key" else KEY
    )
    before = bench.bytes.copy()
    ticket = bench.copy(Direction.LOAD, row(4, slot, 3 if change == "being written" else 2))
    ticket.synchronize()
    assert ticket.outcome is CopyOutcome.STALE
    assert np.array_equal(bench.bytes, before)


@pytest.mark.parametrize(("block", "slot"), [(BLOCKS, 0), (0, slot_index(0, 65_535)), (0, slot_index(4000, 0))])
def test_rows_outside_the_memory_are_refused(bench: Bench, worker: Worker, block: int, slot: int) -> None:
    bench.follow()
    bench.header(slot_index(0, 0), 1)
    ticket = bench.copy(Direction.STORE, row(block, slot, 1))
    ticket.synchronize()
    assert ticket.outcome is CopyOutcome.REFUSED
    assert bench.link.is_ready, "one bad row ends one copy, not the connection"


def test_worker_killed_fails_every_queued_copy(bench: Bench, worker: Worker, root: Path) -> None:
    bench.follow()
    worker.signal(signal.SIGSTOP)
    tickets = [bench.copy(Direction.STORE, row(0, index, 1)) for index in range(50)]
    tickets += [bench.copy(Direction.LOAD, row(0, index, 2)) for index in range(50)]
    assert not any(ticket.query() for ticket in tickets)
    worker.signal(signal.SIGKILL)
    eventually(lambda: all(ticket.query() for ticket in tickets), "all tickets to end", WEDGE_SECONDS)
    assert not any(ticket.succeeded() for ticket in tickets)
    assert bench.link.submit(Direction.STORE, [row(0, 0, 1)]) is None, "nothing is given to a dead worker"
    assert bench.count("copy_worker_lost_copies") == 100
    second = Worker(root)
    try:
        eventually(lambda: bench.link.is_ready, "the link to find the next worker")
        bench.header(slot_index(0, 0), 1)
        ticket = bench.copy(Direction.STORE, row(3, slot_index(0, 0), 1))
        ticket.synchronize()
        assert ticket.succeeded() and bench.payload(slot_index(0, 0)) == bench.block(3)
    finally:
        second.end()


def test_worker_that_hangs_is_killed_and_its_copies_end(bench: Bench, worker: Worker) -> None:
    """Every copy ends in bounded time."""
    bench.follow()
    bench.header(slot_index(0, 0), 1)
    worker.signal(signal.SIGSTOP)
    started = time.monotonic()
    ticket = bench.copy(Direction.STORE, row(0, slot_index(0, 0), 1))
    assert time.monotonic() - started < WEDGE_SECONDS / 2, "handing a copy over waited for the worker"
    ticket.synchronize()
    assert WEDGE_SECONDS <= time.monotonic() - started < WEDGE_SECONDS + 3
    assert not ticket.succeeded()
    assert worker.process.wait(1) == -signal.SIGKILL, "a copy called failed could still have run"
    assert bench.payload(slot_index(0, 0)) == bytes(SLOT.payload_bytes)
    assert bench.count("copy_worker_wedged") == 1


def test_engine_never_waits_and_what_is_too_much_is_not_taken(bench: Bench, worker: Worker) -> None:
    bench.follow()
    worker.signal(signal.SIGSTOP)
    started, taken = time.monotonic(), 0
    while (ticket := bench.link.submit(Direction.STORE, [row(0, 0, 1)] * 16)) is not None:
        bench.link.flush()
        taken += 16
    assert taken == ROWS_OUTSTANDING_MAX[Direction.STORE]
    assert time.monotonic() - started < WEDGE_SECONDS
    assert bench.count("copy_worker_full_store") == 1
    load = bench.link.submit(Direction.LOAD, [row(0, 0, 2)])
    assert load is not None and ticket is None, "stores that wait keep no load out"


def test_slots_of_a_gone_engine_wait_for_its_worker(bench: Bench, worker: Worker) -> None:
    bench.follow()
    assert not bench.is_free
    bench.link.leave()
    eventually(lambda: bench.is_free, "the worker to let go after leave")
    bench.follow(2)
    assert not bench.is_free
    bench.link.close()
    eventually(lambda: bench.is_free, "the worker to let go after the end of the engine")
    bench.link = WorkerLink(KVOffer(HOST, {}, {}))


def test_segment_of_an_earlier_boot_is_refused(bench: Bench, worker: Worker) -> None:
    """Copies stay where they were."""
    bench.segment.epoch = BootEpoch(bench.segment.epoch + 1)  # a promise of a boot that the file is not of
    bench.follow(wait=False)
    eventually(lambda: bench.count("copy_worker_refused"), "the refusal")
    assert not bench.link.is_ready
    assert bench.link.submit(Direction.STORE, [row(0, 0, 1)]) is None


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00",
        b"\xff" * 100,
        b"\x01{",
        b"\x02[]",
        b"\x04" + bytes(6),
        b"\x04\x00\xff\xff" + bytes(99),
        b"\x01" * 200_000,
    ],
)
def test_one_engines_nonsense_does_not_reach_another(bench: Bench, worker: Worker, garbage: bytes) -> None:
    bench.follow()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(str(copy_worker_socket(bench.directory, HOST)))
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        stranger.settimeout(20)
        stranger.send(garbage)
        with contextlib.suppress(ConnectionError):
            while stranger.recv(1 << 16):  # an answer that says no, or the end of the connection
                break
    bench.header(slot_index(0, 0), 1)
    ticket = bench.copy(Direction.STORE, row(3, slot_index(0, 0), 1))
    ticket.synchronize()
    assert ticket.succeeded()


@contextlib.contextmanager
def stranger(bench: Bench) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as engine:
        engine.connect(str(copy_worker_socket(bench.directory, HOST)))
        engine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        engine.settimeout(20)
        yield engine


def say_hello(bench: Bench, engine: socket.socket, size: object = LAYOUT.region_bytes) -> None:
    fields = {"device": HOST, "memory": {"kind": MemoryKind.MEMFD.value, "bytes": size}, "layout": LAYOUT.fields()}
    socket.send_fds(engine, [pack_json(Kind.HELLO, {"version": VERSION, **fields})], [bench.kv.descriptor])


def test_descriptors_that_come_with_nonsense_are_closed(bench: Bench, worker: Worker) -> None:
    def open_files() -> int:
        return len(list(Path(f"/proc/{worker.process.pid}/fd").iterdir()))

    bench.follow()
    before = open_files()
    for garbage in (b"\x01{", b"\x63", b"\x02[]", b"\x01" + b"[" * 100_000) * 3:
        with stranger(bench) as engine:
            socket.send_fds(engine, [garbage], [bench.kv.descriptor] * 2)
            with contextlib.suppress(ConnectionError):
                while engine.recv(1 << 16):
                    pass
    with stranger(bench) as engine:
        for size in ("much", -1, 1 << 50):
            say_hello(bench, engine, size)
        engine.recv(1 << 16)  # the refusal
    eventually(lambda: open_files() <= before, "closed descriptors")


def test_damaged_copies_of_a_stranger_harm_nobody(bench: Bench, worker: Worker) -> None:
    """Its pool and its memory are real ones, so that what is still whole is looked at in full."""
    bench.follow()
    before = bytes(bench.bytes)
    rows = pack_rows(CopyRow(i, slot_index(0, i), Generation(4), KEY) for i in range(8))
    whole = pack_copies([PackedJob(1, Direction.LOAD, rows), PackedJob(2, Direction.STORE, rows)])
    draw = random.Random(1)
    for _ in range(40):
        with stranger(bench) as engine, contextlib.suppress(OSError):
            say_hello(bench, engine)
            engine.send(pack_pool(bench.pool()))
            for _ in range(5):
                engine.send(damaged(draw, whole)[:MESSAGE_BYTES_MAX])
    bench.header(slot_index(0, 0), 1)
    ticket = bench.copy(Direction.STORE, row(3, slot_index(0, 0), 1))
    ticket.synchronize()
    assert ticket.succeeded()
    assert bytes(bench.bytes) == before


def test_engine_that_reads_no_answers_is_left(bench: Bench, worker: Worker) -> None:
    """Its process stands still: the worker must not wait for it for ever."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as engine:
        engine.connect(str(copy_worker_socket(bench.directory, HOST)))
        memory = {"kind": MemoryKind.MEMFD.value, "bytes": LAYOUT.region_bytes}
        hello = {"version": VERSION, "device": HOST, "memory": memory, "layout": LAYOUT.fields()}
        socket.send_fds(engine, [pack_json(Kind.HELLO, hello)], [bench.kv.descriptor])
        geometry, epoch = bench.segment.geometry, bench.segment.epoch
        engine.send(pack_pool(PoolSource(1, str(bench.segment.path), geometry, epoch, SLOT, bench.engine_id)))
        eventually(lambda: not bench.is_free, "the worker to hold the engine's lock")
        rows = pack_rows([row(0, 0, 1)])
        engine.setblocking(False)
        job = 0

        def is_left() -> bool:
            nonlocal job
            with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                for _ in range(50):
                    job += 1
                    engine.send(pack_copies([PackedJob(job, Direction.LOAD, rows)]))
            return bool(bench.is_free)

        eventually(is_left, "the worker to leave an engine that does not read")


@pytest.mark.parametrize("kind", ["too small", "can shrink", "a plain file", "no descriptor"])
def test_memory_that_could_kill_the_worker_is_refused(bench: Bench, worker: Worker, root: Path, kind: str) -> None:
    bench.follow()
    if kind == "a plain file":
        descriptor: int | None = os.open(root / "plain", os.O_RDWR | os.O_CREAT)
    else:
        descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    assert descriptor is not None
    os.ftruncate(descriptor, LAYOUT.region_bytes // (2 if kind == "too small" else 1))
    memory = {"kind": MemoryKind.MEMFD.value, "bytes": LAYOUT.region_bytes}
    offered = None if kind == "no descriptor" else descriptor
    stranger = WorkerLink(KVOffer(HOST, memory, LAYOUT.fields(), offered))
    try:
        source = PoolSource(1, str(bench.segment.path), bench.segment.geometry, bench.segment.epoch, SLOT, bytes(16))
        stranger.follow(bench.directory, source)
        eventually(lambda: stranger.take_counters().get("copy_worker_refused"), "the refusal")
        assert not stranger.is_ready
    finally:
        stranger.close()
        os.close(descriptor)
    bench.header(slot_index(0, 0), 1)
    ticket = bench.copy(Direction.STORE, row(3, slot_index(0, 0), 1))
    ticket.synchronize()
    assert ticket.succeeded(), "the worker serves the others on"


def test_second_worker_of_a_device_is_refused(root: Path) -> None:
    """The first one leaves nothing behind."""
    first = Worker(root)
    directory = node_directory("s", NodeId("n"), root)
    [record] = find_copy_workers(directory)
    assert record.pid == first.process.pid and record.device == HOST
    with pytest.raises(ServiceConflict):
        CopyWorker(CopyWorkerConfig("s", NodeId("n"), root), HostDevice()).start()
    assert first.end() == 0
    assert not list(directory.iterdir())


def stop_thread(thread_id: int) -> None:
    """For good, while the other threads of its process go on."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    for request in (PTRACE_SEIZE, PTRACE_INTERRUPT):
        if libc.ptrace(request, thread_id, None, None):
            pytest.skip(f"ptrace is not allowed here: {os.strerror(ctypes.get_errno())}")


def threads_of(process: subprocess.Popen[str]) -> set[int]:
    return {int(path.name) for path in Path(f"/proc/{process.pid}/task").iterdir()}


def test_worker_with_a_hanging_thread_ends_itself(bench: Bench, root: Path) -> None:
    """Every copy ends with it."""
    bench.link.close()
    memory = {"kind": MemoryKind.MEMFD.value, "bytes": LAYOUT.region_bytes}
    bench.link = WorkerLink(KVOffer(HOST, memory, LAYOUT.fields(), bench.kv.descriptor), 20.0)
    worker = Worker(root, "--wedge-seconds", "0.5")
    before = threads_of(worker.process)
    bench.follow()
    made = lambda: sorted(threads_of(worker.process) - before)  # noqa: E731
    eventually(lambda: len(made()) == len(Direction) + 1, "the thread that maps the pool ahead has ended")
    lanes_and_reader = made()
    stop_thread(lanes_and_reader[Direction.STORE])
    bench.header(slot_index(0, 0), 1)
    store = bench.copy(Direction.STORE, row(3, slot_index(0, 0), 1))
    bench.header(slot_index(0, 1), 2)
    load = bench.copy(Direction.LOAD, row(3, slot_index(0, 1), 2))
    load.synchronize()
    assert load.succeeded(), "the other lane goes on"
    store.synchronize()
    assert not store.succeeded()
    while os.WIFSTOPPED(os.waitpid(lanes_and_reader[Direction.STORE], WALL)[1]):  # by its tracer, before its process
        pass
    assert worker.end() == STATUS_WEDGED
    assert bench.payload(slot_index(0, 0)) == bytes(SLOT.payload_bytes)


class StuckCopies:
    """A copy call that does not come back until the test says so."""

    def __init__(self, release: threading.Event) -> None:
        self.release = release

    def start(self, direction: Direction, runs: Descriptors) -> AlreadyEnded:
        assert self.release.wait(30)
        return AlreadyEnded()

    def close(self) -> None:
        return


class StuckDevice(HostDevice):
    def __init__(self) -> None:
        self.release = threading.Event()

    def copies(self, kv: object, segment: Segment) -> StuckCopies:  # type: ignore[override]
        return StuckCopies(self.release)


def test_stuck_copy_is_reported_and_state_still_answers(bench: Bench, root: Path) -> None:
    device = StuckDevice()
    server = CopyWorker(CopyWorkerConfig("s", NodeId("n"), root, wedge_seconds=0.3), device)
    server.start()
    try:
        bench.follow()
        bench.header(slot_index(0, 0), 1)
        ticket = bench.copy(Direction.STORE, row(0, slot_index(0, 0), 1))
        assert server.wedged.wait(5)
        started = time.monotonic()
        state = server.state()
        assert time.monotonic() - started < 1.0
        assert state["wedged"] and state["engines"] == 1
    finally:
        device.release.set()
        ticket.synchronize()
        server.stop()
    assert server.state()["counters"]["store_blocks"] == 1


def test_worker_without_descriptors_takes_engines_later(bench: Bench, root: Path) -> None:
    server, errors = CopyWorker(CopyWorkerConfig("s", NodeId("n"), root), HostDevice()), [OSError(errno.EMFILE, "")]

    class Listener(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            if errors:
                raise errors.pop()
            return super().accept()

    with pytest.MonkeyPatch.context() as patch:
        listen = server_module._listen
        patch.setattr(server_module, "_listen", lambda path: Listener(fileno=listen(path).detach()))
        server.start()
    bench.follow()
    server.stop()
