"""The tier that all nodes share: blocks as objects of S3, GCS, Azure, or a folder.

An object is exactly the file of a block (core.segment.blockfile) under the name

    PREFIX/NAMESPACE/v1/4f/4f1c…9a.safetensors

with the prefix of the URL, the version of the format, and the block's key. Every cluster with the same URL, namespace
and engines has the same names, so clusters share blocks. Nothing is promised: blocks are found by asking for their
names, and verified as they are read. Only the marks of clears are listed (tier.mark_objects).

Everything here runs on one event loop on a thread of its own; obstore's threads move the bytes. A store that is down or
hangs is left alone for a while: reads then fail and writes are dropped at once, and both are counted.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from kvservice.aio import end_tasks
from kvservice.codec.base import EXTRA_BYTES_MAX
from kvservice.codec.coder import Coder
from kvservice.core.block.marks import Mark
from kvservice.core.events import BroughtBlock, PullResult
from kvservice.core.segment.blockfile import BLOCKFILE_VERSION, FILE_HEADER_BYTES, pack_file_header
from kvservice.core.tier.tier_block import TierBlock
from kvservice.errors import TierError
from kvservice.tier.answers import ItemAnswers, Written, read_answers, write_answers
from kvservice.tier.base import ProbeCallback, ReadCallback, TierRead, TierWrite, WriteCallback, WriteResult
from kvservice.tier.block_objects import BlockObjects
from kvservice.tier.galloping import first_looks, narrowed, next_looks
from kvservice.tier.headers import brought, header_of
from kvservice.units import BlockKey, MiB

log = logging.getLogger("kvservice.tier")
T = TypeVar("T")

READS_MAX = 64  # under way: at 50 ms to the first byte, 64 reads of 2 MiB ask for 2.7 GB/s
WARMING_READS_MAX = 32  # of them for reads that nobody waits for, so that urgent ones find room
READ_BYTES_MAX = 256 * MiB  # of answers that are on their way or wait to be copied; one block passes in any case
WRITES_MAX = 16  # under way: they pin slots, and compete with reads for the link
WRITES_BESIDE_READS = 4  # of them while an engine waits for a read: the rest of the link is for that
WRITE_BYTES_MAX = 64 * MiB  # the same in bytes; one block passes in any case
WRITES_WAITING_MAX = 256  # further writes are dropped
ERASES_MAX = 2  # requests under way
ERASE_KEYS_MAX = 1000  # of one request: what S3 takes
MARKS_SECONDS = 20.0  # to read or write the marks of clears; the start and `kvservice clear` wait for it
CLOSE_SECONDS = 3.0  # for writes under way at the end: in a store that hangs they would take REQUEST_SECONDS
CODEC_THREADS = 2  # a codec takes milliseconds a block; plain blocks are copied on the loop
_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}(/[A-Za-z0-9][A-Za-z0-9._-]{0,62}){0,7}")


@dataclass(slots=True)
class _ObjectReads:
    job: TierRead
    answers: ItemAnswers[BroughtBlock]


@dataclass(slots=True)
class _ObjectWrites:
    job: TierWrite
    answers: ItemAnswers[Written]


@dataclass(slots=True)
class _ObjectProbe:
    """The chain of a probe: all before `low` is there, nothing from `high` on is."""

    keys: tuple[BlockKey, ...]
    deadline: float
    on_done: ProbeCallback
    low: int
    high: int


@dataclass(slots=True)
class _Lane:
    """One kind of work: what waits, and how much of it is under way."""

    count_max: int
    bytes_max: int
    waiting: deque[tuple[Any, int]] = field(default_factory=deque)  # (job, place of one of its items)
    count: int = 0
    size: int = 0

    def takes(self, size: int) -> bool:
        return self.count == 0 or (self.count < self.count_max and self.size + size <= self.bytes_max)


class ObjectTier:
    """See kvservice.tier.base.Tier. It lists nothing: it is probed."""

    name = "objects"

    def __init__(self, url: str, namespace: str = "default", coder: Coder | None = None) -> None:
        """Raises TierError for a namespace that makes no name of an object."""
        if _NAMESPACE.fullmatch(namespace) is None:
            raise TierError(
                f"objects_namespace {namespace!r} makes no name of an object: use letters, digits and -._, "
                "and / between parts",
                namespace=namespace,
            )
        self._coder = coder or Coder()
        self._codec_threads = ThreadPoolExecutor(CODEC_THREADS, thread_name_prefix="kvservice-objects-codec")
        self._objects = BlockObjects(url, f"{namespace}/v{BLOCKFILE_VERSION}", f"{namespace}/marks")
        self._is_open = False
        self._urgent: _Lane = _Lane(READS_MAX, READ_BYTES_MAX)
        self._warming: _Lane = _Lane(WARMING_READS_MAX, READ_BYTES_MAX // 2)
        self._writes: _Lane = _Lane(WRITES_MAX, WRITE_BYTES_MAX)
        self._erasing: deque[BlockKey] = deque()
        self._erases = 0  # requests under way
        self._erased: dict[BlockKey, asyncio.Future[None]] = {}  # of what is not erased yet: a write waits for it
        self._counters: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._puts: set[asyncio.Task[Any]] = set()  # of these, those that read a payload
        self._expiry: asyncio.TimerHandle | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kvservice-objects", daemon=True)
        self._closing = False
        self._lock = threading.Lock()  # between close and calls of other threads

    # -- for other threads ----

    def start(self) -> list[TierBlock]:
        """Open the store and prove that it keeps bytes: one write, read, compare and delete. Finds no blocks.

        Blocks, for half a minute at most. Raises TierError, whose attribute `transient` says whether the same may work
        later.
        """
        self._objects.open()
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._objects.prove(), self._loop).result()
        except BaseException:
            self.close()
            raise
        self._is_open = True
        return []

    def write(self, job: TierWrite, on_done: WriteCallback) -> None:
        """Write each block that is not known to be there. Full queues and stores that are down drop writes."""
        writing = _ObjectWrites(job, write_answers(job, on_done))
        self._submit(lambda: self._accept_writes(writing), writing.answers.drop_all)

    def read(self, job: TierRead, on_done: ReadCallback) -> None:
        reading = _ObjectReads(job, read_answers(job, on_done))
        self._submit(lambda: self._accept_reads(reading), reading.answers.drop_all)

    def erase(self, keys: Sequence[BlockKey]) -> None:
        self._submit(lambda: self._accept_erases(tuple(keys)), lambda: None)

    def probe(self, keys: Sequence[BlockKey], deadline: float, on_done: ProbeCallback) -> None:
        """Looks at a few of the keys, as if prefixes had no holes. What was found is remembered for a while."""
        probing = _ObjectProbe(tuple(keys), deadline, on_done, 0, len(keys))
        self._submit(lambda: self._spawn(self._probe(probing)), lambda: on_done(0))

    def load_marks(self) -> tuple[Mark, ...]:
        return self._ask(self._objects.load_marks())

    def keep_marks(self, marks: Sequence[Mark]) -> None:
        self._ask(self._objects.keep_marks(marks))

    def _ask(self, work: Coroutine[Any, Any, T]) -> T:
        """Do the work on the loop and wait for it. Raises TierError if the tier is not open, or has no time left."""

        async def ask() -> T:
            done: T = await self._spawn(work)
            return done

        with self._lock:
            is_usable = self._is_open and not self._closing
            asked = asyncio.run_coroutine_threadsafe(ask(), self._loop) if is_usable else None
        if asked is None:
            work.close()
            raise TierError("the object store is not open")
        try:
            return asked.result(MARKS_SECONDS)
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            asked.cancel()
            raise TierError(f"the object store did not answer within {MARKS_SECONDS:.0f} s, or was closed") from None

    def trouble(self) -> str:
        return self._objects.trouble

    def write_trouble(self) -> str:
        return self._objects.write_trouble

    def counters(self) -> Mapping[str, int]:
        return {**self._counters, **self._objects.counters, **self._coder.counters()}

    def close(self) -> None:
        """Blocks for CLOSE_SECONDS at most, if a write hangs in a store that is a folder. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    def _submit(self, work: Callable[[], object], drop: Callable[[], None]) -> None:
        """Run `work` on the loop; `drop` at once when the tier is closed or was never started."""
        with self._lock:
            if self._is_open and not self._closing:
                self._loop.call_soon_threadsafe(work)
                return
        drop()

    # -- on the loop: what waits, and what begins ----

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _accept_reads(self, reading: _ObjectReads) -> None:
        lane = self._urgent if reading.job.urgent else self._warming
        lane.waiting.extend((reading, place) for place in range(len(reading.job.items)))
        self._pump()

    def _accept_writes(self, writing: _ObjectWrites) -> None:
        for place in range(len(writing.job.items)):
            if len(self._writes.waiting) >= WRITES_WAITING_MAX:
                self._counters["writes_dropped"] += 1
                writing.answers.drop(place)
            else:
                self._writes.waiting.append((writing, place))
        self._pump()

    def _accept_erases(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self._objects.believe_absent(key)
            if key not in self._erased:
                self._erased[key] = self._loop.create_future()
                self._erasing.append(key)
        self._pump()

    def _pump(self) -> None:
        """Begin what may begin: urgent reads, then other reads, then erasing, then writes."""
        now = time.monotonic()
        for lane in (self._urgent, self._warming):
            while lane.waiting:
                reading, place = lane.waiting[0]
                block, _ = reading.job.items[place]
                is_late = reading.job.deadline <= now
                if not is_late and not self._read_lane_takes(lane, block.payload_bytes):
                    break
                lane.waiting.popleft()
                if is_late or not self._objects.may_read(now):
                    self._counters["reads_late" if is_late else "reads_refused"] += 1
                    reading.answers.drop(place)
                else:
                    self._begin(lane, block.payload_bytes, self._read(reading, place))
        while self._erasing and self._erases < ERASES_MAX:
            keys = [self._erasing.popleft() for _ in range(min(ERASE_KEYS_MAX, len(self._erasing)))]
            self._erases += 1
            self._spawn(self._erase(keys))
        while self._writes.waiting and not self._urgent.waiting:
            writing, place = self._writes.waiting[0]
            size = len(writing.job.items[place][1])
            if not self._writes.takes(size) or (self._urgent.count and self._writes.count >= WRITES_BESIDE_READS):
                break
            self._writes.waiting.popleft()
            self._begin_write(writing, place, size, now)
        self._expire_later(now)

    def _read_lane_takes(self, lane: _Lane, size: int) -> bool:
        """Both kinds of reads share one bound; the reads that nobody waits for have a smaller one of their own."""
        together = self._urgent.size + self._warming.size + size <= READ_BYTES_MAX
        at_once = self._urgent.count + self._warming.count < READS_MAX
        return lane.takes(size) and at_once and (together or lane.count == 0)

    def _begin_write(self, writing: _ObjectWrites, place: int, size: int, now: float) -> None:
        key = writing.job.items[place][0].key
        if self._objects.believed(key, now):
            self._counters["writes_skipped"] += 1
            writing.answers.put(place, Written(WriteResult.OK))
        elif not self._objects.may_write(now):
            self._counters["writes_dropped"] += 1
            writing.answers.drop(place)
        else:
            self._begin(self._writes, size, self._write(writing, place))

    def _begin(self, lane: _Lane, size: int, work: Coroutine[Any, Any, None]) -> None:
        lane.count += 1
        lane.size += size

        def ended(done: asyncio.Task[None]) -> None:
            self._puts.discard(done)
            lane.count -= 1
            lane.size -= size
            self._pump()

        task = self._spawn(work)
        if lane is self._writes:
            self._puts.add(task)
        task.add_done_callback(ended)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        def ended(done: asyncio.Task[T]) -> None:
            self._tasks.discard(done)
            error = None if done.cancelled() else done.exception()
            if error is not None and not isinstance(error, TierError):  # a bug, or a panic in the library
                log.error("object_tier_broken", exc_info=error)

        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(ended)
        return task

    def _expire_later(self, now: float) -> None:
        """Answer reads that wait too long, even when nothing else happens."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        deadlines = [lane.waiting[0][0].job.deadline for lane in (self._urgent, self._warming) if lane.waiting]
        if deadlines:
            self._expiry = self._loop.call_later(max(min(deadlines) - now, 0.0), self._pump)

    # -- on the loop: what is asked of the store ----

    async def _read(self, reading: _ObjectReads, place: int) -> None:
        block, target = reading.job.items[place]
        answer = BroughtBlock(PullResult.FAILED)
        try:
            answer = await self._fetch(block, target)
            if answer.result is PullResult.CORRUPT:  # or a bit that changed on its way would erase it for all nodes
                answer = await self._fetch(block, target)
        finally:
            if answer.result is PullResult.OK:
                self._counters["fetched_objects"] += 1
            else:
                self._counters[f"reads_{answer.result.value}"] += 1
            if answer.result in (PullResult.STALE, PullResult.CORRUPT):
                self._objects.believe_absent(block.key)  # so the next write replaces what is there
            reading.answers.put(place, answer)

    async def _fetch(self, block: TierBlock, target: memoryview) -> BroughtBlock:
        began = time.perf_counter()
        found = await self._objects.get(block.key, FILE_HEADER_BYTES + block.payload_bytes + EXTRA_BYTES_MAX)
        if isinstance(found, PullResult):
            return BroughtBlock(found)
        self._coder.tier_read(len(found[0]), time.perf_counter() - began)
        return await self._unpack(*found, block, target)

    async def _unpack(self, data: memoryview, written_at: float, block: TierBlock, target: memoryview) -> BroughtBlock:
        """Verify and copy. Nothing gives this up midway, so an answered read has no writer left.

        A block is no younger than its object. Else one of a node whose clock was ahead would outlive a clear.
        """
        header = header_of(data[:FILE_HEADER_BYTES], len(data), block)
        if isinstance(header, PullResult):
            return BroughtBlock(header)
        if written_at < block.stored_at:
            return BroughtBlock(PullResult.STALE)
        stored = data[FILE_HEADER_BYTES:]
        if header.codec:
            result = await self._on_codec_thread(lambda: self._coder.decode(header, stored, target))
        else:
            result = self._coder.decode(header, stored, target)
        answer = brought(result, header)
        return replace(answer, stored_at=min(answer.stored_at, written_at))

    async def _write(self, writing: _ObjectWrites, place: int) -> None:
        block, payload = writing.job.items[place]
        is_written, encoded = False, None
        try:
            if self._coder.is_plain:
                encoded = self._coder.encode(block, payload)
            else:
                encoded = await self._on_codec_thread(lambda: self._coder.encode(block, payload))
            if (erased := self._erased.get(block.key)) is not None:  # or the new object would go instead of the old one
                await asyncio.wait([erased])
            if encoded is not None and not self._closing:
                is_written = await self._objects.put(block.key, [pack_file_header(encoded.header), encoded.data])
        finally:
            if is_written:
                self._counters["stored_objects"] += 1
            else:
                self._counters["writes_failed"] += 1
            stored_bytes = encoded.header.stored_bytes if encoded is not None else 0
            writing.answers.put(place, Written(WriteResult.OK if is_written else WriteResult.FAILED, stored_bytes))

    async def _on_codec_thread(self, work: Callable[[], T]) -> T:
        """Runs to its end, also when this task is cancelled meanwhile: `work` uses the memory of a slot."""
        future = self._loop.run_in_executor(self._codec_threads, work)
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        return future.result()

    async def _erase(self, keys: Sequence[BlockKey]) -> None:
        is_erased = False
        try:
            is_erased = self._objects.may_write(time.monotonic()) and await self._objects.delete(keys)
        finally:
            self._counters["erased" if is_erased else "erases_dropped"] += len(keys)
            self._erases -= 1
            self._end_erases(keys)
            self._pump()

    def _end_erases(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            self._erased.pop(key).set_result(None)

    async def _probe(self, probing: _ObjectProbe) -> None:
        """Answered at the deadline with what is known then. Looks that are under way go on, and are remembered."""
        self._counters["probes"] += 1
        try:
            now = time.monotonic()
            if self._objects.is_left_alone(now):
                return
            probing.low, probing.high = self._objects.believed_of(probing.keys, now)
            looks = first_looks(probing.low, probing.high)
            while looks and now < probing.deadline and self._objects.may_read(now):
                tasks = {index: self._spawn(self._objects.look(probing.keys[index])) for index in looks}
                await asyncio.wait(tasks.values(), timeout=probing.deadline - now)
                seen = {index: task.result() for index, task in tasks.items() if task.done()}
                probing.low, probing.high = narrowed(probing.low, probing.high, seen)
                if len(seen) < len(tasks) or None in seen.values():
                    break  # no time left, or a store that does not say
                looks, now = next_looks(probing.low, probing.high), time.monotonic()
            if probing.low:
                self._objects.believe_prefix(probing.keys[probing.low - 1])
        finally:
            probing.on_done(probing.low, probing.low == probing.high < len(probing.keys))

    # -- the end ----

    async def _end(self) -> None:
        """Answer what waits, give up reads and probes, and wait for writes."""
        for lane in (self._urgent, self._warming, self._writes):
            while lane.waiting:
                work, place = lane.waiting.popleft()
                work.answers.drop(place)
        self._end_erases(self._erasing)
        self._erasing.clear()
        await asyncio.sleep(0)  # a task that is cancelled before its first step would answer nobody
        await end_tasks(self._tasks - self._puts)
        if self._puts:
            await asyncio.wait(self._puts, timeout=CLOSE_SECONDS)
        if self._puts:
            log.warning("tier_hangs_at_its_end", extra={"tier": self.name, "writes": len(self._puts)})
        self._codec_threads.shutdown(wait=False)
