"""The engine's session with its pool. It has a thread with an event loop, so that the scheduler never waits for an RPC.

The scheduler half posts commands and takes results; neither blocks. The session attaches, sends heartbeats, keeps a
stock of reserved slots so that no RPC is needed per block, and attaches again after a loss. While it is not attached it
answers at once: nothing is found and nothing is stored.

A program that can wait runs `serve` on a loop of its own, keeps no stock, and awaits `ask`, `reserve` and `store`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvservice.aio import begun, is_set_within, within
from kvservice.core.messages import (
    AcquireRequest,
    AcquireResult,
    Attachment,
    EngineSpec,
    RequestReport,
    SealItem,
    SealStatus,
)
from kvservice.core.reconcile import Ledger
from kvservice.core.segment.refs import BlockRef
from kvservice.errors import KVServiceError, Refused, Unavailable
from kvservice.observe import logs, tracing
from kvservice.pool.port import PoolPort
from kvservice.session.news import BlockNews, NewsInbox
from kvservice.session.outbox import Outbox, Parcel, giving_back, leave
from kvservice.session.pending import PendingAcquire, PendingAcquires
from kvservice.session.stock import STOCK_MIN, Stock
from kvservice.session.suspects import UnnamedSuspects
from kvservice.units import AttachmentId, HandoffId, LeaseId, format_bytes

log = logging.getLogger("kvservice.session")

RETRY_SECONDS_FIRST = 0.2  # Before the second attempt to attach; it doubles. A restarted shard is back in a second.
RETRY_SECONDS_MAX = 5.0  # The most between two attempts: a shard that comes back is used at most this much later.
# After a refusal because of the fingerprint. The engine with the other fingerprint may leave.
REFUSED_RETRY_SECONDS = 15.0
GATHER_SECONDS = 0.002  # The loop waits this long before it looks, so that all that a step sends goes out together.
TICK_SECONDS = 1.0  # Between two looks at the stock and the requests' reports.
CLOSE_SECONDS = 5.0  # For the last reports and detaching. Then the shard notices the closed stream.
# However long leases are: heartbeats also repair what was lost on the way, and that should not take longer.
HEARTBEAT_SECONDS_MAX = 10.0
# Reports of ended requests between two renewals. Beyond it the oldest are dropped; `kvservice explain` then lacks them.
REPORTS_MAX = 1024
# A report reaches the shard within this time, so that `kvservice explain` knows a request soon after its end.
REPORT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class AcquireAnswer:
    """The result of one acquire. `result` is None if there was no pool to ask."""

    request_id: str
    attachment: AttachmentId
    result: AcquireResult | None
    asked: AcquireRequest
    trace: str = ""  # W3C traceparent of the acquire's span: what the request does next is below it


class Session:
    """All public methods but `start` and `close` return at once. Call them on the scheduler's thread."""

    def __init__(
        self,
        open_pool: Callable[[], Awaitable[PoolPort]],
        spec: EngineSpec,
        may_reattach: Callable[[], bool],
        stock_min: int | None = STOCK_MIN,
        rng: random.Random | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`stock_min` is the number of slots held ready while no requests are known; None = there is no stock. `rng`
        spreads the attempts to attach. `on_end` is called on the loop when an attachment has ended."""
        self._open_pool = open_pool
        self._spec = spec
        self._losses: list[str] = []  # why the current attachment ended
        self._may_reattach = may_reattach
        self._has_stock = stock_min is not None
        self._stock = Stock(spec, stock_min or 0)
        self._on_end = on_end
        self._rng = rng or random.Random()
        self._lock = threading.Lock()
        self._answers: deque[AcquireAnswer] = deque()
        self._answered = threading.Condition(self._lock)
        self._pending = PendingAcquires()
        self._seals: set[asyncio.Task[Any]] = set()  # used on the loop only
        self._reports: deque[RequestReport] = deque(maxlen=REPORTS_MAX)
        self._suspects = UnnamedSuspects()
        self._leases: set[LeaseId] = set()  # delivered and not released; only these are renewed
        self._news = NewsInbox(is_read=spec.hears_removals)
        self._ledger = Ledger()  # what each heartbeat states
        self._attachment: Attachment | None = None
        self._attempts = 0  # attempts to attach
        self._attaching: asyncio.Future[Attachment] | None = None  # the last one; `stop` ends it
        self._pool: PoolPort | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._stopping = False
        self._background: set[asyncio.Task[None]] = set()
        self._outbox = Outbox()
        self._is_poked = False  # the loop was told to look and has not yet
        self._first_attempt = threading.Event()
        self._has_tried = asyncio.Event()  # the same, for the loop
        self.failure: KVServiceError | None = None  # why the last attempt to attach failed; None while attached
        self.counters: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="kvservice-session", daemon=True)

    # -- the scheduler's thread ----

    def start(self, wait_seconds: float) -> Attachment | None:
        """Start the thread and wait for the first attempt to attach, so that early requests can hit already. Blocks for
        at most `wait_seconds`. Returns the attachment, or None."""
        self._thread.start()
        self._first_attempt.wait(wait_seconds)
        return self.attachment

    @property
    def attachment(self) -> Attachment | None:
        """The current attachment; None while there is no pool."""
        with self._lock:
            return self._attachment

    def acquire(self, request_id: str, request: AcquireRequest) -> AttachmentId | None:
        """Ask for a prefix. The result appears in `answers`. Returns None, without an answer, if there is no pool."""
        attachment = self.attachment
        if attachment is None:
            return None
        pending = self._pending.open(request_id)
        if self._post(self._acquire(attachment, pending, request)):
            return attachment.attachment_id
        self._pending.close(pending)
        return None

    def abandon(self, request_id: str) -> None:
        """The request ended and waits no more. An answer that still comes is given back."""
        abandoned = self._pending.abandon(request_id)
        if abandoned:
            self._call(self._cancel, abandoned)

    def wait_for_answer(self, seconds: float) -> None:
        """Give the interpreter to this session's thread until an answer is there or the time is over. For an engine
        with nothing else to do: asking again without a pause would slow down the very answer it waits for."""
        with self._answered:
            if seconds and not self._answers:
                self._answered.wait(seconds)

    def answers(self) -> list[AcquireAnswer]:
        with self._lock:
            found = list(self._answers)
            self._answers.clear()
        return found

    def expect(self, count: int) -> None:
        """`count` more blocks will want slots soon. A negative count takes that back."""
        with self._lock:
            self._stock.expect(count)
        if count > 0:
            self._poke()

    def take_slots(self, attachment: AttachmentId, count: int, group: int = 0) -> list[BlockRef]:
        """Up to `count` reserved slots of this attachment for a KV cache group. The caller seals or aborts each of
        them."""
        with self._lock:
            if not self._is_current(attachment):
                return []
            taken = self._stock.take(count, group)
        self._poke()
        return taken

    def seal(self, attachment: AttachmentId, items: Sequence[SealItem]) -> None:
        self._send(Parcel.SEAL, attachment, items)

    def abort(self, attachment: AttachmentId, refs: Sequence[BlockRef]) -> None:
        with self._lock:
            if self._is_current(attachment):
                self._ledger.give_back(refs)
        self._send(Parcel.ABORT, attachment, refs)

    def open_handoff(self, handoff: HandoffId) -> AttachmentId | None:
        """Let other engines follow what is stored for this hand-off. Returns None if there is no pool."""
        with self._lock:
            if self._attachment is None:
                return None
            wanted = self._attachment.attachment_id
            call = self._ledger.open_handoff(handoff)
        self._post(self._with_pool(wanted, "open_handoff", lambda pool: pool.open_handoff(wanted, handoff, call)))
        return wanted

    def close_handoff(self, attachment: AttachmentId, handoff: HandoffId) -> None:
        """Close the hand-off once everything that was sent to be sealed before is sealed."""
        self._post(self._close_handoff(attachment, handoff))

    def release(self, attachment: AttachmentId, lease_id: LeaseId) -> None:
        with self._lock:
            if self._is_current(attachment):
                self._leases.discard(lease_id)
        self._send(Parcel.RELEASE, attachment, [lease_id])

    def report(self, report: RequestReport) -> None:
        """Report an ended request. It travels with the next renewal, within a second."""
        with self._lock:
            self._reports.append(report)

    def suspect(self, refs: Iterable[BlockRef]) -> None:
        """Name slots that did not hold what was promised, so that the pool looks at them: with the next renewal, within
        a second. Any thread may call."""
        self._suspects.add(refs)

    def news(self) -> BlockNews:
        """What was heard of blocks since the last call. Empty unless the spec `hears_removals`."""
        return self._news.take()

    def stop(self) -> None:
        """Make `serve` detach and end. Returns at once. May be called again."""
        self._stopping = True
        self._poke()

    def close(self) -> None:
        """Detach and end the thread. Blocks for at most CLOSE_SECONDS. May be called again."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)

    # -- the loop ----

    def _run(self) -> None:
        try:
            asyncio.run(self.serve())
        except Exception:  # thread boundary: without a session the engine runs on without the cache
            log.exception("session_failed")
            self.counters["session_crashed"] += 1
        finally:
            with self._lock:
                self._attachment = None
            self._first_attempt.set()

    async def serve(self) -> None:
        """Attach, and attach again after each loss, until `stop`; then wait a moment for what is under way. The thread
        of `start` runs this."""
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        delay = RETRY_SECONDS_FIRST
        while not self._stopping:
            try:
                await self._serve()
                delay = RETRY_SECONDS_FIRST
            except KVServiceError as error:
                self._report_failure(error)
                delay = REFUSED_RETRY_SECONDS if isinstance(error, Refused) else min(delay * 2, RETRY_SECONDS_MAX)
            except Exception as error:  # thread boundary: the next attempt may succeed
                if not self._stopping:  # `stop` ends an attempt
                    self._report_failure(KVServiceError(f"unexpected {type(error).__name__}: {error}"))
                log.debug("session_failed", exc_info=True)
                delay = RETRY_SECONDS_MAX
            self._attempted()
            await self._pause(delay * self._rng.uniform(0.8, 1.2))
        if self._background:
            await asyncio.wait(self._background, timeout=1.0)
        if self._pool is not None:
            await self._pool.close()

    async def _serve(self) -> None:
        """Attach and keep the attachment going until it is lost or the session closes."""
        if self._pool is None:
            self._pool = await self._open_pool()
        # A worker may still have an old plan. Attaching again would free the slots that it writes.
        while not self._may_reattach():
            if self._stopping:  # do not attach just to leave
                return
            await asyncio.sleep(0.05)
        self._losses = lost = []

        def on_lost(reason: str) -> None:
            lost.append(reason)
            if self._losses is not lost:  # the end of an earlier attachment, heard of late
                return
            self._forget()
            self._poke()

        self._attempts += 1
        spec = replace(self._spec, attempt=self._attempts)
        self._attaching = asyncio.ensure_future(self._pool.attach(spec, on_lost))
        attachment = await within(None, self._attaching)
        with self._lock:
            self._attachment = attachment
        self.failure = None
        self._attempted()
        self.counters["attached"] += 1
        log.info("%s", self._describe(attachment))
        try:
            leave_by = await self._keep(attachment, lost)
        finally:
            unused = self._forget()
            self._on_end()
        if lost:
            log.warning("the pool is gone (%s); serving without the cache until it is back", lost[0])
            self.counters["lost"] += 1
        elif self._stopping:
            leaving = leave(self._pool, attachment.attachment_id, unused)
            await within(max(0.0, leave_by - asyncio.get_running_loop().time()), leaving)

    def _describe(self, attachment: Attachment) -> str:
        again = " again" if self.counters["attached"] > 1 else ""
        where = f"to node {attachment.node_id}" if attachment.node_directory else "to the pool of this engine"
        layout, size = self._spec.layout, format_bytes(attachment.geometry.segment_bytes)
        return (
            f"attached{again} {where} (pool {size}, a block of {layout.block_tokens} tokens is "
            f"{format_bytes(layout.payload_bytes)}, fingerprint {self._spec.fingerprint.short})"
        )

    async def _keep(self, attachment: Attachment, lost: list[str]) -> float:
        """Returns the loop's time by which a session that closes has detached. Raises TimeoutError when it has gone."""
        assert self._loop is not None and self._wake is not None
        period = min(attachment.lease_seconds / 3, HEARTBEAT_SECONDS_MAX)
        renew_at = self._loop.time() + period
        report_at = self._loop.time()
        while not self._stopping and not lost:
            self._wake.clear()
            with self._lock:
                is_idle = self._stock.is_idle(self._loop.time())
            for group in range(self._stock.group_count if self._has_stock else 0):
                await self._restock(attachment, group, is_idle)
            has_news = self._reports or self._suspects or self._spec.hears_removals
            if self._loop.time() >= renew_at or (has_news and self._loop.time() >= report_at):
                report_at = self._loop.time() + REPORT_SECONDS
                renew_at = self._loop.time() + period
                begun(self._renew(attachment), self._background)
            await is_set_within(min(TICK_SECONDS, max(renew_at - self._loop.time(), 0.01)), self._wake)
        leave_by = self._loop.time() + CLOSE_SECONDS
        if self._reports and not lost:  # of requests that ended just before the engine
            await within(CLOSE_SECONDS, self._renew(attachment))
        return leave_by

    def _renew(self, attachment: Attachment) -> Coroutine[Any, Any, None]:
        # A lease whose answer was lost on the way is not among them, so it expires.
        with self._lock:
            leases, statement = sorted(self._leases), self._ledger.state()
            reports = list(self._reports)
            self._reports.clear()
        number, suspects = attachment.attachment_id, self._suspects.take()

        async def renew(pool: PoolPort) -> None:
            try:
                await self._news.hear(pool.renew(number, leases, reports, statement, suspects))
            except KVServiceError:
                if self._is_current(number):  # the pool may not have heard of them
                    self._suspects.add(suspects)
                raise

        return self._with_pool(number, "renew", renew)

    async def _restock(self, attachment: Attachment, group: int, is_idle: bool) -> None:
        """Reserve what the stock lacks, or give back what the engine need not hold: everything when it is idle."""
        assert self._pool is not None
        with self._lock:
            missing, surplus = self._stock.level(group, attachment, is_idle=is_idle)
            self._ledger.give_back(surplus)
        try:
            if surplus:
                self.counters["stock_given_back"] += len(surplus) if is_idle else 0
                await self._pool.abort(attachment.attachment_id, surplus)
            elif missing:
                refs = await self.reserve(attachment, missing, group)
                with self._lock:
                    if self._attachment is attachment:
                        self._stock.add(refs, group)
        except KVServiceError as error:
            self.counters["reserve_failed"] += 1
            log.debug("reserve failed: %s", error.message)

    async def _acquire(self, attachment: Attachment, pending: PendingAcquire, request: AcquireRequest) -> None:
        result: AcquireResult | None = None
        trace = ""
        try:
            if self._pending.is_open(pending):
                asked = len(request.keys) - request.skip
                with (
                    logs.about(pending.request_id),
                    tracing.request_span(
                        "acquire", request.trace, request_id=pending.request_id, asked_blocks=asked
                    ) as span,
                ):
                    trace = tracing.traceparent()
                    pending.call = asyncio.ensure_future(self.ask(attachment, request))
                    result = await pending.call
                    span.set(hit_blocks=len(result.blocks), fetched_blocks=result.fetched_count, miss=result.miss.value)
        except KVServiceError as error:
            self.counters["acquire_failed"] += 1
            log.debug("acquire failed: %s", error.message)
        finally:
            if self._pending.close(pending):
                with self._answered:
                    answer = AcquireAnswer(pending.request_id, attachment.attachment_id, result, request, trace)
                    self._answers.append(answer)
                    self._answered.notify_all()
            elif result is not None and result.lease_id:
                self.counters["acquire_abandoned"] += 1
                self.release(attachment.attachment_id, result.lease_id)

    def _cancel(self, abandoned: Iterable[PendingAcquire]) -> None:
        for pending in abandoned:
            if pending.call is None or pending.call.cancel():  # without a call it is not begun any more
                self.counters["acquire_cancelled"] += 1

    async def _close_handoff(self, attachment: AttachmentId, handoff: HandoffId) -> None:
        if self._seals:
            await asyncio.wait(set(self._seals))
        with self._lock:
            if self._is_current(attachment):
                self._ledger.close_handoff(handoff)
        await self._with_pool(attachment, "close_handoff", lambda pool: pool.close_handoff(attachment, handoff))

    async def _seal(self, number: AttachmentId, items: list[SealItem]) -> None:
        attachment = self.attachment
        if attachment is None or attachment.attachment_id != number:
            self.counters["seal_dropped"] += len(items)
            self._news.not_sealed(items)
            return
        try:
            statuses = await begun(self._store_and_hear(attachment, items), self._seals)
        except KVServiceError as error:
            self.counters["seal_failed"] += len(items)
            self._news.not_sealed(items)
            log.debug("seal failed: %s", error.message)
            return
        self.counters.update(f"seal_{status.value}" for status in statuses)
        if sealed := statuses.count(SealStatus.SEALED):
            self.counters["stored_blocks"] += sealed

    async def _store_and_hear(self, attachment: Attachment, items: list[SealItem]) -> list[SealStatus]:
        """The answer is heard before any that came behind it, as nothing is awaited in between."""
        statuses = await self.store(attachment, items)
        if self._is_current(attachment.attachment_id):
            self._news.sealed(items, statuses)
        else:  # it was lost as the answer came
            self._news.not_sealed(items)
        return statuses

    async def _with_pool(
        self, attachment: AttachmentId, what: str, call: Callable[[PoolPort], Awaitable[None]]
    ) -> None:
        pool = self._pool
        if pool is None or not self._is_current(attachment):
            return  # the attachment is gone, and what it held with it
        try:
            await call(pool)
        except KVServiceError as error:
            self.counters[f"{what}_failed"] += 1
            log.debug("%s failed: %s", what, error.message)

    @property
    def held(self) -> frozenset[BlockRef]:
        """The slots that this engine may write: in stock, in plans, at its workers or being sealed."""
        with self._lock:
            return self._ledger.slots

    def _is_current(self, attachment: AttachmentId) -> bool:
        current = self._attachment
        return current is not None and current.attachment_id == attachment

    # -- for callers on the loop ----

    async def wait_for_attempt(self) -> Attachment | None:
        """Wait for the end of the first attempt to attach. Returns the attachment; None: `failure` says why not."""
        await self._has_tried.wait()
        return self.attachment

    async def ask(self, attachment: Attachment, request: AcquireRequest) -> AcquireResult:
        """Acquire a prefix. Its lease is renewed until `release`. Raises KVServiceError."""
        result = await self.pool_of(attachment).acquire(attachment.attachment_id, request)
        with self._lock:
            if result.lease_id and self._attachment is attachment:
                self._leases.add(result.lease_id)
        return result

    async def reserve(self, attachment: Attachment, count: int, group: int = 0) -> list[BlockRef]:
        """Reserve up to `count` slots. The caller seals or aborts each of them. Raises KVServiceError.

        Slots that arrive too late are not used, because a heartbeat has already denied them.
        """
        pool = self.pool_of(attachment)
        with self._lock:
            call = self._ledger.begin_call()
        try:
            refs = await pool.reserve(attachment.attachment_id, count, group, call)
            with self._lock:
                return refs if self._attachment is attachment and self._ledger.take(call, refs) else []
        finally:
            with self._lock:
                self._ledger.give_up(call)

    async def store(self, attachment: Attachment, items: Sequence[SealItem]) -> list[SealStatus]:
        """Seal written slots. Raises KVServiceError; then it is not known which of them are sealed."""
        try:
            return await self.pool_of(attachment).seal(attachment.attachment_id, items)
        finally:
            with self._lock:
                if self._is_current(attachment.attachment_id):
                    self._ledger.give_back(item.ref for item in items)

    def pool_of(self, attachment: Attachment) -> PoolPort:
        """The pool of the current attachment. Raises Unavailable."""
        if self._pool is None or not self._is_current(attachment.attachment_id):
            raise Unavailable("the pool is gone")
        return self._pool

    # -- between the threads ----

    def _post(self, work: Coroutine[Any, Any, None]) -> bool:
        if not self._stopping and self._call(self._begin, work):
            return True
        work.close()
        return False

    def _send(self, kind: Parcel, attachment: AttachmentId, values: Sequence[Any]) -> None:
        """Send these with everything of their kind that is put before the loop looks."""
        if not self._stopping:
            self._outbox.put(kind, attachment, values)
            self._poke()

    def _call(self, function: Callable[..., object], *arguments: Any) -> bool:
        """Call a function on the loop soon. False if the loop has ended or not begun."""
        loop = self._loop
        if loop is None:
            return False
        try:
            loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop has ended
            return False
        return True

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Start this behind what was put into the outbox before it."""
        self._look()
        begun(work, self._background)

    def _poke(self) -> None:
        """Let the loop look after its outbox and its stock: once, however often it is told before it looks."""
        if self._loop is not None and not self._is_poked:
            self._is_poked = True
            self._call(self._loop.call_later, GATHER_SECONDS, self._look)

    def _look(self) -> None:
        assert self._wake is not None
        if self._stopping and self._attaching is not None:  # a shard that hangs would keep it for seconds
            self._attaching.cancel()
        self._is_poked = False  # before it looks, so that what comes from here on wakes it again
        for kind, attachment, values in self._outbox.take():
            if kind is Parcel.SEAL:
                call = self._seal(attachment, values)
            else:
                call = self._with_pool(attachment, kind.value, giving_back(kind, attachment, values))
            begun(call, self._background)
        self._wake.set()

    async def _pause(self, seconds: float) -> None:
        """Sleep, but wake early if the session closes."""
        assert self._loop is not None and self._wake is not None
        until = self._loop.time() + seconds
        while not self._stopping and self._loop.time() < until:
            self._wake.clear()
            await is_set_within(min(0.25, max(until - self._loop.time(), 0.001)), self._wake)

    def _forget(self) -> list[BlockRef]:
        """Forget the attachment. Returns the slots that no worker was told to write."""
        with self._lock:
            self._attachment = None
            unused = self._stock.clear()
            self._leases.clear()
            self._ledger.forget()
        self._suspects.take()
        self._news.all_gone()
        return unused

    def _report_failure(self, error: KVServiceError) -> None:
        self.counters[f"attach_{error.reason.lower()}"] += 1
        known, self.failure = self.failure, error
        if known is None or error.message != known.message:  # log it once, not at every retry
            log.error("serving without the cache: %s", error.message)

    def _attempted(self) -> None:
        self._first_attempt.set()
        self._has_tried.set()
