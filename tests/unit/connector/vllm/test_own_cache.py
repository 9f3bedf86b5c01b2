"""The connector and vLLM's own prefix cache, and requests that stay out of the pool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.outputs import KVConnectorOutput

from kvservice.connector.scheduler.prefill_speed import PrefillSpeed
from kvservice.errors import ConfigError
from kvservice.testing.eventually import eventually
from tests.unit.connector.vllm.test_connector import BLOCK, Pair, StepOutput, make, model, request, wait_for

__all__ = ["make", "model"]  # fixtures


def test_private_request_is_neither_stored_nor_loaded(make: Callable[..., Pair]) -> None:
    pair = make()
    known = request("a")
    pair.prefill(known, [1, 2, 3, 4])
    wait_for(pair, "stored_blocks", 3)
    private = request("b")
    private.kv_transfer_params = {"kvservice": {"version": 1, "store": False, "load": False}}
    private.block_hashes += request("x", chain=7).block_hashes
    private.num_tokens += 3 * BLOCK
    pair.prefill(private, list(range(5, 12)))
    pair.finish(private, list(range(5, 12)))
    pair.step(StepOutput())
    assert pair.scheduler.counters()["store_blocks_planned"] == 3
    assert "load_blocks" not in pair.scheduler.counters()


def test_blocks_that_vllm_has_itself_are_not_asked_for(make: Callable[..., Pair]) -> None:
    pair = make()
    one = request("a", count=6)
    pair.prefill(one, list(range(1, 8)))
    for block_id, block_hash in zip(range(1, 5), one.block_hashes, strict=False):  # vLLM caches four of them
        block = pair.block_pool.blocks[block_id]
        pair.block_pool._insert_block_hash(make_block_hash_with_group_id(block_hash, 0), block, num_tokens=BLOCK)
    wait_for(pair, "stored_blocks", 6)
    again = request("b", count=6)
    pair.scheduler._scheduler._speed = PrefillSpeed()  # else computing two blocks is faster than asking
    pair.scheduler.on_new_request(again)

    def answer() -> tuple[int, bool] | None:
        tokens, is_async = pair.scheduler.get_num_new_matched_tokens(again, 4 * BLOCK)
        return None if tokens is None else (tokens, is_async)

    assert eventually(answer, "the answer") == (2 * BLOCK, True)
    assert pair.scheduler._scheduler._requests["b"].asked.skip == 4


def test_step_planned_ahead_does_not_time_the_one_before(make: Callable[..., Pair]) -> None:
    """With asynchronous scheduling vLLM plans a prompt's step before it hears of the end of a decode."""
    pair = make(max_concurrent_batches=2)
    speed = pair.scheduler._scheduler._speed
    pair.scheduler.build_connector_meta(StepOutput({"decode": 1}))
    pair.scheduler.build_connector_meta(StepOutput({"prompt": 2000}))
    pair.scheduler.update_connector_output(KVConnectorOutput())
    assert speed.seconds_for(1) == 0.0
    pair.scheduler.update_connector_output(KVConnectorOutput())
    assert speed.seconds_for(1) > 0.0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"cache_config__enable_prefix_caching": False}, "needs vLLM's prefix caching, which is off"),
        ({"scheduler_config__policy": "priority"}, "needs vLLM's scheduling policy 'fcfs'"),
    ],
)
def test_evicting_needs_what_it_reads(make: Callable[..., Pair], changes: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make({"offload": "evicting"}, **changes)


def test_block_that_the_pool_evicts_is_told_as_removed(make: Callable[..., Pair]) -> None:
    """In vLLM's own events, with the medium, for routers that read them."""
    pair = make(kv_events_config=SimpleNamespace(enable_kv_cache_events=True))
    one = request("a")
    pair.prefill(one, [1, 2, 3, 4])
    wait_for(pair, "seal_sealed", 3)
    stored = [event for event in pair.scheduler.take_events() if isinstance(event, BlockStored)]
    assert {event.medium for event in stored} == {"CPU"}
    session = pair.scheduler._session
    attachment = session.attachment.attachment_id

    async def fill() -> None:
        while await session._pool.reserve(attachment, 512):
            pass

    asyncio.run_coroutine_threadsafe(fill(), session._loop).result(20)

    def removed() -> list[Any]:
        return [event for event in pair.scheduler.take_events() if isinstance(event, BlockRemoved)]

    found = eventually(removed, "events of removed blocks")
    assert {event.medium for event in found} == {"CPU"}
    assert {event.block_hashes[0] for event in found} == {event.block_hashes[0] for event in stored}


def test_images_that_vllm_only_numbers_are_not_cached(make: Callable[..., Pair]) -> None:
    """With both of its caches off vLLM calls the first image of every process `renderer0-mm-1-image-0`."""
    image = (SimpleNamespace(identifier="renderer0-mm-1-image-0"),)
    for prefixes, is_named in ((True, True), (False, False)):
        pair = make(
            cache_config__enable_prefix_caching=prefixes,
            model_config__multimodal_config=SimpleNamespace(mm_processor_cache_gb=0),
        )
        seen = request("a")
        seen.mm_features = image
        pair.prefill(seen, [3, 1, 4, 9])  # with no hit
        pair.finish(seen, [3, 1, 4, 9])
        counters = pair.scheduler.counters()
        assert bool(counters.get("store_blocks_planned")) is is_named
        assert counters.get("media_unnamed", 0) == (not is_named)
        assert not any(name.startswith("failed_") for name in counters)
    pair.prefill(request("b"), [2, 5, 6, 7])
    assert pair.scheduler.counters()["store_blocks_planned"] == 3, "a prompt of text alone has its names"
