"""One simulated engine: the production scheduler half and session, with a simulated worker and scheduler around them.

An engine has two processes, as vLLM does: the scheduler's and the worker's. The worker may live on for a moment after
the scheduler was killed, and still writes what it was told to write.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvservice.connector.plan import LoadPlan, PoolInfo, StepPlan, StepReport
from kvservice.connector.scheduler.half import SchedulerHalf
from kvservice.connector.scheduler.handoff import Prefill
from kvservice.connector.scheduler.ports import Promise, Wait
from kvservice.connector.scheduler.request_terms import RequestTerms
from kvservice.connector.scheduler.tailed import TailedScheduler
from kvservice.core.block.keys import block_keys, tenant_key, term_key
from kvservice.core.block.tails import tail_hash
from kvservice.core.block.tenants import NOBODY
from kvservice.core.messages import NO_HINTS, AcquireRequest, AcquireResult, Attachment, EngineSpec, Handoff, Hints
from kvservice.session.session import Session
from kvservice.testing.sim.line import Line
from kvservice.testing.sim.loop import ProcessLoop
from kvservice.testing.sim.memory import SCALED, content_of
from kvservice.testing.sim.node import Node
from kvservice.testing.sim.parts import EngineParts
from kvservice.testing.sim.worker import SimWorker
from kvservice.testing.sim.world import Violation, World
from kvservice.units import BlockHash, BlockKey

# A step that computes: the middle of what real engines take.
STEP_SECONDS = 0.01
WAITING_SECONDS = 0.025  # A step that computes nothing: it waits for answers and copies.
# What clients say of a prompt; its last hash says which. Most say nothing.
HINTS = (
    *(3 * [NO_HINTS]),
    Hints(last_turn=True),
    Hints(reuse_seconds=30.0, prefetch=True),
    Hints(write_down=True),
    Hints(share=True),
)
BLOCKS_PER_STEP = 2  # blocks that a request computes in one step, so that requests take several steps
# vLLM's default. Only the names of blocks depend on it.
BLOCK_TOKENS = 16
# Short beside the connector's default, so that faults of a schedule often reach it.
FETCH_TIMEOUT_SECONDS = 0.5
# Longer than any schedule delays a prefill, so that reaching it is a fault.
HANDOFF_TIMEOUT_SECONDS = 5.0
STOP_SECONDS = 20.0  # Virtual seconds. A session that takes longer to close is a violation.
RESET_SECONDS = 0.05  # between two tries of a reset


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


class Engine(EngineParts):
    """One engine. `spec` names it; a restarted one gets another id. `verifies_loads` stands for verify_load=full."""

    node: Node

    def __init__(
        self,
        world: World,
        name: str,
        node: Node,
        spec: EngineSpec,
        *,
        verifies_loads: bool,
        copy_delay: float = 0.0,
        tenant: str = NOBODY,
        tails: bool = False,
    ) -> None:
        super().__init__(world, name, node.host)
        self.node = node
        self.spec = spec
        self.tenant = tenant
        self._tails = tails
        self.tenant_key = tenant_key(b"simulated secret", tenant) if tenant else b""
        self._term = b""  # the term of its weights
        self._changes = 0
        self.verifies_loads = verifies_loads
        self.copy_delay = copy_delay
        self.requests: dict[str, SimRequest] = {}
        self.unfinished: dict[str, SimRequest] = {}
        self.waiting: deque[str] = deque()
        self._blocks: dict[int, bytearray] = {}
        self._pins: dict[int, int] = {}
        self._next_block = 1
        self.on_store: Callable[[], None] | None = None  # called once, when the worker has begun to copy
        self.pause_at_answer = 0.0  # seconds between a promise and its load
        self.worker = SimWorker(self)
        self.line = Line(self)
        self.loop = ProcessLoop(self)
        self.session = Session(self._open_line, spec, lambda: self.half.may_reattach(), rng=world.random)
        self.half = self._make_half()
        self._serving = self.loop.start(self.session.serve())
        self._is_stepping = False
        self._stopped_at: float | None = None

    def _make_half(self) -> SchedulerHalf:
        def info(attachment: Attachment) -> PoolInfo:
            return PoolInfo.of(attachment, self.spec.layout, self.spec.engine_id)

        half = (TailedScheduler if self._tails else SchedulerHalf)(
            self.session,
            partial(block_keys, self.spec.fingerprint.digest),
            info,
            block_tokens=BLOCK_TOKENS,
            worker_count=1,
            fetch_timeout_seconds=FETCH_TIMEOUT_SECONDS,
            handoff_timeout_seconds=HANDOFF_TIMEOUT_SECONDS,
        )
        half.pin_with(self)
        if isinstance(half, TailedScheduler):
            half.name_tails_with(self._name_tail)
        return half

    # -- partial tails ----

    def _rest(self, request: SimRequest) -> int:
        """Tokens of a request behind its last whole block. The last hash says how many."""
        return request.hashes[-1][0] % BLOCK_TOKENS if self._tails else 0

    def _name_tail(self, request_id: str, begin: int, end: int) -> BlockHash | None:
        """What follows a block begins with the same tokens in every prompt, up to the last token of the next block."""
        request = self.requests[request_id]
        if end > len(request.hashes) * BLOCK_TOKENS + self._rest(request):
            return None
        before = request.hashes[begin // BLOCK_TOKENS - 1] if begin else b""
        return BlockHash(hashlib.sha256(before + f"and {end - begin} tokens".encode()).digest())

    def _tail_of(self, request: SimRequest) -> BlockHash | None:
        """The hash that names its last block; None if it ends with a whole one."""
        begin, rest = len(request.hashes) * BLOCK_TOKENS, self._rest(request)
        named = self._name_tail(request.request_id, begin, begin + rest) if rest else None
        return None if named is None else tail_hash(named, rest)

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

    def forget(self, block_ids: Sequence[int]) -> None:
        """This engine has no prefix cache of its own."""

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
            self._blocks[block] = bytearray(SCALED[self.spec.layout.payload_bytes])
        return found

    def check_loaded(self, load: LoadPlan) -> None:
        """Check the promise of the whole service: an engine is given exactly what was computed."""
        request = self.requests[load.request_id]
        self.world.counters["blocks_loaded"] += len(load.entries)
        for entry in load.entries:
            position = request.block_ids.index(entry.block_id)
            is_whole = position < len(request.keys) and entry.key == request.keys[position]
            right = self._right(request, position) if is_whole else self.world.right[entry.key]
            self.world.counters["tails_loaded"] += not is_whole
            if self.read_block(entry.block_id) != right:
                raise Violation(f"{self.name} was given wrong bytes for block {position} of {load.request_id}")

    def check_promised(self, request: AcquireRequest, result: AcquireResult) -> None:
        """Check that what is promised lies in its slot, under its own key, when it is promised."""
        start = request.skip if request.tail_at is None else result.tail_index
        for key, ref in zip(request.keys[start:], result.blocks, strict=False):
            header = self.node.memory.read_header(ref.slot)
            if header is not None and header.key != key:  # None: its bits were flipped, and no load accepts it
                raise Violation(f"{self.name} was promised slot {ref.slot:#x} for another block than it asked for")

    def _right(self, request: SimRequest, position: int) -> bytes:
        return self._content(request.hashes[position])

    def _content(self, block_hash: BlockHash) -> bytes:
        """With tenants the bytes depend on the tenant too, to tell their blocks apart."""
        model = self.tenant.encode() + self.spec.fingerprint.digest + self._term
        return content_of(model, block_hash, self.spec.layout.payload_bytes)

    # -- weights ----

    def change_weights(self) -> None:
        """Change the weights as a trainer does: every running request is preempted, the cache is reset, and new weights
        apply from here on. While blocks are held the reset is refused, and tried again."""
        if not self.alive or self._stopped_at is not None:
            return
        for request in self.unfinished.values():
            if request.block_ids and not request.is_loading:
                self._preempt(request)
        if self._pins or any(request.is_loading for request in self.unfinished.values()):
            self.half.reset(None)
            self.after(RESET_SECONDS, self.change_weights)
            return
        self._changes += 1
        self._term = f"{self.spec.engine_id.hex()} {self._changes}".encode()
        self.half.reset(self._term)
        self.world.note(self.name, "has other weights")
        self.world.counters["weights_changed"] += 1
        for request in self.unfinished.values():
            self._name(request)

    def _preempt(self, request: SimRequest) -> None:
        self._free(request.block_ids)
        request.block_ids, request.computed, request.written = [], 0, 0
        self.waiting.append(request.request_id)

    def _free(self, block_ids: Sequence[int]) -> None:
        """The engine now uses these blocks for something else, unless they are being copied."""
        for block in block_ids:
            if block not in self._pins:
                self._blocks[block][:] = b"\xee" * len(self._blocks[block])

    def _name(self, request: SimRequest) -> None:
        """Name the request's blocks as this tenant does with these weights."""
        key = term_key(self.tenant_key, self._term)
        request.keys = block_keys(self.spec.fingerprint.digest, request.hashes, key)
        tail = self._tail_of(request)
        hashes = [*request.hashes, *([] if tail is None else [tail])]
        for block_hash, name in zip(hashes, block_keys(self.spec.fingerprint.digest, hashes, key), strict=True):
            self.world.right[name] = self._content(block_hash)
            self.world.owners[name] = self.tenant, self.spec.model

    # -- requests ----

    def submit(self, request_id: str, hashes: list[BlockHash], wants: Prefill | Handoff | None) -> None:
        request = SimRequest(request_id, hashes, [], wants, arrived_at=self.world.now)
        self.requests[request_id] = self.unfinished[request_id] = request
        self._name(request)
        self.waiting.append(request_id)
        tokens = len(hashes) * BLOCK_TOKENS + self._rest(request)
        hints = HINTS[hashes[-1][1] % len(HINTS)]
        self.half.on_new_request(
            request_id, hashes, self.clock(), tokens=tokens, terms=RequestTerms(wants=wants, hints=hints)
        )
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
        return not self.unfinished

    def _step(self) -> None:
        if self._stopped_at is not None:
            return
        now = self.clock()
        self._schedule(now)
        plan = StepPlan()
        self.half.begin_step(plan, now)
        running = [request for request in self.unfinished.values() if request.block_ids and not request.is_loading]
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
        self.after(STEP_SECONDS if running else WAITING_SECONDS, self._end_step)

    def _end_step(self) -> None:
        worker = self.worker
        report, worker.report = worker.report, StepReport()
        self.half.reported(report)
        loaded, failed = worker.loaded, worker.failed
        worker.loaded, worker.failed = set(), set()
        for request_id in sorted(loaded):
            self._loaded(request_id, request_id in failed)
        for request in list(self.unfinished.values()):
            is_computed = bool(request.block_ids) and request.computed >= len(request.keys)
            if is_computed and not request.is_loading:
                self._finish(request, store_rest=True)
        self._is_stepping = not self.is_idle or self.half.has_pending_work(self.clock()) or worker.busy > 0
        if self._is_stepping:
            self._step()

    def _schedule(self, now: float) -> None:
        for request_id in list(self.waiting):
            request = self.requests[request_id]
            rest = self._rest(request)
            answer = self.half.matched(request_id, 0, len(request.keys) * BLOCK_TOKENS + max(rest, 1), now)
            if isinstance(answer, Wait):
                if now - request.arrived_at > HANDOFF_TIMEOUT_SECONDS + 10.0:
                    raise Violation(f"{request_id} waits for the cache since {request.arrived_at:.2f}")
                continue
            assert isinstance(answer, Promise)
            self.waiting.remove(request_id)
            request.block_ids = self._allocate(len(request.keys) + (rest > 0))
            self.half.allocated(request_id, request.block_ids, answer.tokens)
            blocks = answer.tokens // BLOCK_TOKENS
            request.is_loading = answer.tokens > 0
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
        del self.unfinished[request.request_id]
        if request.request_id in self.waiting:
            self.waiting.remove(request.request_id)
        tail = self._tail_of(request)
        is_whole = tail is not None and bool(request.block_ids) and request.computed == len(request.keys)
        if tail is not None and is_whole and not request.is_loading:
            self._blocks[request.block_ids[-1]][:] = self._content(tail)
        self.half.finished(
            request.request_id,
            request.hashes,
            request.computed * BLOCK_TOKENS + (self._rest(request) if is_whole else 0),
            request.block_ids,
            store_rest=store_rest,
        )
        self._free(request.block_ids)

    async def _open_line(self) -> Line:
        return self.line

    def promised(self, result: AcquireResult) -> None:
        """An answer has come."""
        if self.pause_at_answer and result.lease_id:
            seconds, self.pause_at_answer = self.pause_at_answer, 0.0
            self.world.at(0.001, self.pause, seconds)

    # -- death ----

    def stop(self, ended: Callable[[], None]) -> None:
        """Tell the engine to end: its scheduler steps no more, and its session detaches."""
        self.world.note(self.name, "is told to stop")
        self._stopped_at = self.world.now
        self.session.close()

        def over(_: object) -> None:
            if self._stopped_at is not None:
                self.world.note(self.name, "stopped")
                self.die()
                self.world.at(0.0, ended)

        self._serving.add_done_callback(over)

    def check(self) -> None:
        """Raises AssertionError if the engine contradicts itself, or does not end."""
        stopped_at = self._stopped_at
        if self.alive:
            self.half.check_invariants()
            if stopped_at is not None and self.world.now - max(stopped_at, self.paused_until) > STOP_SECONDS:
                raise Violation(f"{self.name} was told to stop at {stopped_at:.2f}, and its session does not end")

    def crash(self) -> None:
        """Kill the scheduler's process with -9. The worker finishes what it is doing, and holds its lock until then."""
        self.world.note(self.name, "crashed")
        self.die()

    def die(self) -> None:
        super().die()
        self.world.counters["stock_given_back"] += self.session.counters["stock_given_back"]
        self.worker.scheduler_died()


def _same(ids: list[int]) -> list[int]:
    return ids
