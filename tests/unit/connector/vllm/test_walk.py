"""Which of a step's requests are shown to the scheduler half, as vLLM hands them over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvservice.connector.cache_groups import OneGroup
from kvservice.connector.plan import StepPlan
from kvservice.connector.vllm.walk import StepWalk

BLOCK = 16


class Half:
    """Notes what it is shown."""

    def __init__(self) -> None:
        self.shown: list[tuple[str, int, Any]] = []
        self.behind: list[str] = []
        self.fails = False

    def plan_stores(self, plan: StepPlan, scheduled: Any, preempted: Any) -> list[str]:
        if self.fails:
            next(iter(scheduled))
            raise OSError("planned")
        self.shown = [(request_id, end, block_ids()) for request_id, _, end, block_ids in scheduled]
        return self.behind


class Engine:
    """Steps as vLLM does: it counts the tokens of a step once the plan is made."""

    def __init__(self) -> None:
        self.live: dict[str, Any] = {}
        self.walk = StepWalk(self.live, BLOCK, OneGroup())
        self.half = Half()

    def step(self, new: tuple[str, ...] = (), resumed: tuple[str, ...] = (), **tokens: int) -> list[tuple[str, int]]:
        for name in new:
            self.live[name] = SimpleNamespace(
                request_id=name, block_hashes=[], num_computed_tokens=0, lora_request=None
            )
        output: Any = SimpleNamespace(
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=0) for name in new],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(resumed)),
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: ([7, 8],)),
            preempted_req_ids=None,
        )
        self.walk.plan_stores(self.half, StepPlan(), output)  # type: ignore[arg-type]
        for name, count in tokens.items():
            self.live[name].num_computed_tokens += count
        assert all(ids == [7, 8] for _, _, ids in self.half.shown)
        return [(name, end) for name, end, _ in self.half.shown]


def test_a_decoding_request_is_shown_when_it_fills_a_block() -> None:
    engine = Engine()
    assert engine.step(new=("a", "b"), a=14, b=15) == [("a", 14), ("b", 15)]
    assert engine.step(a=1, b=1) == [("b", 16)]
    assert engine.step(a=1, b=1) == [("a", 16)]
    assert engine.step(a=1, b=1) == []


def test_a_request_that_comes_back_is_shown_with_one_token_too() -> None:
    engine = Engine()
    engine.step(new=("a",), a=3)
    assert engine.step(a=1) == []
    assert engine.step(resumed=("a",), a=1) == [("a", 5)]


def test_a_request_with_blocks_to_store_is_shown_again() -> None:
    engine = Engine()
    engine.half.behind = ["a"]
    engine.step(new=("a",), a=16)
    engine.half.behind = []
    assert engine.step(a=1) == [("a", 17)]
    assert engine.step(a=1) == []


def test_when_a_plan_fails_its_requests_are_shown_again() -> None:
    engine = Engine()
    engine.step(new=("a", "b", "c"), a=15, b=15, c=3)
    engine.half.fails = True
    with pytest.raises(OSError, match="planned"):
        engine.step(a=1, b=1, c=1)
    engine.half.fails = False
    for name in "abc":
        engine.live[name].num_computed_tokens += 1
    assert engine.step(a=1, b=1, c=1) == [("a", 17), ("b", 17)]
