"""What vLLM calls with a model that keeps states: which of its blocks are stored, and that a hit brings state and
blocks together, before the forward that reads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.request import RequestStatus

from kvservice.connector.vllm import KVServiceConnector
from tests.unit.connector.vllm.test_connector import (
    BLOCK,
    BLOCKS,
    FULL,
    HEAD_SIZE,
    HEADS,
    Pair,
    Request,
    StepOutput,
    model,
    request,
    vllm_config,
    wait_for,
)

__all__ = ["model"]  # a fixture

STATE = MambaSpec(
    block_size=BLOCK, shapes=((3, 4), (8, 8)), dtypes=(torch.bfloat16, torch.float32), mamba_cache_mode="align"
)
STATE_BYTES = 3 * 4 * 2 + 8 * 8 * 4


@dataclass
class StateStep(StepOutput):
    """`tables` of attention and of states; `offers` as vLLM makes them: (group, block id, tokens)."""

    tables: dict[str, tuple[list[int], ...]] = field(default_factory=dict)
    offers: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)

    @property
    def kv_connector_block_state(self) -> Any:
        return SimpleNamespace(get_block_ids=self.tables.get, boundary_state_offloads=self.offers)


class StatePair(Pair):
    def __init__(self, model: Path, *, alone: bool = False, **extra: object) -> None:
        """`alone`: no layer has attention."""
        options = {"mode": "embedded", "memory": "8MiB", "verify_load": "full", "defer_stores": "off", **extra}
        config = vllm_config(model, options)
        groups = [KVCacheGroupSpec(["attention"], FULL), KVCacheGroupSpec(["conv", "ssm"], STATE)][alone:]
        cache = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups, hash_block_size=BLOCK)
        self.worker = KVServiceConnector(config, KVConnectorRole.WORKER, cache)
        states = {name: torch.randint(0, 99, (BLOCKS, 1, 1, STATE_BYTES)).to(torch.int8) for name in ("conv", "ssm")}
        attention = torch.randn(BLOCKS, HEADS, BLOCK, 2 * HEAD_SIZE).to(torch.bfloat16)
        self.tensors = {"attention": attention, **states}
        self.worker.register_kv_caches(self.tensors)
        self.scheduler = KVServiceConnector(config, KVConnectorRole.SCHEDULER, cache)
        self.block_pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=BLOCK)
        self.scheduler.bind_gpu_block_pool(self.block_pool)
        self._wait_for_slots()

    def arrive(self, one: Request) -> tuple[int, bool]:
        self.scheduler.on_new_request(one)  # type: ignore[arg-type]
        return self.match(one)

    def compute(
        self, one: Request, begin: int, end: int, tables: tuple[list[int], ...], *offers: tuple[int, int, int]
    ) -> None:
        name = one.request_id
        self.step(StateStep({name: end - begin}, {name: begin}, tables={name: tables}, offers={name: list(offers)}))


@pytest.fixture
def pair(model: Path) -> Iterator[StatePair]:
    made = StatePair(model)
    yield made
    made.close()


def test_state_at_the_end_of_a_step_comes_back_with_its_blocks(pair: StatePair) -> None:
    first = request("a", count=4)
    assert pair.arrive(first) == (0, False)
    pair.scheduler.update_state_after_alloc(first, tables([3, 1], [0, 5]), 0)
    pair.compute(first, 0, 2 * BLOCK, ([3, 1], [0, 5]))
    # Block 5 is still there, and a new one is written.
    pair.compute(first, 2 * BLOCK, 4 * BLOCK + 5, ([3, 1, 4, 9, 2], [0, 5, 0, 0, 6]))
    wait_for(pair, "stored_blocks", 4 + 1)
    wanted = {name: tensor[[5]].clone() for name, tensor in pair.tensors.items() if name != "attention"}
    blocks = pair.tensors["attention"][[3, 1]].clone()
    second = request("b", count=4)
    assert pair.arrive(second) == (2 * BLOCK, True), "not up to the state, or not before the forward"
    pair.scheduler.update_state_after_alloc(second, tables([7, 8], [0, 10]), 2 * BLOCK)
    untouched = pair.tensors["ssm"][[0, 6, 11]].clone()
    results = pair.step(StateStep())
    assert results.finished_recving == {"b"} and not results.failed_recving
    for name, state in wanted.items():
        assert torch.equal(pair.tensors[name][[10]], state)
    assert torch.equal(pair.tensors["attention"][[7, 8]], blocks)
    assert torch.equal(pair.tensors["ssm"][[0, 6, 11]], untouched), "another block was written"


def test_state_comes_back_where_there_is_no_attention(model: Path) -> None:
    pair = StatePair(model, alone=True)
    try:
        first = request("a", count=4)
        assert pair.arrive(first) == (0, False)
        pair.scheduler.update_state_after_alloc(first, tables([0, 5]), 0)
        pair.compute(first, 0, 2 * BLOCK, ([0, 5],))
        pair.compute(first, 2 * BLOCK, 4 * BLOCK + 5, ([0, 5, 0, 0, 6],))
        wait_for(pair, "stored_blocks", 4 + 1)
        first.num_computed_tokens, first.status = 4 * BLOCK + 5, RequestStatus.FINISHED_STOPPED
        pair.scheduler.request_finished_all_groups(first, ([0, 0, 0, 0, 6],))  # type: ignore[arg-type]
        state = pair.tensors["ssm"][5].clone()
        second = request("b", count=4)
        assert pair.arrive(second) == (2 * BLOCK, True), "a signpost without a state"
        pair.scheduler.update_state_after_alloc(second, tables([0, 10]), 2 * BLOCK)
        untouched = pair.tensors["ssm"][[0, 6, 11]].clone()
        results = pair.step(StateStep())
        assert results.finished_recving == {"b"} and not results.failed_recving
        assert torch.equal(pair.tensors["ssm"][10], state)
        assert torch.equal(pair.tensors["ssm"][[0, 6, 11]], untouched), "another block was written"
        assert not [name for name in pair.scheduler.counters() if name.startswith("failed_")]
        assert not pair.block_pool.null_block.ref_cnt > 1 and not pair.scheduler.has_pending_push_work()
    finally:
        pair.close()


def test_state_that_vllm_keeps_within_a_step_is_stored(pair: StatePair) -> None:
    """On GPUs, Mamba-2 does not end a step at a prompt's last boundary: it keeps a state on the way."""
    first = request("a", count=3)
    assert pair.arrive(first) == (0, False)
    pair.scheduler.update_state_after_alloc(first, tables([3, 1, 4, 9], [0, 0, 5, 6]), 0)
    pair.compute(first, 0, 3 * BLOCK + 5, ([3, 1, 4, 9], [0, 0, 5, 6]), (1, 5, 3 * BLOCK), (1, 6, 3 * BLOCK + 4))
    wait_for(pair, "stored_blocks", 3 + 1)
    assert pair.arrive(request("b", count=3)) == (3 * BLOCK, True)


def test_states_in_the_table_of_an_ended_request_are_left(pair: StatePair) -> None:
    """Nobody knows any more at how many tokens they were."""
    first = request("a", count=3)
    assert pair.arrive(first) == (0, False)
    whole = ([3, 1, 4, 9], [0, 0, 5, 6])
    pair.scheduler.update_state_after_alloc(first, tables(*whole), 0)
    first.num_computed_tokens = first.num_tokens
    first.status = RequestStatus.FINISHED_STOPPED
    pair.scheduler.request_finished_all_groups(first, whole)  # type: ignore[arg-type]
    pair.step(StateStep())
    wait_for(pair, "stored_blocks", 3)
    assert pair.arrive(request("b", count=3)) == (0, False), "attention without a state"
    assert pair.scheduler.counters()["stored_blocks"] == 3


def test_blocks_of_several_groups_are_not_lent(model: Path) -> None:
    """A copy worker copies one group only, so nobody could read them; and the request is handed off all the same."""
    pair = StatePair(model, copier="worker", handoff_loans="on")
    try:
        first = request("a", count=3)
        first.kv_transfer_params = {"kvservice": {"version": 1, "role": "prefill", "handoff": "ab" * 16}}
        pair.scheduler.on_new_request(first)  # type: ignore[arg-type]
        pair.match(first)
        whole = ([3, 1, 4, 9], [0, 0, 5, 6])
        pair.scheduler.update_state_after_alloc(first, tables(*whole), 0)
        pair.compute(first, 0, first.num_tokens, whole)
        first.num_computed_tokens, first.status = first.num_tokens, RequestStatus.FINISHED_STOPPED
        _, params = pair.scheduler.request_finished_all_groups(first, whole)  # type: ignore[arg-type]
        assert params is not None, pair.scheduler.counters()
        assert not [name for name in pair.scheduler.counters() if name.startswith("failed_")]
    finally:
        pair.close()


def tables(*of_groups: list[int]) -> Any:
    return SimpleNamespace(get_block_ids=lambda: of_groups)
