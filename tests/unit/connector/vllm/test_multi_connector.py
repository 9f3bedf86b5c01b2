"""vLLM's MultiConnector with our class in it: every connector stores, and the first that has a hit loads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvservice.connector.vllm import KVServiceConnector
from kvservice.testing.eventually import eventually
from tests.settled import has_slots
from tests.unit.connector.vllm.test_connector import (
    BLOCK,
    BLOCKS,
    HEAD_SIZE,
    HEADS,
    LAYERS,
    Pair,
    Request,
    StepOutput,
    blocks,
    cache_config,
    model,
    request,
    vllm_config,
)

__all__ = ["model"]  # a fixture
CHILD = {
    "kv_connector": "KVServiceConnector",
    "kv_connector_module_path": "kvservice.connector.vllm",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"mode": "embedded", "memory": "8MiB", "verify_load": "full"},
}


class Several(Pair):
    """Both roles of a MultiConnector with two of our connectors, each with a pool of its own."""

    def __init__(self, model: Path) -> None:
        config = vllm_config(model, {"connectors": [CHILD, CHILD]})
        config.kv_transfer_config.kv_connector = "MultiConnector"
        config.scheduler_config.disable_hybrid_kv_cache_manager = False
        made = [KVConnectorFactory.create_connector(config, role, cache_config()) for role in KVConnectorRole]
        self.scheduler, self.worker = made  # type: ignore[assignment]
        backing = torch.randn(len(LAYERS), BLOCKS, HEADS, BLOCK, 2 * HEAD_SIZE).to(torch.bfloat16)
        self.tensors = dict(zip(LAYERS, backing.unbind(0), strict=True))
        self.worker.register_kv_caches(self.tensors)
        self.block_pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=BLOCK)
        self.scheduler.bind_gpu_block_pool(self.block_pool)
        sessions: list[Any] = [child._session for child in self.children]
        eventually(lambda: all(has_slots(session) for session in sessions), "slots of every pool")

    @property
    def children(self) -> list[KVServiceConnector]:
        assert isinstance(self.scheduler, MultiConnector)
        found = self.scheduler.sub_connectors
        assert all(isinstance(child, KVServiceConnector) for child in found)
        return found  # type: ignore[return-value]

    def counted(self, counter: str) -> list[int]:
        return [child.counters().get(counter, 0) for child in self.children]

    def store(self) -> None:
        """A prompt, whose three blocks are in both pools then."""
        first = request("a")
        self.prefill(first, [3, 1, 4, 9])
        self.finish(first, [3, 1, 4, 9])
        assert self.scheduler.has_pending_push_work(), "vLLM makes steps until all is stored"
        self.step(StepOutput())
        eventually(lambda: self.counted("stored_blocks") == [3, 3], "the prompt in both pools")

    def hit(self, name: str, block_ids: list[int]) -> Request:
        """A request for the stored prompt, whose three blocks are loaded into these."""
        asked = request(name)
        self.scheduler.on_new_request(asked)
        assert self.match(asked) == (3 * BLOCK, True)
        self.scheduler.update_state_after_alloc(asked, blocks(block_ids), 3 * BLOCK)
        assert self.step(StepOutput()).finished_recving == {name}
        return asked


def test_every_connector_stores_and_the_first_that_hits_loads(model: Path) -> None:
    several = Several(model)
    try:
        several.store()
        wanted = {name: tensor[[3, 1, 4]].clone() for name, tensor in several.tensors.items()}
        second = several.hit("b", [7, 8, 10, 11])
        assert several.counted("load_blocks") == [3, 0]
        several.finish(second, [7, 8, 10, 11])
        assert several.children[0].reset_cache() is True, "the first has nothing any more"
        several.hit("c", [12, 13, 14, 15])
        assert several.counted("load_blocks") == [3, 3]
        for name, tensor in several.tensors.items():
            assert torch.equal(tensor[[7, 8, 10]], wanted[name])
            assert torch.equal(tensor[[12, 13, 14]], wanted[name])
        assert not any(any(child._counters.values()) for child in several.children)
    finally:
        several.close()


def test_session_aborted_in_anothers_load_is_not_stored(model: Path) -> None:
    """vLLM counts what is being loaded as computed."""
    several = Several(model)
    try:
        several.store()
        assert several.children[1].reset_cache() is True, "the second has nothing any more"
        session = request("b")
        session.resumable = True
        several.scheduler.on_new_request(session)
        assert several.match(session) == (3 * BLOCK, True)
        several.scheduler.update_state_after_alloc(session, blocks([7, 8, 10, 11]), 3 * BLOCK)
        session.num_computed_tokens = 3 * BLOCK
        several.finish(session, [7, 8, 10, 11], RequestStatus.FINISHED_ABORTED)
        several.step(StepOutput())
        assert several.counted("store_blocks_planned") == [3, 3]
    finally:
        several.close()


def test_what_is_computed_on_anothers_failed_load_is_not_sealed(model: Path) -> None:
    """vLLM computes it again in the same blocks."""
    several = Several(model)
    try:
        asked = request("a")
        several.scheduler.on_new_request(asked)
        assert several.match(asked) == (0, False)
        several.scheduler.update_state_after_alloc(asked, blocks([3, 1, 4, 9]), 0)
        step = StepOutput({"a": asked.num_tokens}, {"a": 0}, {"a": [3, 1, 4, 9]})
        several.scheduler.build_connector_meta(step)
        several.scheduler.update_connector_output(KVConnectorOutput(invalid_block_ids={1}))
        assert several.counted("store_blocks_planned") == [3, 3]
        several.step(step)
        assert several.counted("store_blocks_planned") == [6, 6]
        several.finish(asked, [3, 1, 4, 9])
        several.step(StepOutput())
        eventually(lambda: several.counted("stored_blocks") == [3, 3], "what was computed again")
    finally:
        several.close()


@pytest.mark.parametrize("executor", ["uni", "external_launcher", "mp"])
def test_a_multi_connectors_policy_is_set_to_recompute(
    model: Path, executor: str, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM reads that of the MultiConnector. A worker in another process than the scheduler says what to do."""
    config = vllm_config(model, {"connectors": [CHILD]}, parallel_config__distributed_executor_backend=executor)
    config.kv_transfer_config.kv_connector = "MultiConnector"
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    with set_current_vllm_config(config):
        KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache_config())
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert ("set kv_load_failure_policy of MultiConnector" in caplog.text) == (executor == "mp")


def test_a_single_connectors_worker_has_nothing_to_say(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The scheduler's half sets the policy in its own process."""
    extra = {"mode": "embedded", "memory": "8MiB"}
    config = vllm_config(model, extra, parallel_config__distributed_executor_backend="mp")
    with set_current_vllm_config(config):
        KVServiceConnector(config, KVConnectorRole.WORKER, cache_config())
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert "set kv_load_failure_policy" not in caplog.text
