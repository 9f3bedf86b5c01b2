"""KVServiceTier as vLLM's tiering manager uses it: what was offloaded comes back, and whatever breaks is a miss."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.config import OffloadingGroupConfig, OffloadingModelConfig

from kvservice.connector.offloading import tier
from kvservice.connector.offloading.tier import EVENTS, KVServiceTier, identity
from kvservice.errors import ConfigError
from tests.unit.connector.offloading.engine_line import (
    OffloadingEngine,
    keys_of,
    offloading_config,
    some_chunks,
)

EMBEDDED: dict[str, object] = {"mode": "embedded", "memory": "8MiB", "verify_load": "full"}
HIT, MISS = LookupResult.HIT, LookupResult.MISS


@pytest.fixture
def engine() -> Iterator[OffloadingEngine]:
    made = OffloadingEngine(EMBEDDED)
    yield made
    made.close()


def test_chunks_that_left_the_cpu_memory_come_back(engine: OffloadingEngine) -> None:
    keys, chunks = keys_of("a", 4), some_chunks(1, 4)
    engine.store(keys, chunks)
    engine.forget()
    context = engine.request()
    assert engine.found(context, [*keys, *keys_of("b", 1)]) == [HIT] * 4 + [MISS]
    assert np.array_equal(engine.load(context, keys), chunks)
    engine.manager.on_request_finished(context)
    assert engine.tier.counters["offloading_loaded"] == engine.tier.counters["offloading_stored"] == 4
    runtime = engine.tier._blocks._thread._runtime
    assert runtime is not None
    engine.until(lambda: runtime.state.lease_count == 0, "no lease is left")


def test_a_prompt_longer_than_the_cpu_memory_loads_what_fits() -> None:
    """vLLM finds no room to load into, and says so; the tier gives back what it had promised."""
    engine = OffloadingEngine(EMBEDDED, chunks=2)
    try:
        keys, chunks = keys_of("a", 4), some_chunks(1, 4)
        for first in (0, 2):
            engine.store(keys[first : first + 2], chunks[first : first + 2])
        engine.forget()
        context = engine.request()

        def answered() -> bool:
            last[:] = [engine.manager.lookup(key, context) for key in keys]
            return LookupResult.RETRY not in last

        last: list[LookupResult] = []
        engine.until(answered, "the tier has answered")
        assert last == [LookupResult.HIT_PENDING] * 2 + [MISS] * 2
        assert engine.found(context, keys[:2]) == [HIT, HIT]
        assert np.array_equal(engine.load(context, keys[:2]), chunks[:2])
        engine.manager.on_request_finished(context)
        runtime = engine.tier._blocks._thread._runtime
        assert runtime is not None
        engine.until(lambda: runtime.state.lease_count == 0, "no lease is left")
    finally:
        engine.close()


def test_a_request_that_ends_while_it_waits_leaves_nothing(engine: OffloadingEngine) -> None:
    keys = keys_of("a", 3)
    engine.store(keys, some_chunks(1, 3))
    engine.forget()
    context = engine.request()
    assert [engine.manager.lookup(key, context) for key in keys] == [LookupResult.RETRY] * 3
    engine.step()
    engine.manager.on_request_finished(context)
    runtime = engine.tier._blocks._thread._runtime
    assert runtime is not None
    engine.until(lambda: not engine.tier._lookups._sent and runtime.state.lease_count == 0, "no lease is left")
    assert not engine.tier._lookups._questions


def test_a_damaged_chunk_is_a_miss_and_not_tried_again(engine: OffloadingEngine) -> None:
    keys = keys_of("a", 1)
    engine.store(keys, some_chunks(1, 1))
    engine.forget()
    (promise,) = engine.tier._blocks.hold(keys, 1.0).result()
    assert promise is not None
    promise.mapped._segment.payload(promise.ref.slot, 1)[0] ^= 1
    engine.tier._blocks.release([promise])
    context = engine.request()
    assert engine.found(context, keys) == [MISS]
    assert engine.tier.counters["offloading_not_loaded"] == 1


def test_after_a_reset_nothing_from_before_is_found(engine: OffloadingEngine) -> None:
    keys, chunks = keys_of("a", 2), some_chunks(1, 2)
    engine.store(keys, chunks)
    engine.reset()
    context = engine.request()
    assert engine.found(context, keys) == [MISS, MISS]
    engine.manager.on_request_finished(context)
    engine.store(keys, chunks)  # by the new weights
    engine.forget()
    assert engine.found(engine.request(), keys) == [HIT, HIT]


def test_a_reset_does_not_wait_for_a_silent_shard(engine: OffloadingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(*_: object) -> list[object]:
        await asyncio.sleep(60)
        return []

    monkeypatch.setattr(engine.tier._blocks._program.session, "store", silent)
    monkeypatch.setattr(tier, "STORE_SECONDS", 0.1)
    context, began = engine.request(), time.monotonic()
    engine.offload(context, keys_of("a", 2), some_chunks(1, 2))
    engine.step()
    engine.manager.on_request_finished(context)
    engine.reset()
    assert time.monotonic() - began < 10 and engine.tier.counters["offloading_not_stored"] == 2


def test_a_reset_while_a_request_holds_blocks_closes_the_tier(engine: OffloadingEngine) -> None:
    """Its blocks may be of both weights, and vLLM stores all of them again after the reset."""
    keys, context = keys_of("a", 2), engine.request()
    engine.reset()
    engine.offload(context, keys, some_chunks(1, 2))
    engine.until(lambda: not engine.manager.has_pending_work(), "the job has ended")
    assert engine.tier.counters["offloading_refused"] == 2
    engine.manager.on_request_finished(context)
    engine.forget()
    assert engine.found(engine.request(), keys) == [MISS, MISS]
    for request in list(engine.tier._requests):
        engine.manager.on_request_finished(engine.manager._req_state[request].req_context)
    engine.reset()
    engine.store(keys, some_chunks(1, 2))
    engine.forget()
    assert engine.found(engine.request(), keys) == [HIT, HIT]


def test_replicas_share_again_by_a_version_file(tmp_path: Path) -> None:
    version = tmp_path / "version"
    engine = OffloadingEngine({**EMBEDDED, "weights_version_file": str(version)})
    try:
        terms = []
        for text in ("step-1", "step-2", "step-1"):
            version.with_suffix(".new").write_text(text)
            version.with_suffix(".new").rename(version)
            engine.reset()
            terms.append(engine.tier._blocks.term)
        assert terms[0] == terms[2] != terms[1]
    finally:
        engine.close()


def test_whatever_fails_is_a_miss_and_counted(engine: OffloadingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = keys_of("a", 2)
    engine.store(keys, some_chunks(1, 2))
    engine.forget()

    def broken(*_: Any) -> Any:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        for name in ("put", "load"):
            patch.setattr(engine.tier._blocks, name, broken)
        context = engine.request()
        assert engine.found(context, keys) == [MISS, MISS]  # found, and not loaded
        engine.offload(context, keys_of("b", 1), some_chunks(2, 1))
        for name in ("ask", "send", "end", "receive"):
            patch.setattr(engine.tier._lookups, name, broken)
        assert engine.manager.lookup(keys[0], context) is MISS
        engine.step()
        engine.manager.on_request_finished(context)
        engine.until(lambda: not engine.manager.has_pending_work(), "the jobs have ended")
    assert engine.tier.counters["offloading_failed"] >= 4


def test_a_store_that_fails_later_is_logged_with_its_reason(
    engine: OffloadingEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It fails on the pool's thread, and is told outside of any `except`."""

    async def broken(*_: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(engine.tier._blocks, "_put", broken)
    monkeypatch.setattr(logging.getLogger("kvservice"), "propagate", True)
    engine.store(keys_of("a", 1), some_chunks(1, 1))
    (record,) = [record for record in caplog.records if record.getMessage().startswith("store failed")]
    assert record.exc_info is not None and isinstance(record.exc_info[1], RuntimeError)


def test_what_is_counted_is_in_vllms_metrics(engine: OffloadingEngine) -> None:
    engine.store(keys_of("a", 3), some_chunks(1, 3))
    stats = engine.manager.get_stats()
    assert stats.reduce()[f"{EVENTS}:('offloading_stored',)"] == 3
    defined = type(engine.spec).build_metric_definitions(engine.spec.extra_config)
    assert defined[EVENTS].labelnames == ("event",)
    assert engine.tier.get_stats() is None


def test_without_a_shard_the_engine_starts_and_misses() -> None:
    engine = OffloadingEngine({"mode": "service", "socket": "/nowhere/shard.sock"})
    try:
        keys = keys_of("a", 2)
        engine.store(keys, some_chunks(1, 2))
        engine.forget()
        assert engine.found(engine.request(), keys) == [MISS, MISS]
        assert engine.tier.counters["offloading_not_stored"] == 2
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"weights_version": None}, "needs weights_version"),
        ({"memroy": "1GiB"}, "memroy"),
        ({"accept_codec": "int8"}, "leave them out"),
    ],
)
def test_a_wrong_option_stops_the_engine_at_its_start(option: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        OffloadingEngine({**EMBEDDED, **option})


def test_what_changes_the_bytes_of_a_chunk_is_in_its_name() -> None:
    config = offloading_config({})
    changes: dict[str, Any] = {
        "dtype": replace(config, model=OffloadingModelConfig("org/tiny", "float8_e4m3fn")),
        "layers": replace(config, groups=(OffloadingGroupConfig(16, ("model.0",), 0),)),
        "layout": replace(config, kv_cache_layout="HND"),
        "canonical": replace(config, canonical_layout=True),
        "ranks": replace(config, parallel=replace(config.parallel, world_size=2, tp_size=2)),
        "chunk": replace(config, cache=replace(config.cache, blocks_per_chunk=4)),
    }
    base = identity(config, "w1")
    assert all(identity(changed, "w1") != base for changed in changes.values())
    assert identity(config, "w2") != base
    elsewhere = replace(config, model=OffloadingModelConfig("/models/tiny", "bfloat16"), engine_id="other")
    assert identity(elsewhere, "w1") == base  # where the files lie changes no byte


def test_it_is_what_vllm_loads_by_module_path() -> None:
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    entry = {"type": "KVServiceTier", "module_path": "kvservice.connector.offloading"}
    assert SecondaryTierFactory.get_tier_class(entry) is KVServiceTier
