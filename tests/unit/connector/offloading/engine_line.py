"""vLLM's tiering manager with KVServiceTier below it, made by vLLM's own factories, and what an engine does with it.

The GPU is left out: its copies into and out of the CPU memory are written here. Everything else is vLLM's.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from kvservice.connector.offloading.tier import KVServiceTier
from kvservice.testing.eventually import eventually
from kvservice.units import KiB

CHUNK_BYTES = 64 * KiB
STEP_SECONDS = 10.0  # for a handful of chunks; a loaded machine is slow


def offloading_config(extra: dict[str, object], **changes: Any) -> OffloadingConfig:
    parallel = OffloadingParallelConfig(
        rank=0,
        world_size=1,
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=True,
    )
    given: dict[str, Any] = {
        "groups": (OffloadingGroupConfig(16, ("model.0", "model.1"), 0),),
        "worker_kv_bytes_per_block": CHUNK_BYTES,
        "enable_kv_cache_events": False,
        "extra_config": extra,
        "engine_id": uuid.uuid4().hex,
        "model": OffloadingModelConfig("org/tiny", "bfloat16"),
        "cache": OffloadingCacheConfig(16, 1),
        "parallel": parallel,
        "kv_cache_layout": "NHD",
        **changes,
    }
    return OffloadingConfig(**given)


class OffloadingEngine:
    """One engine's scheduler side. `chunks` is the room in its CPU memory."""

    def __init__(self, tier: dict[str, object], *, chunks: int = 8, **changes: Any) -> None:
        entry = {
            "type": "KVServiceTier",
            "module_path": "kvservice.connector.offloading",
            "weights_version": "w1",
            **tier,
        }
        extra = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": chunks * CHUNK_BYTES,
            "secondary_tiers": [entry],
        }
        self.spec = OffloadingSpecFactory.create_spec(offloading_config(extra, **changes))
        self.manager = self.spec.get_manager()
        self.tier: KVServiceTier = self.manager.secondary_tiers[0]
        self._requests = 0

    @property
    def rows(self) -> Any:
        return np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)

    def request(self) -> ReqContext:
        self._requests += 1
        context = ReqContext(f"r{self._requests}")
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def until(self, done: Callable[[], bool], what: str) -> None:
        """Step until it holds, as an engine does."""

        def stepped() -> bool:
            self.step()
            return done()

        eventually(stepped, what, STEP_SECONDS)

    def offload(self, context: ReqContext, keys: Sequence[OffloadKey], chunks: Sequence[Any]) -> None:
        """The engine computed these chunks, and its GPU copied them into the CPU memory."""
        found = self.manager.prepare_store(keys, context)
        assert found is not None and list(found.keys_to_store) == list(keys)
        for chunk_id, chunk in zip(found.store_spec.chunk_ids, chunks, strict=True):
            self.rows[chunk_id] = chunk
        self.manager.complete_store(keys, context)

    def store(self, keys: Sequence[OffloadKey], chunks: Sequence[Any]) -> None:
        """A request from its first to its last call, and the copies behind it."""
        context = self.request()
        self.offload(context, keys, chunks)
        self.until(lambda: not self.manager.has_pending_work(), "the chunks are stored")
        self.manager.on_request_finished(context)

    def found(self, context: ReqContext, keys: Sequence[OffloadKey]) -> list[LookupResult]:
        """What vLLM says of these chunks when it need not wait any more."""
        last: list[LookupResult] = []

        def known() -> bool:
            last[:] = [self.manager.lookup(key, context) for key in keys]
            return not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(last)

        self.until(known, "the lookups are answered")
        return last

    def load(self, context: ReqContext, keys: Sequence[OffloadKey]) -> Any:
        """What the GPU would copy out of the CPU memory."""
        spec = self.manager.prepare_load(keys, context)
        read = self.rows[spec.chunk_ids].copy()
        self.manager.complete_load(keys, context)
        return read

    def reset(self) -> None:
        """vLLM resets its cache, as after an update of weights."""
        self.manager.reset_cache()
        if hasattr(self.manager, "on_reset_flushed"):  # vLLM 0.33: the workers have no copy under way any more
            self.manager.on_reset_flushed()

    def forget(self) -> None:
        """The CPU memory gives its chunks to others."""
        self.manager.primary_tier.reset_cache()

    def close(self) -> None:
        self.manager.shutdown()


def keys_of(prompt: str, count: int) -> list[OffloadKey]:
    """vLLM's keys: 32 bytes of a block hash, and the KV cache group."""
    return [make_offload_key(uuid.uuid5(uuid.NAMESPACE_URL, f"{prompt}/{i}").bytes * 2, 0) for i in range(count)]


def some_chunks(seed: int, count: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (count, CHUNK_BYTES), np.uint8)
