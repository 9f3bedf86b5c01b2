"""Which requests a step looks at."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from kvservice.connector.scheduler.due import DueRing

BLOCK = 4


class Engine:
    """Computes tokens of requests, and stores the full blocks of those that are due, as far as their tokens are known.
    Drafts are computed before they are."""

    def __init__(self) -> None:
        self.ring = DueRing(BLOCK)
        self.computed: dict[str, int] = {}
        self.stored: dict[str, int] = {}  # full blocks
        self.fresh: set[str] = set()

    def come(self, request: str, computed: int = 0) -> None:
        self.computed[request], self.stored[request] = computed, 0
        self.fresh.add(request)

    def leave(self, request: str) -> None:
        del self.computed[request], self.stored[request]
        self.fresh.discard(request)
        self.ring.forget(request)

    def step(
        self, tokens: dict[str, int], known: dict[str, int] | None = None, behind: tuple[str, ...] = ()
    ) -> list[str]:
        """`known` tokens of each request exist before the step; without it, all that are computed."""
        fresh = self.fresh & tokens.keys()
        self.fresh -= fresh
        due = self.ring.begin_step(tokens, sum(tokens.values()), fresh)
        late = set(behind)
        for request in tokens:
            self.computed[request] += tokens[request]
        for request in due:
            end = self.computed[request]
            self.stored[request] = min(end, end if known is None else known[request]) // BLOCK
            self.ring.look_again(request, end)
            if self.stored[request] < end // BLOCK:
                late.add(request)
        self.ring.look_next(late)
        return due


@given(seed=st.integers(0, 2**32))
def test_no_request_fills_a_block_unseen(seed: int) -> None:
    """Whatever comes, leaves, is left out of steps, computes several tokens, or has drafts taken back."""
    rng, engine = random.Random(seed), Engine()
    for number in range(60):
        if rng.random() < 0.2:
            engine.come(str(number), rng.randrange(3 * BLOCK))
        if engine.computed and rng.random() < 0.1:
            engine.leave(rng.choice(sorted(engine.computed)))
        chosen = [request for request in engine.computed if rng.random() < 0.8]
        tokens = {request: rng.choice((1, 1, 1, 1, 1, 3, 9)) for request in chosen}
        known = {request: engine.computed[request] + rng.randrange(1, 1 + tokens[request]) for request in chosen}
        engine.step(tokens, known)
        for request in chosen:
            full = min(engine.computed[request], known[request]) // BLOCK
            assert engine.stored[request] >= full, f"{request} in step {number}"
            engine.computed[request] = known[request]
        assert sum(map(len, engine.ring._ring)) <= BLOCK * (number + 1)


def test_who_decodes_is_looked_at_when_a_block_is_full() -> None:
    engine = Engine()
    for number in range(8):
        engine.come(str(number), number)
    everyone = dict.fromkeys(engine.computed, 1)
    assert len(engine.step(everyone)) == 8, "all are new"
    for _ in range(5 * BLOCK):
        filled = [request for request in everyone if (engine.computed[request] + 1) % BLOCK == 0]
        assert sorted(engine.step(everyone)) == sorted(filled)


def test_who_is_left_out_of_its_step_is_due_in_its_next() -> None:
    engine = Engine()
    engine.come("r", BLOCK - 2)
    engine.step({"r": 1})
    assert engine.step({}) == []
    assert engine.step({}) == []
    assert engine.step({"r": 1}) == ["r"]
    assert engine.step({"r": 1}) == []


def test_who_is_behind_is_due_in_every_step() -> None:
    engine = Engine()
    engine.come("r")
    engine.step({"r": BLOCK}, behind=("r",))
    assert engine.step({"r": 1}, behind=("r",)) == ["r"]
    assert engine.step({"r": 1}) == ["r"]
    assert engine.step({"r": 1}) == []


def test_drafts_in_every_step_leave_no_entries_behind() -> None:
    engine = Engine()
    engine.come("r")
    for _ in range(1000):
        engine.step({"r": 3})
    assert sum(map(len, engine.ring._ring)) <= BLOCK
