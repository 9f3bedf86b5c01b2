"""KVServiceTier: kvservice below the CPU memory of vLLM's OffloadingConnector.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
    "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592, "secondary_tiers": [{"type": "KVServiceTier",
    "module_path": "kvservice.connector.offloading", "weights_version": "llama-3.1-8b"}]}}'

Runs in the engine's scheduler process, on its thread; vLLM asks that nothing blocks there. Copies run on threads of the
pool. Only a wrong option at start raises into the engine. A failure is a miss or a chunk not stored, and is counted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadingCounterMetadata, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvservice.api.layout import Array, Layout
from kvservice.api.named import NamedBlocks
from kvservice.connector.failures import Failures, guarded
from kvservice.connector.offloading.lookups import Lookups, Presence
from kvservice.connector.offloading.options import TierOptions
from kvservice.connector.weights import Terms
from kvservice.observe import logs
from kvservice.observe.events import OFFLOADING_EVENTS

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingMetricMetadata, OffloadingSpec, OffloadKey, ReqContext
    from vllm.v1.kv_offload.config import OffloadingConfig
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.base import ScheduleEndContext, TransferJob

log = logging.getLogger("kvservice.connector")

EVENTS = "vllm:kvservice_offloading_events"
# Longest that a store waits for the shard's answers, which come within milliseconds. A reset waits for it, on the
# thread that schedules.
STORE_SECONDS = 4.0
ANSWERS = {
    Presence.HERE: LookupResult.HIT,
    Presence.MISSING: LookupResult.MISS,
    Presence.ASKED: LookupResult.RETRY,
}


@dataclass(frozen=True, slots=True)
class _Copying:
    """A store or a load under way. Its result says, chunk by chunk, what went well."""

    keys: tuple[OffloadKey, ...]
    is_load: bool
    began: float  # time.monotonic()
    copied: Future[list[bool]]


class KVServiceTier(SecondaryTierManager):
    """One chunk of the connector is one block of the pool, under vLLM's own key of it."""

    medium: ClassVar[Medium] = Medium.CPU

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **options: Any,
    ) -> None:
        """Blocks until the first attempt to attach has ended. Raises ConfigError, or SegmentError if /dev/shm has too
        little room for an embedded pool."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        logs.speak_through("vllm")
        self._options = TierOptions(**options)
        config = offloading_spec.config
        self._rows: Array | None = np.asarray(primary_kv_view).view(np.uint8)
        self._blocks = NamedBlocks(
            self._options,
            Path(config.model.name).name,
            Layout(_chunk_tokens(config), (self.block_size_bytes,), "uint8"),
            identity(config, str(self._options.weights_version)),
            namespace=self._options.namespace,
            verify=self._options.verify_load.value,
        )
        if not self._blocks.is_attached:
            log.error("serving without the tier: %s", self._blocks.failure)
        self._terms = Terms(self._options.weights_version_file)
        self._blocks.term = self._terms.first()
        self._lookups = Lookups(self._blocks, self._options.fetch_timeout_seconds)
        self._jobs: dict[int, _Copying] = {}
        self._failed: list[JobResult] = []  # that could not even begin
        self._requests: set[str] = set()  # that have not ended
        self._is_closed = False  # after a reset while requests held blocks, until one that finds none
        self.counters: Counter[str] = Counter()
        self.failures = Failures(self.counters, "offloading_failed")
        self._reported: Counter[str] = Counter()

    # -- lookups ----

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._requests.add(req_context.req_id)
        return RequestOffloadingContext()

    @guarded(lambda *_: LookupResult.MISS)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if self._is_closed:
            return LookupResult.MISS
        return ANSWERS[self._lookups.ask(key, req_context.req_id)]

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        with self.failures.guard("on_schedule_end"):
            self._lookups.send()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._requests.discard(req_context.req_id)
        with self.failures.guard("on_request_finished"):
            self._lookups.end(req_context.req_id)

    # -- copies ----

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._begin(job_metadata, is_load=False)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._begin(job_metadata, is_load=True)

    def _begin(self, job: TransferJob, *, is_load: bool) -> None:
        keys = tuple(job.keys)
        try:
            if self._is_closed or self._rows is None:
                self.counters["offloading_refused"] += len(keys)
                self._give_up(job.job_id, keys)
                return
            rows = [self._rows[chunk] for chunk in job.chunk_ids]
            copied = self._load(keys, rows) if is_load else self._blocks.put(keys, rows, STORE_SECONDS)
            self._jobs[job.job_id] = _Copying(keys, is_load, time.monotonic(), copied)
        except Exception as error:  # noqa: BLE001  the engine's loop must go on whatever happens here
            self.failures.note("submit_load" if is_load else "submit_store", error)
            self._give_up(job.job_id, keys)

    def _load(self, keys: tuple[OffloadKey, ...], rows: list[Array]) -> Future[list[bool]]:
        held = self._lookups.take(keys)
        try:
            return self._blocks.load(keys, held, rows, self._options.fetch_timeout_seconds)
        except BaseException:
            self._blocks.release(list(held.values()))
            raise

    def _give_up(self, job_id: int, keys: tuple[OffloadKey, ...]) -> None:
        """A job that could not even begin."""
        self._lookups.failed(keys)
        self._failed.append(JobResult(job_id, success=False))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        with self.failures.guard("get_finished_jobs"):
            found, missed = self._lookups.receive()
            self.counters["offloading_found"] += found
            self.counters["offloading_missed"] += missed
        finished, self._failed = self._failed, []
        for job_id, job in list(self._jobs.items()):
            if job.copied.done():
                del self._jobs[job_id]
                finished.append(self._result(job_id, job))
        return finished

    def _result(self, job_id: int, job: _Copying) -> JobResult:
        error = None if job.copied.cancelled() else job.copied.exception()
        if isinstance(error, Exception):
            self.failures.note("load" if job.is_load else "store", error)
        went = [False] * len(job.keys) if job.copied.cancelled() or error is not None else job.copied.result()
        good = [key for key, is_good in zip(job.keys, went, strict=True) if is_good]
        lost = len(job.keys) - len(good)
        self.counters["offloading_loaded" if job.is_load else "offloading_stored"] += len(good)
        self.counters["offloading_not_loaded" if job.is_load else "offloading_not_stored"] += lost
        if job.is_load and lost:
            self._lookups.failed(key for key, is_good in zip(job.keys, went, strict=True) if not is_good)
        return JobResult(
            job_id,
            success=not lost,
            successful_keys=good if job.is_load and lost else None,
            transfer_time=time.monotonic() - job.began,
            transfer_bytes=len(good) * self.block_size_bytes,
        )

    # -- resets, and the end ----

    def drain_jobs(self) -> None:
        """vLLM calls this when its cache is reset, because weights may have changed. What is stored from here on has
        other names. While requests have not ended, what they hold may be of both weights: then nothing is stored or
        found until a reset that finds none. Blocks until the copies under way have ended."""
        wait([job.copied for job in self._jobs.values()])
        try:
            self._lookups.forget()
            self._is_closed = bool(self._requests)
            if self._is_closed:
                self.counters["offloading_resets_refused"] += 1
                log.error("requests held blocks at a reset: the tier is out of use until a reset without requests")
            else:
                self._blocks.term = self._terms.next()
        except Exception as error:  # noqa: BLE001  the engine's loop must go on whatever happens here
            self._is_closed = True
            self.failures.note("drain_jobs", error)

    def shutdown(self) -> None:
        wait([job.copied for job in self._jobs.values()])
        self._lookups.forget()
        self._blocks.close()
        self._jobs.clear()
        self._rows = None  # vLLM unmaps the memory next

    # -- what is counted ----

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        text = "what kvservice's tier below the OffloadingConnector counts, by event"
        return {EVENTS: OffloadingCounterMetadata(documentation=text, labelnames=("event",))}

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What was counted since the last call."""
        stats = OffloadingConnectorStats()
        for event in OFFLOADING_EVENTS:
            if change := self.counters[event] - self._reported[event]:
                stats.increase_counter(EVENTS, change, (event,))
                self._reported[event] = self.counters[event]
        return None if stats.is_empty() else stats


def identity(config: OffloadingConfig, weights_version: str) -> dict[str, object]:
    """Everything that vLLM tells a tier and that changes the bytes of a chunk. A chunk lies as the KV cache lies, one
    worker behind the other, so the layout and all degrees of parallelism are in it."""
    parallel = config.parallel
    groups = [[group.group_id, group.tokens_per_block, *group.layer_names] for group in config.groups]
    return {
        "engine": "vllm-offloading",
        "vllm": vllm.__version__,
        "weights": f"version {weights_version}",
        "kv_dtype": config.model.dtype,
        "kv_layout": f"{config.kv_cache_layout} canonical {config.canonical_layout} single {config.replicated_layout}",
        "device": str(current_platform.get_device_name()),
        "groups": hashlib.sha256(json.dumps(groups).encode()).hexdigest()[:32],
        "chunk": f"{config.cache.blocks_per_chunk} blocks, {config.cache.tokens_per_hash} tokens a hash",
        "worker_bytes": config.worker_kv_bytes_per_block,
        "ranks": (
            f"world {parallel.world_size} tp {parallel.tp_size} pp {parallel.pp_size} pcp {parallel.pcp_size} "
            f"dcp {parallel.dcp_size}"
        ),
    }


def _chunk_tokens(config: OffloadingConfig) -> int:
    """Tokens of a chunk of the first group; other groups may have others. Only people read it."""
    return int(config.groups[0].tokens_per_block * config.cache.blocks_per_chunk)
