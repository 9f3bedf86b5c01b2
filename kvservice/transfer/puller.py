"""Verified reads of a peer's blocks, on one thread, which says of each block whether it can be trusted.

A peer of this machine is mapped: the thread and a helper copy and digest its blocks in one pass (see transfer.mapped).
Every other peer is read through a Transport, which the thread owns. The payloads of a job are read in batches, a few of
them in flight. The helper digests what has landed, and when nothing is left to read, both threads do.
Either way, the source headers are read last. A block is OK only if epoch, generation, key, length and digest are those
of the handle, the local bytes have that digest, and the lease has not expired. The order matters: a header that is
unchanged after the payload was read proves that the slot was not rewritten meanwhile.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvservice.core.acquire.pulls import PULL_BLOCKS_MAX
from kvservice.core.events import PullResult
from kvservice.core.segment.copy_runs import Offsets, merge_runs
from kvservice.core.segment.digest import digest_payload
from kvservice.core.segment.geometry import HEADER_BYTES
from kvservice.core.segment.header_checks import are_as_located, is_as_located
from kvservice.errors import TransferError
from kvservice.memory.segment import Segment
from kvservice.observe.failpoints import failpoint
from kvservice.transfer import mapped
from kvservice.transfer.base import Completion, Copy, PeerHandle, TransferId, TransferOutcome, Transport
from kvservice.transfer.connections import AnyPeer, Connections
from kvservice.transfer.greetings import Greetings, OnMet
from kvservice.transfer.job import DoneCallback, PullJob, WritesEndedCallback
from kvservice.transfer.mapped import MappedPeer
from kvservice.transfer.scratch import SCRATCH_HEADERS, Scratch
from kvservice.transfer.silence import Silence
from kvservice.transfer.ways import joined, pack_ways
from kvservice.units import BootEpoch, MiB, NodeId

log = logging.getLogger("kvservice.transfer")

# A batch is half of what is left, within these limits, because what the last batch brings is verified when nothing
# else is left to do.
BATCH_BYTES_MIN, BATCH_BYTES_MAX = 4 * MiB, 8 * MiB
# Of one job. When a reader is killed, a source may crash inside UCX with more in flight over TCP. A transport that
# copies inside its call gets one batch of this size, because each call costs a third of a millisecond of Python, in
# which nothing is copied.
IN_FLIGHT_BYTES_MAX = 24 * MiB
PIECE_BYTES = 2 * MiB  # that one thread verifies before it looks for other work: a tenth of a millisecond
# Of a mapped peer, copied before other jobs have their turn: ten milliseconds. At its end both threads wait.
SLICE_BYTES = 64 * MiB
SHARED_BYTES = 4 * MiB  # a smaller slice is not worth waking the helper
DIGEST_THREADS = 1  # with two, they and the polling thread wait for each other at the interpreter lock
# An idle thread waits this long for a job before it looks whether it must stop, and whether reads that were given up
# have ended.
IDLE_SECONDS = 0.2
GREETING_SECONDS = 0.001  # while it only greets peers, it waits this long for a job between two polls
QUICK_SECONDS = 1.0  # then it polls as if idle: a peer that stopped may keep its answer for minutes
POLL_SECONDS = 0.0001  # between two polls when nothing has moved: shorter than one block takes on a fast link
BROKEN_SECONDS = 0.05  # between two polls of a transport that raises, so that its errors do not use a core
assert PULL_BLOCKS_MAX <= SCRATCH_HEADERS, "the headers of one pull must fit into the scratch area"
assert PIECE_BYTES <= BATCH_BYTES_MIN <= BATCH_BYTES_MAX <= IN_FLIGHT_BYTES_MAX


@dataclass(frozen=True, slots=True)
class _Errand:
    """Something to do for the thread."""

    begin: Callable[[], None]
    refuse: Callable[[], None]  # the thread has ended


@dataclass(slots=True)
class _Active:
    job: PullJob
    on_done: DoneCallback
    on_writes_ended: WritesEndedCallback
    peer: AnyPeer
    way: str  # in which the peer is read
    good: bytearray  # by item: 1 when the bytes that landed have the digest of their handle
    next_item: int = 0  # first item whose payload is not posted yet
    in_flight: dict[TransferId, range] = field(default_factory=dict)  # payload batches
    pieces: deque[range] = field(default_factory=deque)  # landed, and not taken by a thread to be verified
    verifying: list[Future[None]] = field(default_factory=list)
    results: dict[int, PullResult] = field(default_factory=dict)
    headers: TransferId | None = None  # the read of the source headers while it is in flight
    scratch: int | None = None  # index of this job's first scratch header
    headers_read: bool = False
    answered: bool = False  # on_done was called; the job only waits for the end of its writes

    @property
    def payloads_done(self) -> bool:
        return self.next_item >= len(self.job.items) and not self.in_flight

    @property
    def is_reading(self) -> bool:
        return bool(self.in_flight) or self.headers is not None


class Puller:
    """Call `start`, then `submit` from any thread. Callbacks run on the puller's thread and must not block."""

    def __init__(
        self,
        segment: Segment,
        make_transport: Callable[[], Transport] | None,
        clock: Callable[[], float] = time.monotonic,
        *,
        maps_peers: bool = True,
    ) -> None:
        """With `make_transport` None and `maps_peers` it reads peers of this machine only."""
        self._segment = segment
        self._maps_peers = maps_peers
        self._make_transport = make_transport
        self._clock = clock
        self._inbox: queue.SimpleQueue[_Errand | None] = queue.SimpleQueue()
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="kvservice-puller", daemon=True)
        self._digesting = ThreadPoolExecutor(DIGEST_THREADS, thread_name_prefix="kvservice-verify")
        self._active: list[_Active] = []
        self._greeted_at = 0.0
        self._scratch = Scratch()
        self._greetings = Greetings(self._scratch, segment.geometry.scratch_offset)
        self._silence = Silence()
        self._name = ""
        self._description = b""
        self._stopping = False
        self._ended = False  # the thread takes no more jobs
        self._counters: Counter[str] = Counter()
        self._counting = threading.Lock()

    def start(self) -> None:
        """Make the transport, if there is one, on its thread. Blocks until that is done, and raises what it raised."""
        self._digesting.submit(int)  # starts the helper now, because later the system may have no thread left
        self._thread.start()
        self._started.result()

    @property
    def name(self) -> str:
        """The ways that it reads peers in, for people: 'shm', 'nixl', 'shm+nixl'."""
        return self._name

    def describe(self) -> bytes:
        """How peers can read this segment, for their pullers: see transfer.ways."""
        return self._description

    def counters(self) -> dict[str, int]:
        """All counters at this moment. May be called from any thread."""
        with self._counting:
            return dict(self._counters)

    def submit(self, job: PullJob, on_done: DoneCallback, on_writes_ended: WritesEndedCallback) -> None:
        """Begin a job. Never blocks. May be called from any thread.

        `on_done(job id, results)` is called exactly once, by the deadline. If a result is STUCK, `on_writes_ended(job
        id)` is called exactly once, when nothing can write the destinations any more.
        """
        assert 0 < len(job.items) <= SCRATCH_HEADERS, f"{len(job.items)} blocks in one pull"
        failed = (PullResult.FAILED,) * len(job.items)
        self._put(
            partial(self._begin, job, on_done, on_writes_ended),
            partial(self._call, on_done, job.job_id, failed),
        )

    def greet(self, peer: NodeId, epoch: BootEpoch, description: bytes, on_met: OnMet) -> None:
        """Connect to a peer and read one page, so that its first pull finds a way that is open. Never blocks. May be
        called from any thread.

        `on_met(whether)` is called when the read has ended, which may be never if the peer stopped.
        """
        begin = partial(self._greet, peer, epoch, description, on_met)
        self._put(begin, partial(self._call, on_met, False))

    def _put(self, begin: Callable[[], None], refuse: Callable[[], None]) -> None:
        self._inbox.put(_Errand(begin, refuse))
        if self._ended:
            self._refuse_inbox()

    def close(self) -> None:
        """Fail the open jobs, stop the thread and close the transport. Blocks shortly."""
        self._stopping = True
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(10)
        self._digesting.shutdown(wait=True, cancel_futures=True)

    # -- the thread ----

    def _run(self) -> None:
        try:
            self._transport = transport = None if self._make_transport is None else self._make_transport()
            ways = {mapped.NAME: mapped.describe(self._segment)} if self._maps_peers else {}
            if transport is not None:
                ways[transport.name] = transport.describe()
            self._name, self._description = joined(ways), pack_ways(ways)
        except BaseException as error:  # noqa: BLE001  thread boundary: handed to start()
            self._started.set_exception(error)
            return
        self._connections = Connections(transport, self._maps_peers, self._count, self._count_error)
        self._started.set_result(None)
        try:
            while not self._stopping:
                self._take_jobs()
                if (self._active or self._greetings) and not self._step() and not self._is_idle:
                    time.sleep(POLL_SECONDS)
                self._connections.let_go_of_the_gone([active.peer for active in self._active])
        finally:
            self._end()

    def _end(self) -> None:
        """Answer everything as FAILED. After the transport is closed, nothing writes any more."""
        try:
            if self._transport is not None:
                self._transport.close()
        except Exception as error:  # noqa: BLE001  thread boundary: callers still wait for their answers
            self._count_error("transport_close_failed", error)
        self._connections.close()
        for active in self._active:
            self._answer(active, dict.fromkeys(range(len(active.job.items)), PullResult.FAILED))
            if PullResult.STUCK in active.results.values():
                self._call(active.on_writes_ended, active.job.job_id)
        self._active.clear()
        for greeting in self._greetings.give_up():
            self._call(greeting.on_met, False)
        self._ended = True
        self._refuse_inbox()

    def _refuse_inbox(self) -> None:
        """Answer jobs that were submitted too late. Runs on whichever thread finds them."""
        while True:
            try:
                entry = self._inbox.get_nowait()
            except queue.Empty:
                return
            if entry is not None:
                entry.refuse()

    def _call(self, callback: Callable[..., None], *arguments: object) -> None:
        try:
            callback(*arguments)
        except Exception as error:  # noqa: BLE001  thread boundary: one caller's bug must not stop the others' pulls
            self._count_error("callback_errors", error)

    def _count(self, name: str, more: int = 1) -> None:
        with self._counting:
            self._counters[name] += more

    def _count_error(self, name: str, error: Exception) -> None:
        self._count(name)
        log.warning(name, extra={"error": f"{type(error).__name__}: {error}"})

    @property
    def _is_idle(self) -> bool:
        """Whether nobody waits: all that is in flight was given up, or greets a peer."""
        return all(active.answered and active.is_reading for active in self._active)

    def _take_jobs(self) -> None:
        """Take all jobs that have arrived. Waits a little when there is nothing else to do."""
        try:
            is_greeting = bool(self._greetings) and self._clock() < self._greeted_at + QUICK_SECONDS
            wait = GREETING_SECONDS if is_greeting else IDLE_SECONDS
            entry = self._inbox.get(timeout=wait) if self._is_idle else self._inbox.get_nowait()
            while True:
                if entry is not None:
                    entry.begin()
                entry = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _begin(self, job: PullJob, on_done: DoneCallback, on_writes_ended: WritesEndedCallback) -> None:
        try:
            peer = self._connections.connect(job.peer, job.peer_epoch, job.description)
        except Exception as error:  # noqa: BLE001  thread boundary: one peer's failure must not end the thread
            log.info("pull_connect_failed", extra={"peer": job.peer, "error": str(error)})
            self._count("connect_failed")
            self._call(on_done, job.job_id, (PullResult.FAILED,) * len(job.items))
            return
        way = mapped.NAME
        if self._transport is not None and not isinstance(peer, MappedPeer):
            if self._silence.is_long(peer):
                self._count("peers_silent")
                self._call(on_done, job.job_id, (PullResult.FAILED,) * len(job.items))
                self._greet_over(job.peer, peer, lambda is_met: None)  # its answer ends the silence
                return
            way = self._transport.name
        self._active.append(_Active(job, on_done, on_writes_ended, peer, way, bytearray(len(job.items))))

    def _greet(self, peer: NodeId, epoch: BootEpoch, description: bytes, on_met: OnMet) -> None:
        try:
            handle = self._connections.connect(peer, epoch, description)
        except Exception as error:  # noqa: BLE001  thread boundary: one peer's failure must not end the thread
            log.info("greeting_failed", extra={"peer": peer, "error": str(error)})
            self._call(on_met, False)
            return
        if isinstance(handle, MappedPeer):
            self._call(on_met, True)  # mapped: there is nothing to wire up
        else:
            self._greet_over(peer, handle, on_met)

    def _greet_over(self, peer: NodeId, handle: PeerHandle, on_met: OnMet) -> None:
        assert self._transport is not None, "the peer was connected through it"
        if self._greetings.begin(self._transport, peer, handle, on_met):
            self._greeted_at = self._clock()
        else:
            self._call(on_met, False)

    def _step(self) -> bool:
        """One round over all jobs. False when nothing changed."""
        moved = False
        try:
            completions = [] if self._transport is None else self._transport.poll()
        except Exception as error:  # noqa: BLE001  thread boundary: open jobs have failed, later ones may succeed
            self._count_error("poll_errors", error)
            for active in self._active:
                self._fail_rest(active)
            time.sleep(BROKEN_SECONDS)
            completions = []
        else:
            self._silence.looked(self._clock())
        for completion in completions:
            moved = True
            self._complete(completion)
        for active in list(self._active):
            try:
                moved |= self._advance(active)
            except Exception as error:  # noqa: BLE001  thread boundary: this job fails, the others continue
                self._count_error("job_errors", error)
                self._fail_rest(active)
                self._connections.drop(active.job.peer, active.peer)
        return moved

    def _complete(self, completion: Completion) -> None:
        done = completion.outcome is TransferOutcome.DONE
        greeting = self._greetings.end(completion.transfer)
        if greeting is not None:
            self._silence.heard(greeting.handle, self._clock())
            if not done:
                self._connections.drop(greeting.peer, greeting.handle)
            self._call(greeting.on_met, done)
            return
        for active in self._active:
            if completion.transfer == active.headers:
                active.headers = None
                active.headers_read = done
            else:
                batch = active.in_flight.pop(completion.transfer, None)
                if batch is None:
                    continue
                if done and not active.answered:
                    step = max(1, PIECE_BYTES // active.job.payload_bytes)
                    active.pieces += [batch[i : i + step] for i in range(0, len(batch), step)]
                    active.verifying.append(self._digesting.submit(self._verify_landed, active))
            assert not isinstance(active.peer, MappedPeer)
            self._silence.ended(active.peer, self._clock())
            if not done:
                log.info("read_failed", extra={"peer": active.job.peer, "detail": completion.detail})
                self._count("reads_failed")
                self._fail_rest(active)
                self._connections.drop(active.job.peer, active.peer)  # the next job starts with a new connection
            return

    def _advance(self, active: _Active) -> bool:
        """Advance one job as far as it goes now. True when something changed."""
        job = active.job
        if active.answered:
            return self._retire(active)
        if self._clock() > job.deadline:
            self._count("deadlines")
            self._fail_rest(active)
        if isinstance(active.peer, MappedPeer):
            return self._copy_slice(active, active.peer)
        moved = False
        if active.next_item < len(job.items):
            # One per round: the previous one may have landed in its call.
            moved |= self._post_batch(active, active.peer)
        if active.payloads_done and active.headers is None and not active.headers_read and not active.results:
            moved |= self._post_headers(active, active.peer)
        elif active.payloads_done and active.pieces:
            self._verify_piece(active)  # this thread has nothing else to do for the job
            moved = True
        if self._is_decided(active):
            self._answer(active, self._check_blocks(active))
            moved = True
        return moved

    def _post_batch(self, active: _Active, peer: PeerHandle) -> bool:
        """Post the next batch. False when enough is in flight."""
        job = active.job
        flying = sum(map(len, active.in_flight.values())) * job.payload_bytes
        copies_in_call = active.next_item > 0 and not flying  # or the transport is faster than this thread
        half = (len(job.items) - active.next_item) * job.payload_bytes // 2
        wanted = min(max(half, BATCH_BYTES_MIN), IN_FLIGHT_BYTES_MAX if copies_in_call else BATCH_BYTES_MAX)
        if flying and flying + max(wanted, job.payload_bytes) > IN_FLIGHT_BYTES_MAX:
            return False
        count = max(1, wanted // job.payload_bytes)
        batch = range(active.next_item, min(active.next_item + count, len(job.items)))
        items = job.items[batch.start : batch.stop]
        copies = _merged(
            job.geometry.payload_offsets([item.handle.slot for item in items], job.payload_bytes),
            self._segment.geometry.payload_offsets([item.destination for item in items], job.payload_bytes),
            job.payload_bytes,
        )
        active.in_flight[self._post(peer, copies)] = batch
        active.next_item = batch.stop
        failpoint("shard.read")
        return True

    def _post_headers(self, active: _Active, peer: PeerHandle) -> bool:
        items = active.job.items
        active.scratch = self._scratch.take(len(items))
        if active.scratch is None:
            return False  # the headers of other jobs take the space: try again in the next round
        start = self._segment.geometry.scratch_offset + active.scratch * HEADER_BYTES
        remote = active.job.geometry.header_offsets([item.handle.slot for item in items])
        local = start + HEADER_BYTES * np.arange(len(items))
        active.headers = self._post(peer, _merged(remote, local, HEADER_BYTES))
        return True

    def _post(self, peer: PeerHandle, copies: list[Copy]) -> TransferId:
        assert self._transport is not None, "the peer was connected through it"
        transfer = self._transport.post_read(peer, copies)
        self._silence.began(peer, self._clock())
        return transfer

    def _copy_slice(self, active: _Active, peer: MappedPeer) -> bool:
        """Copy the next slice of a job from a mapped peer; behind the last one, judge the job. It always moves."""
        job = active.job
        try:
            if active.next_item < len(job.items):
                count = max(1, SLICE_BYTES // job.payload_bytes)
                self._copy_both(active, peer, range(active.next_item, min(active.next_item + count, len(job.items))))
                failpoint("shard.read")
            if active.payloads_done and not active.results:
                headers = peer.read_headers(job.geometry.header_offsets([item.handle.slot for item in job.items]))
                self._answer(active, self._judged(active, headers))
        except TransferError as error:
            log.info("read_failed", extra={"peer": job.peer, "detail": error.message})
            self._count("reads_failed")
            self._fail_rest(active)
            self._connections.drop(job.peer, peer)
        if active.results:
            self._answer(active, active.results)
        return True

    def _copy_both(self, active: _Active, peer: MappedPeer, batch: range) -> None:
        """Copy a batch on this thread and the helper. Both have ended when this returns or raises."""
        if len(batch) * active.job.payload_bytes < SHARED_BYTES or len(batch) < 2:
            self._copy_part(active, peer, batch)
        else:
            middle = batch[len(batch) // 2]
            helped = self._digesting.submit(self._copy_part, active, peer, range(middle, batch.stop))
            try:
                self._copy_part(active, peer, range(batch.start, middle))
            finally:
                wait([helped])
            helped.result()
        active.next_item = batch.stop

    def _copy_part(self, active: _Active, peer: MappedPeer, part: range) -> None:
        """Copy these items, and note which have the digest of their handle."""
        job, own = active.job, self._segment
        items = job.items[part.start : part.stop]
        remote = job.geometry.payload_offsets([item.handle.slot for item in items], job.payload_bytes)
        local = own.geometry.payload_offsets([item.destination for item in items], job.payload_bytes)
        found = peer.read_blocks(remote, own, local, job.payload_bytes, [item.handle.key for item in items])
        wanted = np.array([item.handle.digest for item in items], np.uint64)
        active.good[part.start : part.stop] = (found == wanted).tobytes()

    def _is_decided(self, active: _Active) -> bool:
        if active.results:
            return True
        return active.headers_read and not active.pieces and all(future.done() for future in active.verifying)

    def _check_blocks(self, active: _Active) -> dict[int, PullResult]:
        """One result per item: the failure that was noted, or what headers and digests show."""
        job = active.job
        if active.results:
            return active.results
        assert active.scratch is not None
        start = self._segment.geometry.scratch_offset + active.scratch * HEADER_BYTES
        headers = bytes(self._segment.buffer[start : start + len(job.items) * HEADER_BYTES])
        for future in active.verifying:
            future.result()  # raises what verifying raised
        return self._judged(active, headers)

    def _judged(self, active: _Active, headers: bytes) -> dict[int, PullResult]:
        """One result per item, of bytes that have all landed before `headers` were read."""
        job, results = active.job, dict[int, PullResult]()
        if self._clock() > job.deadline:
            return dict.fromkeys(range(len(job.items)), PullResult.FAILED)
        rows = np.frombuffer(headers, "<u8").reshape(len(job.items), -1)
        if all(active.good) and are_as_located(rows, [item.handle for item in job.items], job.peer_epoch):
            return dict.fromkeys(range(len(job.items)), PullResult.OK)
        for index, (item, good) in enumerate(zip(job.items, active.good, strict=True)):
            header = headers[index * HEADER_BYTES : (index + 1) * HEADER_BYTES]
            if not is_as_located(header, item.handle, job.peer_epoch):
                results[index] = PullResult.STALE
            else:
                results[index] = PullResult.OK if good else PullResult.CORRUPT
        return results

    def _fail_rest(self, active: _Active) -> None:
        """Give the job up: results are STUCK where a transfer may still write, and FAILED elsewhere."""
        if active.answered:
            return
        stuck = {index for batch in active.in_flight.values() for index in batch}
        for index in range(len(active.job.items)):
            active.results[index] = PullResult.STUCK if index in stuck else PullResult.FAILED
        active.next_item = len(active.job.items)

    def _answer(self, active: _Active, results: dict[int, PullResult]) -> None:
        if not active.answered:
            active.answered = True
            active.pieces.clear()
            ordered = tuple(results[index] for index in range(len(active.job.items)))
            good = ordered.count(PullResult.OK)
            self._count("jobs")
            self._count("blocks", good)
            for result, count in Counter(ordered).items():
                self._count(f"blocks_{result.value}", count)
            self._count(f"{active.way}_bytes", good * active.job.payload_bytes)
            active.results = results
            self._call(active.on_done, active.job.job_id, ordered)

    def _retire(self, active: _Active) -> bool:
        """Forget an answered job when nothing of it is in flight."""
        if active.is_reading:
            return False
        self._active.remove(active)
        self._scratch.give(active.scratch, len(active.job.items))
        if PullResult.STUCK in active.results.values():
            self._call(active.on_writes_ended, active.job.job_id)
        return True

    def _verify_landed(self, active: _Active) -> None:
        """Verify everything that has landed by now. Runs on the helper thread."""
        while self._verify_piece(active):
            pass

    def _verify_piece(self, active: _Active) -> bool:
        """Check the digest of each payload in one piece. False when there is no piece."""
        try:
            piece = active.pieces.popleft()
        except IndexError:  # the other thread took the last one
            return False
        payload_bytes = active.job.payload_bytes
        for index in piece:
            item = active.job.items[index]
            payload = self._segment.payload(item.destination, payload_bytes)
            active.good[index] = digest_payload(payload, item.handle.key) == item.handle.digest
        return True


def _merged(remote: Offsets, local: Offsets, length: int) -> list[Copy]:
    """Runs of equal length as copies. Runs that are adjacent on both sides are merged, which halves the time of small
    blocks.
    """
    runs = merge_runs(remote, local, np.full(len(remote), length, dtype=np.int64))
    rows = zip(runs.engine.tolist(), runs.segment.tolist(), runs.lengths.tolist(), strict=True)
    return [Copy(there, here, size) for there, here, size in rows]
