"""Scheduler half that also stores and promises partial tails: the last block of a prompt, of which only the first
tokens are computed. For engines with one KV cache group that want it; others use SchedulerHalf and pay nothing.

When the prefix is promised, one more question asks for a tail behind it, of every length that the request could use.
The engine loads the tail's whole block and computes on behind the tail. What lies there in the engine may be of
other requests: a slot has zeros there. When a request ends, its last block is stored under the name of its tail, and so
is the block in which its prompt ends. `core.block.tails` says what a tail is named by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvservice.connector.cache_groups import Table, entries_of
from kvservice.connector.plan import CopyEntry
from kvservice.connector.scheduler.half import SchedulerHalf
from kvservice.connector.scheduler.ports import Promise, Wait
from kvservice.connector.scheduler.request import EngineRequest, RequestEvent, RequestState
from kvservice.connector.scheduler.store_plan import PlannedStore
from kvservice.core.block.keys import route_of_head
from kvservice.core.block.tails import NO_BLOCK, tail_hash, tail_lengths
from kvservice.core.messages import (
    AcquireRequest,
    AcquireResult,
    Attachment,
    MissReason,
    SealItem,
)
from kvservice.observe import tracing
from kvservice.session.session import AcquireAnswer
from kvservice.units import AttachmentId, BlockHash, BlockKey, HandoffId, LeaseId

# (request, first token, end) -> the engine's hash for a block of exactly these tokens, chained to the block before.
# None where it has none, for example because a token is not known yet.
NameTail = Callable[[str, int, int], BlockHash | None]
NOTHING = AcquireResult(LeaseId(0), (), 0, MissReason.NONE)


@dataclass(slots=True)
class PromisedTail:
    """What a request asked for behind its prefix, and what was promised."""

    position: int  # of its block
    lengths: range  # in tokens, in the order of the names
    asked: AcquireRequest
    attachment: AttachmentId  # that the lease belongs to
    result: AcquireResult | None = None  # with one block
    tokens: int = 0


class TailedScheduler(SchedulerHalf):
    """Call `name_tails_with` before the first request."""

    def name_tails_with(self, name_tail: NameTail) -> None:
        self._name_tail = name_tail
        self._tails: dict[str, PromisedTail] = {}  # by request

    # -- asking ----

    def _begin(self, request: EngineRequest, now: float) -> None:
        super()._begin(request, now)
        request.prompt_tokens = request.tokens
        if self._may_write and request.admitted:
            self._stores.expect(request, 1)
        attachment = self._session.attachment
        is_short = request.terms.may_load and not request.keys and request.state is RequestState.RUNNING
        if is_short and attachment is not None:
            request.attachment, request.result, request.deadline = attachment.attachment_id, NOTHING, now
            self._extend(request)

    def _extend(self, request: EngineRequest) -> None:
        """Ask for a tail behind what is promised, if the request can use one."""
        if self._paused or not self._is_current(request.attachment):
            return
        size, position = self._block_tokens, request.promised_end
        lengths = tail_lengths(request.tokens - position * size, size)
        keys = self._tail_keys(request, position, lengths) if lengths else None
        if keys is None:
            return
        per_block = self._speed.seconds_for(size)
        timeout = min(self._fetch_timeout, per_block) if per_block else self._fetch_timeout
        wanted = AcquireRequest(tuple(keys), 1, timeout, per_block, trace=request.trace, tail_at=position)
        asked = self._session.acquire(request.request_id, wanted)
        if asked is None:
            return
        request.deadline += timeout
        self._drop_tail(request.request_id)
        self._tails[request.request_id] = PromisedTail(position, lengths, wanted, asked)
        self.counters["tails_asked"] += 1
        request.move(RequestEvent.EXTEND)

    def _tail_keys(self, request: EngineRequest, position: int, lengths: Sequence[int]) -> list[BlockKey] | None:
        """The key of the block before this position, and those of tails of these lengths. None if one has no name."""
        begin = position * self._block_tokens
        names: list[BlockHash] = []
        for length in lengths:
            named = self._name_tail(request.request_id, begin, begin + length)
            if named is None:
                return None
            names.append(tail_hash(named, length))
        if position:
            return [request.keys[position - 1], *self._keyring.tails(request, position, names)]
        return self._keyring.tails(request, position, [NO_BLOCK, *names])

    def _take_answer(self, answer: AcquireAnswer, request: EngineRequest | None, result: AcquireResult) -> None:
        tail = self._tails.get(answer.request_id)
        if tail is not None and tail.asked is answer.asked:
            self._take_tail(tail, request, result)
            return
        super()._take_answer(answer, request, result)
        if request is not None and request.asked is answer.asked and request.state is RequestState.ANSWERED:
            self._extend(request)

    def _take_tail(self, tail: PromisedTail, request: EngineRequest | None, result: AcquireResult) -> None:
        waits = request is not None and request.state is RequestState.EXTENDING
        index = result.tail_index - 1
        fits = waits and len(result.blocks) == 1 and 0 <= index < len(tail.lengths)
        if fits and self._is_current(tail.attachment) and self._suspects.slots.isdisjoint(result.blocks):
            tail.result, tail.tokens = result, tail.lengths[index]
            self._known.learn([tail.asked.keys[result.tail_index]])
            self.counters["tails_promised"] += 1
        else:
            self._end_lease(tail.attachment, result.lease_id)
        if request is not None and waits:
            request.move(RequestEvent.ANSWER)

    def matched(self, request_id: str, computed_tokens: int, total_tokens: int, now: float) -> Wait | Promise:
        """As SchedulerHalf; the promise may end within a block."""
        self.take_answers()
        request, size = self._requests.get(request_id), self._block_tokens
        if request is not None and request.state is RequestState.EXTENDING:
            tail = self._tails[request_id]
            is_wanted = request.skip * size <= computed_tokens < tail.position * size + tail.lengths[0]
            if is_wanted and now < request.deadline and self._is_current(tail.attachment):
                return Wait()
            request.move(RequestEvent.GIVE_UP)  # its answer is given back when it comes
        answer = super().matched(request_id, computed_tokens, total_tokens, now)
        tail_now = self._tails.get(request_id)
        if isinstance(answer, Wait) or tail_now is None or tail_now.result is None or self._paused:
            return answer
        begin = tail_now.position * size
        end = min(begin + tail_now.tokens, total_tokens)
        is_next = computed_tokens + answer.tokens == begin and end > begin
        return Promise(end - computed_tokens) if is_next and self._is_current(tail_now.attachment) else answer

    # -- loading ----

    def allocated(self, request_id: str, block_ids: Table, external_tokens: int) -> None:
        """As SchedulerHalf. The engine may take the promise with its tail, with a part of the tail, or whole blocks."""
        request, tail = self._requests.get(request_id), self._tails.get(request_id)
        if request is None or tail is None or tail.result is None or request.state is not RequestState.ANSWERED:
            super().allocated(request_id, block_ids, external_tokens)
            return
        of_tail = request.local_tokens + external_tokens - tail.position * self._block_tokens
        if not external_tokens or not 0 < of_tail <= tail.tokens:
            self._drop_tail(request_id)
            super().allocated(request_id, block_ids, external_tokens)
            return
        request.scheduled = True
        if external_tokens > of_tail:
            super().allocated(request_id, block_ids, external_tokens - of_tail)
        else:
            self._begin_load(request, block_ids, tail.position)
        (ref,), key = tail.result.blocks, tail.asked.keys[tail.result.tail_index]
        entry = CopyEntry(block_ids[tail.position], ref, key)
        self._loads.extend(request_id, entry, tail.attachment, tail.result.lease_id)
        del self._tails[request_id]

    # -- storing ----

    def finished(
        self,
        request_id: str,
        hashes: Sequence[BlockHash],
        computed_tokens: int,
        block_ids: Table,
        *,
        store_rest: bool,
    ) -> HandoffId | None:
        self.take_answers()
        request = self._requests.get(request_id)
        if request is not None and request.state is RequestState.EXTENDING:
            request.move(RequestEvent.GIVE_UP)
        handoff = super().finished(request_id, hashes, computed_tokens, block_ids, store_rest=store_rest)
        self._drop_tail(request_id)
        return handoff

    def _store_rest(
        self, request: EngineRequest, hashes: Sequence[BlockHash], computed_tokens: int, block_ids: Table
    ) -> None:
        super()._store_rest(request, hashes, computed_tokens, block_ids)
        attachment = self._rest_goes_to()
        if request.state is not RequestState.RUNNING or attachment is None or not request.admitted:
            return
        # A prompt that is asked again, and one that goes on behind the answer.
        for end in sorted({min(request.prompt_tokens, computed_tokens), computed_tokens}):
            self._store_tail(attachment, request, end, block_ids)

    def _store_tail(self, attachment: Attachment, request: EngineRequest, end: int, block_ids: Table) -> None:
        """Queue the copy of the block with the token before `end`, under the name of the tail that ends there. With
        `prompt_only` there is none: the block may hold tokens of the answer as well."""
        position, rest = divmod(end, self._block_tokens)
        is_named = request.kept_out <= position <= len(request.keys) and not request.terms.prompt_only
        places = self._grouping.stored(block_ids, 0, position) if is_named and position < len(block_ids) else None
        # The newest token may not be known to the engine yet: then one less is named.
        for length in tail_lengths(rest, self._block_tokens)[:2] if places else ():
            keys = self._tail_keys(request, position, [length])
            if keys is not None:
                break
        else:
            return
        head, key = keys
        if self._known.learnt_since(key, request.ask_number):  # before, the pool may have evicted it unseen
            return
        slots = self._stores.take_slots(attachment.attachment_id, 1)
        if not slots:
            self.counters["store_tails_put_off"] += 1
            return
        parent = request.keys[position - 1] if position else None
        planned = PlannedStore(
            entries=[entry._replace(tokens=length) for entry in entries_of(places or [], slots[0], key)]
        )
        planned.items.append(SealItem(slots[0], key, parent, position, route_of_head(head), request.terms.hints))
        spans = [tracing.begin("store", request.trace, blocks=1)]
        store = self._stores.open(attachment.attachment_id, planned, [], request.writes, spans=spans)
        assert store is not None, "a store of one block was refused"
        self._stores.queue(store)
        self.counters["store_tails_planned"] += 1

    # -- what was promised is not wanted ----

    def _decline(self, request: EngineRequest) -> bool:
        if request.state is RequestState.ANSWERED:
            self._drop_tail(request.request_id)
        return super()._decline(request)

    def _forget_promise(self, request: EngineRequest) -> None:
        if request.state is RequestState.EXTENDING:
            request.move(RequestEvent.GIVE_UP)
        super()._forget_promise(request)

    def _drop_tail(self, request_id: str) -> None:
        tail = self._tails.pop(request_id, None)
        if tail is not None and tail.result is not None:
            self._end_lease(tail.attachment, tail.result.lease_id)

    def check_invariants(self) -> None:
        super().check_invariants()
        assert self._tails.keys() <= self._requests.keys(), "a tail of no request"
        for request_id, request in self._requests.items():
            if request.state is RequestState.EXTENDING:
                assert self._tails[request_id].result is None, "a request waits for a tail that it has"
