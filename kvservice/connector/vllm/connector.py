"""KVServiceConnector: the class that vLLM talks to. It builds a scheduler half or a worker half and decides nothing.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVServiceConnector",
    "kv_connector_module_path": "kvservice.connector.vllm", "kv_role": "kv_both"}'

Only a wrong option at start raises into the engine. Every entry is guarded: failures are counted, logged once per kind,
and the engine goes on as if the cache had nothing.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from kvservice.connector.cache_groups import Grouping, OneGroup
from kvservice.connector.failures import Failures, guarded
from kvservice.connector.layerwise.scheduler import LayerwiseScheduler
from kvservice.connector.layerwise.worker import LayerwiseWorker
from kvservice.connector.options import AdapterFiles, ConnectorOptions, CopierChoice, Layerwise, Share
from kvservice.connector.plan import PoolInfo, StepPlan, StepReport
from kvservice.connector.scheduler.half import SchedulerHalf
from kvservice.connector.scheduler.handoff import decode_params
from kvservice.connector.scheduler.ports import Wait
from kvservice.connector.scheduler.prefill_speed import StepTimes
from kvservice.connector.scheduler.request_terms import terms_of
from kvservice.connector.scheduler.tailed import TailedScheduler
from kvservice.connector.shared.judge import Probation
from kvservice.connector.step_failures import PlanningFailures, WorkerFailures
from kvservice.connector.vllm import compat, events, sharing
from kvservice.connector.vllm.adapter_loads import AdapterLoads
from kvservice.connector.vllm.draft_layers import drafted_tokens, has_draft_layers
from kvservice.connector.vllm.group_rules import group_count
from kvservice.connector.vllm.lora import Adapters, located
from kvservice.connector.vllm.pins import PoolCache, PoolPins
from kvservice.connector.vllm.simple_offload_options import in_our_words
from kvservice.connector.vllm.state_tables import StateTables
from kvservice.connector.vllm.stats import ConnectorPromMetrics, ConnectorStats
from kvservice.connector.vllm.step_metadata import Metadata, WorkerMetadata
from kvservice.connector.vllm.tail_names import TailNames
from kvservice.connector.vllm.walk import RequestBlocks, StepWalk
from kvservice.connector.weights import Terms
from kvservice.connector.worker.block_copier import BlockCopier
from kvservice.connector.worker.half import WorkerHalf
from kvservice.connector.worker.remote_copier import copier_for, copier_for_groups
from kvservice.connector.worker.shared_kv import SharedKV
from kvservice.core.block.keys import block_keys
from kvservice.core.messages import Attachment, Handoff
from kvservice.errors import ConfigError, KVServiceError
from kvservice.observe import logs, tracing
from kvservice.session.pool_choice import PoolChoice, choose_pool
from kvservice.session.session import Session

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger("kvservice.connector")

# At engine start: a large embedded pool takes a while to reserve. Then the engine starts without the cache and attaches
# later.
ATTACH_WAIT_SECONDS = 15.0
STORABLE = frozenset({RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED})


class KVServiceConnector(KVConnectorBase_V1, SupportsHMA):
    """One instance per role. `_scheduler` or `_worker` is None for the other role. Both are None if the engine's model
    or settings are not supported; the connector then does nothing."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        logs.speak_through("vllm")
        super().__init__(vllm_config, role, kv_cache_config)
        given = self._kv_transfer_config.kv_connector_extra_config or {}
        self._options = ConnectorOptions.parse(in_our_words(given, vllm_config.parallel_config.world_size))
        self._config = kv_cache_config
        self._scheduler: SchedulerHalf | None = None
        self._session: Session | None = None
        self._pool: PoolChoice | None = None
        self._worker: WorkerHalf | None = None
        # The same halves, if they load or save layer by layer.
        self._layered_scheduler: LayerwiseScheduler | None = None
        self._layered_worker: LayerwiseWorker | None = None
        self._shared_kv: SharedKV | None = None
        # With the option share: names of pages, and the comparison before anything is shared.
        self._pages: sharing.SharedRequests | None = None
        self._probation: Probation | None = None
        self._counters: Counter[str] = Counter()  # of failures, for one
        self.failures = Failures(self._counters)
        self._reported: Counter[str] = Counter()
        self._steps = StepTimes(getattr(vllm_config, "max_concurrent_batches", 1) - 1)
        self._may_be_invalid: deque[set[int]] = deque(maxlen=2)  # blocks that our loads of the last steps were to fill
        self._planning = PlanningFailures()
        self._copying = WorkerFailures()
        self._layerwise = self._options.layerwise
        self._adapters = Adapters(located, files_stay=self._options.adapter_files is AdapterFiles.IMMUTABLE)
        self._terms = Terms(self._options.weights_version_file)
        self._names_media = compat.names_media(vllm_config)
        self._pins: PoolPins | None = None
        self._events: events.StoredEvents | None = None
        self._is_supported = False  # worker role
        self._adapter_loads: AdapterLoads | None = None  # worker role
        self._grouping: Grouping = OneGroup()  # scheduler role
        self._states: StateTables | None = None  # scheduler role, of a model with states
        self._live: dict[str, Request] = {}  # scheduler role: requests between their first and last call
        # Those whose load failed. vLLM asks them first, and while one does not fit it looks at no other request that
        # has blocks: if all such loads failed, nobody would run or free any. So each is passed over once.
        self._to_skip_once: set[str] = set()
        self._walk: StepWalk | None = None  # scheduler role
        self._blocks = RequestBlocks()  # scheduler role
        compat.prefer_recompute(vllm_config)
        try:
            groups = group_count(kv_cache_config)
            self._layerwise = compat.layerwise_for(vllm_config, self._options, groups)
            compat.check_offload(vllm_config, self._options, groups)
            compat.check_tails(vllm_config, kv_cache_config, self._options)
            if role is KVConnectorRole.SCHEDULER:
                self._start_scheduler(vllm_config)
            else:
                compat.check(vllm_config, kv_cache_config)
                self._is_supported = True
                if getattr(vllm_config, "lora_config", None) is not None:
                    self._adapter_loads = AdapterLoads()
        except ConfigError:
            raise  # a wrong option: fail at start instead of running without a cache for months
        except KVServiceError as error:
            log.error("serving without the cache: %s", error.message)

    def _start_scheduler(self, vllm_config: VllmConfig) -> None:
        self._spec = compat.engine_spec(vllm_config, self._config, self._options)
        drafts = has_draft_layers(vllm_config.speculative_config)
        remembers = events.publishes_events(vllm_config) and not drafts  # events name a block by vLLM's own hash of it
        self._spec = replace(self._spec, hears_removals=remembers)
        if not self._names_media:
            log.warning(
                "requests with images and the like run without the cache, because vLLM only numbers them: set "
                "--mm-processor-cache-gb above 0, or leave prefix caching on"
            )
        grouping = compat.grouping(vllm_config, self._config, self._spec)
        worker_count = vllm_config.parallel_config.world_size
        if self._options.share is Share.ENGINES:
            self._spec = sharing.engine_spec(vllm_config, self._config, self._spec, self._options)
            grouping, remembers = sharing.grouping(self._config), False
            self._pages = sharing.SharedRequests(worker_count)
        ahead = self._spec.layout.part_tokens if drafts else 0
        self._blocks = RequestBlocks(self._pages, ahead, drafted_tokens(vllm_config))
        self._grouping = grouping
        self._events = events.stored_events(self._spec.layout, self._config, grouping) if remembers else None
        self._pool = choose_pool(self._options, self._spec)
        # A prompt that is handed off is waited for, so the blocks of its first step must find slots at once.
        step_tokens = vllm_config.scheduler_config.max_num_batched_tokens or 0
        step_blocks = step_tokens // self._spec.layout.block_tokens
        device = vllm_config.device_config.device_type
        # A copy worker, which copies what is lent, knows one group only.
        lends = self._options.loans_on(device) and group_count(self._config) == 1
        self._states = StateTables.of(grouping)
        self._walk = StepWalk(
            self._live,
            self._spec.layout.block_tokens,
            grouping,
            is_named=functools.partial(self._is_named, may_be_later=True),
            events=self._events,
            states=self._states,
            blocks=self._blocks,
        )
        session = Session(self._pool.open, self._pool.spec, lambda: half.may_reattach(), step_blocks)
        plain = TailedScheduler if self._options.tails else SchedulerHalf
        make_half = LayerwiseScheduler if self._layerwise.loads else plain
        half = make_half(
            session,
            functools.partial(block_keys, self._spec.fingerprint.digest),
            self._pool_info,
            block_tokens=self._spec.layout.block_tokens,
            worker_count=worker_count,
            offload=self._options.offload,
            evicting_blocks=2 * max(step_blocks, 1),
            fetch_timeout_seconds=self._options.fetch_timeout_seconds,
            handoff_timeout_seconds=self._options.handoff_timeout_seconds,
            loan_seconds=self._options.loan_seconds if lends else 0.0,
            may_write=self._kv_transfer_config.is_kv_producer,
            remember_stored=remembers,
            grouping=grouping,
            term=self._terms.first(lambda: compat.weights_of(vllm_config.model_config, self._options.weights_cache)),
        )
        self._session, self._scheduler = session, half
        self._layered_scheduler = half if isinstance(half, LayerwiseScheduler) else None
        if isinstance(half, TailedScheduler):
            algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
            half.name_tails_with(TailNames(self._live, algorithm, self._spec.layout.block_tokens))
        tracing.start(self._options.traces, "kvservice-engine", model=self._spec.model)
        session.start(ATTACH_WAIT_SECONDS)

    def _pool_info(self, attachment: Attachment) -> PoolInfo:
        assert self._pool is not None
        return PoolInfo.of(attachment, self._spec.layout, self._pool.spec.engine_id)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a dropped store is only a later miss

    # -- scheduler role ----

    @guarded(lambda *_: None)
    def on_new_request(self, request: Request) -> None:
        if self._scheduler is not None:
            self._live[request.request_id] = request
            if (adapter := self._adapter(request)) is None or self._has_unnamed_media(request):
                return  # later questions about it are answered with nothing
            terms = terms_of(
                request.kv_transfer_params,
                self._options,
                self._counters,
                request_id=request.request_id,
                envelope=getattr(request, "kv_hints", None),
            )
            may_read = self._kv_transfer_config.is_kv_consumer and not request.skip_reading_prefix_cache
            may_share = self._pages is None or self._pages.begin(request)
            self._scheduler.on_new_request(
                request.request_id,
                self._blocks.hashes(request),
                time.monotonic(),
                tokens=request.num_tokens,
                terms=replace(
                    terms,
                    may_load=may_read and terms.may_load and may_share,
                    may_store=terms.may_store and may_share and compat.keeps_session_true(self._vllm_config, request),
                ),
                salted=request.cache_salt is not None,
                adapter=adapter,
                trace=tracing.parent_in(request.trace_headers, request.kv_transfer_params),
            )

    def _adapter(self, request: Request) -> bytes | None:
        """The adapter's identity. None if it is not known which weights the request is computed with."""
        lora = request.lora_request
        found = b"" if lora is None else self._adapters.of(lora.lora_path, lora.lora_int_id)
        self._forget_lost_adapters()
        return found

    def _is_named(self, request: Request, *, may_be_later: bool = False) -> bool:
        """Whether what the request has computed is of the weights that it is named by."""
        lora = request.lora_request
        if lora is None:
            return True
        reason = self._adapters.look(lora.lora_path, lora.lora_int_id, may_be_later=may_be_later)
        self._forget_lost_adapters()
        return not reason

    def _forget_lost_adapters(self) -> None:
        for adapter in self._adapters.take_lost():
            assert self._scheduler is not None
            self._scheduler.forget_adapter(adapter)

    def _has_unnamed_media(self, request: Request) -> bool:
        """Whether two requests with other images could have its names."""
        if self._names_media or not request.mm_features:
            return False
        self._counters["media_unnamed"] += 1
        return True

    @guarded(lambda *_: (0, False))
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None or request.skip_reading_prefix_cache:
            return 0, False
        if request.request_id in self._to_skip_once:
            self._to_skip_once.discard(request.request_id)
            return None, False
        if self._planning.has_given_up(request.request_id):
            layered = self._layered_scheduler
            waits = layered is not None and layered.must_wait(request.request_id, num_computed_tokens)
            return (None if waits else 0), False
        answer = self._scheduler.matched(request.request_id, num_computed_tokens, request.num_tokens, time.monotonic())
        if isinstance(answer, Wait):
            return None, False
        own = num_computed_tokens // self._spec.layout.part_tokens
        self._planning.promised(request.request_id, own if answer.layered else None)
        return answer.tokens, answer.tokens > 0 and not answer.layered

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        if self._scheduler is not None:
            self._pins = PoolPins(gpu_block_pool)
            self._scheduler.pin_with(self._pins)
            if compat.keeps_hashed_blocks_true(self._vllm_config) and self._blocks.are_named_by_vllm:
                self._scheduler.read_cache(PoolCache(gpu_block_pool))

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if self._scheduler is None:
            return
        waits = True
        try:
            block_ids = blocks.get_block_ids()
            waits = self._planning.take_promise(request.request_id, block_ids[0], num_external_tokens)
            self._scheduler.allocated(request.request_id, self._grouping.table(block_ids), num_external_tokens)
        except Exception as error:  # noqa: BLE001  the engine's loop must go on whatever happens here
            self.failures.note("update_state_after_alloc", error)
            self._planning.give_up(request.request_id, engine_waits=waits and num_external_tokens > 0)

    @guarded(lambda *_: {})
    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        if self._scheduler is None or num_external_tokens == 0:
            return {}
        local, remote = self._scheduler.hit_sources(request.request_id, num_external_tokens)
        found = {CacheHitSource.HOST: local, CacheHitSource.P2P: remote}
        return {source: tokens for source, tokens in found.items() if tokens}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        plan = StepPlan()
        if self._scheduler is not None:
            with self.failures.guard("build_connector_meta"):
                self._plan_step(self._scheduler, plan, scheduler_output)
            # Whatever failed above, what is in the plan by now is done, and everything else is answered.
            for request_id, block_ids in self._planning.complete(plan).items():
                with self.failures.guard("build_connector_meta"):
                    assert self._layered_scheduler is not None, "only a layered load is computed on in its own step"
                    self._layered_scheduler.unplanned(request_id, block_ids)
        layered = (entry.block_id for load in plan.loads if load.layered for entry in load.entries)
        self._may_be_invalid.append({*plan.invalid_blocks, *layered})
        return Metadata(plan)

    def _plan_step(self, scheduler: SchedulerHalf, plan: StepPlan, output: SchedulerOutput) -> None:
        tokens = output.total_num_scheduled_tokens
        if tokens == 0 and self._session is not None:
            self._session.wait_for_answer(scheduler.idle_seconds())
        now = time.monotonic()
        self._steps.begin(tokens, now)
        scheduler.begin_step(plan, now, is_idle=tokens == 0)
        if self._walk is not None:
            self._walk.plan_stores(scheduler, plan, output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._scheduler is None:
            return
        if (step := self._steps.end(time.monotonic())) is not None:
            self._scheduler.computed(*step)
        worker_meta = connector_output.kv_connector_worker_meta
        report = worker_meta.report if isinstance(worker_meta, WorkerMetadata) else None
        if connector_output.invalid_block_ids - set().union(*self._may_be_invalid):
            with self.failures.guard("update_connector_output"):
                self._scheduler.void_stores()
        if report is not None:
            with self.failures.guard("update_connector_output"):
                for number, path in report.adapters.items():
                    self._adapters.loaded(number, path)
                self._forget_lost_adapters()  # before the stores of the same step are sealed
                self._scheduler.reported(report)
                if self._pages is not None:
                    self._pages.gate.reported(report.counters)
        if self._layered_scheduler is not None:
            with self.failures.guard("update_connector_output"):
                self._layered_scheduler.end_layered(report)
        failed = connector_output.failed_recving or set()
        self._to_skip_once |= failed & self._live.keys()
        for request_id in connector_output.finished_recving or ():
            with self.failures.guard("update_connector_output"):
                self._scheduler.loaded(request_id, failed=request_id in failed)

    @guarded(lambda *_: (False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        try:
            return self._finished(request, block_ids)
        finally:
            self._live.pop(request.request_id, None)
            self._to_skip_once.discard(request.request_id)
            if self._walk is not None:
                self._walk.ended(request.request_id)

    def _finished(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        if self._events is not None:
            self._events.end(request)
        self._planning.finished(request.request_id)
        if self._scheduler is None or self._session is None:
            return False, None
        attachment = self._session.attachment
        done = request.status in STORABLE
        is_computed = done or (compat.is_session_end(request) and self._scheduler.has_begun(request.request_id))
        hashes, table = self._blocks.hashes(request), self._grouping.table(block_ids)
        if self._pages is not None:
            self._pages.end(request.request_id)
        if self._states is not None:
            table = self._states.at_end(table)
        handoff = self._scheduler.finished(
            request.request_id,
            hashes,
            self._blocks.whole(request.num_computed_tokens),
            table,
            store_rest=is_computed and self._is_named(request),
        )
        answer = None
        if done and handoff is not None and attachment is not None:
            answer = decode_params(Handoff(handoff, attachment.node_id))
        return False, answer  # blocks that are still to be copied are pinned

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @guarded(lambda *_: ())
    def take_events(self) -> Iterable[KVCacheEvent]:
        """Blocks that this engine stored in the pool of its node, and those of them that are no longer there."""
        if self._scheduler is None or self._events is None:
            return ()
        return self._events.take(self._scheduler)

    @guarded(lambda *_: False)
    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_pending_work(time.monotonic())

    @guarded(lambda *_: False)
    def reset_cache(self) -> bool | None:
        """The weights have changed or are about to: blocks from before are not served again, and new blocks get names
        of their own. vLLM calls it between two steps, after it has emptied its own cache.

        Returns False while the engine holds blocks, because what is computed on them mixes both weights. Nothing is
        read or stored then until a reset succeeds.
        """
        if self._scheduler is None:
            return True
        if self._pins is not None and self._pins.are_blocks_in_use():
            self._scheduler.reset(None)
            self._counters["resets_refused"] += 1
            log.error(
                "the cache cannot be reset while requests or copies hold blocks; serving without the cache until it "
                "is. Pause the engine, or reset again when it is idle"
            )
            return False
        self._scheduler.reset(None)  # whatever fails below, nothing from before is served
        self._scheduler.reset(self._terms.next())
        return True

    # -- worker role ----

    @guarded(lambda *_: None)
    def get_mem_pool_context(self) -> SharedKV | None:
        if self._options.copier is CopierChoice.WORKER:
            self._shared_kv = SharedKV()
        return self._shared_kv

    @guarded(lambda *_: None)
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if not self._is_supported:
            return
        share = compat.rank_share(self._vllm_config, self._config)
        verify, defers = self._options.verify_load, self._options.defer_stores
        if group_count(self._config) > 1:
            several = compat.grouped_block_copiers(self._vllm_config, self._config, kv_caches)
            copier = copier_for_groups(self._options.copier, several)
            self._worker = WorkerHalf(several, verify, copier, share, defer_stores=defers)
            return
        layers = compat.ordered_layers(self._vllm_config, self._config, kv_caches)
        if self._options.share is Share.ENGINES:
            pages = sharing.page_copier(self._vllm_config, layers, share.heads)
            self._probation = sharing.probation(self._vllm_config, pages)
            self._worker = WorkerHalf(pages, verify, None, share, defer_stores=defers)
            return
        token_of = compat.token_of_elements(self._vllm_config, self._config, layers) if self._options.tails else None
        block_copier = BlockCopier(layers, share.heads, token_of=token_of)
        lends = self._options.loans_on(block_copier.device.type) and self._kv_transfer_config.is_kv_producer
        copier = copier_for(self._options.copier, block_copier, layers, share.heads, self._shared_kv, lends=lends)
        if self._layerwise is Layerwise.OFF:
            self._worker = WorkerHalf(block_copier, verify, copier, share, defer_stores=defers)
        else:
            names = self._config.kv_cache_groups[0].layer_names
            saves = self._layerwise.saves
            self._worker = LayerwiseWorker(block_copier, verify, copier, share, names, save=saves, defer_stores=defers)
            self._layered_worker = self._worker

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        plan = self._plan()
        if plan is None:
            return
        self._copying.begin_loads(plan)
        if self._worker is not None:
            with self.failures.guard("start_load_kv"):
                self._copying.loads_started(self._worker.start_loads(plan))

    @guarded(lambda *_: None)
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads of whole blocks have ended before their request is scheduled, so they are not waited for here."""
        if self._copying.has_layered and self._layered_worker is not None:
            self._layered_worker.begin_layer(layer_name)

    @guarded(lambda *_: None)
    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        plan = self._plan() if self._layerwise.saves else None
        if plan is not None and self._layered_worker is not None:
            self._layered_worker.end_layer(layer_name, plan)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(extra_config.get("layerwise", Layerwise.OFF.value) != Layerwise.OFF.value)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of requests that this step computed on and that may not be what was promised."""
        plan = self._plan()
        invalid = set() if plan is None else set(plan.invalid_blocks)
        sound: set[str] = set()
        if self._copying.has_layered and self._layered_worker is not None:
            with self.failures.guard("get_block_ids_with_load_errors"):
                sound = self._layered_worker.end_layered()
        return invalid | self._copying.end_layers(sound)

    def wait_for_save(self) -> None:
        plan = self._plan()
        if plan is None:
            return
        self._copying.begin_stores(plan)
        if self._worker is not None:
            with self.failures.guard("wait_for_save"):
                self._copying.stores_started(self._worker.store(plan))
        if self._probation is not None and plan.probe is not None:
            with self.failures.guard("look"):
                self._probation.look(plan.probe)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        loaded: set[str] = set()
        failed: set[str] = set()
        if self._worker is not None:
            with self.failures.guard("get_transfer_results"):
                loaded, failed = self._worker.take_loaded()
        missing = self._copying.take_unstarted()
        return KVConnectorTransferResults(set(), loaded | missing, failed | missing)

    @guarded(lambda *_: None)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = self._copying.complete(None if self._worker is None else self._worker.take_report())
        if self._probation is not None and (found := self._probation.take_counters()):
            report = (report or StepReport()).merge(StepReport(counters=found))
        if self._adapter_loads is not None and (loaded := self._adapter_loads.take()):
            report = (report or StepReport()).merge(StepReport(adapters=loaded))
        return None if report is None else WorkerMetadata(report)

    def _plan(self) -> StepPlan | None:
        metadata = self._connector_metadata
        return metadata.plan if isinstance(metadata, Metadata) else None

    # -- both ----

    @guarded(lambda *_: None)
    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """What was counted since the last call."""
        counters = Counter(self.counters())
        change = {name: count - self._reported[name] for name, count in counters.items()}
        self._reported = counters
        change = {name: count for name, count in change.items() if count}
        return ConnectorStats(change) if change else None

    def counters(self) -> dict[str, int]:
        """Everything counted since the start, for tests and benchmarks."""
        found = Counter(self._counters)
        for part in (self._scheduler, self._session, self._adapters, self._pages):
            if part is not None:
                found.update(part.counters)
        return dict(found)

    @guarded(lambda *_: None)
    def shutdown(self) -> None:
        if self._session is not None:
            self._session.close()
        if self._worker is not None:
            self._worker.close()
        self._adapters.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats | None:
        return ConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorPromMetrics:
        return ConnectorPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
