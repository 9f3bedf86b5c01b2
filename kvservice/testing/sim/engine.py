"""One simulated engine: the production scheduler half, a session over simulated calls, a worker that copies.

An engine has two processes, as vLLM does: the one with the scheduler, and the worker, which may live on for a moment
when the first is killed, and then still writes what it was told to write.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvservice.connector.handoff import Prefill
from kvservice.connector.plan import CopyEntry, LoadPlan, PoolInfo, StepPlan, StepReport, StorePlan
from kvservice.connector.scheduler import Promise, SchedulerHalf, Wait
from kvservice.connector.session import Answer
from kvservice.core import events as ev
from kvservice.core.checks import is_as_promised, is_reserved
from kvservice.core.digest import digest_payload
from kvservice.core.header import SlotHeader
from kvservice.core.keys import block_keys
from kvservice.core.messages import (
    AcquireRequest,
    AcquireResult,
    Attachment,
    BlockRef,
    EngineSpec,
    Handoff,
    RequestReport,
    SealItem,
)
from kvservice.core.shard import AttachReply
from kvservice.testing.sim.memory import BLANK, content_of
from kvservice.testing.sim.node import Node
from kvservice.testing.sim.world import Process, Violation, World
from kvservice.units import AttachmentId, BlockHash, BlockKey, HandoffId, LeaseId

STEP_SECONDS = 0.01
BLOCKS_PER_STEP = 2  # that a request computes
COPY_SECONDS = 0.02
CALL_SECONDS = 0.0003
RETRY_SECONDS = 0.2
STOCK = 4
BLOCK_TOKENS = 16
FETCH_TIMEOUT_SECONDS = 0.5
HANDOFF_TIMEOUT_SECONDS = 5.0


@dataclass(slots=True)
class _Acquire:
    op: int = 0  # once it has arrived
    is_over: bool = False


class SimSession:
    """What connector.session does, without a thread: commands become calls of the node's shard, answers are kept until
    they are asked for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._life = 0  # of the attachment
        self.attachment: Attachment | None = None
        self._stock: deque[BlockRef] = deque()
        self._expected = 0
        self._restocking = False
        self._answers: deque[Answer] = deque()
        self._asking: dict[str, _Acquire] = {}  # the call of each request that waits for one
        self._leases: set[LeaseId] = set()
        self._reports: list[RequestReport] = []
        self._seals = 0  # under way
        self._after_seals: list[Callable[[], None]] = []
        engine.after(0.0, self._attach)

    # -- attachment ----

    def _attach(self) -> None:
        node = self._engine.node
        if self.attachment is not None:
            return
        if not node.alive or not self._engine.half.may_reattach():
            self._engine.after(RETRY_SECONDS, self._attach)
            return
        boot = node.life

        def attached(answer: object) -> None:
            if isinstance(answer, AttachReply) and node.life == boot:
                self._engine.receive(self._attached, answer, boot)
            else:
                self._engine.after(RETRY_SECONDS, self._attach)

        self._send(lambda: node.call(lambda op: ev.Attach(op, self._engine.spec), attached))
        self._engine.after(1.0, self._attach)  # when no answer comes

    def _attached(self, reply: AttachReply, boot: int) -> None:
        if self.attachment is not None or self._engine.node.life != boot:
            return
        node = self._engine.node
        self.attachment = Attachment(
            reply.attachment, node.node_id, reply.epoch, reply.lease_seconds, node.name, node.memory.geometry, "lock"
        )
        self._life += 1
        self._engine.after(reply.lease_seconds / 3, self._renew, self._life)
        self._restock()

    def lost(self) -> None:
        """The shard died: its stream ended."""
        self.attachment = None
        self._life += 1
        self._stock.clear()
        self._leases.clear()
        self._restocking = False
        for call in self._asking.values():
            call.is_over = True
        self._asking.clear()
        self._engine.after(RETRY_SECONDS, self._attach)

    def _renew(self, life: int) -> None:
        if life != self._life or self.attachment is None:
            return
        attachment, leases = self.attachment, tuple(sorted(self._leases))
        reports, self._reports = tuple(self._reports), []
        self._call(lambda op: ev.Renew(op, attachment.attachment_id, leases, reports), lambda answer: None)
        self._engine.after(attachment.lease_seconds / 3, self._renew, life)

    def _restock(self) -> None:
        attachment, life = self.attachment, self._life
        if attachment is None or self._restocking:
            return
        wanted = STOCK + min(self._expected, 8)
        if len(self._stock) * 2 > wanted:
            return
        self._restocking = True
        count = wanted - len(self._stock)

        def reserved(answer: object) -> None:
            if life != self._life:
                return
            self._restocking = False
            if isinstance(answer, list):
                self._stock.extend(answer)

        self._call(lambda op: ev.Reserve(op, attachment.attachment_id, count), reserved)

    # -- SessionPort ----

    def acquire(self, request_id: str, request: AcquireRequest) -> AttachmentId | None:
        attachment = self.attachment
        if attachment is None:
            return None
        call = self._asking[request_id] = _Acquire()

        def answered(answer: object) -> None:
            if call.is_over:
                return  # given up meanwhile: what it promised is not renewed, and ends
            call.is_over = True
            self._asking.pop(request_id, None)
            result = answer if isinstance(answer, AcquireResult) else None
            if result is not None and result.lease_id:
                self._leases.add(result.lease_id)
            self._answers.append(Answer(request_id, attachment.attachment_id, result))
            if self._engine.pause_at_answer and result is not None and result.lease_id:
                self._engine.pause(self._engine.pause_at_answer)
                self._engine.pause_at_answer = 0.0

        def reply(answer: object) -> None:
            if isinstance(answer, AcquireResult):
                self._engine.check_promised(request, answer)
            self._back(answered, answer)

        def ask() -> None:
            if not call.is_over:
                call.op = self._engine.node.call(lambda op: ev.Acquire(op, attachment.attachment_id, request), reply)

        self._send(ask)
        return attachment.attachment_id

    def answers(self) -> list[Answer]:
        found = list(self._answers)
        self._answers.clear()
        return found

    def abandon(self, request_id: str) -> None:
        call = self._asking.pop(request_id, None)
        if call is not None:
            call.is_over = True
            if call.op:
                self._send(lambda: self._engine.node.cancel(call.op))

    def expect(self, count: int) -> None:
        self._expected = max(0, self._expected + count)

    def take_slots(self, attachment: AttachmentId, count: int) -> list[BlockRef]:
        if self.attachment is None or self.attachment.attachment_id != attachment:
            return []
        taken = [self._stock.popleft() for _ in range(min(count, len(self._stock)))]
        self._restock()
        return taken

    def seal(self, attachment: AttachmentId, items: Sequence[SealItem]) -> None:
        sealing = tuple(items)
        self._seals += 1
        is_over = False

        def sealed(answer: object) -> None:
            nonlocal is_over
            if is_over:
                return
            is_over = True
            self._seals -= 1
            if not self._seals:
                waiting, self._after_seals = self._after_seals, []
                for call in waiting:
                    call()

        if self._is_current(attachment):
            self._call(lambda op: ev.Seal(op, attachment, sealing), sealed, lost=sealed)
        else:
            sealed(None)

    def abort(self, attachment: AttachmentId, refs: Sequence[BlockRef]) -> None:
        given = tuple(refs)
        if self._is_current(attachment):
            self._call(lambda op: ev.Abort(op, attachment, given), lambda answer: None)

    def release(self, attachment: AttachmentId, lease_id: LeaseId) -> None:
        self._leases.discard(lease_id)
        if self._is_current(attachment):
            self._call(lambda op: ev.Release(op, attachment, (lease_id,)), lambda answer: None)

    def report(self, report: RequestReport) -> None:
        self._reports.append(report)

    def open_handoff(self, handoff: HandoffId) -> AttachmentId | None:
        attachment = self.attachment
        if attachment is None:
            return None
        wanted = attachment.attachment_id
        self._call(lambda op: ev.OpenHandoff(op, wanted, handoff), lambda answer: None)
        return wanted

    def close_handoff(self, attachment: AttachmentId, handoff: HandoffId) -> None:
        def close() -> None:
            if self._is_current(attachment):
                self._call(lambda op: ev.CloseHandoff(op, attachment, handoff), lambda answer: None)

        if self._seals:
            self._after_seals.append(close)
        else:
            close()

    # -- calls ----

    def _is_current(self, attachment: AttachmentId) -> bool:
        return self.attachment is not None and self.attachment.attachment_id == attachment

    def _send(self, call: Callable[[], object]) -> None:
        """Over the node's socket: fast, in order, and gone when either side dies."""
        node, life = self._engine.node, self._engine.node.life

        def arrive() -> None:
            if node.life == life:
                node.receive(perform)

        def perform() -> None:
            call()

        self._engine.world.at(CALL_SECONDS, arrive)

    def _call(
        self,
        make: Callable[[int], ev.Event],
        answered: Callable[[object], None],
        lost: Callable[[object], None] | None = None,
    ) -> None:
        node, life = self._engine.node, self._engine.node.life
        if not node.alive:
            if lost is not None:
                lost(None)
            return
        self._send(lambda: node.call(make, partial(self._back, answered)))
        if lost is not None:
            self._engine.when_node_dies(node, life, lost)

    def _back(self, answered: Callable[[object], None], answer: object) -> None:
        node, life = self._engine.node, self._engine.node.life

        def arrive() -> None:
            if node.life == life:
                self._engine.receive(answered, answer)

        self._engine.world.at(CALL_SECONDS, arrive)


class SimWorker:
    """Copies between slots and the engine's blocks, half by half; survives its scheduler for a moment."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.alive = True
        self.busy = 0  # copies under way: the liveness lock is held as long
        self.report = StepReport()
        self.loaded: set[str] = set()
        self.failed: set[str] = set()

    def die(self) -> None:
        """With its host: nothing of it writes any more."""
        self.alive = False
        self.busy = 0

    def run(self, plan: StepPlan) -> None:
        pool = plan.pool
        for load in plan.loads:
            self._load(load, pool)
        for store in plan.stores:
            self._store(store, pool)

    def _load(self, load: LoadPlan, pool: PoolInfo | None) -> None:
        memory, world = self._engine.node.memory, self._engine.world
        good = pool is not None and bool(load.entries)
        if pool is not None:
            for entry in load.entries:
                good &= is_as_promised(memory.read_header(entry.ref.slot), pool.epoch, entry.ref, entry.key)
        if not good or pool is None:
            self._end_load(load, False)
            return
        headers = [memory.header_bytes(entry.ref.slot) for entry in load.entries]
        self.busy += 1

        def copy(half: int) -> None:
            for entry in load.entries:
                self._engine.write_block(entry.block_id, half, memory.read(entry.ref.slot))

        def end() -> None:
            if not self.alive:
                return
            self.busy -= 1
            sound = True
            for entry, before in zip(load.entries, headers, strict=True):
                header = memory.read_header(entry.ref.slot)
                if (
                    memory.header_bytes(entry.ref.slot) != before
                    or header is None
                    or (self._engine.verifies_loads and not self._is_genuine(entry, header))
                ):
                    sound = False
                    self.report.suspects.add(entry.ref)
            self._end_load(load, sound)

        world.at(COPY_SECONDS * world.random.random(), copy, 0)
        world.at(COPY_SECONDS, copy, 1)
        world.at(COPY_SECONDS + 0.001, end)

    def _is_genuine(self, entry: CopyEntry, header: SlotHeader) -> bool:
        return digest_payload(self._engine.read_block(entry.block_id), entry.key) == header.digest

    def _end_load(self, load: LoadPlan, good: bool) -> None:
        self.loaded.add(load.request_id)
        if good:
            self._engine.check_loaded(load)
        else:
            self.failed.add(load.request_id)
            self._engine.world.counters["loads_failed"] += 1

    def _store(self, store: StorePlan, pool: PoolInfo | None) -> None:
        memory, world = self._engine.node.memory, self._engine.world
        good = pool is not None and memory.epoch == pool.epoch
        if pool is not None:
            for entry in store.entries:
                good &= is_reserved(memory.read_header(entry.ref.slot), pool.epoch, entry.ref)
        if not good:
            self.report.failed[store.store_id] = 1
            return
        self.busy += 1

        def copy(half: int) -> None:
            for entry in store.entries if self.alive else ():
                memory.write_half(entry.ref.slot, half, self._engine.read_block(entry.block_id))

        def end() -> None:
            if not self.alive:
                return
            self.busy -= 1
            self.report.stored[store.store_id] = 1
            world.counters["blocks_stored"] += len(store.entries)

        delay = self._engine.copy_delay
        world.at(delay + COPY_SECONDS * world.random.random(), copy, 0)
        world.at(delay + COPY_SECONDS, copy, 1)
        world.at(delay + COPY_SECONDS + 0.001, end)
        if self._engine.on_store is not None:
            call, self._engine.on_store = self._engine.on_store, None
            world.at(0.0, call)


@dataclass(slots=True)
class SimRequest:
    request_id: str
    hashes: list[BlockHash]
    keys: list[BlockKey]
    wants: Prefill | Handoff | None
    block_ids: list[int] = field(default_factory=list)
    computed: int = 0  # blocks
    written: int = 0  # blocks that the engine has computed or was given
    is_loading: bool = False
    is_over: bool = False
    arrived_at: float = 0.0


class Engine(Process):
    """`spec` names the engine; a restarted one gets another id. `verifies_loads` is verify_load=full."""

    def __init__(
        self, world: World, name: str, node: Node, spec: EngineSpec, *, verifies_loads: bool, copy_delay: float = 0.0
    ) -> None:
        super().__init__(world, name, node.host)
        self.node = node
        self.spec = spec
        self.verifies_loads = verifies_loads
        self.copy_delay = copy_delay
        self.requests: dict[str, SimRequest] = {}
        self.waiting: deque[str] = deque()
        self._blocks: dict[int, bytearray] = {}
        self._pins: dict[int, int] = {}
        self._next_block = 1
        self._on_death: list[tuple[int, Callable[[object], None]]] = []
        self.on_store: Callable[[], None] | None = None  # called once, when the worker has begun to copy
        self.pause_at_answer = 0.0  # seconds: the moment between a promise and its load
        self.worker = SimWorker(self)
        self.session = SimSession(self)
        self.half = self._make_half()
        self._is_stepping = False

    def _make_half(self) -> SchedulerHalf:
        def info(attachment: Attachment) -> PoolInfo:
            return PoolInfo(
                attachment.segment_path, attachment.geometry, attachment.epoch, self.spec.layout,
                attachment.liveness_path,
            )  # fmt: skip

        half = SchedulerHalf(
            self.session,
            lambda hashes: block_keys(self.spec.fingerprint.digest, hashes),
            info,
            block_tokens=BLOCK_TOKENS,
            worker_count=1,
            lazy=False,
            fetch_timeout_seconds=FETCH_TIMEOUT_SECONDS,
            handoff_timeout_seconds=HANDOFF_TIMEOUT_SECONDS,
        )
        half.pin_with(self)
        return half

    # -- blocks ----

    def pin(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            self._pins[block] = self._pins.get(block, 0) + 1

    def unpin(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            count = self._pins.get(block, 0) - 1
            if count > 0:
                self._pins[block] = count
            else:
                self._pins.pop(block, None)

    def free_share(self) -> float:
        """There is always room."""
        return 1.0

    def write_block(self, block: int, half: int, payload: bytes) -> None:
        old = self._blocks.get(block)
        if old is not None:
            middle = len(payload) // 2
            old[half * middle : (half + 1) * middle] = payload[half * middle : (half + 1) * middle]

    def read_block(self, block: int) -> bytes:
        return bytes(self._blocks[block])

    def _allocate(self, count: int) -> list[int]:
        found = list(range(self._next_block, self._next_block + count))
        self._next_block += count
        for block in found:
            self._blocks[block] = bytearray(BLANK)
        return found

    def check_loaded(self, load: LoadPlan) -> None:
        """The promise of the whole service: what an engine was given is what was computed."""
        request = self.requests[load.request_id]
        self.world.counters["blocks_loaded"] += len(load.entries)
        for entry in load.entries:
            position = request.block_ids.index(entry.block_id)
            if self.read_block(entry.block_id) != self._right(request, position):
                raise Violation(f"{self.name} was given wrong bytes for block {position} of {load.request_id}")

    def check_promised(self, request: AcquireRequest, result: AcquireResult) -> None:
        """What is promised lies in its slot, under its own key, at the moment it is promised."""
        for key, ref in zip(request.keys[request.skip :], result.blocks, strict=False):
            header = self.node.memory.read_header(ref.slot)
            if header is not None and header.key != key:  # None: its bits were flipped, and no load takes it
                raise Violation(f"{self.name} was promised slot {ref.slot:#x} for another block than it asked for")

    def _right(self, request: SimRequest, position: int) -> bytes:
        return content_of(self.spec.fingerprint.digest, request.hashes[position])

    # -- requests ----

    def submit(self, request_id: str, hashes: list[BlockHash], wants: Prefill | Handoff | None) -> None:
        keys = block_keys(self.spec.fingerprint.digest, hashes)
        self.requests[request_id] = SimRequest(request_id, hashes, keys, wants, arrived_at=self.world.now)
        for block_hash, key in zip(hashes, keys, strict=True):
            self.world.right[key] = content_of(self.spec.fingerprint.digest, block_hash)
        self.waiting.append(request_id)
        self.half.on_new_request(request_id, hashes, self.clock(), wants=wants)
        if not self._is_stepping:
            self._is_stepping = True
            self.after(0.0, self._step)

    def abort(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        if request is not None and not request.is_over and not request.is_loading:
            self.world.note(self.name, f"{request_id} aborted")
            self._finish(request, store_rest=False)

    @property
    def is_idle(self) -> bool:
        return all(request.is_over for request in self.requests.values())

    def _step(self) -> None:
        now = self.clock()
        self._schedule(now)
        plan = StepPlan()
        self.half.begin_step(plan, now)
        running = [
            request
            for request in self.requests.values()
            if not request.is_over and request.block_ids and not request.is_loading
        ]
        scheduled = []
        for request in running:
            request.computed = min(request.computed + BLOCKS_PER_STEP, len(request.keys))
            ids = request.block_ids
            scheduled.append((request.request_id, request.hashes, request.computed * BLOCK_TOKENS, partial(_same, ids)))
        self.half.plan_stores(plan, scheduled)
        for request in running:
            for position in range(request.computed):
                if position >= request.written:
                    self._blocks[request.block_ids[position]][:] = self._right(request, position)
            request.written = request.computed
        self.worker.run(plan)
        self.after(STEP_SECONDS, self._end_step)

    def _end_step(self) -> None:
        worker = self.worker
        report, worker.report = worker.report, StepReport()
        self.half.reported(report)
        loaded, failed = worker.loaded, worker.failed
        worker.loaded, worker.failed = set(), set()
        for request_id in sorted(loaded):
            self._loaded(request_id, request_id in failed)
        for request in list(self.requests.values()):
            is_computed = bool(request.block_ids) and request.computed >= len(request.keys)
            if is_computed and not request.is_over and not request.is_loading:
                self._finish(request, store_rest=True)
        self._is_stepping = not self.is_idle or self.half.has_pending_work(self.clock()) or worker.busy > 0
        if self._is_stepping:
            self._step()

    def _schedule(self, now: float) -> None:
        for request_id in list(self.waiting):
            request = self.requests[request_id]
            answer = self.half.matched(request_id, 0, len(request.keys) * BLOCK_TOKENS + 1, now)
            if isinstance(answer, Wait):
                if now - request.arrived_at > HANDOFF_TIMEOUT_SECONDS + 10.0:
                    raise Violation(f"{request_id} waits for the cache since {request.arrived_at:.2f}")
                continue
            assert isinstance(answer, Promise)
            self.waiting.remove(request_id)
            request.block_ids = self._allocate(len(request.keys))
            self.half.allocated(request_id, request.block_ids, answer.tokens)
            blocks = answer.tokens // BLOCK_TOKENS
            request.is_loading = blocks > 0
            request.computed = request.written = blocks
            if blocks:
                self.world.note(self.name, f"{request_id} loads {blocks} of {len(request.keys)} blocks")

    def _loaded(self, request_id: str, failed: bool) -> None:
        self.half.loaded(request_id, failed=failed)
        request = self.requests.get(request_id)
        if request is not None:
            request.is_loading = False
            if failed:
                request.computed = request.written = 0

    def _finish(self, request: SimRequest, store_rest: bool) -> None:
        request.is_over = True
        if request.request_id in self.waiting:
            self.waiting.remove(request.request_id)
        self.half.finished(
            request.request_id, request.hashes, request.computed * BLOCK_TOKENS, request.block_ids,
            store_rest=store_rest,
        )  # fmt: skip
        for block in request.block_ids:  # the engine uses them for something else now, unless they are being copied
            if block not in self._pins:
                self._blocks[block][:] = b"\xee" * len(self._blocks[block])

    # -- death ----

    def when_node_dies(self, node: Node, life: int, call: Callable[[object], None]) -> None:
        self._on_death.append((life, call))

    def node_died(self) -> None:
        """The stream of the attachment ended."""
        calls, self._on_death = self._on_death, []
        for _, call in calls:
            call(None)
        self.session.lost()

    def crash(self) -> None:
        """kill -9 of the scheduler's process; the worker ends what it is at, holding its lock."""
        self.world.note(self.name, "crashed")
        attachment = self.session.attachment
        self.die()
        node, life = self.node, self.node.life
        if attachment is not None:

            def lost() -> None:
                if node.life == life:
                    node.receive(node.handle, ev.AttachmentLost(attachment.attachment_id))

            self.world.at(0.001, lost)

    @property
    def holds_lock(self) -> bool:
        return self.alive or self.worker.busy > 0


def _same(ids: list[int]) -> list[int]:
    return ids
