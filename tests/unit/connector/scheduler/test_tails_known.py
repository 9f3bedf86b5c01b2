"""A partial tail that the pool has evicted is stored again."""

from __future__ import annotations

import hashlib

from kvservice.connector.plan import StepPlan, StepReport
from kvservice.connector.scheduler.tailed import TailedScheduler
from kvservice.units import BlockHash
from tests.unit.connector.line import BLOCK, EngineBlocks, Line, half_of, hashes

CHAIN = hashes(1, 2)
PROMPT = 2 * BLOCK + 5


class Bench:
    def __init__(self) -> None:
        self.line, self.engine = Line(), EngineBlocks(32)
        self.half = half_of(TailedScheduler, self.line)
        self.half.pin_with(self.engine)
        self.half.name_tails_with(lambda _, begin, end: BlockHash(hashlib.sha256(f"{begin}-{end}".encode()).digest()))

    def run(self, name: str, *answers: int) -> list[int]:
        """A request for the prompt, whose asks find so many blocks. Returns the positions that it stored."""
        self.half.on_new_request(name, CHAIN, 0.0, tokens=PROMPT)
        for count in answers:
            self.line.answer(count)
            self.half.take_answers()
        while self.line.asked:
            self.line.answer(0)
            self.half.take_answers()
        self.half.matched(name, 0, PROMPT, 0.1)
        ids, _ = self.engine.take(hashes(1, 3))
        self.half.allocated(name, ids, 0)
        self._step(name, ids)
        self.half.finished(name, CHAIN, PROMPT, ids, store_rest=True)
        self._step()
        self.engine.give_up(ids)
        found = [item.position for item in self.line.sealed]
        self.line.sealed.clear()
        return found

    def _step(self, name: str = "", ids: list[int] | None = None) -> None:
        plan = StepPlan()
        self.half.begin_step(plan, 0.0)
        self.half.plan_stores(plan, [(name, CHAIN, PROMPT, lambda: ids)] if name else [])
        self.half.reported(StepReport(stored={store.store_id: 1 for store in plan.stores}))


def test_a_tail_that_was_evicted_is_stored_again() -> None:
    bench = Bench()
    assert bench.run("first", 0) == [0, 1, 2]
    bench.engine.held.clear()
    assert bench.run("second", 2) == [2], "its prefix is there, and it is not"
    bench.engine.held.clear()
    assert bench.run("third", 0) == [0, 1, 2], "all of it was evicted"
