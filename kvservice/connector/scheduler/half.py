"""Scheduler half: decides what to promise the engine, what to load and what to store. Engine-neutral and without I/O.

Runs on the engine's scheduler thread; the caller passes `now`. It talks to the pool only through a Session (commands
out, answers in), and to the workers only through plans and reports. A request goes through

    NEW -> ASKED -> ANSWERED -> LOADING -> RUNNING -> ENDED

Every lease and every reserved slot that it takes ends exactly once, however it leaves that path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from kvservice.connector.cache_groups import Grouping, OneGroup, Table, usable
from kvservice.connector.options import Offload
from kvservice.connector.plan import PoolInfo, StepPlan, StepReport, StorePlan
from kvservice.connector.scheduler.ended import EndedRequests
from kvservice.connector.scheduler.engine_cache import EngineCache, held_by_engine, table_from_cache
from kvservice.connector.scheduler.handoff import WriterHandoffs
from kvservice.connector.scheduler.known_keys import KnownKeys
from kvservice.connector.scheduler.loads import Loads
from kvservice.connector.scheduler.loan_book import BlockPins, LoanBook
from kvservice.connector.scheduler.near_eviction import NearEviction
from kvservice.connector.scheduler.ports import BlockIds, Promise, SessionPort, StoredBlock, Wait
from kvservice.connector.scheduler.prefill_speed import PrefillSpeed
from kvservice.connector.scheduler.recent_suspects import RecentSuspects
from kvservice.connector.scheduler.request import WAITING, EngineRequest, RequestEvent, RequestState
from kvservice.connector.scheduler.request_keys import Keyring, MakeKeys
from kvservice.connector.scheduler.request_terms import NO_TERMS, RequestTerms
from kvservice.connector.scheduler.store_plan import StorePart
from kvservice.connector.scheduler.stores import Stores
from kvservice.core.block.keys import KEYS_PER_REQUEST_MAX
from kvservice.core.messages import AcquireRequest, AcquireResult, Attachment, Handoff, MissReason
from kvservice.session.session import AcquireAnswer
from kvservice.units import AttachmentId, BlockHash, HandoffId, LeaseId

IDLE_SECONDS = 0.002  # a step with nothing to compute waits this long for the pool instead of busy-polling
# The most: an answer that does not come at once is fetched or computed elsewhere, which needs the cores of empty steps.
IDLE_SECONDS_MAX = 0.01


class SchedulerHalf:
    loads_type: type[Loads] = Loads  # a subclass may load in another way

    def __init__(
        self,
        session: SessionPort,
        make_keys: MakeKeys,
        pool_info: Callable[[Attachment], PoolInfo],
        *,
        block_tokens: int,
        worker_count: int,
        offload: Offload = Offload.EAGER,
        fetch_timeout_seconds: float,
        handoff_timeout_seconds: float = 60.0,
        loan_seconds: float = 0.0,
        may_write: bool = True,
        remember_stored: bool = False,
        evicting_blocks: int = 0,
        grouping: Grouping | None = None,
        term: bytes = b"",
    ) -> None:
        """`block_tokens` are those of a position. `evicting_blocks` is how many of the engine's blocks that go next are
        kept stored with Offload.EVICTING."""
        self.counters: Counter[str] = Counter()
        self._grouping = grouping or OneGroup()
        self._session = session
        self._keyring = Keyring(make_keys, block_tokens, term, self._grouping.stride)
        self._pool_info = pool_info
        self._block_tokens = block_tokens
        self._offload = offload
        self._may_write = may_write
        self._fetch_timeout = fetch_timeout_seconds
        self._handoff_timeout = handoff_timeout_seconds
        self._pins: BlockPins | None = None
        self._cache: EngineCache | None = None
        self._paused = False  # a reset was not possible, so nothing is read or stored until one is
        self._requests: dict[str, EngineRequest] = {}
        self._known = KnownKeys()
        self._suspects = RecentSuspects()  # of this attachment
        self._speed = PrefillSpeed()
        self._idle_wait = IDLE_SECONDS  # the next one
        self._handoffs = WriterHandoffs(session)
        self._worker_count = worker_count
        self._loads = self.loads_type(session, self._grouping, self.counters, borrows=loan_seconds > 0)
        self._stores = Stores(
            session, self._grouping, self._known, self._handoffs, worker_count, self.counters, remember=remember_stored
        )
        self._ended = EndedRequests(self._stores, self._handoffs)
        self._near = NearEviction(self._stores, self._known, evicting_blocks)
        self._loans = LoanBook(loan_seconds, worker_count, self.counters)

    def pin_with(self, pins: BlockPins) -> None:
        """Give it the engine's pins, before the first request. Without, blocks may change only once reported."""
        self._pins = pins
        self._stores.pin_with(pins)
        self._loans.pin_with(pins)

    def read_cache(self, cache: EngineCache) -> None:
        """Let it look into the engine's own cache. Without it, the pool is asked for blocks that the engine has, and
        nothing is stored when a request is preempted or its blocks are near eviction. Call it before the first
        request."""
        if not self._grouping.window_groups:
            self._cache = cache

    # -- requests arrive and ask ----

    def on_new_request(
        self,
        request_id: str,
        hashes: Sequence[BlockHash],
        now: float,
        *,
        tokens: int = 0,
        terms: RequestTerms = NO_TERMS,
        salted: bool = False,
        adapter: bytes = b"",
        trace: str = "",
    ) -> None:
        """Start to ask for the prefix at once; what the engine has itself becomes known later. Returns at once.

        Args:
            tokens: length of the prompt; needed only with several KV cache groups.
            adapter: identity of the adapter.
            trace: W3C traceparent of the span that the request came with.
        """
        if request_id in self._requests:
            return
        request = self._requests[request_id] = EngineRequest(request_id, [], tokens=tokens, terms=terms)
        request.adapter, request.trace, request.hashes = adapter, trace, hashes
        request.admitted, wants = terms.may_store, terms.wants
        request.window_keys = [[] for _ in self._grouping.window_groups]
        if isinstance(wants, Handoff):
            request.reads = wants
        elif wants is not None and wants.handoff_id is not None and self._may_write:
            request.writes = self._handoffs.open(wants.handoff_id, self.counters)
        request.offload = self._offload if request.writes is None else Offload.EAGER
        self._extend_keys(request, hashes, self._session.attachment)
        request.prompt_blocks, request.salted = len(request.keys), salted
        self._begin(request, now)

    def _begin(self, request: EngineRequest, now: float) -> None:
        """The first thing that is done for a new request."""
        if not self._ask(request, now):
            request.move(RequestEvent.SKIP)

    def _ask(self, request: EngineRequest, now: float) -> bool:
        """Post an acquire for the whole chain. False if there is nothing to ask, no pool, or it may not read."""
        if not request.terms.may_load:
            return False
        keys = request.keys[:KEYS_PER_REQUEST_MAX]
        if self._grouping.window_groups:
            # The engine computes the last token itself, so a window that ends behind it may lack its first block.
            keys = keys[: max(request.tokens - 1, 0) // self._block_tokens]
        skip = held_by_engine(self._cache, request.hashes, len(keys), self._grouping.stride)
        if not keys or self._paused or not self._keyring.is_current(request, self._session.attachment):
            return False
        per_block = self._speed.seconds_for(self._block_tokens)
        timeout = self._fetch_timeout
        if per_block:
            timeout = min(timeout, per_block * (len(keys) - skip))
        handoff, request.reads = request.reads, None  # if it asks again later, its writer is done
        request.waits_for_writer = handoff is not None
        if handoff is not None:
            timeout = self._handoff_timeout
            self.counters["handoffs_read"] += 1
        wanted = AcquireRequest(
            tuple(keys), skip, timeout, per_block, handoff, request.request_id, request.trace, hints=request.terms.hints
        )
        asked = self._session.acquire(request.request_id, wanted)
        if asked is None:
            self.counters["asked_without_pool"] += 1
            return False
        request.attachment, request.result, request.asked, request.skip = asked, None, wanted, skip
        request.deadline = now + timeout
        request.ask_number = self._known.next_ask()
        self._idle_wait = IDLE_SECONDS
        request.move(RequestEvent.ASK)
        return True

    def matched(self, request_id: str, computed_tokens: int, total_tokens: int, now: float) -> Wait | Promise:
        """What can be promised beyond `computed_tokens`, a multiple of the engine's block size. Changes no ownership:
        it may be called any number of times before `allocated`."""
        self.take_answers()
        request = self._requests.get(request_id)
        if request is None:
            return Promise(0)
        if not request.scheduled:
            request.engine_blocks = computed_tokens // self._block_tokens
        if request.state is RequestState.RUNNING and request.scheduled and not request.load_failed:
            request.scheduled = False
            request.tokens = total_tokens
            self.counters["asked_after_preemption"] += self._ask(request, now)
        local = computed_tokens // self._block_tokens
        usable = request.usable(max(total_tokens - 1, 0) // self._block_tokens)  # it computes the last token itself
        if local < min(request.skip, usable):
            self._ask_again(request, now)
        if request.state is RequestState.ASKED:
            has_all = request.skip > 0 and local >= usable
            if not has_all and now < request.deadline and self._is_current(request.attachment):
                return Wait()
            request.move(RequestEvent.GIVE_UP)
            if not has_all:
                request.gave_up = True
                self.counters["gave_up_waiting"] += 1
        if request.state is not RequestState.ANSWERED or self._paused:
            return Promise(0)
        if not self._is_current(request.attachment):
            return Promise(0)  # the pool that made the promise is gone
        request.local_tokens = computed_tokens
        if local < request.skip:
            return Promise(0)
        end = self._grouping.whole(min(request.promised_end, total_tokens // self._block_tokens))
        return Promise(max(end * self._block_tokens - computed_tokens, 0))

    def _ask_again(self, request: EngineRequest, now: float) -> None:
        """The engine has lost blocks that it had when the pool was asked: ask once more."""
        if request.asked_again or request.waits_for_writer or not self._decline(request):
            return
        request.asked_again = True
        self.counters["asked_again"] += self._ask(request, now)

    def allocated(self, request_id: str, block_ids: Table, external_tokens: int) -> None:
        """Note that the engine gave the request blocks. It takes the promise if external_tokens > 0."""
        request = self._requests.get(request_id)
        if request is None:
            return
        request.scheduled, request.begun = True, False
        if request.state is not RequestState.ANSWERED:
            return
        attachment, result = request.promise
        if self._is_current(attachment):
            held = request.promised_end if result.skipped_held >= request.skip else result.skipped_held
            self._stores.found(request, max(request.stored, held))
        if external_tokens == 0:
            self._decline(request)
            return
        end, rest = divmod(request.local_tokens + external_tokens, self._block_tokens)
        assert rest == 0, "the engine takes a part of a block"
        self._begin_load(request, block_ids, end)

    def _begin_load(self, request: EngineRequest, block_ids: Table, end: int) -> None:
        """Plan the load of what was promised, up to position `end`."""
        attachment, result = request.promise
        if self._grouping.window_groups:
            assert end == request.promised_end, "the engine takes less than was promised, with another window"
        taken = replace(result, blocks=result.blocks[: end - request.skip])
        # First what can fail: a request that stays ANSWERED keeps its lease, and gives it back when it ends.
        self._loads.plan(request, attachment, taken, block_ids, self._engine_blocks(request.local_tokens))
        request.move(RequestEvent.LOAD)

    def hit_sources(self, request_id: str, tokens: int) -> tuple[int, int]:
        """(tokens from this node's pool, tokens fetched from another node) of a promise that was taken."""
        request = self._requests.get(request_id)
        remote = 0 if request is None else min(request.fetched_blocks * self._block_tokens, tokens)
        return tokens - remote, remote

    def take_answers(self) -> None:
        for answer in self._session.answers():
            result = answer.result or AcquireResult(LeaseId(0), (), 0, MissReason.DETACHED)
            self._take_answer(answer, self._requests.get(answer.request_id), result)

    def _take_answer(self, answer: AcquireAnswer, request: EngineRequest | None, result: AcquireResult) -> None:
        if request is None or request.state is not RequestState.ASKED or request.asked is not answer.asked:
            self._end_lease(answer.attachment, result.lease_id)  # too late: nobody waits for it any more
            if request is not None and request.asked is answer.asked and self._is_current(answer.attachment):
                self._known.take_answer(request, result, self._grouping)
            return
        self._follow(answer.attachment)
        request.trace = answer.trace or request.trace
        request.result = usable(self._grouping, result, self._suspects.slots, self.counters)
        request.move(RequestEvent.ANSWER)
        if not result.admitted and request.writes is None:
            request.admitted = False
            self._stores.expect(request, -request.expected)
        self._known.take_answer(request, result, self._grouping)
        if result.miss is not MissReason.NONE:
            self.counters[f"acquires_cut_{result.miss.value}"] += 1

    # -- each step ----

    def begin_step(self, plan: StepPlan, now: float, *, is_idle: bool = False) -> None:
        """Fill in the loads of this step, and the stores and loans of requests that ended. `is_idle` means that the
        engine found nothing to compute."""
        self._loads.begin_step(plan)
        self._stores.begin_step(plan, now)
        self._ended.begin_step(now)
        self._suspects.begin_step(now)
        attachment = self._session.attachment
        if attachment is not None:  # otherwise the workers keep the old mapping, and its headers show that it is void
            plan.pool = self._pool_info(attachment)
        self.take_answers()
        runnable = (RequestState.ANSWERED, RequestState.RUNNING)
        is_starved = is_idle and any(request.state in runnable for request in self._requests.values())
        self._loans.begin_step(plan, now, is_starved=is_starved)

    def plan_stores(
        self,
        plan: StepPlan,
        scheduled: Iterable[tuple[str, Sequence[BlockHash], int, BlockIds]],
        preempted: Iterable[str] = (),
    ) -> list[str]:
        """Add the stores of this step: what they cost depends on the blocks that it fills. Returns the requests that
        have full blocks which are not stored yet: name them again in the next step.

        Args:
            scheduled: per request its id, its block hashes so far, its computed tokens at the end of the step, and how
            to get the ids of its blocks. Requests that fill no block may be left out.
            preempted: requests that lost their blocks since the last step.
        """
        attachment = self._session.attachment
        if attachment is None or plan.pool is None or not self._may_write or self._paused:
            return [request_id for request_id, *_ in scheduled] if self._may_write else []  # until there is a pool
        self._follow(attachment.attachment_id)
        self._stores.follow(attachment.epoch, chain(self._requests.values(), self._ended))
        self._stores.gather()
        lost = [part for part in (self._part_of_preempted(attachment, it) for it in preempted) if part is not None]
        parts, looked_at = lost + self._ended.parts(partial(self._part_from_cache, attachment)), []
        for request_id, hashes, computed_tokens, block_ids in scheduled:
            request = self._requests.get(request_id)
            if request is not None and request.state is not RequestState.ENDED:
                looked_at.append(request)
                request.begun = True
                if request.state is not RequestState.LOADING:
                    request.computed_blocks, request.hashes = computed_tokens // self._block_tokens, hashes
                    parts += self._parts_of(attachment, request, computed_tokens, block_ids)
        admitted = [part for part in parts if part.request.admitted]
        plan.stores += self._stores.plan(attachment.attachment_id, admitted)
        if lost:
            self.counters["store_blocks_preempted"] += self._grouping.stride * sum(part.found for part in lost)
        if self._offload is Offload.EVICTING and self._cache is not None:
            self._near.plan(plan, attachment, self._keyring.naming_of(attachment), self._cache)
        return [it.request_id for it in looked_at if it.state is RequestState.LOADING or it.is_behind]

    def _parts_of(
        self, attachment: Attachment, request: EngineRequest, computed_tokens: int, block_ids: BlockIds
    ) -> list[StorePart]:
        """What the request stores in this step. Unless it does so at once, its blocks are named only."""
        if not request.is_behind:
            return []
        if request.offload is Offload.EAGER:
            return [self._part_of(attachment, request, computed_tokens, block_ids())]
        self._extend_keys(request, request.hashes, attachment)
        self._near.note(request, request.hashes, request.computed_blocks)
        return []

    def _part_of(
        self, attachment: Attachment, request: EngineRequest, computed_tokens: int, block_ids: Table
    ) -> StorePart:
        """The full blocks of a request, as far as they have names."""
        self._extend_keys(request, request.hashes, attachment)
        full = min(computed_tokens // self._block_tokens, len(request.keys), self._grouping.length(block_ids))
        return StorePart(request, request.hashes, request.storable(full), block_ids)

    def _store_of(
        self, attachment: Attachment, request: EngineRequest, computed_tokens: int, block_ids: Table
    ) -> StorePlan | None:
        """Plan the copies of full blocks of one request that are not in the pool."""
        part = self._part_of(attachment, request, computed_tokens, block_ids)
        self._follow(attachment.attachment_id)
        return next(iter(self._stores.plan(attachment.attachment_id, [part]) if request.admitted else ()), None)

    def _part_of_preempted(self, attachment: Attachment, request_id: str) -> StorePart | None:
        """What the request has full and not stored, as far as the engine still has it. It asks the pool for its blocks
        when it is scheduled again."""
        request = self._requests.get(request_id)
        if request is None or request.state is not RequestState.RUNNING:
            return None
        return self._part_from_cache(attachment, request, request.computed_blocks)

    def _part_from_cache(self, attachment: Attachment, request: EngineRequest, most: int) -> StorePart | None:
        """What of its first `most` blocks is full and not stored, as far as the engine still has it."""
        if not request.has_left or self._cache is None or self._pins is None:
            return None
        self._extend_keys(request, request.hashes, attachment)
        end = request.storable(min(request.computed_blocks, len(request.keys), most))
        blocks, stride = range(request.stored, end), self._grouping.stride
        table = table_from_cache(self._cache, request.hashes, request.keys, self._known, blocks, stride)
        return self._part_of(attachment, request, self._grouping.length(table) * self._block_tokens, table)

    def _extend_keys(self, request: EngineRequest, hashes: Sequence[BlockHash], attachment: Attachment | None) -> None:
        """Add keys for the blocks that have got a hash since the last call."""
        if not self._keyring.is_current(request, attachment):
            self._stores.expect(request, -request.expected)
        has_prompt = bool(request.keys)
        new = self._keyring.extend(request, hashes, attachment)
        if request.terms.prompt_only and has_prompt:
            new = 0
        if new and self._may_write and request.admitted and request.offload is not Offload.EVICTING:
            self._stores.expect_new(request, new)

    def keep_out(self, request_id: str, tokens: int) -> None:
        """Have the request never store its first `tokens` tokens: their bytes may not be what their names say."""
        if (request := self._requests.get(request_id)) is not None:
            request.given = -(-tokens // self._block_tokens)
            if request.given > request.stored:
                self._stores.found(request, request.given)

    def reported(self, report: StepReport) -> None:
        """Note the copies that some workers have finished. A block is sealed when all workers have copied their part of
        it."""
        if report.suspects:
            self._suspects.add(report.suspects)
            self._session.suspect(report.suspects)
        self.counters.update(report.counters)
        self._loans.returned(report.returned)
        self._stores.reported(report)

    def loaded(self, request_id: str, *, failed: bool) -> None:
        """Note that all workers are done with the load of this request."""
        self._loads.done(request_id)
        request = self._requests.get(request_id)
        if request is None or request.state is not RequestState.LOADING:
            return
        request.move(RequestEvent.LOADED)
        if failed:
            request.load_failed = True
            self.counters["loads_failed"] += 1
            request.stored = request.kept_out
            request.computed_blocks = 0
            self._known.forget(chain.from_iterable(request.chains))

    def computed(self, tokens: int, seconds: float) -> None:
        """Note how many tokens a step computed in how many seconds: a fetch has to be faster."""
        self._speed.add(tokens, seconds)

    def has_begun(self, request_id: str) -> bool:
        """Whether a step was planned that computes with the blocks that the engine gave this request last."""
        return request_id in self._requests and self._requests[request_id].begun

    def void_stores(self) -> None:
        """A step may have computed on what was not loaded, or with other weights: nothing copied now is sealed."""
        self._stores.void(self._requests.values())

    # -- requests leave ----

    def finished(
        self,
        request_id: str,
        hashes: Sequence[BlockHash],
        computed_tokens: int,
        block_ids: Table,
        *,
        store_rest: bool,
    ) -> HandoffId | None:
        """Note that the request ended. Its remaining blocks are copied in the next step; they are pinned until then.
        Returns the hand-off that the request was computed for.

        A load under way keeps its lease until the workers are done with it.
        """
        self.take_answers()
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        try:
            if store_rest:
                self._store_rest(request, hashes, computed_tokens, block_ids)
        finally:
            if request.state is RequestState.ANSWERED:
                self._end_lease(*request.lease)
            self._session.abandon(request_id)
            self._session.report(request.report())
            request.move(RequestEvent.END)
            if request not in self._ended:
                self._session.expect(-request.expected)
                self._handoffs.request_ended(request.writes)
        return request.writes

    def _store_rest(
        self, request: EngineRequest, hashes: Sequence[BlockHash], computed_tokens: int, block_ids: Table
    ) -> None:
        """Queue the copies of what a request that ended has not stored, and lend its blocks if it was handed off. What
        finds no slot is stored in later steps, as long as the engine has it in its cache."""
        attachment = self._rest_goes_to()
        if request.state is not RequestState.RUNNING or attachment is None or self._rest_can_wait(request):
            return
        request.hashes, request.computed_blocks = hashes, computed_tokens // self._block_tokens
        store = self._store_of(attachment, request, computed_tokens, block_ids)
        if store is not None:
            self._stores.queue(store)
        if request.has_left and self._cache is not None:
            self._ended.add(request)
        if request.writes is not None and not request.given:
            self._loans.lend(request.keys[: computed_tokens // self._block_tokens], block_ids)

    def _rest_can_wait(self, request: EngineRequest) -> bool:
        """Whether the engine keeps the blocks of a request that ended until its free blocks are looked through."""
        if request.offload is not Offload.EVICTING or self._cache is None:
            return False
        return self._cache.free_blocks() >= self._near.window

    def _rest_goes_to(self) -> Attachment | None:
        """Where the blocks of a request that ended are stored. None if they are not."""
        return self._session.attachment if self._may_write and not self._paused and self._pins is not None else None

    def has_pending_work(self, now: float) -> bool:
        """Whether steps are needed even without requests, to start copies and loans and to learn how they ended."""
        return not self._ended.is_empty or self._loans.is_pending(now) or self._stores.is_pending(now)

    def idle_seconds(self) -> float:
        """How many seconds an engine with nothing to compute may wait for an answer of the pool, for slots, or for the
        end of a loan. 0 if none is due. Longer each time, until something is asked again."""
        waiting = [request for request in self._requests.values() if request.state in WAITING]
        if not waiting:
            is_settled = self._loans.is_empty and self._ended.is_empty and self._stores.is_told
            return IDLE_SECONDS if self._stores.is_empty and not is_settled else 0.0
        if all(request.waits_for_writer for request in waiting):
            return IDLE_SECONDS_MAX
        wait, self._idle_wait = self._idle_wait, min(2 * self._idle_wait, IDLE_SECONDS_MAX)
        return wait

    def take_told(self) -> tuple[list[BlockHash], list[StoredBlock]]:
        """Blocks to tell of: those that left the pool, then those that are in it. Empty unless `remember_stored`."""
        return self._stores.take_told()

    def may_reattach(self) -> bool:
        """Whether no worker can write a slot of an earlier attachment any more."""
        return self._stores.is_quiet

    def reset(self, term: bytes | None) -> None:
        """The engine's weights change between two steps. Nothing from before is promised, sealed, lent or handed off,
        and new blocks get the names of this term. With None the engine still holds blocks from before, so nothing is
        read or stored until a reset with a term."""
        self._paused = True
        self.take_answers()
        self._stores.reset()
        self._handoffs.end_all()
        self._loans.recall_all()
        self._known.clear()
        self._near.clear()
        self._ended.clear()
        for request in self._requests.values():
            self._forget_promise(request)
        if term is not None:
            self._keyring.begin_term(term)
            self._paused = False
            self.counters["resets"] += 1

    def forget_adapter(self, adapter: bytes) -> None:
        """The engine may have other weights than this name says: what is not in the pool yet is not stored by it."""
        self.void_stores()
        self._loans.recall_all()
        self._near.clear()
        self._ended.clear()
        for request in self._requests.values():
            request.admitted = request.admitted and request.adapter != adapter

    def _forget_promise(self, request: EngineRequest) -> None:
        request.reads = request.writes = request.asked = None
        request.stored = request.kept_out  # if it goes on, it is computed again from its start
        request.named = request.computed_blocks = request.skip = 0
        self._stores.expect(request, -request.expected)
        self._decline(request)

    def _decline(self, request: EngineRequest) -> bool:
        """What the pool was asked for is not wanted. Returns whether it waited for the answer or had the promise."""
        if request.state is RequestState.ASKED:  # its answer is given back when it comes
            request.move(RequestEvent.GIVE_UP)
            return True
        if request.state is not RequestState.ANSWERED:
            return False
        self._end_lease(*request.lease)
        request.result = None
        request.move(RequestEvent.DECLINE)
        return True

    # -- inside ----

    def _engine_blocks(self, tokens: int) -> int:
        """How many of the engine's hashes these tokens have; with one KV cache group each is of a block."""
        return tokens * self._grouping.stride // self._block_tokens

    def _is_current(self, attachment: AttachmentId | None) -> bool:
        current = self._session.attachment
        return current is not None and current.attachment_id == attachment

    def _end_lease(self, attachment: AttachmentId, lease_id: LeaseId) -> None:
        if lease_id:
            self._session.release(attachment, lease_id)

    def _follow(self, attachment: AttachmentId) -> None:
        """Forget what was learnt about the pool of an earlier attachment."""
        if self._known.follow(attachment):
            self._suspects.clear()

    def check_invariants(self) -> None:
        assert all(request.expected >= 0 for request in chain(self._requests.values(), self._ended))
        for request in self._requests.values():
            assert (request.state is RequestState.LOADING) <= self._loads.is_open(request.request_id)
            assert request.state is not RequestState.ENDED, "an ended request is still kept"
            assert (request.result is None) or request.state not in (RequestState.NEW, RequestState.ASKED)
        self._stores.check_invariants()
        self._handoffs.check_invariants()
        self._loans.check_invariants()
