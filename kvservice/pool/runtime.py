"""Performs what the shard's core decides: headers, digests, lookups, pulls and announcements. It serves no gRPC.

PoolRuntime satisfies pool.port.PoolPort. The shard service serves it by RPCs; the embedded mode calls it in the
engine's process. Everything runs on the event loop that opened it, except digests (two threads) and the puller (its own
thread). Both return to the loop as events, so the state has a single writer.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, cast

from kvservice.aio import end_tasks, in_thread
from kvservice.client.peer import PeerPort
from kvservice.core import actions as act
from kvservice.core import events as ev
from kvservice.core.acquire.clearing import ClearResult
from kvservice.core.attachments import AttachReply
from kvservice.core.block.marks import Mark
from kvservice.core.block.tenants import NOBODY, TenantLimits
from kvservice.core.directory.meetings import Meetings
from kvservice.core.drain.sender import DrainPhase, DrainProgress
from kvservice.core.explain.counter_windows import SAMPLE_SECONDS
from kvservice.core.messages import (
    AcquireRequest,
    AcquireResult,
    Attachment,
    EngineSpec,
    FollowResult,
    Holder,
    LocateResult,
    Pin,
    Removed,
    RequestReport,
    SealItem,
    SealStatus,
    Statement,
    TakeOverItem,
    TakeOverResult,
    WarmRequest,
    WarmResult,
    names_of,
)
from kvservice.core.segment.refs import BlockRef
from kvservice.core.shard import ShardState
from kvservice.errors import KVServiceError, Unavailable
from kvservice.memory.liveness import claim
from kvservice.memory.segment import Segment
from kvservice.observe import logs
from kvservice.observe.failpoints import failpoint
from kvservice.observe.timings import Timings
from kvservice.pool.answers import PoolAnswers
from kvservice.pool.clears import PoolClears
from kvservice.pool.digests import Digests
from kvservice.pool.late_disks import LateDisks
from kvservice.pool.mark_files import MarkFiles
from kvservice.pool.meeting import PeerMeetings
from kvservice.pool.name_files import NameFiles
from kvservice.pool.open_calls import Later, OpenCalls, Waiter
from kvservice.pool.opening import close_new, open_segment
from kvservice.pool.remote import DirectoryPort, PeerReads, RemoteShards
from kvservice.pool.runtime_ports import Claim, MemoryPort, PoolConfig, PullerPort
from kvservice.pool.tier_factory import tier_makers
from kvservice.pool.tier_specs import rules_of
from kvservice.pool.tiers import PoolTiers
from kvservice.pool.vanished import VanishedEngines
from kvservice.tier.base import Tier
from kvservice.transfer.puller import Puller
from kvservice.units import AttachmentId, BlockKey, BootEpoch, HandoffId, LeaseId, NodeId

log = logging.getLogger("kvservice.pool")

# Between two checks of the core's invariants in production; a broken one fences the pool. Counters are sampled as well.
CHECK_SECONDS = SAMPLE_SECONDS
# The least step of the wall clock that the core hears of. Clocks of nodes may differ by five times as much.
CLOCK_STEP_SECONDS = 1.0
MARKS_SECONDS = 3.0  # for a shared tier to open and say what was cleared; then the node starts without
ARM_SECONDS = 0.001  # between two looks at when something is due next, while events come all the time
CHECK_SLOTS_MAX = 20_000  # a pool with more slots is not checked: a check would block the loop for too long


class PoolRuntime(PoolAnswers):
    """Make one with `open`, or with parts of your own and `begin`. Call every method on the loop that made it."""

    def __init__(
        self,
        config: PoolConfig,
        segment: MemoryPort,
        puller: PullerPort | None,
        directory: DirectoryPort | None,
        peers: PeerPort | None,
        clock: Callable[[], float],
        claim: Claim,
        tiers: Mapping[str, Callable[[], Tier]] | None = None,
    ) -> None:
        self._wall_offset = config.wall_clock() - clock()
        state = ShardState(
            config.node_id,
            BootEpoch(segment.epoch),
            segment.geometry,
            lease_seconds=config.lease_seconds,
            has_directory=directory is not None,
            tenants=config.tenants,
            policy=config.eviction(),
            tiers=[rules_of(spec) for spec in config.tiers],
            max_age_seconds=config.max_age_seconds,
            slices=config.slices,
            wall_offset=self._wall_offset,
            spills=config.spill and not config.accept_spill,  # one that takes what others evict passes nothing on
        )
        self.timings = Timings()
        late = {spec.name: spec.unusable for spec in config.tiers if spec.is_late}
        pool_tiers = PoolTiers(
            tiers or {}, segment, clock, self.timings, self._from_thread, self._take_marks, late, self._join_late
        )
        super().__init__(config, segment, puller, state, pool_tiers, clock)
        self._directory = directory
        self._loop = asyncio.get_running_loop()
        self._no_request = contextvars.copy_context()  # for what is done for nobody in particular: it is in no trace
        self.accepts_spill = config.accept_spill
        self._remote = RemoteShards(
            config.node_id,
            directory,
            peers,
            clock,
            state.counters,
            self.timings,
            accepts_spill=config.accept_spill,
            on_asked=lambda node_id: self.meetings.asked(node_id),
        )
        meetings = Meetings(config.node_id, config.meet_peers, state.counters)
        self.meetings = PeerMeetings(meetings, self._remote, puller, clock, self._spawn)
        self._digests = Digests(segment, self.timings, state.counters)
        self._peer_reads = PeerReads(puller, self._remote, clock, self.timings, self._from_thread)
        self._calls = OpenCalls(clock, self.timings)
        self._lost: dict[AttachmentId, Callable[[str], None]] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}  # in the order of their start
        self._vanished = VanishedEngines(claim, lambda work: self._keep(self._loop.create_task(work)), self._dispatch)
        unusable = [spec.unusable for spec in config.tiers if spec.unusable]
        mark_files = MarkFiles(config.mark_files, config.wall_clock, unusable)
        self.clears = PoolClears(state.freshness, mark_files, pool_tiers, clock, self._clear_blocks)
        self._name_files = NameFiles(config.name_files)
        self._late_disks = LateDisks(config.tiers, state.freshness, self.clears, mark_files, self._name_files)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._is_arming = False  # the timer is soon set anew
        self._armed_at = -ARM_SECONDS
        self._closed = False
        if directory is not None:
            directory.listen(self.meetings.heard)
        self.drained = asyncio.Event()  # a drain with a timeout has ended: nothing here is read any more
        self.adopt_seconds = 0.0

    @classmethod
    async def open(
        cls,
        config: PoolConfig,
        *,
        reads: Callable[[Segment], Puller] | None = None,
        directory: DirectoryPort | None = None,
        peers: PeerPort | None = None,
        tiers: Mapping[str, Callable[[], Tier]] | None = None,
    ) -> PoolRuntime:
        """Open or create the segment, adopt the blocks that an earlier boot left in it, and start.

        Raises SegmentError when the memory cannot be reserved, ServiceConflict when another process owns the segment,
        TransferError when `reads`, the reader of peers, cannot start. `tiers` replace those of the config.
        """
        segment = await open_segment(
            config.segment_path, config.directory, config.geometry, config.node_id, config.epoch_floor
        )
        puller, runtime = None, None
        makers = tier_makers(config.tiers, config.coders) if tiers is None else tiers
        try:
            if reads is not None:
                puller = reads(segment)
                await asyncio.to_thread(puller.start)
            segment.map_ahead()
            runtime = cls(config, segment, puller, directory, peers, time.monotonic, partial(claim, segment), makers)
            await runtime.begin()
        except BaseException:
            if runtime is not None:
                await asyncio.shield(runtime.close())  # its tiers own folders
            elif puller is not None:
                puller.close()
            close_new(segment)
            raise
        return runtime

    async def begin(self) -> None:
        """Adopt the blocks that an earlier boot left, and start the checks. `open` does this itself."""
        marks = await self.clears.load()
        self._state.freshness.learn(await in_thread(self._name_files.load))
        await self._adopt()
        await self.clears.finish(marks, self._segment.used_at)
        self._segment.touch(self._config.wall_clock())
        rules = [rules_of(spec) for spec in self._config.tiers]
        shared = [each.name for each in rules if each.is_shared and each.name in self._tiers.names]
        for work in (*self._tiers.opening(), self._check_forever(), *map(self._tiers.follow_marks, shared)):
            self._spawn(work)
        may_serve_old = bool(self._state.blocks()) or len(shared) < len(rules)
        if may_serve_old and not await self._tiers.marks_known(shared, MARKS_SECONDS):
            log.warning("marks_not_asked", extra={"reason": f"a shared tier was not open within {MARKS_SECONDS:.0f} s"})

    async def _take_marks(self, marks: Sequence[Mark]) -> Sequence[Mark]:
        return await self.clears.take(marks)

    async def _join_late(self, tier: str) -> None:
        await self._late_disks.join(tier)

    # -- PoolPort ----

    async def attach(self, spec: EngineSpec, on_lost: Callable[[str], None], account: str = NOBODY) -> Attachment:
        """`account` is the tenant that the engine's channel names."""
        self._state.freshness.learn(spec.names)
        await self._name_files.keep(self._state.freshness.names())  # before any of its blocks can be on the disk
        reply: AttachReply = await self.ask(lambda op: ev.Attach(op, spec, account), None)
        for attachment in reply.replaced:
            if (end := self._lost.pop(attachment, None)) is not None:
                end("the engine attached again")
        self._lost[reply.attachment] = on_lost
        self._config.coders.learn(spec)
        return Attachment(
            reply.attachment,
            self._config.node_id,
            reply.epoch,
            reply.lease_seconds,
            str(self._segment.path),
            self._segment.geometry,
            "",
        )

    async def detach(self, attachment: AttachmentId) -> None:
        self._lost.pop(attachment, None)
        self._dispatch(ev.Detach(attachment))

    async def acquire(self, attachment: AttachmentId, request: AcquireRequest) -> AcquireResult:
        return cast(AcquireResult, await self.ask(lambda op: ev.Acquire(op, attachment, request), attachment))

    async def reserve(self, attachment: AttachmentId, count: int, group: int = 0, call: int = 0) -> list[BlockRef]:
        refs: list[BlockRef] = await self.ask(lambda op: ev.Reserve(op, attachment, count, group, call), attachment)
        return refs

    async def seal(self, attachment: AttachmentId, items: Sequence[SealItem]) -> list[SealStatus]:
        return cast(list[SealStatus], await self.ask(lambda op: ev.Seal(op, attachment, tuple(items)), attachment))

    async def abort(self, attachment: AttachmentId, refs: Sequence[BlockRef]) -> None:
        await self.ask(lambda op: ev.Abort(op, attachment, tuple(refs)), attachment)

    async def release(self, attachment: AttachmentId, lease_ids: Sequence[LeaseId]) -> None:
        await self.ask(lambda op: ev.Release(op, attachment, tuple(lease_ids)), attachment)

    async def renew(
        self,
        attachment: AttachmentId,
        lease_ids: Sequence[LeaseId],
        reports: Sequence[RequestReport] = (),
        statement: Statement | None = None,
        suspects: Sequence[BlockRef] = (),
    ) -> Removed:
        said = (tuple(lease_ids), tuple(reports), statement, tuple(suspects))
        return cast(Removed, await self.ask(lambda op: ev.Renew(op, attachment, *said), attachment))

    async def open_handoff(self, attachment: AttachmentId, handoff: HandoffId, call: int = 0) -> None:
        await self.ask(lambda op: ev.OpenHandoff(op, attachment, handoff, call), attachment)

    async def close_handoff(self, attachment: AttachmentId, handoff: HandoffId) -> None:
        await self.ask(lambda op: ev.CloseHandoff(op, attachment, handoff), attachment)

    async def close(self) -> None:
        """Stop. The segment file stays, so that the next boot adopts its blocks; see `unlink`."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self.meetings.close()
        while self._tasks:  # a task that ends may start another
            await end_tasks(self._tasks)
            await asyncio.sleep(0)  # a task leaves the set one turn after its end
        self._calls.refuse_all(Unavailable("the pool is shutting down"))
        if self._puller is not None:
            await in_thread(self._puller.close)
        await self._tiers.close()
        await in_thread(self._digests.shutdown)
        await self._remote.close()
        self._segment.close()

    async def warm(self, request: WarmRequest, account: str = NOBODY) -> WarmResult:
        result: WarmResult = await self.ask(lambda op: ev.Warm(op, account, request), None)
        return result

    # -- what only the shard service uses ----

    async def unpin(self, name: str, account: str = NOBODY) -> Pin | None:
        """End a pin. Returns what it was; None if there is none of this name."""
        ended: Pin | None = await self.ask(lambda op: ev.Unpin(op, account, name), None)
        return ended

    def attachment_lost(self, attachment: AttachmentId) -> None:
        """The engine's stream ended without Detach. Unknown attachments are ignored."""
        self._lost.pop(attachment, None)
        if not self._closed:
            self._dispatch(ev.AttachmentLost(attachment))

    async def locate(
        self, reader: NodeId, epoch: BootEpoch, keys: tuple[BlockKey, ...], wait_seconds: float = 0.0
    ) -> LocateResult:
        result: LocateResult = await self.ask(lambda op: ev.PeerLocate(op, reader, epoch, keys, wait_seconds), None)
        return result

    async def follow(
        self, reader: NodeId, epoch: BootEpoch, handoff: HandoffId, keys: tuple[BlockKey, ...], wait_seconds: float
    ) -> FollowResult:
        result: FollowResult = await self.ask(
            lambda op: ev.PeerFollow(op, reader, epoch, handoff, keys, wait_seconds), None
        )
        return result

    async def release_located(
        self, reader: NodeId, epoch: BootEpoch, lease_id: LeaseId, suspects: Sequence[BlockRef]
    ) -> None:
        await self.ask(lambda op: ev.PeerRelease(op, reader, epoch, lease_id, suspects), None)

    async def take_over(
        self, epoch: BootEpoch, leaver: Holder, payload_bytes: int, items: tuple[TakeOverItem, ...], wait_seconds: float
    ) -> TakeOverResult:
        """Read blocks that another node offers, as many as there is room for. Raises Refused for a node that is not
        a member, Forbidden for one that does not leave, unless this shard accepts what others evict."""
        member = await self._remote.leaver(leaver)
        if self._state.freshness.learn(names_of(items)):
            await self._name_files.keep(self._state.freshness.names())  # before any of the blocks can be on the disk
        result: TakeOverResult = await self.ask(
            lambda op: ev.PeerTakeOver(op, epoch, member, payload_bytes, items, wait_seconds), None
        )
        return result

    async def _clear_blocks(self, marks: Sequence[Mark]) -> ClearResult:
        self._look_at_the_clock()
        return cast(ClearResult, await self.ask(lambda op: ev.Clear(op, tuple(marks)), None))

    def count(self, name: str) -> None:
        """Count something that happened to a caller, for the counters of `stats`."""
        self._state.counters[name] += 1

    def drain(self, undo: bool = False, timeout_seconds: float = 0.0, handover: bool = True) -> DrainProgress:
        """Stop accepting writes and fetches, or (`undo`) accept them again; with a timeout, also leave within it.
        Returns the progress at once: see `drained`."""
        self._dispatch(ev.Drain(undo, timeout_seconds, handover))
        return self.drain_progress()

    def set_tenants(self, limits: Mapping[str, TenantLimits], secrets: Mapping[str, bytes] | None = None) -> None:
        """Replace the tenants, their limits, and the secrets that their blocks are encrypted with below the memory."""
        self._config.coders.keys.set_tenants(secrets or {})
        self._dispatch(ev.SetTenants(limits))

    def retire(self) -> None:
        """Mark the memory as unused: engines unmap it at their next step."""
        self._segment.retire()

    def unlink(self) -> None:
        """Remove the segment file, so that the next boot finds nothing to adopt."""
        self._segment.unlink()

    # -- events in, actions out ----

    async def ask(
        self, make: Callable[[int], ev.Event], attachment: AttachmentId | None, later: Later | None = None
    ) -> Any:
        """`post`, and wait for the answer. Raises what the core refuses with."""
        future: asyncio.Future[Any] = self._loop.create_future()
        op = self.post(make, attachment, future, later)
        try:
            return await future
        except asyncio.CancelledError:
            if not self.cancel(op) and future.done() and not future.cancelled() and future.exception() is None:
                self._take_back(future.result(), attachment)
            raise

    def post(
        self,
        make: Callable[[int], ev.Event],
        attachment: AttachmentId | None,
        waiter: Waiter,
        later: Later | None = None,
    ) -> int:
        """Ask the core, without a task. Returns the number of the call, for `cancel`.

        `waiter` hears the answer once, perhaps before this returns, and must not raise. `make` gets the number and
        returns the event. `later` takes what continues a long call and runs it when it is the caller's turn again; by
        default that is the loop's next turn. Raises Unavailable when the pool is closed or fenced.
        """
        if self._closed or self._fenced is not None:
            raise Unavailable(f"the pool of node {self._config.node_id} is {self._fenced or 'shut down'}")
        op, event = self._calls.add(make, attachment, waiter, later)
        if isinstance(event, ev.Acquire) and event.request.request_id:
            with logs.about(event.request.request_id):
                self._dispatch(event)
        else:
            self._dispatch(event)
        return op

    def cancel(self, op: int) -> bool:
        """Give a call up: its waiter hears nothing more. Returns False if it was answered before."""
        if self._calls.pop(op) is None:
            return False
        self._dispatch(ev.Cancel(op))
        return True

    def _dispatch(self, event: ev.Event) -> None:
        """Pass one event to the core and perform its actions, and the events that these cause at once."""
        if self._fenced is not None:
            return
        try:
            now = self._clock()
            performed = self._state.handle(event, now)
            self._perform(performed)
        except Exception as error:  # noqa: BLE001  mailbox boundary: nothing may build on half-performed actions
            self._fence(f"fenced after an internal error: {type(error).__name__}: {error}")
            return
        if self._state.drain_phase is DrainPhase.GONE:
            self.drained.set()
        if not self._is_arming:  # every part is asked when it is due next: that is once for events that come together
            self._is_arming = True
            wait = 0.0 if now >= self._armed_at + ARM_SECONDS else ARM_SECONDS
            self._armed_at = now + wait
            self._loop.call_later(wait, self._arm_timer, context=self._no_request)

    def _perform(self, performed: list[act.Action]) -> None:
        digests: list[act.Digest] = []
        changes: list[act.Announce | act.Retract] = []
        for action in performed:
            match action:
                case act.Reply() | act.Refuse():
                    self._answer(action)
                case act.Digest():
                    digests.append(action)
                case act.WriteHeader(slot, header):
                    failpoint("shard.header")
                    self._segment.write_header(slot, header)
                case act.ClearHeader(slot):
                    self._segment.clear_header(slot)
                case act.AssignSlab(slab, payload_bytes):
                    self._segment.assign_slab(slab, payload_bytes)
                case act.NextTurn(op):
                    self._in_turn(op, partial(self._go_on, ev.GoOn(op)))
                case act.Announce() | act.Retract():
                    failpoint("shard.announce")
                    changes.append(action)
                case act.Pull():
                    self._peer_reads.begin(action)
                case act.WriteDown() | act.BringBack() | act.Erase() | act.Probe():
                    self._tiers.perform(action)
                case act.WatchEngine(engine_id):
                    self._vanished.watch(engine_id)
                case _:
                    self._spawn(self._report(action))
        if changes and self._directory is not None:
            self._directory.tell(changes)
        if digests:
            self._digests.begin(digests, self._go_on)

    def _in_turn(self, op: int, work: Callable[[], None]) -> None:
        """Run this when it is the turn of the call's caller again."""
        (self._calls.later(op) or self._loop.call_soon)(work)

    def _go_on(self, event: ev.GoOn | ev.Digested) -> None:
        if not self._closed:
            self._dispatch(event)

    def _answer(self, action: act.Reply | act.Refuse) -> None:
        failpoint("shard.answer")
        call = self._calls.pop(action.op)  # None: the call was cancelled
        if isinstance(action, act.Refuse):
            if call is not None and not call.waiter.done():
                call.waiter.set_exception(action.error)
        elif call is None or call.waiter.done():
            self._take_back(action.value, None if call is None else call.attachment)
        else:
            self._calls.time(call, action.value)
            call.waiter.set_result(action.value)

    def _take_back(self, value: object, attachment: AttachmentId | None) -> None:
        """Give back what a call was promised after its caller gave up; it would stay leased while the engine lives."""
        if isinstance(value, AcquireResult) and value.lease_id and attachment is not None:
            self._spawn(self.release(attachment, [value.lease_id]))
        elif isinstance(value, LocateResult | FollowResult):
            self._state.counters["locate_abandoned"] += 1  # its lease expires
        elif isinstance(value, list) and value and isinstance(value[0], BlockRef) and attachment is not None:
            self._spawn(self.abort(attachment, value))

    def _arm_timer(self) -> None:
        self._is_arming = False
        due = self._state.next_deadline()
        if self._timer is not None:
            if due is not None and self._timer_due <= due:
                return  # it finds nothing due, and is set again then: cheaper than a new timer for every event
            self._timer.cancel()
            self._timer = None
        if due is not None and not self._closed:
            self._timer_due = due
            delay = max(due - self._clock(), 0.0) + 0.001
            self._timer = self._loop.call_later(delay, self._on_due, context=self._no_request)

    def _on_due(self) -> None:
        self._timer = None
        self._dispatch(ev.Tick())

    def _fence(self, reason: str) -> None:
        """Stop serving: a state that contradicts itself could promise a wrong block."""
        log.critical("pool_fenced", extra={"reason": reason, "node": self._config.node_id}, exc_info=True)
        self._fenced = reason
        self._calls.refuse_all(Unavailable(reason))
        for on_lost in list(self._lost.values()):
            on_lost(reason)
        self._lost.clear()

    async def _report(self, action: act.Outgoing) -> None:
        answer = await self._remote.perform(action)
        if answer is not None:
            self._dispatch(answer)

    def _from_thread(self, event: ev.Event, context: contextvars.Context | None = None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._dispatch, event, context=context or self._no_request)
        except RuntimeError:
            log.debug("event_after_close", extra={"event": type(event).__name__})

    # -- start, checks, tasks ----

    async def _adopt(self) -> None:
        """Verify every block that an earlier boot left in the segment, and adopt it."""
        started = self._clock()
        found = await self._digests.verified()
        for event in found:
            self._dispatch(event)
        for engine_id in self._state.watch_list():
            self._vanished.watch(engine_id)
        self.adopt_seconds = self._clock() - started
        if found:
            adopted = self._state.all_counters().get("blocks_adopted", 0)
            log.info("blocks_adopted", extra={"count": adopted, "found": len(found), "seconds": self.adopt_seconds})

    async def _check_forever(self) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            self._look_at_the_clock()
            self._segment.touch(self._config.wall_clock())
            self._windows.sample(self._clock(), self._state.all_counters())
            await self._name_files.keep_again(self._state.freshness.names())
            if self._state.capacity <= CHECK_SLOTS_MAX:
                try:
                    self._state.check_invariants()
                except Exception as error:  # noqa: BLE001  a state that cannot even be checked contradicts itself
                    self._fence(f"fenced: {error if isinstance(error, AssertionError) else repr(error)}")
                    return

    def _look_at_the_clock(self) -> None:
        """Tell the core when somebody has set the time of day, or the machine slept: clears and ages go by it."""
        offset = self._config.wall_clock() - self._clock()
        step = offset - self._wall_offset
        if abs(step) >= CLOCK_STEP_SECONDS:
            log.warning("clock_set", extra={"node": self._config.node_id, "seconds": round(step, 3)})
            self._wall_offset = offset
            self._dispatch(ev.ClockSet(offset))

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        async def run() -> None:
            try:
                await work
            except KVServiceError as error:
                log.info("background_call_failed", extra={"error": error.message})

        task = self._loop.create_task(run())
        # A task that is cancelled before its first turn never begins the work.
        task.add_done_callback(lambda _: work.close())
        self._keep(task)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
