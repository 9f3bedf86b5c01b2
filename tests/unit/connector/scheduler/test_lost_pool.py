"""What a request that runs on does when its pool is lost and comes back."""

from __future__ import annotations

import pytest

from kvservice.connector.plan import StepPlan, StepReport
from kvservice.connector.scheduler.request_terms import RequestTerms
from tests.unit.connector.line import BLOCK, EngineBlocks, Line, half, hashes

CHAIN = hashes(1, 6)


class Bench:
    """One request "r" of an engine, which fills a block in each step."""

    def __init__(self) -> None:
        self.line, self.engine = Line(slots=100), EngineBlocks(64)
        self.half = half(self.line)
        self.half.pin_with(self.engine)
        self.half.on_new_request("r", CHAIN, 0.0, terms=RequestTerms(may_load=False))
        self.ids, _ = self.engine.take(CHAIN)
        self.half.allocated("r", self.ids, 0)

    def step(self, blocks: int) -> list[str]:
        """Returns the requests to look at again."""
        plan = StepPlan()
        self.half.begin_step(plan, 0.0)
        left = self.half.plan_stores(plan, [("r", CHAIN, blocks * BLOCK, lambda: self.ids)])
        self.half.reported(StepReport(stored={store.store_id: 1 for store in plan.stores}))
        self.half.check_invariants()
        return left

    def stored(self) -> list[int]:
        """The positions that were sealed since the last call."""
        found = [item.position for item in self.line.sealed]
        self.line.sealed.clear()
        return found

    def lose(self) -> None:
        self.line.lose()
        self.line.slots.clear()


@pytest.mark.parametrize(("boot", "again"), [(2, [0, 1, 2, 3]), (1, [3])])
def test_a_pool_that_started_anew_gets_all_blocks(boot: int, again: list[int]) -> None:
    """A suffix without its prefix is of use to nobody. The same boot has what it had."""
    bench = Bench()
    bench.step(3)
    assert bench.stored() == [0, 1, 2]
    bench.lose()
    bench.step(3)
    bench.line.attach(2, boot)
    bench.step(4)
    assert bench.stored() == again


def test_requests_of_an_outage_are_looked_at_again() -> None:
    """Else one that fills no block soon after it would be forgotten."""
    bench = Bench()
    bench.lose()
    assert bench.step(2) == ["r"] and bench.stored() == []
    bench.line.attach(2)
    assert bench.step(2) == [] and bench.stored() == [0, 1]
