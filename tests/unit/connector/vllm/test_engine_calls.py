"""vLLM's own code around a connector, with ours in it: factory, transfer group, attention wrapper, and the order of
calls in a step. No engine is started: what calls the connector is vLLM's, and only the forward is a loop of ours."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.distributed.kv_transfer.kv_transfer_state as state
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.forward_context import override_forward_context
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request as VllmRequest
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvservice.connector.vllm import KVServiceConnector
from kvservice.connector.vllm.step_metadata import Metadata
from kvservice.core.block.keys import block_keys
from tests.unit.connector.vllm.test_connector import (
    BLOCK,
    BLOCKS,
    HEAD_SIZE,
    HEADS,
    LAYERS,
    cache_config,
    model,
    vllm_config,
)

__all__ = ["model"]  # a fixture
LAYER_NAMES = [f"model.layers.{index}.attn" for index in range(30)]
LAYER_METHODS = ("wait_for_layer_load", "save_kv_layer")
LAYER_CALLS = [f"{method} {name}" for name in LAYER_NAMES for method in LAYER_METHODS]
AFTER_THE_FORWARD = (
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)
OURS = "kvservice.connector.vllm"


def transfer_config(module: str | None, name: str = "KVServiceConnector") -> KVTransferConfig:
    return KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_module_path=module)


def engine_config(model: Path) -> Any:
    config = vllm_config(model, {"mode": "embedded", "memory": "8MiB"})
    config.kv_transfer_config.kv_connector_module_path = OURS
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    config.adjust_dcp_kv_cache_interleave_size = lambda kv_cache_config: None
    return config


@pytest.fixture
def group(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KVServiceConnector]:
    """The connector of this process's worker, made as vLLM's worker makes it."""
    monkeypatch.setattr(state, "_sync_engine_id_across_tp", lambda config: None)  # needs ranks that talk to each other
    state.ensure_kv_transfer_initialized(engine_config(model), cache_config())
    made = state.get_kv_transfer_group()
    assert isinstance(made, KVServiceConnector)
    yield made
    state.ensure_kv_transfer_shutdown()


def test_vllms_factory_makes_our_connector_by_its_module(model: Path) -> None:
    """It imports the module that the configuration names, and only for who names it: by its name alone ours is not
    known. One class is made once for each role, with the other half left out."""
    assert KVConnectorFactory.get_connector_class(transfer_config(OURS)) is KVServiceConnector
    with pytest.raises(ValueError, match="Unsupported connector type"):
        KVConnectorFactory.get_connector_class(transfer_config(None))
    with pytest.raises(AttributeError, match="not found in"):
        KVConnectorFactory.get_connector_class(transfer_config(OURS, "Another"))
    config = engine_config(model)
    scheduler = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache_config())
    worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache_config())
    try:
        assert isinstance(scheduler, KVServiceConnector) and isinstance(worker, KVServiceConnector)
        assert scheduler._scheduler is not None and scheduler._worker is None
        assert worker._scheduler is None and worker._session is None
    finally:
        for connector in (scheduler, worker):
            assert isinstance(connector, KVServiceConnector)
            connector.shutdown()


def test_vllms_factory_takes_us_with_several_kv_cache_groups(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses connectors that know one group only while the engine has several, and those of the old signature."""
    assert KVConnectorFactory.supports_hma_config(transfer_config(OURS))

    class OneGroup(KVConnectorBase_V1):
        """Has no request_finished_all_groups."""

    class OldSignature(KVConnectorBase_V1):
        def __init__(self, vllm_config: Any, role: KVConnectorRole) -> None: ...

    module = module_with(monkeypatch, OneGroup=OneGroup, OldSignature=OldSignature)
    config = engine_config(model)
    config.kv_transfer_config = transfer_config(module, "OneGroup")
    with pytest.raises(ValueError, match="does not support HMA"):
        KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache_config())
    with pytest.raises(ValueError, match="deprecated"):
        KVConnectorFactory.get_connector_class(transfer_config(module, "OldSignature"))


def module_with(monkeypatch: pytest.MonkeyPatch, **classes: type) -> str:
    """The name of a module that has these classes."""
    made = ModuleType("connectors_of_this_test")
    vars(made).update(classes)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made.__name__


def test_a_worker_process_has_one_connector(group: KVServiceConnector, model: Path) -> None:
    """A second initialisation changes nothing, and after the end there is none."""
    assert state.has_kv_transfer_group() and state.is_v1_kv_transfer_group()
    state.ensure_kv_transfer_initialized(engine_config(model), cache_config())
    assert state.get_kv_transfer_group() is group
    state.ensure_kv_transfer_shutdown()
    assert not state.has_kv_transfer_group()


@pytest.fixture
def calls(group: KVServiceConnector, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the connector's methods in the order in which vLLM calls them. Each that is called between bind and
    clear has the step's metadata."""
    made: list[str] = []
    for name in ("bind_connector_metadata", "start_load_kv", *LAYER_METHODS, *AFTER_THE_FORWARD):
        record(monkeypatch, group, name, made, group)
    return made


def record(
    monkeypatch: pytest.MonkeyPatch, target: object, name: str, made: list[str], group: KVServiceConnector
) -> None:
    unpatched = getattr(target, name)

    def call(*arguments: Any, **named: Any) -> Any:
        made.append(f"{name} {arguments[0]}" if name in LAYER_METHODS else name)
        if name not in ("bind_connector_metadata", "clear_connector_metadata"):
            assert group.has_connector_metadata(), f"{name} without the step's metadata"
        return unpatched(*arguments, **named)

    monkeypatch.setattr(target, name, call)


def forward_context() -> Any:
    layers = {name: SimpleNamespace(kv_cache=None) for name in LAYER_NAMES}
    return SimpleNamespace(
        attn_metadata={name: object() for name in LAYER_NAMES}, no_compile_layers=layers, slot_mapping={}
    )


@maybe_transfer_kv_layer
def attend(layer_name: str) -> None:
    """An attention layer, as vLLM wraps it."""


def run_step(*, has_sync_kv_loads: bool) -> Any:
    """A step of vLLM's model runner on thirty layers."""
    output = SimpleNamespace(
        kv_connector_metadata=Metadata(), has_sync_kv_loads=has_sync_kv_loads, finished_req_ids=set()
    )
    step: Any = output
    with (
        override_forward_context(forward_context()),
        KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(step) as found,
    ):
        for name in LAYER_NAMES:
            attend(name)
    return found


def test_order_of_the_step(group: KVServiceConnector, calls: list[str]) -> None:
    """Thirty layers, each waited for and saved in order; bind before everything, clear behind everything. Every call
    between them finds the step's metadata, and outside there is none."""
    assert not group.has_connector_metadata()
    run_step(has_sync_kv_loads=True)
    assert calls == ["bind_connector_metadata", "start_load_kv", *LAYER_CALLS, *AFTER_THE_FORWARD]
    assert not group.has_connector_metadata()


def test_copies_are_where_the_step_has_them(
    group: KVServiceConnector, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads start with start_load_kv, stores with wait_for_save behind the last layer, and what has ended is told
    after both."""
    group.register_kv_caches(
        {name: torch.zeros(BLOCKS, HEADS, BLOCK, 2 * HEAD_SIZE, dtype=torch.bfloat16) for name in LAYERS}
    )
    copies = ("start_loads", "store", "take_loaded", "take_report")
    for name in copies:
        record(monkeypatch, group._worker, name, calls, group)
    run_step(has_sync_kv_loads=True)
    behind = {"start_load_kv": "start_loads", "wait_for_save": "store"}
    behind |= {"get_transfer_results": "take_loaded", "build_connector_worker_meta": "take_report"}
    assert [name for name in calls if name in copies] == list(copies)
    for entry, copy in behind.items():
        assert calls.index(copy) == calls.index(entry) + 1


def test_loads_that_no_step_waits_for_start_after_its_forward(calls: list[str]) -> None:
    """The surveys of the interface have start_load_kv before every forward. vLLM 0.32 calls it after the forward was
    launched, unless this step computes on what is loaded."""
    run_step(has_sync_kv_loads=False)
    assert calls == ["bind_connector_metadata", *LAYER_CALLS, "start_load_kv", *AFTER_THE_FORWARD]


def test_attention_calls_no_connector_where_there_is_none() -> None:
    assert not state.has_kv_transfer_group()
    attend(LAYER_NAMES[0])  # would need a forward context otherwise
    step: Any = SimpleNamespace()
    with KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(step) as found:
        assert found is None


def test_a_step_before_the_kv_caches_are_registered_does_nothing(group: KVServiceConnector, calls: list[str]) -> None:
    """Older connectors of others pick the KV tensors up from the first forward. Ours gets them by register_kv_caches,
    and a step without them is one without a cache."""
    found = run_step(has_sync_kv_loads=True)
    assert not found.finished_sending and not found.finished_recving and not found.failed_recving
    assert not found.invalid_block_ids
    assert len(calls) == 2 + len(LAYER_CALLS) + len(AFTER_THE_FORWARD)
    assert not group._counters


def test_two_images_in_another_order_are_another_prompt() -> None:
    """Their placeholders are the same tokens at the same places. The blocks in front of the first image are shared."""
    function = get_hash_fn_by_name("sha256_cbor")
    init_none_hash(function)

    def keys(*images: str) -> list[bytes]:
        places = [PlaceholderRange(offset=(1 + 2 * index) * BLOCK, length=BLOCK) for index in range(len(images))]
        features = [
            MultiModalFeatureSpec(None, "image", name, place) for name, place in zip(images, places, strict=True)
        ]
        made = VllmRequest(
            "r",
            prompt_token_ids=[7] * (5 * BLOCK),
            sampling_params=SamplingParams(),
            pooling_params=None,
            mm_features=features,
            block_hasher=get_request_block_hasher(BLOCK, function),
        )
        return list(block_keys(bytes(32), made.block_hashes))

    one, other = keys("cat", "dog"), keys("dog", "cat")
    assert one == keys("cat", "dog")
    assert one[0] == other[0]
    assert not set(one[1:]) & set(other[1:])
