"""Verified reads of a peer's blocks. Owns a Transport on one thread, and says of each block whether it can be trusted.

The payloads of a job are read in batches, a few of them in flight. A helper thread computes the digests of what has
landed; at the end both threads do. Then the source headers are read again. A block is OK only if epoch, generation,
key, length and digest are those of the handle, the local bytes have that digest, and the lease has not expired. The
order matters: a header that is unchanged after the payload was read proves that the slot was not rewritten meanwhile.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from kvservice.core.acquire.pulls import PULL_BLOCKS_MAX
from kvservice.core.events import PullResult
from kvservice.core.segment.copy_runs import Offsets, merge_runs
from kvservice.core.segment.digest import digest_payload
from kvservice.core.segment.geometry import HEADER_BYTES, SCRATCH_BYTES, Geometry
from kvservice.core.segment.header_checks import is_as_located
from kvservice.core.segment.refs import BlockHandle
from kvservice.memory.segment import Segment
from kvservice.observe.failpoints import failpoint
from kvservice.transfer.base import Completion, Copy, PeerHandle, TransferId, TransferOutcome, Transport
from kvservice.units import BootEpoch, MiB, NodeId, SlotIndex

log = logging.getLogger("kvservice.transfer")

# A batch is half of what is left, within these limits, because what the last batch brings is verified when nothing
# else is left to do.
BATCH_BYTES_MIN, BATCH_BYTES_MAX = 4 * MiB, 8 * MiB
# Of one job. When a reader is killed, a source may crash inside UCX with more in flight over TCP. A transport that
# copies inside its call gets one batch of this size, because each call costs a third of a millisecond of Python, in
# which nothing is copied.
IN_FLIGHT_BYTES_MAX = 24 * MiB
PIECE_BYTES = 2 * MiB  # that one thread verifies before it looks for other work: a tenth of a millisecond
DIGEST_THREADS = 1  # with two, they and the polling thread wait for each other at the interpreter lock
IDLE_SECONDS = 0.2  # an idle thread waits this long for a job before it looks whether it must stop
POLL_SECONDS = 0.0001  # between two polls when nothing has moved: shorter than one block takes on a fast link
BROKEN_SECONDS = 0.05  # between two polls of a transport that raises, so that its errors do not use a core
SCRATCH_HEADERS = SCRATCH_BYTES // HEADER_BYTES
PEERS_MAX = 1024  # connections kept; for one more the peer connected longest ago is disconnected
assert PULL_BLOCKS_MAX <= SCRATCH_HEADERS, "the headers of one pull must fit into the scratch area"
assert PIECE_BYTES <= BATCH_BYTES_MIN <= BATCH_BYTES_MAX <= IN_FLIGHT_BYTES_MAX

DoneCallback = Callable[[int, tuple[PullResult, ...]], None]
WritesEndedCallback = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class PullItem:
    """One block to read, and the local slot that it is read into."""

    handle: BlockHandle
    destination: SlotIndex


@dataclass(frozen=True, slots=True)
class PullJob:
    """Blocks of one peer to read and verify."""

    job_id: int
    peer: NodeId
    peer_epoch: BootEpoch
    description: bytes  # what the peer's Transport.describe() returned
    geometry: Geometry  # of the peer's segment
    payload_bytes: int  # of every item
    items: tuple[PullItem, ...]
    deadline: float  # on the puller's clock; nothing that ends later is accepted


@dataclass(frozen=True, slots=True)
class _ConnectedPeer:
    epoch: BootEpoch
    description: bytes
    handle: PeerHandle


@dataclass(slots=True)
class _Active:
    job: PullJob
    on_done: DoneCallback
    on_writes_ended: WritesEndedCallback
    peer: PeerHandle
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


class Puller:
    """Call `start`, then `submit` from any thread. Callbacks run on the puller's thread and must not block."""

    def __init__(
        self, segment: Segment, make_transport: Callable[[], Transport], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._segment = segment
        self._make_transport = make_transport
        self._clock = clock
        self._inbox: queue.SimpleQueue[tuple[PullJob, DoneCallback, WritesEndedCallback] | None] = queue.SimpleQueue()
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="kvservice-puller", daemon=True)
        self._digesting = ThreadPoolExecutor(DIGEST_THREADS, thread_name_prefix="kvservice-verify")
        self._active: list[_Active] = []
        self._peers: dict[NodeId, _ConnectedPeer] = {}
        self._scratch_free = [True] * SCRATCH_HEADERS
        self._name = ""
        self._description = b""
        self._stopping = False
        self._ended = False  # the thread takes no more jobs
        self._counters: Counter[str] = Counter()
        self._counting = threading.Lock()

    def start(self) -> None:
        """Make the transport on its thread. Blocks until that is done, and raises what it raised."""
        self._thread.start()
        self._started.result()

    @property
    def name(self) -> str:
        return self._name

    def describe(self) -> bytes:
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
        self._inbox.put((job, on_done, on_writes_ended))
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
            transport = self._make_transport()
            self._name = transport.name
            self._description = transport.describe()
        except BaseException as error:  # noqa: BLE001  thread boundary: handed to start()
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        try:
            while not self._stopping:
                self._take_jobs(transport)
                if self._active and not self._step(transport):
                    time.sleep(POLL_SECONDS)
        finally:
            self._end(transport)

    def _end(self, transport: Transport) -> None:
        """Answer everything as FAILED. After the transport is closed, nothing writes any more."""
        try:
            transport.close()
        except Exception as error:  # noqa: BLE001  thread boundary: callers still wait for their answers
            self._count_error("transport_close_failed", error)
        for active in self._active:
            self._answer(active, dict.fromkeys(range(len(active.job.items)), PullResult.FAILED))
            if PullResult.STUCK in active.results.values():
                self._call(active.on_writes_ended, active.job.job_id)
        self._active.clear()
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
                job, on_done, _ = entry
                self._call(on_done, job.job_id, (PullResult.FAILED,) * len(job.items))

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

    def _take_jobs(self, transport: Transport) -> None:
        """Take all jobs that have arrived. Waits a little when there is nothing else to do."""
        try:
            entry = self._inbox.get(timeout=IDLE_SECONDS) if not self._active else self._inbox.get_nowait()
            while True:
                if entry is not None:
                    self._begin(transport, *entry)
                entry = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _begin(
        self, transport: Transport, job: PullJob, on_done: DoneCallback, on_writes_ended: WritesEndedCallback
    ) -> None:
        try:
            peer = self._connect(transport, job)
        except Exception as error:  # noqa: BLE001  thread boundary: one peer's failure must not end the thread
            log.info("pull_connect_failed", extra={"peer": job.peer, "error": str(error)})
            self._count("connect_failed")
            self._call(on_done, job.job_id, (PullResult.FAILED,) * len(job.items))
            return
        self._active.append(_Active(job, on_done, on_writes_ended, peer, bytearray(len(job.items))))

    def _connect(self, transport: Transport, job: PullJob) -> PeerHandle:
        known = self._peers.get(job.peer)
        if known is not None and (known.epoch, known.description) == (job.peer_epoch, job.description):
            return known.handle
        if known is not None or len(self._peers) >= PEERS_MAX:
            self._drop_peer(transport, job.peer if known is not None else next(iter(self._peers)))
        handle = transport.connect(job.description)
        self._peers[job.peer] = _ConnectedPeer(job.peer_epoch, job.description, handle)
        self._count("connects")
        return handle

    def _drop_peer(self, transport: Transport, peer: NodeId, handle: PeerHandle | None = None) -> None:
        """Disconnect the peer; with a handle, only if that is the peer's present connection."""
        known = self._peers.get(peer)
        if known is not None and handle in (None, known.handle):
            del self._peers[peer]
            try:
                transport.disconnect(known.handle)
            except Exception as error:  # noqa: BLE001  thread boundary: the peer is forgotten anyway
                self._count_error("disconnect_failed", error)

    def _step(self, transport: Transport) -> bool:
        """One round over all jobs. False when nothing changed."""
        moved = False
        try:
            completions = transport.poll()
        except Exception as error:  # noqa: BLE001  thread boundary: open jobs have failed, later ones may succeed
            self._count_error("poll_errors", error)
            for active in self._active:
                self._fail_rest(active)
            time.sleep(BROKEN_SECONDS)
            completions = []
        for completion in completions:
            moved = True
            self._complete(transport, completion)
        for active in list(self._active):
            try:
                moved |= self._advance(transport, active)
            except Exception as error:  # noqa: BLE001  thread boundary: this job fails, the others continue
                self._count_error("job_errors", error)
                self._fail_rest(active)
                self._drop_peer(transport, active.job.peer, active.peer)
        return moved

    def _complete(self, transport: Transport, completion: Completion) -> None:
        done = completion.outcome is TransferOutcome.DONE
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
            if not done:
                log.info("read_failed", extra={"peer": active.job.peer, "detail": completion.detail})
                self._count("reads_failed")
                self._fail_rest(active)
                self._drop_peer(transport, active.job.peer, active.peer)  # the next job starts with a new connection
            return

    def _advance(self, transport: Transport, active: _Active) -> bool:
        """Advance one job as far as it goes now. True when something changed."""
        job = active.job
        if active.answered:
            return self._retire(active)
        if self._clock() > job.deadline:
            self._count("deadlines")
            self._fail_rest(active)
        moved = False
        if active.next_item < len(job.items):
            moved |= self._post_batch(transport, active)  # one per round: the previous one may have landed in its call
        if active.payloads_done and active.headers is None and not active.headers_read and not active.results:
            moved |= self._post_headers(transport, active)
        elif active.payloads_done and active.pieces:
            self._verify_piece(active)  # this thread has nothing else to do for the job
            moved = True
        if self._is_decided(active):
            self._answer(active, self._check_blocks(active))
            moved = True
        return moved

    def _post_batch(self, transport: Transport, active: _Active) -> bool:
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
        active.in_flight[transport.post_read(active.peer, copies)] = batch
        active.next_item = batch.stop
        failpoint("shard.read")
        return True

    def _post_headers(self, transport: Transport, active: _Active) -> bool:
        items = active.job.items
        active.scratch = self._take_scratch(len(items))
        if active.scratch is None:
            return False  # the headers of other jobs take the space: try again in the next round
        start = self._segment.geometry.scratch_offset + active.scratch * HEADER_BYTES
        remote = active.job.geometry.header_offsets([item.handle.slot for item in items])
        local = start + HEADER_BYTES * np.arange(len(items))
        active.headers = transport.post_read(active.peer, _merged(remote, local, HEADER_BYTES))
        return True

    def _is_decided(self, active: _Active) -> bool:
        if active.results:
            return True
        return active.headers_read and not active.pieces and all(future.done() for future in active.verifying)

    def _check_blocks(self, active: _Active) -> dict[int, PullResult]:
        """One result per item: the failure that was noted, or what headers and digests show."""
        job = active.job
        if active.results:
            return active.results
        if self._clock() > job.deadline:
            return dict.fromkeys(range(len(job.items)), PullResult.FAILED)
        results: dict[int, PullResult] = {}
        assert active.scratch is not None
        start = self._segment.geometry.scratch_offset + active.scratch * HEADER_BYTES
        headers = bytes(self._segment.buffer[start : start + len(job.items) * HEADER_BYTES])
        for future in active.verifying:
            future.result()  # raises what verifying raised
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
            self._count(f"{self._name}_bytes", good * active.job.payload_bytes)
            active.results = results
            self._call(active.on_done, active.job.job_id, ordered)

    def _retire(self, active: _Active) -> bool:
        """Forget an answered job when nothing of it is in flight."""
        if active.in_flight or active.headers is not None:
            return False
        self._active.remove(active)
        self._give_scratch(active)
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

    def _take_scratch(self, count: int) -> int | None:
        """The first `count` consecutive free scratch headers; None when there are none."""
        run = 0
        for index, free in enumerate(self._scratch_free):
            run = run + 1 if free else 0
            if run == count:
                first = index - count + 1
                self._scratch_free[first : index + 1] = [False] * count
                return first
        return None

    def _give_scratch(self, active: _Active) -> None:
        if active.scratch is not None:
            count = len(active.job.items)
            self._scratch_free[active.scratch : active.scratch + count] = [True] * count


def _merged(remote: Offsets, local: Offsets, length: int) -> list[Copy]:
    """Runs of equal length as copies. Runs that are adjacent on both sides are merged, which halves the time of small
    blocks.
    """
    runs = merge_runs(remote, local, np.full(len(remote), length, dtype=np.int64))
    rows = zip(runs.engine.tolist(), runs.segment.tolist(), runs.lengths.tolist(), strict=True)
    return [Copy(there, here, size) for there, here, size in rows]
