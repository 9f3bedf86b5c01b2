"""The cache as the reference engine uses it: a session, a scheduler half and a worker half in one process.

The halves are the ones that vLLM's connector drives; this class calls them in the order of a step. It also keeps the
host side of swaps: the bytes of a preempted request lie in the pool under random keys, so no other request can hit
them.

Everything runs on the engine's thread. Nothing raises into the engine's loop: what fails is counted, logged once per
kind, and answered as if the cache had nothing. It waits only for the copies of swaps, whose time is bounded.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import transformers

from kvservice.connector.cache_groups import NOWHERE, OneGroup, Table
from kvservice.connector.failures import Failures
from kvservice.connector.layerwise.scheduler import LayerwiseScheduler
from kvservice.connector.layerwise.worker import LayerwiseWorker
from kvservice.connector.options import Share, slot_parts
from kvservice.connector.plan import PoolInfo, StepPlan, StepReport
from kvservice.connector.scheduler.half import SchedulerHalf
from kvservice.connector.scheduler.handoff import decode_params
from kvservice.connector.scheduler.loan_book import BlockPins
from kvservice.connector.scheduler.ports import BlockIds, Promise, Wait
from kvservice.connector.scheduler.request_terms import RequestTerms, terms_of
from kvservice.connector.scheduler.tailed import TailedScheduler
from kvservice.connector.step_failures import PlanningFailures, WorkerFailures
from kvservice.connector.weights import changed_since, weights_identity
from kvservice.connector.worker.block_copier import BlockCopier
from kvservice.connector.worker.half import WorkerHalf
from kvservice.connector.worker.remote_copier import copier_for
from kvservice.connector.worker.shared_kv import SharedKV
from kvservice.core.block.fingerprint import Fingerprint
from kvservice.core.block.keys import block_keys
from kvservice.core.block.numbers import number_fields
from kvservice.core.messages import Attachment, EngineSpec, Handoff
from kvservice.core.segment.layout import SlotLayout
from kvservice.engine.blocks import RELEASED, Pairs
from kvservice.engine.model import PagedModel
from kvservice.engine.options import EngineOptions, EngineRole
from kvservice.engine.schedule import Found
from kvservice.engine.sharing import check_pages, page_copier, shared_spec
from kvservice.errors import ConfigError, UnnamedWeights
from kvservice.session.pool_choice import choose_pool
from kvservice.session.session import Session
from kvservice.units import BlockHash

log = logging.getLogger("kvservice.engine")

ATTACH_WAIT_SECONDS = 15.0  # at the start of the engine; then it runs without the cache and attaches later
# For the slots and the copies of a swap to the host, and for the pool's word that it can come back. They take
# milliseconds; after this the request is computed again.
SWAP_SECONDS_MAX = 5.0
POLL_SECONDS = 0.0005  # between two looks at copies or slots that the loop waits for
LEFT_OUT = frozenset({"_name_or_path", "transformers_version"})  # of the model's configuration: they change no byte
TEXT_CHARS_MAX = 160  # of a configured value in the fingerprint; a longer one is replaced by its digest


def engine_spec(model: PagedModel, options: EngineOptions) -> EngineSpec:
    """The engine's identity towards the pool. May read all files of the model.

    Raises ConfigError if nothing names the weights, or if slot_tokens or accept_codec do not fit the blocks,
    UnnamedWeights if their files cannot be read.
    """
    shape, config = model.shape, model.config.to_dict()
    weights, parts = options.weights_name(), slot_parts(options.slot_tokens, shape.block_tokens)
    if weights is None and not model.name:
        raise ConfigError(
            "the weights of a model that was made or changed in memory have no name: set weights_version, or save "
            "it to a folder and open that"
        )
    row = shape.key_width if shape.key_width == shape.value_width else 0
    if options.accept_codec and not row:
        raise ConfigError(
            f"accept_codec: K has {shape.key_width} numbers a head and V {shape.value_width}, and a lossy codec needs "
            "rows of one length: leave it out",
            key="accept_codec",
        )
    fields: dict[str, object] = {
        "engine": "kvservice-reference",
        "transformers": transformers.__version__,
        "weights": weights or _as_loaded(model, options),
        "kv_dtype": str(shape.dtype),
        "cell_format": f"token, K {shape.key_width} then V {shape.value_width}",
        "layers": shape.layer_count,
        "kv_heads": shape.head_count,
        "block_tokens": shape.block_tokens,
        "slot_tokens": shape.block_tokens * parts,
        **number_fields(str(shape.dtype), row, shape.block_tokens, options.accept_codec),
        **{f"hf.{name}": _text(value) for name, value in config.items() if name not in LEFT_OUT},
    }
    called = Path(model.name).name or str(model.config.model_type)
    layout = SlotLayout(shape.layer_count, shape.head_count, shape.cell_bytes, shape.block_tokens * parts, parts)
    fingerprint = Fingerprint.of(fields).within(options.namespace)
    return EngineSpec(bytes(16), called, fingerprint, layout, options.namespace)


def _as_loaded(model: PagedModel, options: EngineOptions) -> str:
    named = weights_identity(model.name, None, model.config.to_dict().get("_commit_hash"), options.weights_cache)
    if (changed := changed_since(model.name, model.loaded_at)) is not None:
        raise UnnamedWeights(
            f"{changed} was changed after this model was loaded: open it again, or set weights_version",
        )
    return named


def _text(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return text if len(text) <= TEXT_CHARS_MAX else f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:32]}"


# (first token, end) -> the hash of a short block of these tokens
NameOwnTail = Callable[[int, int], BlockHash | None]


assert RELEASED == NOWHERE, "a group would store blocks that its window has left"


class WindowedTable(OneGroup):
    """One KV cache group, whose blocks behind a sliding window may be released: RELEASED is NOWHERE."""

    def loaded(self, table: Table, group: int, position: int, end: int) -> list[tuple[int, int, int]]:
        return [place for place in super().loaded(table, group, position, end) if place[2] != RELEASED]


@dataclass(slots=True)
class HostCopy:
    """The blocks of one preempted request, in the pool."""

    name: str  # its request towards the scheduler half; random, so that no client's request is called so
    hashes: list[BlockHash]  # random, one a block
    host_ids: list[int]  # of the engine's books, in the same order; the last one again until the last slot is full
    is_asked: bool = False  # the pool was asked to hold them


@dataclass(slots=True)
class StepEnd:
    """What the loop learns when its step has ended."""

    loaded: set[str] = field(default_factory=set)  # requests whose load has ended well
    failed: set[str] = field(default_factory=set)  # requests whose load has ended otherwise, before or in this step


class BothHalves:
    """Call `begin` and `finished` once a request; `matched` and `allocated` while a step is planned; then `start`,
    `swap_out`, `plan_stores`, the hooks, `store` and `end`, each once a step, in this order."""

    def __init__(
        self, options: EngineOptions, model: PagedModel, pins: BlockPins, shared: SharedKV | None = None
    ) -> None:
        """`model` has its blocks already; `shared` is their memory if it can be shared. Blocks until the first attempt
        to attach. Raises KVServiceError."""
        self.counters: Counter[str] = Counter()
        self._failures = Failures(self.counters)
        self._options = options
        spec, self._pages = engine_spec(model, options), None
        if options.share is Share.ENGINES:
            spec = shared_spec(model, options, spec)
            self._pages = page_copier(model)
            check_pages(model, self._pages)
        self._layout, self._block_tokens = spec.layout, spec.layout.part_tokens
        pool = choose_pool(options, spec)
        self._engine_id = pool.spec.engine_id
        self._session = Session(
            pool.open, pool.spec, lambda: self._half.may_reattach(), options.step_tokens // spec.layout.block_tokens
        )
        self._layered: LayerwiseScheduler | None = None
        self._half = self._make_scheduler(spec, model)
        self._half.pin_with(pins)
        self._worker = self._make_worker(model, shared)
        self._planning, self._copying = PlanningFailures(), WorkerFailures()
        self._swaps: dict[str, HostCopy] = {}  # by request
        self._tails: dict[str, NameOwnTail] = {}  # by request
        self._nonce = os.urandom(16)  # names swaps; nobody else can derive the same keys
        self._swap_count = 0
        self._plan = StepPlan()
        self._ended = StepEnd()
        self._due: set[str] = set()  # requests whose load belongs to the step that is being planned
        self._session.start(ATTACH_WAIT_SECONDS)

    def _make_scheduler(self, spec: EngineSpec, model: PagedModel) -> SchedulerHalf:
        options, device = self._options, model.device.type
        plain = TailedScheduler if options.tails else SchedulerHalf
        make_half = LayerwiseScheduler if options.layerwise.loads else plain
        half = make_half(
            self._session,
            functools.partial(block_keys, spec.fingerprint.digest),
            self._pool_info,
            block_tokens=self._layout.block_tokens,
            worker_count=1,
            offload=options.offload,
            fetch_timeout_seconds=options.fetch_timeout_seconds,
            handoff_timeout_seconds=options.handoff_timeout_seconds,
            loan_seconds=options.loan_seconds if options.loans_on(device) else 0.0,
            may_write=options.role is not EngineRole.CONSUMER,
            grouping=WindowedTable(self._layout.parts),
        )
        self._layered = half if isinstance(half, LayerwiseScheduler) else None
        if isinstance(half, TailedScheduler):
            half.name_tails_with(self._name_tail)
        return half

    def _name_tail(self, request_id: str, begin: int, end: int) -> BlockHash | None:
        name = self._tails.get(request_id)
        return None if name is None else name(begin, end)

    def _make_worker(self, model: PagedModel, shared: SharedKV | None) -> WorkerHalf:
        options, layers = self._options, model.kv.layers
        heads = range(model.shape.head_count)
        block_copier = self._pages or BlockCopier(layers, heads)
        lends = options.loans_on(model.device.type) and options.role is not EngineRole.CONSUMER
        copier = copier_for(options.copier, block_copier, layers, heads, shared, lends=lends)
        share = self._layout.share(0, 1)
        if self._options.layerwise.loads or self._options.layerwise.saves:
            names = [str(layer) for layer in range(model.shape.layer_count)]
            saves = options.layerwise.saves
            return LayerwiseWorker(
                block_copier,
                options.verify_load,
                copier,
                share,
                names,
                save=saves,
                defer_stores=options.defer_stores,
            )
        return WorkerHalf(block_copier, options.verify_load, copier, share, defer_stores=options.defer_stores)

    def _pool_info(self, attachment: Attachment) -> PoolInfo:
        return PoolInfo.of(attachment, self._layout, self._engine_id)

    # -- requests ----

    def begin(
        self,
        request_id: str,
        hashes: Sequence[BlockHash],
        tokens: int,
        *,
        tail: NameOwnTail,
        params: Mapping[str, object] | None = None,
        salted: bool = False,
    ) -> None:
        """Ask the pool for the whole prompt. `tail` hashes short blocks of it, `params` are its transfer parameters."""
        if self._options.tails:
            self._tails[request_id] = tail
        with self._failures.guard("begin"):
            terms = terms_of(params, self._options, self.counters, request_id=request_id)
            self._half.on_new_request(
                request_id,
                hashes,
                time.monotonic(),
                tokens=tokens,
                terms=replace(terms, may_load=terms.may_load and self._options.role is not EngineRole.PRODUCER),
                salted=salted,
            )

    def matched(self, request_id: str, local_tokens: int, total_tokens: int) -> Found:
        """What the pool promises beyond the engine's own hit."""
        found = Found()
        with self._failures.guard("matched"):
            if self._planning.has_given_up(request_id):
                layered = self._layered
                return Found(wait=layered is not None and layered.must_wait(request_id, local_tokens))
            answer = self._half.matched(request_id, local_tokens, total_tokens, time.monotonic())
            if isinstance(answer, Wait):
                return Found(wait=True)
            own = local_tokens // self._block_tokens
            self._planning.promised(request_id, own if answer.layered else None)
            found = Found(answer.tokens, answer.layered)
        return found

    def allocated(self, request_id: str, table: Sequence[int], external_tokens: int) -> None:
        waits = True
        if external_tokens:
            self._due.add(request_id)
        try:
            waits = self._planning.take_promise(request_id, table, external_tokens)
            self._half.allocated(request_id, list(table), external_tokens)
        except Exception as error:  # noqa: BLE001  as in Failures.guard; and the request must not wait for its load for ever
            self._failures.note("allocated", error)
            self._planning.give_up(request_id, engine_waits=waits and external_tokens > 0)

    def finished(
        self, request_id: str, hashes: Sequence[BlockHash], computed: int, table: Sequence[int], *, store_rest: bool
    ) -> dict[str, object] | None:
        """The request has ended. Returns what the engine that continues it must be told, if it was handed off."""
        self.drop_swap(request_id)
        self._planning.finished(request_id)
        with self._failures.guard("finished"):
            attachment = self._session.attachment
            handoff = self._half.finished(request_id, hashes, computed, list(table), store_rest=store_rest)
            self._tails.pop(request_id, None)
            if handoff is not None and attachment is not None and store_rest:
                return decode_params(Handoff(handoff, attachment.node_id))
        return None

    # -- one step, in this order ----

    def wait_for_answer(self) -> None:
        """The engine has nothing to compute: give the pool's answers a moment."""
        with self._failures.guard("wait_for_answer"):
            self._session.wait_for_answer(self._half.idle_seconds())

    def start(self, swap_in: Iterable[tuple[str, Pairs]], *, is_idle: bool) -> set[str]:
        """Begin the step: start its loads, those of swaps among them, and wait for the swaps. Returns the requests
        whose swapped blocks are lost."""
        self._plan, lost = StepPlan(), set()
        coming: dict[str, HostCopy] = {}
        for request_id, pairs in swap_in:
            copy = self._swaps.pop(request_id, None)
            if copy is not None and self._promise(copy, dict(pairs)):
                coming[request_id] = copy
            else:
                lost.add(request_id)
                self._forget(copy)
        with self._failures.guard("begin_step"):
            self._half.begin_step(self._plan, time.monotonic(), is_idle=is_idle)
        for request_id, block_ids in self._planning.complete(self._plan).items():
            with self._failures.guard("unplanned"):
                assert self._layered is not None, "only a layered load is computed on in its own step"
                self._layered.unplanned(request_id, block_ids)
        self._keep_due()
        self._copying.begin_loads(self._plan)
        with self._failures.guard("start_loads"):
            self._copying.loads_started(self._worker.start_loads(self._plan))
        arrived = self._wait_for_loads({copy.name for copy in coming.values()})
        for request_id, copy in coming.items():
            if copy.name not in arrived:
                lost.add(request_id)
            self._forget(copy)
        self._ask_for_swaps()
        return lost

    def swap_out(self, request_id: str, pairs: Pairs) -> bool:
        """Copy these blocks into the pool, now: the step may overwrite them. False if the pool does not take all of
        them. Blocks for the copies, for at most SWAP_SECONDS_MAX."""
        pairs = pairs + pairs[-1:] * (-len(pairs) % self._layout.parts)  # only whole slots are stored
        table = [block_id for block_id, _ in pairs]
        self._swap_count += 1
        seed = self._nonce + self._swap_count.to_bytes(8, "big")
        hashes = [BlockHash(hashlib.sha256(seed + i.to_bytes(4, "big")).digest()) for i in range(len(table))]
        copy = HostCopy(f"{request_id}/swap-{os.urandom(8).hex()}", hashes, [host_id for _, host_id in pairs])
        is_stored = False
        with self._failures.guard("swap_out"):
            self._half.on_new_request(copy.name, hashes, time.monotonic(), terms=RequestTerms(may_load=False))
            is_stored = self._store_now(copy, table)
        self._forget(copy)
        if is_stored:
            self._swaps[request_id] = copy
        self.counters["swaps_out" if is_stored else "swaps_refused"] += 1
        return is_stored

    def plan_stores(self, scheduled: Iterable[tuple[str, Sequence[BlockHash], int, BlockIds]]) -> None:
        """Plan the stores of what this step computes; see SchedulerHalf.plan_stores."""
        with self._failures.guard("plan_stores"):
            self._half.plan_stores(self._plan, scheduled)

    def before(self, layer: int) -> None:
        """The forward is about to use this layer. Blocks until what it loads is there."""
        if self._copying.has_layered and isinstance(self._worker, LayerwiseWorker):
            with self._failures.guard("before_layer"):
                self._worker.begin_layer(str(layer))

    def written(self, layer: int) -> None:
        """The forward has written this layer."""
        if isinstance(self._worker, LayerwiseWorker) and self._options.layerwise.saves:
            with self._failures.guard("layer_written"):
                self._worker.end_layer(str(layer), self._plan)

    def store(self) -> None:
        """The forward has ended: start the stores."""
        self._copying.begin_stores(self._plan)
        with self._failures.guard("store"):
            self._copying.stores_started(self._worker.store(self._plan))

    def end(self, tokens: int, seconds: float) -> StepEnd:
        """End the step, which computed so many tokens in so many seconds. A request whose layered load was not sound is
        among the failed ones: what this step computed for it does not count."""
        layered = {load.request_id for load in self._plan.loads if load.layered}
        sound: set[str] = set()
        if self._copying.has_layered and isinstance(self._worker, LayerwiseWorker):
            with self._failures.guard("end_layered"):
                sound = self._worker.end_layered()
        self._copying.end_layers(sound)
        self._ended.failed |= layered - sound
        self._take_loaded()
        with self._failures.guard("computed"):
            self._half.computed(tokens, seconds)
        self._take_report()
        ended, self._ended = self._ended, StepEnd()
        return ended

    # -- the rest ----

    def drop_swap(self, request_id: str) -> None:
        """The request needs its swapped blocks no more."""
        self._forget(self._swaps.pop(request_id, None))

    @property
    def has_pending_work(self) -> bool:
        """Whether steps are needed even without requests, for copies that have to start or to end."""
        is_pending = False
        with self._failures.guard("has_pending_work"):
            is_pending = self._half.has_pending_work(time.monotonic())
        return is_pending

    def all_counters(self) -> Counter[str]:
        """Everything counted since the start."""
        return self.counters + self._half.counters + self._session.counters

    def close(self) -> None:
        """Detach and unmap. Blocks for seconds at most."""
        with self._failures.guard("close"):
            self._session.close()
        with self._failures.guard("close"):
            self._worker.close()

    # -- inside ----

    def _keep_due(self) -> None:
        """Every load that is due in this step is in its plan, or has failed. One that comes later would write into
        blocks that somebody else has by then."""
        planned = {load.request_id for load in self._plan.loads}
        self._ended.failed |= self._due - planned
        for request_id in planned - self._due:
            with self._failures.guard("loaded"):
                self._half.loaded(request_id, failed=True)
        self._plan.loads = [load for load in self._plan.loads if load.request_id in self._due]
        self._due = set()

    def _store_now(self, copy: HostCopy, table: list[int]) -> bool:
        """Store these blocks and wait until they are copied. The session may have too few slots ready: then the rest
        follows when it has fetched more."""
        attachment = self._session.attachment
        if attachment is None:
            return False
        tokens, deadline = len(table) * self._block_tokens, time.monotonic() + SWAP_SECONDS_MAX
        planned, open_stores = 0, set[int]()
        while planned < len(table) or open_stores:
            if time.monotonic() > deadline or self._session.attachment is not attachment:
                return False
            plan = StepPlan(self._pool_info(attachment))
            self._half.plan_stores(plan, [(copy.name, copy.hashes, tokens, lambda: table)])
            if plan.stores:
                planned += sum(len(store.entries) for store in plan.stores)
                open_stores |= {store.store_id for store in plan.stores}
                self._copying.begin_stores(plan)
                self._copying.stores_started(self._worker.store(plan))
                self._worker.start_loads(StepPlan(plan.pool))  # a store that would wait for the next step begins
            report = self._take_report()
            if report is not None:
                open_stores -= report.stored.keys()
                if not open_stores.isdisjoint(report.failed):
                    return False
            if planned < len(table) or open_stores:
                time.sleep(POLL_SECONDS)
        return True

    def _ask_for_swaps(self) -> None:
        """Ask the pool for the blocks of swaps, a step after they were stored. Its answer leases them, so they are not
        evicted before they are wanted back."""
        for copy in self._swaps.values():
            if not copy.is_asked:
                copy.is_asked = True
                with self._failures.guard("ask_for_swap"):
                    self._half.on_new_request(
                        copy.name, copy.hashes, time.monotonic(), terms=RequestTerms(may_store=False)
                    )

    def _promise(self, copy: HostCopy, targets: dict[int, int]) -> bool:
        """Plan the load of a swap into these blocks. False if the pool has not all of it any more, or does not say so.
        Blocks for at most SWAP_SECONDS_MAX, and mostly not at all: the pool was asked steps ago."""
        tokens, deadline = len(copy.hashes) * self._block_tokens, time.monotonic() + SWAP_SECONDS_MAX
        with self._failures.guard("swap_in"):
            if not copy.is_asked:
                self._half.on_new_request(copy.name, copy.hashes, time.monotonic(), terms=RequestTerms(may_store=False))
            while isinstance(answer := self._half.matched(copy.name, 0, tokens, time.monotonic()), Wait):
                if time.monotonic() > deadline:
                    break
                self._session.wait_for_answer(POLL_SECONDS)
            if isinstance(answer, Promise) and answer.tokens == tokens:
                self._half.allocated(copy.name, [targets[host_id] for host_id in copy.host_ids], tokens)
                self._due.add(copy.name)
                return True
        self.counters["swaps_lost"] += 1
        return False

    def _forget(self, copy: HostCopy | None) -> None:
        if copy is not None:
            with self._failures.guard("forget_swap"):
                self._half.finished(copy.name, copy.hashes, 0, [], store_rest=False)

    def _wait_for_loads(self, names: set[str]) -> set[str]:
        """Wait until these loads have ended. Returns those that ended well. A copy worker that does not answer ends
        them too: its link gives it up after some seconds."""
        arrived: set[str] = set()
        while names:
            self._take_loaded()
            arrived |= names & self._ended.loaded
            gone = names & (self._ended.loaded | self._ended.failed)
            self._ended.loaded -= gone
            self._ended.failed -= gone
            names = names - gone
            if names:
                time.sleep(POLL_SECONDS)
        return arrived

    def _take_loaded(self) -> None:
        """Note the loads that have ended."""
        loaded: set[str] = set()
        failed: set[str] = set()
        with self._failures.guard("take_loaded"):
            loaded, failed = self._worker.take_loaded()
        missing = self._copying.take_unstarted()
        for request_id in loaded | missing:
            is_failed = request_id in failed or request_id in missing
            (self._ended.failed if is_failed else self._ended.loaded).add(request_id)
            with self._failures.guard("loaded"):
                self._half.loaded(request_id, failed=is_failed)

    def _take_report(self) -> StepReport | None:
        report: StepReport | None = None
        with self._failures.guard("take_report"):
            report = self._worker.take_report()
        report = self._copying.complete(report)
        with self._failures.guard("reported"):
            if report is not None:
                self._half.reported(report)
            if self._layered is not None:
                self._layered.end_layered(report)
        return report
