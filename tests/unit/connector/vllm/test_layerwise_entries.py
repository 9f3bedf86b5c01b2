"""The hooks vLLM calls around each layer: whatever fails behind them, the engine hears which blocks it computed on in
vain. Both roles, stepped as vLLM steps them when a load is synchronous."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.v1.outputs import KVConnectorOutput

from kvservice.connector.options import ConnectorOptions, Layerwise
from kvservice.connector.vllm import KVServiceConnector
from kvservice.connector.vllm.compat import layerwise_for
from kvservice.testing.eventually import eventually
from tests.unit.connector.vllm.test_connector import (
    BLOCK,
    LAYERS,
    Pair,
    Request,
    StepOutput,
    blocks,
    explode,
    make,
    model,
    request,
    vllm_config,
)

__all__ = ["make", "model"]  # fixtures
SYNCHRONOUS = {"scheduler_config__async_scheduling": False}
IDS = [7, 8, 10, 11]


def computing_step(pair: Pair, request: Request, ids: list[int], before: int) -> set[int]:
    """One step that computes all of the request. Returns the blocks reported as wrong."""
    output = StepOutput(
        {request.request_id: request.num_tokens - before}, {request.request_id: before}, {request.request_id: ids}
    )
    worker = pair.worker
    worker.bind_connector_metadata(pair.scheduler.build_connector_meta(output))
    worker.start_load_kv(None)
    for name in LAYERS:
        worker.wait_for_layer_load(name)
        worker.save_kv_layer(name, pair.tensors[name], None)
    worker.wait_for_save()
    results = worker.get_transfer_results(set())
    assert not results.finished_recving, "vLLM knows no asynchronous load of this request and would stop"
    invalid = worker.get_block_ids_with_load_errors()
    report = worker.build_connector_worker_meta()
    worker.clear_connector_metadata()
    pair.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))
    return invalid


def promised(make: Callable[..., Pair]) -> tuple[Pair, Request]:
    """A request with three blocks in the pool, which the engine has taken up for the step to come."""
    pair = make({"layerwise": "both"}, **SYNCHRONOUS)
    first = request("a")
    pair.scheduler.on_new_request(first)
    assert pair.match(first) == (0, False)
    pair.scheduler.update_state_after_alloc(first, blocks([3, 1, 4, 9]), 0)
    assert computing_step(pair, first, [3, 1, 4, 9], 0) == set()

    def is_stored() -> bool:
        pair.step(StepOutput())
        return pair.scheduler.counters().get("stored_blocks", 0) >= 3

    eventually(is_stored, "three stored blocks", detail=pair.scheduler.counters)
    second = request("b")
    pair.scheduler.on_new_request(second)
    assert pair.match(second) == (3 * BLOCK, False), "synchronous"
    return pair, second


def test_blocks_saved_and_loaded_by_layers_are_the_same_bytes(make: Callable[..., Pair]) -> None:
    pair, second = promised(make)
    wanted = {name: tensor[[3, 1, 4]].clone() for name, tensor in pair.tensors.items()}
    pair.scheduler.update_state_after_alloc(second, blocks(IDS), 3 * BLOCK)
    assert computing_step(pair, second, IDS, 3 * BLOCK) == set()
    assert all(torch.equal(tensor[IDS[:3]], wanted[name]) for name, tensor in pair.tensors.items())
    assert pair.scheduler.counters()["loaded_blocks_layerwise"] == 3


@pytest.mark.parametrize("entry", ["start_loads", "begin_layer", "end_layered"])
def test_worker_that_raises_makes_the_loaded_blocks_wrong(
    make: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    pair, second = promised(make)
    pair.scheduler.update_state_after_alloc(second, blocks(IDS), 3 * BLOCK)
    monkeypatch.setattr(pair.worker._worker, entry, explode)
    assert computing_step(pair, second, IDS, 3 * BLOCK) == set(IDS[:3])
    assert pair.scheduler.counters()["loads_failed"] == 1


@pytest.mark.parametrize("entry", ["allocated", "begin_step"])
def test_load_not_in_the_plan_makes_its_blocks_wrong(
    make: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    pair, second = promised(make)
    with monkeypatch.context() as patch:
        patch.setattr(pair.scheduler._scheduler, entry, explode)
        pair.scheduler.update_state_after_alloc(second, blocks(IDS), 3 * BLOCK)
        assert computing_step(pair, second, IDS, 3 * BLOCK) >= set(IDS[:3])
    before = {name: tensor.clone() for name, tensor in pair.tensors.items()}
    assert not pair.step(StepOutput()).finished_recving
    assert all(torch.equal(pair.tensors[name], before[name]) for name in LAYERS), "loaded after its step"


@pytest.mark.parametrize(
    ("extra", "changes", "wanted"),
    [
        ({}, {"scheduler_config__async_scheduling": True}, Layerwise.OFF),
        ({"layerwise": "both"}, SYNCHRONOUS, Layerwise.BOTH),
        ({"layerwise": "both"}, {"scheduler_config__async_scheduling": True}, Layerwise.SAVE),
        ({"layerwise": "load"}, {"scheduler_config__async_scheduling": True}, Layerwise.OFF),
        ({"layerwise": "save"}, {**SYNCHRONOUS, "speculative_config": object()}, Layerwise.OFF),
        ({"layerwise": "both", "copier": "worker"}, SYNCHRONOUS, Layerwise.OFF),
    ],
)
def test_what_layers_cannot_do_is_done_with_whole_blocks(
    model: Any, extra: dict[str, object], changes: dict[str, Any], wanted: Layerwise
) -> None:
    assert layerwise_for(vllm_config(model, extra, **changes), ConnectorOptions.parse(extra), 1) is wanted


def test_several_cache_groups_are_copied_whole(model: Any) -> None:
    extra: dict[str, object] = {"layerwise": "both"}
    assert layerwise_for(vllm_config(model, extra, **SYNCHRONOUS), ConnectorOptions.parse(extra), 2) is Layerwise.OFF


def test_only_engines_with_the_option_are_kept_from_whole_graphs() -> None:
    assert not KVServiceConnector.requires_piecewise_for_cudagraph({})
    assert not KVServiceConnector.requires_piecewise_for_cudagraph({"layerwise": "off"})
    assert KVServiceConnector.requires_piecewise_for_cudagraph({"layerwise": "save"})
