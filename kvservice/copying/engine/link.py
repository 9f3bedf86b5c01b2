"""The engine's connection to a copy worker: hands it copies without ever blocking, and knows how each of them ended.

There are two threads. The engine's thread submits and asks. The link's own thread connects, reads answers and watches
the clock. A copy that was handed over has ended only when the worker said so, or when the worker is known to do nothing
any more: it said BYE before it closed the connection, or it is dead. A worker that gives no sign of life is killed. If
it were only given up, a copy could still run, and write into blocks that belong to another request by then. A worker
that this process could not kill (another user or PID namespace) is therefore never used.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

from kvservice.copying.engine.worker_process import WorkerProcess, readable_of
from kvservice.copying.message import (
    MESSAGE_BYTES_MAX,
    NO_EVENT,
    ROWS_MAX,
    VERSION,
    CopyOutcome,
    CopyRow,
    Direction,
    Ended,
    Kind,
    PackedJob,
    PoolSource,
    kind_of,
    pack_copies,
    pack_json,
    pack_lent,
    pack_pool,
    pack_rows,
    parse_done,
    parse_json,
    parse_lent,
)
from kvservice.discovery import copy_worker_socket
from kvservice.errors import InvalidRequest, KVServiceError, Unavailable
from kvservice.private_files import peer_credentials
from kvservice.units import SlotIndex

log = logging.getLogger("kvservice.copying")

# For the connection and the answer to a greeting, which take milliseconds. Then the worker is tried again later.
CONNECT_SECONDS = 5.0
RETRY_SECONDS = 2.0  # between attempts to find a worker
# The longest sleep of the link's thread, which looks at overdue copies after it. A quarter of `wedge_seconds` if that
# is less.
IDLE_SECONDS = 1.0
# If a queue of the worker has not moved for this long, the worker is killed and its copies fail. A copy of a step takes
# milliseconds.
WEDGE_SECONDS = 10.0
# Rows handed over and not ended, per direction. Beyond it `submit` returns None and the engine's process copies by
# itself. Loads get more room, because requests wait for them.
ROWS_OUTSTANDING_MAX = {Direction.LOAD: 16_384, Direction.STORE: 4096}
SEND_BUFFER_BYTES = 1 << 20  # Of the socket, for eight of the largest messages, so that `flush` rarely finds it full.
assert min(ROWS_OUTSTANDING_MAX.values()) >= ROWS_MAX and MESSAGE_BYTES_MAX <= SEND_BUFFER_BYTES


@dataclass(frozen=True, slots=True)
class KVOffer:
    """An engine's KV memory as it is offered to a worker. `descriptor` is sent with it; None for memory without one."""

    device: str
    memory: dict[str, Any]
    layout: dict[str, object]
    descriptor: int | None = None


class Copies:
    """A ticket for copies that were handed to a worker. The engine's thread reads it, the link's thread ends it."""

    __slots__ = ("_condition", "borrowed", "outcome", "parts", "submitted")

    digests: ClassVar[Mapping[SlotIndex, int]] = MappingProxyType({})  # a worker makes none

    def __init__(self, parts: int, condition: threading.Condition) -> None:
        self.parts = parts  # messages still under way
        self.outcome = CopyOutcome.COPIED
        self.borrowed = 0  # blocks that were copied from another engine
        self.submitted = time.monotonic()
        self._condition = condition

    def query(self) -> bool:
        return self.parts == 0

    def synchronize(self) -> None:
        """Block until the copies have ended. The time is bounded, because the link ends every ticket."""
        with self._condition:
            self._condition.wait_for(self.query)

    def succeeded(self) -> bool:
        return self.outcome is CopyOutcome.COPIED


class Lent:
    """Blocks lent to the other engines of a worker. They must not change until `is_over`, which follows a recall or the
    end of the worker. The engine's thread reads it, the link's thread changes it."""

    __slots__ = ("ids", "is_over", "is_taken", "lent", "returned")

    def __init__(self, ids: list[int], lent: Copies) -> None:
        self.ids = ids  # ids of the LEND jobs
        self.lent = lent  # ends when the blocks can be read
        self.returned: Copies | None = None  # the ticket of the recall
        self.is_taken = False  # a reader has read what it wanted
        self.is_over = False  # nobody reads the blocks, now or later


# What the worker does in order: copies of one direction, or messages of one kind.
_Queue: TypeAlias = "Direction | Kind"


@dataclass(slots=True)
class _JobUnderWay:
    ticket: Copies
    queue: _Queue
    rows: int
    since: float
    lent: Lent | None = None  # of a recall


class WorkerLink:
    """Connects one engine process with the copy worker of its device. `follow` names the pool. Copies can be submitted
    while `is_ready`. All public methods but `close` return at once."""

    def __init__(
        self, offer: KVOffer, wedge_seconds: float = WEDGE_SECONDS, *, worker_device: str | None = None
    ) -> None:
        """`worker_device` is set for a worker of another device: it copies nothing for this engine, but blocks can be
        lent to it."""
        self._offer = offer
        self._worker_device = worker_device or offer.device
        self._lends_only = worker_device is not None
        self._wedge_seconds = wedge_seconds
        self._lock = threading.Lock()  # never held while anything blocks
        self._ended = threading.Condition(self._lock)
        self._jobs: dict[int, _JobUnderWay] = {}
        self._last_id = 0
        self._lent: dict[int, Lent] = {}  # by the id of its last LEND job, until it is over
        self._rows = Counter[_Queue]()  # rows handed over and not ended
        self._progress: dict[_Queue, float] = {}
        self._batch: list[PackedJob] = []  # submitted since the last flush
        self._unsent: deque[bytes] = deque()
        self._wanted: tuple[Path, PoolSource] | None = None
        self._socket: socket.socket | None = None
        self._ready = False
        self._said_bye = False
        self._problem = ""  # the last problem that was logged
        self._closing = False
        self._else = f"nothing is lent to {worker_device}" if worker_device else "copies run in the engine's process"
        self._counters = Counter[str]()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kvservice-copy-link", daemon=True)
        self._thread.start()

    # -- the engine's thread ----

    @property
    def is_ready(self) -> bool:
        return self._ready

    def follow(self, directory: Path, pool: PoolSource) -> None:
        """Use the worker that is registered in this node directory, for copies to and from this pool."""
        with self._lock:
            self._wanted, self._ready = (directory, pool), False
        self._wake()

    def leave(self) -> None:
        """Stop using the pool until the next `follow`. No copy may be under way."""
        with self._lock:
            self._wanted, self._ready = None, False
        self._wake()

    def submit(self, direction: Direction, rows: Sequence[CopyRow], *, may_borrow: bool = False) -> Copies | None:
        """Take copies; the next `flush` sends them. Returns None if there is no worker for them, or if too many rows
        are outstanding. With `may_borrow`, blocks that another engine lends may be loaded from there."""
        pieces = [rows[start : start + ROWS_MAX] for start in range(0, len(rows), ROWS_MAX)]
        with self._lock:
            if not self._ready:
                return None
            if self._rows[direction] + len(rows) > ROWS_OUTSTANDING_MAX[direction]:
                self._counters[f"copy_worker_full_{direction.name.lower()}"] += 1
                return None
            ticket = Copies(len(pieces), self._ended)
            for piece in pieces:
                self._last_id += 1
                self._jobs[self._last_id] = _JobUnderWay(ticket, direction, len(piece), ticket.submitted)
                self._batch.append(PackedJob(self._last_id, direction, pack_rows(piece), may_borrow))
            self._rows[direction] += len(rows)
        return ticket

    def flush(self, event: int = NO_EVENT) -> None:
        """Send what was submitted. A step of ordinary size takes one message."""
        with self._lock:
            batch, self._batch = self._batch, []
            if self._socket is None or not batch:
                return
            self._unsent.extend(_messages(batch, event))
            self._send_unsent()
            unsent = bool(self._unsent)
        if unsent:
            self._wake()

    def lend(self, blocks: Sequence[CopyRow], event: int = NO_EVENT) -> Lent | None:
        """Let the other engines of this worker copy these blocks, which they find by key; slots and generations are
        not used. The blocks must not change until the loan is over. Returns None if there is no worker; nothing is
        lent then."""
        pieces = [pack_rows(blocks[start : start + ROWS_MAX]) for start in range(0, len(blocks), ROWS_MAX)]
        with self._lock:
            if not self._ready or self._socket is None or not pieces:
                return None
            lent = Lent([], Copies(len(pieces), self._ended))
            for piece in pieces:
                lent.ids.append(self._add_job(lent.lent, Kind.LEND))
                job = PackedJob(lent.ids[-1], Direction.LOAD, piece)
                self._unsent.append(pack_copies([job], event, Kind.LEND))
            self._lent[lent.ids[-1]] = lent
            self._send_unsent()
        self._wake()
        return lent

    def recall(self, lent: Lent) -> None:
        """Ask for the end of this loan; `is_over` tells when it has come. Copies under way are waited for, others do
        not start."""
        with self._lock:
            if lent.is_over or lent.returned is not None:
                return
            lent.returned = Copies(len(lent.ids), self._ended)
            if self._socket is None:
                # the link's thread ends the loan when it gives the connection up and the worker does nothing any more
                return
            for lend_id in lent.ids:
                job_id = self._add_job(lent.returned, Kind.RECALL, lent)
                self._unsent.append(pack_lent(Kind.RECALL, lend_id, job_id))
            self._send_unsent()
        self._wake()

    def _add_job(self, ticket: Copies, kind: Kind, lent: Lent | None = None) -> int:
        """The caller holds the lock."""
        self._last_id += 1
        self._jobs[self._last_id] = _JobUnderWay(ticket, kind, 0, ticket.submitted, lent)
        return self._last_id

    def take_counters(self) -> dict[str, int]:
        with self._lock:
            counters, self._counters = self._counters, Counter()
        return dict(counters)

    def close(self) -> None:
        """Close the connection. Blocks until nothing is under way; bounded, as every copy is. Idempotent."""
        with self._lock:
            self._closing, self._ready = True, False
        self._wake()
        self._thread.join()
        self._wake_reader.close()
        self._wake_writer.close()

    # -- both ----

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it takes no more, so the thread is awake; or the link is closed
            self._wake_writer.send(b"w")

    def _send_unsent(self) -> None:
        """Send as much as the socket takes; the rest stays for later. The caller holds the lock."""
        assert self._socket is not None
        while self._unsent:
            try:
                self._socket.send(self._unsent[0], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:
                self._unsent.clear()  # the link's thread notices the end of the connection
                return
            self._unsent.popleft()

    # -- the link's thread ----

    def _run(self) -> None:
        while True:
            with self._lock:
                wanted, closing = self._wanted, self._closing
            if closing:
                return
            if wanted is None:
                self._sleep(None)
                continue
            worker: WorkerProcess | None = None
            try:
                connection, worker = self._connect(wanted[0])
                self._converse(connection, worker, wanted)
            except Unavailable as error:
                self._note("copy_worker_absent", f"{self._else} until there is a worker: {error}")
            except (KVServiceError, OSError) as error:
                self._note("copy_worker_refused", f"{self._else}: {error}")
            except Exception:  # copies under way must be ended, whatever went wrong here
                self._count("copy_worker_error")
                log.exception("copy worker given up")
            finally:
                self._give_up(worker)
            self._sleep(RETRY_SECONDS)

    def _sleep(self, seconds: float | None) -> None:
        """Sleep until woken, or for this many seconds."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while not self._closing:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            if readable_of([self._wake_reader.fileno()], left):
                self._drain_wakes()
                if deadline is None:
                    return

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_reader.recv(4096):
                pass

    def _connect(self, directory: Path) -> tuple[socket.socket, WorkerProcess]:
        """Connect to the worker. Raises Unavailable if there is none, Refused if it must not be used."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(CONNECT_SECONDS)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            try:
                connection.connect(str(copy_worker_socket(directory, self._worker_device)))
            except OSError as error:
                raise Unavailable(f"no copy worker listens in {directory}: {error}") from error
            pid, user = peer_credentials(connection)
            worker = WorkerProcess.of_peer(pid, user, in_host_memory=self._offer.descriptor is not None)
            try:
                self._greet(connection)
            except BaseException:
                worker.forget()
                raise
            connection.setblocking(False)
        except BaseException:
            connection.close()
            raise
        return connection, worker

    def _greet(self, connection: socket.socket) -> None:
        offer = self._offer
        hello = {
            "version": VERSION,
            "device": offer.device,
            "lends_only": self._lends_only,
            "memory": offer.memory,
            "layout": offer.layout,
        }
        descriptors = [] if offer.descriptor is None else [offer.descriptor]
        try:
            socket.send_fds(connection, [pack_json(Kind.HELLO, hello)], descriptors)
            answer = connection.recv(MESSAGE_BYTES_MAX)
        except OSError as error:  # it hangs or went away, and is tried again
            raise Unavailable(f"the copy worker does not answer: {error}") from error
        if not answer:
            raise Unavailable("the copy worker went away")
        _check_answer(parse_json(answer))

    def _converse(self, connection: socket.socket, worker: WorkerProcess, wanted: tuple[Path, PoolSource]) -> None:
        """Talk to the worker until it is lost or given up, or until another pool is wanted. Raises KVServiceError and
        OSError."""
        directory, asked = wanted[0], None
        asked_at = 0.0
        with self._lock:
            self._socket, self._said_bye = connection, False
            self._progress = {}
        while not self._closing:
            with self._lock:
                now_wanted = self._wanted
            if now_wanted is not None and now_wanted[0] != directory:
                return
            pool = None if now_wanted is None else now_wanted[1]
            if pool != asked:
                message = pack_json(Kind.LEAVE, {}) if pool is None else pack_pool(pool)
                with self._lock:
                    self._unsent.append(message)
                asked, asked_at = pool, time.monotonic()
            if not self._exchange(connection, asked):
                self._note("copy_worker_lost", f"the copy worker is gone: {self._else} until there is one")
                return
            is_late = asked_at + self._wedge_seconds < time.monotonic()
            if asked is not None and not self._ready and not self._closing and is_late:
                raise Unavailable("the copy worker does not answer")
            if self._is_overdue():
                self._note(
                    "copy_worker_wedged",
                    f"the copy worker copied nothing for {self._wedge_seconds:.0f} s, so it is killed",
                )
                worker.kill()
                return

    def _exchange(self, connection: socket.socket, asked: PoolSource | None) -> bool:
        """Wait for something to do, at most IDLE_SECONDS, and do it. Returns False if the connection has ended."""
        with self._lock:
            self._send_unsent()
            writing = [connection.fileno()] if self._unsent else []
        wakes = self._wake_reader.fileno()
        watched = [connection.fileno(), wakes]
        readable = readable_of(watched, min(IDLE_SECONDS, self._wedge_seconds / 4), writing)
        if wakes in readable:
            self._drain_wakes()
        if connection.fileno() not in readable:
            return True
        while True:  # read all there is first: only then can a copy be called late
            try:
                data = connection.recv(MESSAGE_BYTES_MAX, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except ConnectionError:
                return False
            if not data:
                return False
            self._handle(data, asked)
            if self._said_bye:
                return False

    def _handle(self, data: bytes, asked: PoolSource | None) -> None:
        kind = kind_of(data)
        if kind is Kind.DONE:
            self._end_jobs(parse_done(data))
        elif kind is Kind.ANSWER:
            fields = parse_json(data)
            if asked is None or fields.get("pool_id") != asked.pool_id:
                return  # it answers an earlier question
            _check_answer(fields)
            with self._lock:
                if self._wanted is not None and self._wanted[1] == asked and not self._closing:
                    self._ready = True
                    self._counters["copy_worker_connected"] += 1
                    self._problem = ""
        elif kind is Kind.TAKEN:
            _, lend_id = parse_lent(data)
            with self._lock:
                lent = self._lent.get(lend_id)  # a reader reads a loan from its first piece to its last
                if lent is not None:
                    lent.is_taken = True
        elif kind is Kind.BYE:
            self._said_bye = True
        else:
            raise InvalidRequest(f"a worker does not send {kind.name}")

    def _end_jobs(self, ended: Any) -> None:
        now = time.monotonic()
        with self._lock:
            for one in ended:
                self._end_job(one, now)
            self._ended.notify_all()

    def _end_job(self, one: Ended, now: float) -> None:
        job = self._jobs.pop(one.job_id, None)
        if job is None:
            raise InvalidRequest(f"no copy has the id {one.job_id}")
        self._rows[job.queue] -= job.rows
        self._progress[job.queue] = now
        if one.outcome is not CopyOutcome.COPIED:
            job.ticket.outcome = one.outcome
            self._counters[f"copy_worker_{one.outcome.name.lower()}"] += 1
        job.ticket.borrowed += one.borrowed
        job.ticket.parts -= 1
        if job.lent is not None and not job.ticket.parts:
            self._end_loan(job.lent)

    def _end_loan(self, lent: Lent) -> None:
        """The caller holds the lock."""
        self._lent.pop(lent.ids[-1], None)
        lent.is_over = True

    def _is_overdue(self) -> bool:
        """Whether a queue of the worker has not moved for too long."""
        limit = time.monotonic() - self._wedge_seconds
        with self._lock:
            oldest: dict[_Queue, float] = {}
            for job in self._jobs.values():  # in the order in which they were submitted
                oldest.setdefault(job.queue, job.since)
            return any(max(since, self._progress.get(queue, since)) < limit for queue, since in oldest.items())

    def _give_up(self, worker: WorkerProcess | None) -> None:
        """End every copy as failed, once the worker does nothing for this engine any more."""
        with self._lock:
            self._ready = False
            connection, self._socket = self._socket, None
            self._unsent.clear()
            self._batch.clear()
            pending = bool(self._jobs or self._lent)  # a reader may be reading what is lent
        if worker is not None:
            if pending and connection is not None and not self._said_bye:
                worker.await_last_copy(connection, self._wedge_seconds)
            worker.forget()
        if connection is not None:
            connection.close()
        with self._lock:
            self._counters["copy_worker_lost_copies"] += sum(job.rows > 0 for job in self._jobs.values())
            for job in self._jobs.values():
                job.ticket.outcome = CopyOutcome.FAILED
                job.ticket.parts = 0
            self._jobs.clear()
            for lent in list(self._lent.values()):
                self._end_loan(lent)
            self._rows.clear()
            self._ended.notify_all()

    def _count(self, name: str) -> None:
        with self._lock:
            self._counters[name] += 1

    def _note(self, name: str, problem: str) -> None:
        if problem != self._problem:  # the same problem comes again every few seconds
            self._count(name)
            log.warning("%s", problem)
        self._problem = problem


def _messages(batch: Sequence[PackedJob], event: int) -> list[bytes]:
    """As few messages as their size allows. One job always fits one message."""
    messages: list[bytes] = []
    part: list[PackedJob] = []
    size = 0
    for job in batch:
        if part and size + len(job.rows) > MESSAGE_BYTES_MAX - (16 << 10) - 16 * len(part):
            messages.append(pack_copies(part, event))
            part, size = [], 0
        part.append(job)
        size += len(job.rows)
    return [*messages, pack_copies(part, event)]


def _check_answer(fields: dict[str, Any]) -> None:
    """Raises InvalidRequest with the error that the worker reported."""
    error = fields.get("error")
    if error is not None:
        message = error.get("message") if isinstance(error, dict) else error
        raise InvalidRequest(f"the copy worker refused: {message}")
