"""An engine that stores near eviction, against a fake free queue: whatever requests do, a block that the engine takes
again is in the pool, on its way there, or was never to be stored.

The engine takes at most WINDOW blocks in a step, and the copies of a step have ended when it takes more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvservice.connector.options import Offload
from kvservice.connector.plan import StepPlan, StepReport, StorePlan
from kvservice.connector.scheduler.request_terms import RequestTerms
from kvservice.core.messages import SealItem
from kvservice.units import BlockHash, BlockKey
from tests.unit.connector.line import BLOCK, WINDOW, EngineBlocks, Line, half_with, hashes

BLOCKS = 14
RARELY = st.sampled_from([False] * 7 + [True])


@dataclass
class Running:
    chain: list[BlockHash]
    private: bool
    ids: list[int] = field(default_factory=list)


class NearEviction(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.line = Line(slots=1000)
        self.engine = EngineBlocks(BLOCKS)
        self.half = half_with(self.line, self.engine, Offload.EVICTING)
        self.running: dict[str, Running] = {}
        self.open: list[StorePlan] = []
        self.may_go: set[BlockHash] = set()  # of private requests, or lost with a preemption or a failed store
        self.names = 0

    def step(self) -> None:
        plan = StepPlan()
        self.half.begin_step(plan, 0.0)
        self.half.plan_stores(
            plan,
            [(name, run.chain, len(run.ids) * BLOCK, lambda ids=run.ids: ids) for name, run in self.running.items()],
        )
        self.open += plan.stores

    def take(self, run: Running, count: int) -> None:
        """Give the request blocks for the next `count` positions, and plan the step that computes them."""
        while self.open:
            self.half.reported(StepReport(stored={self.open.pop().store_id: 1}))
        begin = len(run.ids)
        ids, evicted = self.engine.take(run.chain[begin : begin + count])
        run.ids += ids
        safe = self.in_pool() | self.may_go
        lost = [block_hash for block_hash in evicted if block_hash not in safe and self.engine.find(block_hash) is None]
        assert not lost, "the engine took a block that is nowhere else"
        self.step()

    def in_pool(self) -> set[BlockHash]:
        """Hashes of what is sealed. What is under copy is pinned, so the engine cannot take it."""
        sealed: list[SealItem] = self.line.sealed
        keys = {item.key for item in sealed}
        return {block_hash for block_hash in self.every_hash() if BlockKey(block_hash[:16]) in keys}

    def every_hash(self) -> set[BlockHash]:
        return {block_hash for prompt in range(5) for block_hash in hashes(prompt, 8)} | {
            block_hash for prompt in range(1, 5) for block_hash in hashes(prompt, 8, shared=2)
        }

    @rule(prompt=st.integers(1, 4), blocks=st.integers(1, WINDOW), private=RARELY)
    def arrive(self, prompt: int, blocks: int, private: bool) -> None:
        chain = hashes(prompt, 8, shared=2)
        own = self.engine.share(chain[: blocks - 1])
        if len(self.engine.queue) < blocks - len(own):
            self.engine.give_up(own)
            return
        self.names += 1
        name, run = f"r{self.names}", Running(chain, private, own)
        self.running[name] = run
        self.half.on_new_request(name, chain[:blocks], 0.0, terms=RequestTerms(may_load=False, may_store=not private))
        self.half.allocated(name, own, 0)
        if private:
            self.may_go |= set(chain)  # a private request may be the only one that computed a block
        self.take(run, blocks - len(own))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, WINDOW))
    def decode(self, data: st.DataObject, count: int) -> None:
        run = self.running[data.draw(st.sampled_from(sorted(self.running)))]
        self.take(run, min(count, len(run.chain) - len(run.ids), len(self.engine.queue)))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        run = self.running.pop(name)
        self.half.finished(name, run.chain, len(run.ids) * BLOCK, run.ids, store_rest=True)
        self.engine.give_up(run.ids)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), failed=RARELY)
    def report(self, data: st.DataObject, failed: bool) -> None:
        store = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        if failed:
            keys = {entry.key for entry in store.entries}
            self.may_go |= {block_hash for block_hash in self.every_hash() if BlockKey(block_hash[:16]) in keys}
        outcome = {store.store_id: 1}
        self.half.reported(StepReport(failed=outcome) if failed else StepReport(stored=outcome))

    @rule()
    def idle(self) -> None:
        self.step()

    @invariant()
    def consistent(self) -> None:
        self.half.check_invariants()
        read = {entry.block_id for store in self.open for entry in store.entries}
        assert read <= set(self.engine.pinned), "a copy under way reads a block that the engine may overwrite"
        assert not read & set(self.engine.queue)

    def teardown(self) -> None:
        for name in sorted(self.running):
            run = self.running.pop(name)
            self.half.finished(name, run.chain, len(run.ids) * BLOCK, run.ids, store_rest=False)
            self.engine.give_up(run.ids)
        self.step()
        for store in self.open:
            self.half.reported(StepReport(stored={store.store_id: 1}))
        assert not self.line.slots, "a reserved slot was neither sealed nor given back"
        assert not self.engine.pinned
        assert sorted(self.engine.queue) == list(range(1, BLOCKS + 1)), "a block of the engine is lost"


NearEviction.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestNearEviction = NearEviction.TestCase
