"""A fake engine that preempts, aborts, re-admits, loses its pool and gets late answers at every state.

Whatever it does: no exception, and in the end every lease has ended once and every reserved slot was sealed or given
back once (the Line asserts "once" at every call).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvservice.connector.options import Offload
from kvservice.connector.plan import LendPlan, LoadPlan, StepPlan, StepReport, StorePlan
from kvservice.connector.scheduler.half import SchedulerHalf
from kvservice.connector.scheduler.handoff import Prefill
from kvservice.connector.scheduler.ports import Promise
from kvservice.connector.scheduler.request_terms import RequestTerms
from kvservice.connector.scheduler.tailed import TailedScheduler
from kvservice.core.messages import Handoff
from kvservice.units import AttachmentId, BlockHash, HandoffId, LeaseId, NodeId
from tests.unit.connector.line import BLOCK, Line, half_of, hashes

WORKERS = 2
LOAN_SECONDS = 3.0


@dataclass
class EngineRequest:
    chain: list[BlockHash]
    tokens: int
    state: str = "waiting"  # waiting | loading | running
    computed: int = 0
    block_ids: list[int] = field(default_factory=list)


@dataclass
class OwnCache:
    """The engine's own cache, which keeps and loses blocks as the test says."""

    held: dict[BlockHash, int] = field(default_factory=dict)

    def find(self, block_hash: BlockHash) -> int | None:
        return self.held.get(block_hash)

    def free_blocks(self) -> int:
        return 0

    def next_to_go(self) -> list[tuple[int, BlockHash | None]]:
        return []

    def give_back(self, block_ids: Sequence[int]) -> None:
        raise AssertionError("nothing is near eviction")


class Engine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.own = OwnCache()
        self.preempted: set[str] = set()
        self.line = Line(slots=12)
        self.lazy = False
        self.half = self.make(False)
        self.now = 0.0
        self.requests: dict[str, EngineRequest] = {}
        self.silent: set[str] = set()  # requests that may not read
        self.loads: list[LoadPlan] = []  # in the workers' hands
        self.reports: list[StorePlan] = []
        self.lent: list[tuple[LendPlan, int]] = []  # with the worker that has it
        self.recalled: set[int] = set()  # by the last step
        self.names = 0
        self.attachments = 1

    half_type: type[SchedulerHalf] = SchedulerHalf

    def make(self, lazy: bool) -> SchedulerHalf:
        offload = Offload.LAZY if lazy else Offload.EAGER
        half = half_of(self.half_type, self.line, worker_count=WORKERS, offload=offload, loan_seconds=LOAN_SECONDS)
        half.read_cache(self.own)
        return half

    @rule(prompt=st.integers(1, 4), begin=st.integers(0, 2), end=st.integers(0, 6))
    def engine_holds(self, prompt: int, begin: int, end: int) -> None:
        """It holds these blocks of a prompt from here on, and no others of it."""
        chain = hashes(prompt, 6, shared=2)
        for block_hash in chain:
            self.own.held.pop(block_hash, None)
        self.own.held.update({chain[i]: 200 + i for i in range(begin, end)})

    @precondition(lambda self: self.names == 0 and not self.lazy)
    @rule()
    def offload_lazily(self) -> None:
        self.lazy = True
        self.half = self.make(True)

    @rule(
        prompt=st.integers(1, 4),
        blocks=st.integers(0, 6),
        rest=st.integers(0, BLOCK - 1),
        may_read=st.booleans(),
        role=st.sampled_from(["", "", "prefill", "decode"]),
    )
    def arrive(self, prompt: int, blocks: int, rest: int, may_read: bool, role: str) -> None:
        self.names += 1
        chain = hashes(prompt, blocks, shared=min(blocks, 2))
        name = f"r{self.names}"
        self.requests[name] = EngineRequest(chain, blocks * BLOCK + max(rest, 1 if blocks == 0 else 0))
        if not may_read:
            self.silent.add(name)
        handoff = HandoffId(self.names.to_bytes(16, "big"))
        wants = {"": None, "prefill": Prefill(handoff), "decode": Handoff(handoff, NodeId("n"))}[role]
        tokens = self.requests[name].tokens
        self.half.on_new_request(
            name, chain, self.now, tokens=tokens, terms=RequestTerms(may_load=may_read, wants=wants)
        )

    @rule(prompt=st.integers(1, 4), blocks=st.integers(1, 4))
    def prefill_in_one_go(self, prompt: int, blocks: int) -> None:
        """Otherwise few sequences come as far as a loan."""
        self.arrive(prompt, blocks, 0, may_read=False, role="prefill")
        name, request = f"r{self.names}", self.requests[f"r{self.names}"]
        assert self.half.matched(name, 0, request.tokens, self.now) == Promise(0)
        request.block_ids = list(range(100, 100 + blocks))
        self.half.allocated(name, request.block_ids, 0)
        request.state = "running"
        self.step(request.tokens)
        self.half.finished(name, request.chain, request.computed, request.block_ids, store_rest=True)
        del self.requests[name]

    @precondition(lambda self: any(r.state == "waiting" for r in self.requests.values()))
    @rule(data=st.data(), fits=st.booleans(), local=st.integers(0, 3), less=st.integers(0, 1))
    def schedule_waiting(self, data: st.DataObject, fits: bool, local: int, less: int) -> None:
        name = data.draw(st.sampled_from(sorted(n for n, r in self.requests.items() if r.state == "waiting")))
        request = self.requests[name]
        local = min(local, max(request.tokens - 1, 0) // BLOCK) * BLOCK
        answer = self.half.matched(name, local, request.tokens, self.now)
        if not isinstance(answer, Promise):
            return
        assert answer.tokens % BLOCK == 0 or self.half_type is TailedScheduler
        assert local + answer.tokens <= request.tokens
        if not fits:
            return  # no room now; the engine asks again
        request.block_ids = list(range(100, 100 + request.tokens // BLOCK + 1))
        taken = answer.tokens - (answer.tokens % BLOCK and less)
        self.half.allocated(name, request.block_ids, taken)
        request.state = "loading" if taken else "running"
        request.computed = local + taken
        self.step(1)  # vLLM plans the step in the same call that allocates

    @rule(chunk=st.integers(1, 3 * BLOCK))
    def step(self, chunk: int) -> None:
        scheduled = []
        for name, request in self.requests.items():
            if request.state == "running":
                request.computed = min(request.computed + chunk, request.tokens)
                scheduled.append((name, request.chain, request.computed, lambda ids=request.block_ids: ids))
        plan = StepPlan()
        self.half.begin_step(plan, self.now)
        preempted, self.preempted = self.preempted, set()
        self.half.plan_stores(plan, scheduled, preempted)
        for store in plan.stores:
            assert store.entries
        for load in plan.loads:
            assert load.request_id in self.requests, "a load for a request that is gone"
        self.loads += plan.loads
        self.reports += [store for store in plan.stores for _ in range(WORKERS)]
        self.lent += [(lending, worker) for lending in plan.lends for worker in range(WORKERS)]
        self.recalled = set(plan.recalls)

    @precondition(lambda self: self.loads)
    @rule(failed=st.booleans())
    def end_load(self, failed: bool) -> None:
        load = self.loads.pop(0)
        self.half.loaded(load.request_id, failed=failed)
        request = self.requests.get(load.request_id)
        if request is not None and request.state == "loading":
            if failed:
                request.state, request.computed, request.block_ids = "waiting", 0, []
            else:
                request.state = "running"
                self.half.allocated(load.request_id, request.block_ids, 0)

    @precondition(lambda self: self.reports)
    @rule(failed=st.booleans(), data=st.data())
    def report(self, failed: bool, data: st.DataObject) -> None:
        store = self.reports.pop(data.draw(st.integers(0, len(self.reports) - 1)))
        outcome = {store.store_id: 1}
        self.half.reported(StepReport(failed=outcome) if failed else StepReport(stored=outcome))

    @precondition(lambda self: self.lent)
    @rule(data=st.data(), again=st.booleans())
    def end_loan(self, data: st.DataObject, again: bool) -> None:
        """Taken, recalled or lost: a worker may give back what nobody asked for, and say it twice."""
        lending, worker = data.draw(st.sampled_from(self.lent))
        self.lent.remove((lending, worker))
        for _ in range(1 + again):
            self.half.reported(StepReport(returned={(lending.loan_id, worker)}))

    @precondition(lambda self: self.line.asked)
    @rule(blocks=st.integers(0, 8), data=st.data())
    def answer(self, blocks: int, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.line.asked) - 1))
        self.line.answer(blocks, number, admitted=data.draw(st.booleans()))

    @precondition(lambda self: any(r.state == "running" for r in self.requests.values()))
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(n for n, r in self.requests.items() if r.state == "running")))
        request = self.requests[name]
        request.state, request.computed, request.block_ids = "waiting", 0, []
        self.preempted.add(name)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), aborted=st.booleans())
    def finish(self, data: st.DataObject, aborted: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        request = self.requests[name]
        stores = not aborted and request.state == "running"
        self.half.finished(name, request.chain, request.computed, request.block_ids, store_rest=stores)
        del self.requests[name]

    @precondition(lambda self: self.line.attachment is not None)
    @rule()
    def lose_pool(self) -> None:
        self.line.lose()

    @precondition(lambda self: self.line.attachment is None)
    @rule()
    def attach_again(self) -> None:
        if self.half.may_reattach():
            self.attachments += 1
            self.line.attach(self.attachments)

    @rule()
    def reset(self) -> None:
        """The weights change; the engine may hold blocks, and then the reset cannot be done."""
        holds = bool(self.line.pins.pinned) or any(r.state != "waiting" for r in self.requests.values())
        self.half.reset(None if holds else f"term {self.names}".encode())
        assert not self.line.handoffs, "a hand-off outlived the weights that it was for"
        loaded = set(chain.from_iterable(self.half._loads._leases.values()))
        assert not set(self.line.leases) - loaded - self.answered(), "a promise outlived them"

    def answered(self) -> set[tuple[AttachmentId, LeaseId]]:
        """Leases of answers that nobody has heard yet."""
        return {(answer.attachment, answer.result.lease_id) for answer in self.line._answers if answer.result}

    @rule(seconds=st.sampled_from([0.001, 0.5, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.half.computed(200, seconds)

    @invariant()
    def consistent(self) -> None:
        self.half.check_invariants()
        assert not self.silent & {name for name, _, _ in self.line.asked}, "asked for a request that may not read"
        read = {entry.block_id for store in self.reports for entry in store.entries}
        read |= {block_id for lending, _ in self.lent for block_id, _ in lending.blocks}
        assert read <= set(self.line.pins.pinned), "a copy under way reads a block that the engine may overwrite"

    def teardown(self) -> None:
        for name in sorted(self.requests):
            request = self.requests.pop(name)
            self.half.finished(name, request.chain, request.computed, request.block_ids, store_rest=False)
        while self.line.asked:
            self.line.answer(2)
        self.step(1)
        while self.loads:
            self.end_load(failed=False)
        while self.reports or not self.half._ended.is_empty:
            for store in self.reports:
                self.half.reported(StepReport(stored={store.store_id: 1}))
            self.reports = []
            self.now += 1.0
            self.step(1)
        self.now += LOAN_SECONDS
        self.step(1)
        assert {lending.loan_id for lending, _ in self.lent} <= self.recalled, "a loan is never asked back"
        for lending, worker in self.lent:
            self.half.reported(StepReport(returned={(lending.loan_id, worker)}))
        assert not self.line.handoffs, "a hand-off stays open for ever"
        assert not self.line.leases, "a lease outlived its request"
        assert not self.line.slots, "a reserved slot was neither sealed nor given back"
        assert self.line.expected == 0
        assert not self.line.pins.pinned, "a block stays pinned for ever"
        assert self.half.may_reattach()


class TailedEngine(Engine):
    """Prompts end anywhere within a block, and what lies behind the last whole one may come from the pool, too."""

    half_type = TailedScheduler

    def make(self, lazy: bool) -> SchedulerHalf:
        half = super().make(lazy)
        assert isinstance(half, TailedScheduler)
        half.name_tails_with(self.name_tail)
        return half

    def name_tail(self, name: str, begin: int, end: int) -> BlockHash | None:
        request = self.requests.get(name)
        if request is None or end > request.tokens:
            return None
        parent = request.chain[begin // BLOCK - 1] if begin else b""
        return BlockHash(hashlib.sha256(parent + f"{end - begin}".encode()).digest())


TailedEngine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestTailedEngine = TailedEngine.TestCase
Engine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestEngine = Engine.TestCase
