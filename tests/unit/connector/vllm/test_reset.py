"""What a reset of vLLM's caches means to the class that vLLM loads: blocks of other weights are never served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvservice.testing.cluster import LocalCluster
from kvservice.units import MiB
from tests.unit.connector.vllm.test_connector import BLOCK, Pair, StepOutput, blocks, make, model, request, wait_for

__all__ = ["make", "model"]  # fixtures


def stored(pair: Pair, name: str, count: int, chain: int = 1) -> None:
    """A request whose blocks are in the pool by now, `count` of all so far."""
    one = request(name, chain)
    pair.prefill(one, [3, 1, 4, 9])
    pair.finish(one, [3, 1, 4, 9])
    wait_for(pair, "stored_blocks", count)
    pair.step(StepOutput())


def promised(pair: Pair, name: str, chain: int = 1) -> int:
    """Blocks promised to a request of the same prompt, which then leaves."""
    one = request(name, chain)
    pair.scheduler.on_new_request(one)
    tokens, _ = pair.match(one)
    pair.finish(one, [], RequestStatus.FINISHED_ABORTED)
    return tokens // BLOCK


def test_after_a_reset_only_what_is_computed_again_is_served(make: Callable[..., Pair]) -> None:
    pair = make()
    stored(pair, "a", 3)
    assert promised(pair, "b") == 3
    assert pair.scheduler.reset_cache() is True
    assert promised(pair, "c") == 0
    stored(pair, "d", 6)
    assert promised(pair, "e") == 3, "under its new name"
    assert pair.scheduler.reset_cache() is True
    assert promised(pair, "f") == 0
    assert pair.scheduler.counters()["resets"] == 2


def test_blocks_promised_before_a_reset_are_computed(make: Callable[..., Pair]) -> None:
    pair = make()
    stored(pair, "a", 3)
    waiting = request("b")
    pair.scheduler.on_new_request(waiting)
    assert pair.match(waiting) == (3 * BLOCK, True)
    assert pair.scheduler.reset_cache() is True
    assert pair.match(waiting) == (0, False)


def test_a_reset_while_blocks_are_held_is_refused(
    make: Callable[..., Pair],
) -> None:
    """Nothing is served until one succeeds."""
    pair = make()
    stored(pair, "a", 3)
    held = pair.block_pool.get_new_blocks(1)  # a request that goes on
    assert pair.scheduler.reset_cache() is False
    assert promised(pair, "b") == 0
    one = request("c", chain=2)
    pair.prefill(one, [3, 1, 4, 9])
    pair.finish(one, [3, 1, 4, 9])
    pair.step(StepOutput())
    assert pair.scheduler.counters()["store_blocks_planned"] == 3, "what both weights may have computed is not stored"
    pair.block_pool.free_blocks(held)
    assert pair.scheduler.reset_cache() is True
    assert promised(pair, "d") == 0
    stored(pair, "e", 6)
    assert promised(pair, "f") == 3


def test_copies_under_way_at_a_reset_are_given_back_unsealed(make: Callable[..., Pair]) -> None:
    pair = make()
    one = request("a")
    pair.scheduler.on_new_request(one)
    assert pair.match(one) == (0, False)
    pair.scheduler.update_state_after_alloc(one, blocks([3, 1, 4, 9]), 0)
    output = StepOutput({"a": one.num_tokens}, {"a": 0}, {"a": [3, 1, 4, 9]})
    metadata = pair.scheduler.build_connector_meta(output)
    assert pair.scheduler.reset_cache() is False, "the copies hold blocks"
    pair.worker.bind_connector_metadata(metadata)
    pair.worker.wait_for_save()
    report = pair.worker.build_connector_worker_meta()
    pair.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))
    pair.step(StepOutput())
    counters = pair.scheduler.counters()
    assert counters["store_blocks_void"] == 3
    assert "stored_blocks" not in counters


def test_engines_with_one_weights_version_share_after_a_reset(make: Callable[..., Pair], tmp_path: Path) -> None:
    version = tmp_path / "version"
    version.write_text("step-1")
    pair = make({"weights_version_file": str(version)})
    stored(pair, "a", 3)
    version.write_text("step-2\n")
    assert pair.scheduler.reset_cache() is True
    assert promised(pair, "b") == 0
    stored(pair, "c", 6)
    assert pair.scheduler.reset_cache() is True
    assert promised(pair, "d") == 0, "nobody has said that these are the weights of step 2 again"
    version.write_text("step-2")
    assert pair.scheduler.reset_cache() is True
    assert promised(pair, "e") == 3, "back to the weights of step 2"


@pytest.mark.processes
def test_engines_that_start_with_other_weights_share_nothing(
    make: Callable[..., Pair], model: Path, tmp_path: Path
) -> None:
    """Before the first reset the file says nothing of them, and the fingerprint names no weights where there is a
    file."""
    file = tmp_path / "version"
    file.write_text("step-1")
    with LocalCluster(nodes=1, lookup_partitions=1, pool_bytes=8 * MiB, slab_bytes=MiB, transport="shm") as cluster:
        options = {"mode": "service", "memory": None, "socket": cluster.socket("n0"), "weights_version_file": str(file)}
        stored(make(options), "a", 3)
        assert promised(make(options), "b") == 3
        (model / "model.safetensors").write_bytes(b"trained further")
        assert promised(make(options), "c") == 0
